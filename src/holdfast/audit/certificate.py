"""Certificates: what an audit found, kept so that a later change to it shows.

A certificate is one JSON document (`docs/certificate.schema.json`): the report, its place in a chain, and the SHA-256
of all of that in canonical form (keys sorted, no spaces, UTF-8). Its place is a number from 1 and the hash of the
certificate before it. The rules:

- Whoever changes a certificate must change its hash, and so every later one: `verify` names the first that is wrong.
- The newest one is held by nothing. Keep its hash elsewhere (a log, a ticket) and hand it to `verify` to hold it too.
- A signed one (`signatures`) cannot be made anew by who has not the private key; its version is 2, since a reader of
  version 1 would count the signature for the hash.
- A chain is of one subject; certificates of several may share a directory.
- A number is taken once: a certificate appears under its final name by a link that refuses an existing name, complete
  and flushed. Of two audits that end together, one takes the next number. Nothing is written anywhere else: source and
  sinks are only read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast import __version__
from holdfast.atomic import write_atomically
from holdfast.audit.signatures import signature_of, wrong_signature
from holdfast.errors import HoldfastError, UsageError
from holdfast.real import RealFileSystem

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

VERSION: Final = 1
VERSION_SIGNED: Final = 2
KIND: Final = "holdfast-audit-certificate"
HASH: Final = "sha256"
SIGNATURE: Final = "signature"
FILE_NAME: Final = re.compile(r"(?P<subject>.+)-(?P<number>\d{6,})\.json")
ATTEMPTS_MAX: Final = 100
"""How many others may take the next number before us; they do it once per audit."""


class Certified(Protocol):
    """What a certificate can be made of: the report of an audit, or of a hand-over."""

    @property
    def subject(self) -> str: ...
    def as_json(self) -> dict[str, Any]: ...


class CertificateError(HoldfastError):
    """A certificate cannot be read, or is none."""


def canonical(document: Any) -> bytes:
    """The one way to write a document: what is hashed. Half a surrogate pair, which a damaged name may hold and UTF-8
    cannot, is written as JSON escapes it."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def content_hash(document: Mapping[str, Any]) -> str:
    """Of everything in a certificate but the hash itself and its signature."""
    left_out = {HASH} if document.get("version") == VERSION else {HASH, SIGNATURE}
    content = {name: value for name, value in document.items() if name not in left_out}
    return hashlib.sha256(canonical(content)).hexdigest()


@dataclass(frozen=True)
class Certificate:
    """One certificate as it stands in a file."""

    document: Mapping[str, Any]
    path: str = ""

    @property
    def number(self) -> int:
        return int(self.document["chain"]["number"])

    @property
    def previous(self) -> str | None:
        found = self.document["chain"]["previous"]
        return None if found is None else str(found)

    @property
    def subject(self) -> str:
        return str(self.document["chain"]["subject"])

    @property
    def sha256(self) -> str:
        return str(self.document[HASH])

    @property
    def verdict(self) -> str:
        return str(self.document["report"]["verdict"])

    @property
    def name(self) -> str:
        where = f" ({self.path})" if self.path else ""
        return f"{self.subject} number {self.number:,}{where}"


def certify(
    report: Certified, before: Certificate | None, key: Ed25519PrivateKey | None = None
) -> Certificate:
    """The certificate of this report, behind the one before it; signed, where there is a key."""
    content: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION if key is None else VERSION_SIGNED,
        "holdfast": __version__,
        "chain": {
            "subject": report.subject,
            "number": 1 if before is None else before.number + 1,
            "previous": None if before is None else before.sha256,
        },
        "report": report.as_json(),
    }
    # Through JSON once, so that what is hashed is what a reader of the file will hash.
    document = json.loads(canonical(content))
    document[HASH] = content_hash(document)
    if key is not None:
        document[SIGNATURE] = signature_of(document[HASH], key)
    return Certificate(document)


# ------------------------------------------------------------------------ files


