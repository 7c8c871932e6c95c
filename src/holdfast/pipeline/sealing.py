"""The key of a pipeline's digests, and the seal that it puts on each entry of a ledger.

An entry's chain is the key's id and a keyed hash (BLAKE2b) over the chain of the entry before it and over the entry
itself. Whoever
lacks the key cannot change an entry, take one out, put an older one back or make one up without breaking the chain. The
newest chain of each sink, its head, is known in two more places: the home's `sinks.json`, and the metadata of the
offsets that the pipeline commits to its group for lag tools.

The key is 32 bytes in `<home>/digest.key`, made once, or a text that the definition's `digest_key` names. A home whose
ledgers were sealed with a key that is not there any more stops the pipeline: a new key would make every row before it
one that nobody can vouch for, and that has to be said by somebody.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from holdfast.atomic import parent_of, read_named
from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.naming import DIGEST_KEY_NAME
from holdfast.pipeline.ledger import Content, Entry, Reached
from holdfast.pipeline.positions import to_text
from holdfast.pipeline.row_digest import MASK, DigestKey
from holdfast.real import RealFileSystem

KEY_FILE: Final = "digest.key"
SECRET_BYTES: Final = 32
SECRET_BYTES_MIN: Final = 16
"""Of a key that somebody else made."""
CHAIN_BYTES: Final = 16
HEADS: Final = "holdfast"
"""Before the heads in the metadata of committed offsets."""
METADATA_BYTES: Final = 4000
"""Of one committed offset; brokers take 4,096 (`offset.metadata.max.bytes`)."""


class DigestKeyLost(HoldfastError):
    """The key that ledgers were sealed with is not there, or is another one. Nothing was read or written."""

    exit_code = 3


def read_key(home: str, given: str | None) -> DigestKey | None:
    """The key that the definition gives, its secret expanded, or the home's; nothing where there is none yet."""
    if given is not None:
        if len(given.encode()) < SECRET_BYTES_MIN:
            raise DigestKeyLost(
                f"digest_key has {len(given.encode())} bytes, and needs {SECRET_BYTES_MIN} at least: "
                "`openssl rand -hex 32` makes one"
            )
        return DigestKey(hashlib.sha256(given.encode()).digest())
    path = os.path.join(home, KEY_FILE)
    try:
        text = read_named(path).decode("ascii").strip()
        secret = bytes.fromhex(text)
    except FileNotFoundError:
        return None  # a home from before there were digests, or a new one: `key_for` tells them from a loss
    except ValueError as error:
        raise DigestKeyLost(
            f"{path} is not the key that was written there ({error}): bring it back"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise DigestKeyLost(
            f"{path} has {len(secret)} bytes of key, and a key has {SECRET_BYTES}: bring it back"
        )
    return DigestKey(secret)


def key_for(
    home: str, given: str | None, entries: Iterable[Entry | None], *, may_be_new: bool = False
) -> DigestKey:
    """The key to seal with; made where no ledger knows of one. `may_be_new`: the loss of the one before is meant."""
    key = read_key(home, given)
    known = {
        entry.content.key: entry.sink for entry in entries if entry is not None and entry.content is not None
    }
    if not may_be_new and known and (key is None or key.id not in known):
        sealed_with, sink = next(iter(known.items()))
        where = "digest_key of the definition" if given is not None else os.path.join(home, KEY_FILE)
        what = "is gone" if key is None else f"has the id {key.id}"
        raise DigestKeyLost(
            f"the ledger of sink {sink!r} is sealed with the key {sealed_with}, and {where} {what}. Nothing was read "
            f"or written. Bring the key back; or `holdfast pipeline run FILE --accept-loss={DIGEST_KEY_NAME}` goes on "
            "with another one: no audit can then tell whether rows from before were altered"
        )
    return key or _made(os.path.join(home, KEY_FILE))


def _made(path: str) -> DigestKey:
    """A new key, durable before anything is sealed with it; nobody else may read it."""
    secret = secrets.token_bytes(SECRET_BYTES)
    aside = f"{path}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{secret.hex()}\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, path)  # refuses to replace one that somebody else has made meanwhile
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    RealFileSystem().flush_directory(parent_of(path))
    return DigestKey(secret)


# ---------------------------------------------------------------------------- entries


@dataclass(frozen=True)
class Written:
    """What a sink wrote aside, by digest."""

    digest: int
    columns: Mapping[str, str]


def sealed(entry: Entry, previous: Entry | None, written: Written | None, key: DigestKey) -> Entry:
    """The entry with its content and its chain; `previous` is the one before it in the same ledger."""
    before = None if previous is None else previous.content
    content = None
    if written is not None:
        goes_on = before is not None and before.key == key.id
        content = Content(
            key.id,
            written.digest,
            (written.digest + (before.total if before is not None and goes_on else 0)) & MASK,
            before.since if before is not None and goes_on else entry.number,
            {**(before.columns if before is not None and goes_on else {}), **written.columns},
        )
    return chained(replace(entry, content=content), previous, key)


def goes_on_from(entry: Entry, previous: Entry | None) -> bool:
    """Whether the total of the entry before counts on in this one: both are by the same key."""
    ours, theirs = entry.content, None if previous is None else previous.content
    return ours is not None and theirs is not None and ours.key == theirs.key


def resealed(entry: Entry, previous: Entry | None, came: int, went: int, key: DigestKey) -> Entry:
    """A sealed entry of an upsert, with the total of the rows that its table has now."""
    assert entry.content is not None
    held = previous.content if goes_on_from(entry, previous) and previous is not None else None
    total = ((0 if held is None else held.total) + came - went) & MASK
    return chained(replace(entry, content=entry.content._replace(total=total)), previous, key)


def chained(entry: Entry, previous: Entry | None, key: DigestKey) -> Entry:
    return replace(entry, chain=chain_of(entry, "" if previous is None else previous.chain, key))


def chain_of(entry: Entry, before: str, key: DigestKey) -> str:
    text = to_text(replace(entry, chain="").as_json())
    hashed = hashlib.blake2b(f"{before}\n{text}".encode(), key=key.chain, digest_size=CHAIN_BYTES)
    return f"{key.id}:{hashed.hexdigest()}"


def broken_links(entries: Sequence[Entry], key: DigestKey) -> list[Entry]:
    """The entries whose chain does not follow from the entry before, of those with that one before them."""
    found = []
    previous: Entry | None = None
    for entry in entries:
        follows = previous is not None and entry.number == previous.number + 1
        if entry.chain.startswith(f"{key.id}:") and (follows or entry.number == 0):
            before = previous.chain if previous is not None and follows else ""
            if entry.chain != chain_of(entry, before, key):
                found.append(entry)
        elif not entry.chain and previous is not None and previous.chain:
            found.append(entry)  # a seal was taken off
        previous = entry
    return found


class Head(NamedTuple):
    """The newest entry of a sink's ledger, as somebody outside the sink knows it."""

    reached: Reached
    chain: str


def heads_of(entries: Mapping[str, Entry | None], places: Mapping[str, str]) -> list[str]:
    """The heads of the ledgers, as texts that each fit into the metadata of a committed offset."""
    texts: list[str] = []
    heads: dict[str, list[Any]] = {}
    for name, entry in entries.items():
        if entry is not None and entry.chain:
            head = [entry.generation, entry.number, places.get(name, ""), entry.chain]
            if heads and len(to_text({HEADS: {**heads, name: head}}).encode()) > METADATA_BYTES:
                texts.append(to_text({HEADS: heads}))
                heads = {}
            heads[name] = head
    return [*texts, to_text({HEADS: heads})] if heads else texts


def heads_in(texts: Iterable[str]) -> dict[str, Head]:
    """By sink, the furthest head that these texts name; a text of somebody else's names none."""
    found: dict[str, Head] = {}
    for text in texts:
        try:
            heads = json.loads(text)[HEADS]
            told = {name: Head(Reached(each[0], each[1], each[2]), each[3]) for name, each in heads.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            continue
        for name, head in told.items():
            found[name] = max(found.get(name, head), head)
    return found