def read(path: str) -> Certificate:
    """The certificate in a file; `CertificateError` when it is none that this version knows."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read())
    except FileNotFoundError as error:
        raise UsageError(f"there is no certificate {path}") from error
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{path} is no certificate: it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise CertificateError(f"{path} is no certificate of an audit")
    if document.get("version") not in (VERSION, VERSION_SIGNED):
        raise CertificateError(
            f"{path} has version {document.get('version')!r}; this holdfast reads {VERSION} and {VERSION_SIGNED}"
        )
    found = Certificate(document, path)
    try:
        chain = (found.number, found.previous, found.subject, found.sha256, found.verdict)
    except (KeyError, TypeError, ValueError) as error:
        raise CertificateError(f"{path} is no certificate: it lacks {error}") from error
    if chain[0] < 1:
        raise CertificateError(f"{path} is no certificate: numbers begin at 1")
    return found


def file_name(subject: str, number: int) -> str:
    """In a directory. A subject that no file can be named after gets a name close to it and digits of its hash."""
    plain = re.sub(r"[^\w.@+=-]", "_", subject)[:120].lstrip(".")
    if plain != subject:
        plain = f"{plain}-{hashlib.sha256(subject.encode()).hexdigest()[:8]}"
    return f"{plain}-{number:06d}.json"


def _stem(subject: str) -> str:
    """How its files begin."""
    return file_name(subject, 0).removesuffix("-000000.json")


def newest(directory: str, subject: str) -> Certificate | None:
    """The last of this subject's chain."""
    if not os.path.exists(directory):
        return None
    names = [match for name in os.listdir(directory) if (match := FILE_NAME.fullmatch(name))]
    numbers = [int(match["number"]) for match in names if match["subject"] == _stem(subject)]
    if not numbers:
        return None
    found = read(os.path.join(directory, file_name(subject, max(numbers))))
    if found.subject != subject:
        raise CertificateError(
            f"{found.path} is of {found.subject!r}, and named as if it were of {subject!r}"
        )
    return found


def write(report: Certified, where: str, key: Ed25519PrivateKey | None = None) -> Certificate:
    """Add the certificate of this report to a directory, or put it in a file, chained to the one that stood there.

    A path that ends in `.json` is a file unless it is a directory; anything else is a directory, made when missing.
    """
    if os.path.isdir(where) or not where.endswith(".json"):
        return _write_in_directory(report, where, key)
    try:
        before: Certificate | None = read(where)
    except UsageError:
        before = None
    if before is not None and before.subject != report.subject:
        raise UsageError(
            f"{where} holds a certificate of {before.subject!r}, not of {report.subject!r}: name another file, or a "
            "directory, which can hold both"
        )
    made = certify(report, before, key)
    os.makedirs(os.path.dirname(os.path.abspath(where)), exist_ok=True)
    write_atomically(RealFileSystem(), os.path.abspath(where), _text(made))
    return Certificate(made.document, where)


def _write_in_directory(report: Certified, directory: str, key: Ed25519PrivateKey | None) -> Certificate:
    os.makedirs(directory, exist_ok=True)
    files = RealFileSystem()
    for _ in range(ATTEMPTS_MAX):
        made = certify(report, newest(directory, report.subject), key)
        path = os.path.join(os.path.abspath(directory), file_name(report.subject, made.number))
        aside = f"{path}.{uuid.uuid4().hex[:12]}.new"
        write_atomically(files, aside, _text(made))
        try:
            os.link(aside, path)
        except FileExistsError:
            continue  # another audit has taken this number: ours comes behind it
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)
        files.flush_directory(os.path.dirname(path))
        return Certificate(made.document, path)
    raise CertificateError(f"no number is free in {directory}: others take each of them first")


def _text(certificate: Certificate) -> bytes:
    text = json.dumps(certificate.document, indent=1, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


# ------------------------------------------------------------------------ verifying


@dataclass(frozen=True)
class Verified:
    """What a chain is worth."""

    subject: str
    certificates: tuple[Certificate, ...]
    problem: str = ""
    """The first link that is broken, and how; nothing: all hold."""
    notes: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.problem

    def as_json(self) -> dict[str, Any]:
        last = self.certificates[-1] if self.certificates else None
        return {
            "subject": self.subject,
            "certificates": len(self.certificates),
            "first": self.certificates[0].number if self.certificates else None,
            "last": None if last is None else last.number,
            "newest_sha256": None if last is None else last.sha256,
            "newest_verdict": None if last is None else last.verdict,
            "valid": self.is_whole,
            "problem": self.problem or None,
            "notes": list(self.notes),
        }


def expand(paths: Sequence[str]) -> list[str]:
    """The files named, and those of the directories named."""
    found: dict[str, None] = {}
    for path in paths:
        inside = [path]
        if os.path.isdir(path):
            inside = [
                os.path.join(path, name) for name in sorted(os.listdir(path)) if FILE_NAME.fullmatch(name)
            ]
        if not inside:
            raise UsageError(f"there is no certificate in {path}")
        found |= dict.fromkeys(inside)
    return list(found)


def verify(
    paths: Sequence[str], expected: str | None = None, key: Ed25519PublicKey | None = None
) -> list[Verified]:
    """Each chain among these files, by subject, and the first link of each that does not hold.

    `expected` is the hash of the newest certificate, kept elsewhere; with a key, each has to be signed by it.
    """
    chains: dict[str, list[Certificate]] = {}
    unreadable: dict[str, str] = {}
    """Why, of the first of each chain."""
    for path in expand(paths):
        try:
            found = read(path)
        except CertificateError as error:
            match = FILE_NAME.fullmatch(os.path.basename(path))
            subject = match["subject"] if match else path
            unreadable.setdefault(subject, str(error))
            chains.setdefault(subject, [])
        else:
            chains.setdefault(found.subject, []).append(found)
    results = []
    for subject, certificates in sorted(chains.items()):
        chain = tuple(sorted(certificates, key=lambda each: (each.number, each.path)))
        why = unreadable.get(subject) or unreadable.get(_stem(subject))
        results.append(Verified(subject, chain, why) if why else _verify_chain(subject, chain, expected, key))
    if expected is not None and not any(
        _is_hash(each.sha256, expected) for result in results for each in result.certificates[-1:]
    ):
        results = [
            each if each.problem else replace(each, problem=_other(each, expected)) for each in results
        ]
    return results


def _other(chain: Verified, expected: str) -> str:
    newest = chain.certificates[-1]
    return (
        f"the newest certificate is {newest.name} with the hash {newest.sha256}, not the expected {expected}: later "
        "ones were removed, or all were made anew"
    )


def _is_hash(found: str, expected: str) -> bool:
    return found == expected.strip().lower()


def _verify_chain(
    subject: str, chain: tuple[Certificate, ...], expected: str | None, key: Ed25519PublicKey | None
) -> Verified:
    notes = []
    if chain[0].number > 1:
        notes.append(
            f"the chain is given from number {chain[0].number:,} on: what came before is not looked at"
        )
    if expected is None:
        notes.append("nothing holds the newest one: keep its hash elsewhere, and give it as --expect")
    if key is None and any(SIGNATURE in each.document for each in chain):
        notes.append(
            "signatures were held against the keys that the certificates name: give yours as --public-key"
        )
    links = zip(chain, (None, *chain), strict=False)
    problem = next(filter(None, (_broken(each, before, key) for each, before in links)), "")
    return Verified(subject, chain, problem, tuple(notes))


def _broken(each: Certificate, before: Certificate | None, key: Ed25519PublicKey | None) -> str:
    actual = content_hash(each.document)
    if actual != each.sha256:
        return f"{each.name} was changed: its content has the hash {actual}, and it says {each.sha256}"
    signature = each.document.get(SIGNATURE)
    wrong = wrong_signature(actual, signature, key) if signature is not None or key is not None else ""
    if wrong:
        return f"{each.name} {wrong}"
    if before is None:
        if each.number == 1 and each.previous is not None:
            return f"{each.name} is the first of its chain, and names one before it"
        return ""
    if each.number == before.number:
        return f"{each.name} and {before.path or 'another'} have the same number: the chain forks"
    if each.number != before.number + 1:
        missing = f"{before.number + 1:,}" + (
            "" if each.number == before.number + 2 else f" to {each.number - 1:,}"
        )
        return f"{each.name} follows number {before.number:,}: {missing} is missing"
    if each.previous != before.sha256:
        return (
            f"{each.name} names {each.previous} as the one before it, and {before.name} has the hash "
            f"{before.sha256}: one of the two was made anew"
        )
    return ""
