"""`holdfast bugreport`: what somebody else needs to understand a bug, in one text, and nobody's secrets.

The command reads the files it is given, and asks no broker. What it hides:

- the value of a setting that is a password by its type, sounds like a secret by its name, or has a name that neither
  the broker nor any client knows;
- those values wherever they stand in the log, in the forms in which texts carry them (`Redactor`), and so what `${…}`
  and `file:` of a definition lead to, and passwords in addresses;
- in every line, whatever looks like a password in an address, a `name=value` with a secret's name, a private key.

It hides too much rather than too little. Whoever sends the text should still read it first, and the text says so.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from holdfast import __version__
from holdfast.cli.options import CommandGroup, examples, option
from holdfast.cli.version import origin
from holdfast.errors import UsageError

app = CommandGroup()

HIDDEN: Final = "***"
LOG_BYTES_MAX: Final = 4 << 20
"""More than any number of lines that somebody reads."""
LINES: Final = 200
SOUNDS_SECRET: Final = re.compile(
    r"pass|pwd|secret|token|credential|jaas|auth(?!or)|api[._-]?key|private|digest_key|user\.info|key\.pem"
    r"|keystore\.key",
    re.IGNORECASE,
)
"""Wider than what pipelines hide, since this text leaves the house."""
NAMED_VALUE: Final = re.compile(
    rf"(?i)([\w.-]*(?:{SOUNDS_SECRET.pattern})[\w.-]*[\"']?\s*[=:]\s*)"
    r"(?:\\?\"(?:[^\"\\]|\\.)*\"|'[^']*'|(?:bearer|basic)\s+[^\s\"',;]+|[^\s&;,\"'}]+)"
)
PATTERNS: Final = (
    (re.compile(r"-----BEGIN [^-]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"(://[^/@\s:\"']*):(?!\$\{)[^\s\"']*@"), rf"\1:{HIDDEN}@"),
    (NAMED_VALUE, rf"\g<1>{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {HIDDEN}"),
)
JAAS_FIELD: Final = re.compile(r"(\w+)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
VARIABLES: Final = re.compile(r"HOLDFAST_\w+|JAVA_HOME|SPARK_HOME|SPARK_CONF_DIR")
REQUIREMENT: Final = re.compile(r"[\w.-]+")
DEV: Final = re.compile(r"extra == ['\"](?:dev|bench)")


@app.command(
    epilog=examples(
        "holdfast bugreport server.properties --log /var/log/holdfast.log --data-dir /var/lib/holdfast",
        "holdfast bugreport orders.yaml --log run.log --certificate proofs/ > report.md",
    )
)
def bugreport(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE…", help="Settings and pipelines: properties, YAML or JSON. Secrets are left out."
        ),
    ] = None,
    log: Annotated[
        str | None, option("FILE", "A log, of the broker or of a program; its end is shown.")
    ] = None,
    lines: Annotated[int, option("N", "How much of the log: so many lines.", min=0)] = LINES,
    data_dir: Annotated[
        str | None, option("DIR", "A data directory; whose it is and how full, no messages.")
    ] = None,
    certificate: Annotated[
        str | None, option("DIR", "A directory of certificates; the last verdict of each chain is shown.")
    ] = None,
) -> None:
    """Gather what a report of a bug needs, as text: versions, settings, the end of a log, the last verdicts. Secrets
    are left out; read it all the same before you send it."""
    secrets = Secrets()
    settings = [line for path in files or () for line in _settings(path, secrets)]
    parts: list[tuple[str, Iterable[str]]] = [("Versions", _versions()), ("Environment", _environment())]
    if settings:
        parts.append(("Settings", settings))
    if data_dir is not None:
        parts.append(("Data directory", _directory(data_dir)))
    if certificate is not None:
        parts.append(("Last verdicts", _verdicts(certificate)))
    if log is not None:
        parts.append((f"The end of {log}", _tail(log, lines)))
    text = "\n".join(f"## {title}\n\n```\n{chr(10).join(inside)}\n```\n" for title, inside in parts)
    typer.echo(
        "# holdfast bug report\n\nSecrets are left out as far as they are known. Read it before you send it.\n"
    )
    typer.echo(secrets.hide(text), nl=False)


class Secrets:
    """What is not to be seen: learnt from settings, taken out of every text."""

    def __init__(self) -> None:
        from holdfast.pipeline.definition.secrets import Redactor

        self._redactor = Redactor()
        for name, value in os.environ.items():
            if SOUNDS_SECRET.search(name) or name == "HOLDFAST_DATABASE":
                self.learn(value)

    def learn(self, value: str) -> None:
        """A value that is a secret, and what is one inside it: lines of a key, the fields of a JAAS entry."""
        inside = [text for name, text in JAAS_FIELD.findall(value) if name != "username"]
        inside += re.findall(r"://[^/@\s:]*:([^\s]*)@", value)
        for each in (value, *value.splitlines(), *inside):
            if each.strip():
                self._redactor.add(each, HIDDEN)

    def follow(self, value: str, directory: str) -> None:
        """What a definition's references lead to is a secret; what leads nowhere hides nothing."""
        from holdfast.pipeline.definition.secrets import FILE_PREFIX, REFERENCE, SECRET_BYTES_MAX, VARIABLE

        for match in REFERENCE.finditer(value):
            variable = VARIABLE.fullmatch(match["inside"] or "")
            if variable is not None and (found := os.environ.get(variable["name"])):
                self._redactor.add(found, f"${{{variable['name']}}}")
        if value.startswith(FILE_PREFIX):
            place = Path(directory, value.removeprefix(FILE_PREFIX).removeprefix("//")).expanduser()
            if place.is_file():
                with place.open("rb") as file:
                    self.learn(file.read(SECRET_BYTES_MAX).decode("utf-8", "replace"))
        for password in re.findall(r"://[^/@\s:]*:(?!\$\{)([^\s]*)@", value):
            self._redactor.add(password, HIDDEN)

    def hide(self, text: str) -> str:
        text = self._redactor.redact(text)
        for pattern, replacement in PATTERNS:
            text = pattern.sub(replacement, text)
        return text


def _versions() -> Iterator[str]:
    yield f"holdfast {__version__}"
    for name, value in origin().items():
        yield f"{name} {value or 'unknown'}"
    yield f"python {platform.python_version()} ({platform.python_implementation()})"
    yield f"system {platform.platform()}, {os.cpu_count()} processors"
    asked = (REQUIREMENT.match(each) for each in metadata.requires("holdfast") or () if not DEV.search(each))
    for name in sorted({match[0] for match in asked if match} - {"holdfast"}):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _environment() -> list[str]:
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)]
    return found or ["nothing of HOLDFAST_*, JAVA_HOME or SPARK_HOME is set"]


def _settings(path: str, secrets: Secrets) -> Iterator[str]:
    from holdfast.doctor.properties_files import read_entries

    yield f"{path}:"
    for entry in read_entries(path):
        name = ".".join(entry.path)
        for value in entry.value if isinstance(entry.value, list) else [entry.value]:
            text = str(value)
            if _is_secret(entry.path):
                secrets.learn(text)
            secrets.follow(text, os.path.dirname(path))
        yield f"  {name} = {HIDDEN if _is_secret(entry.path) else _one_line(entry.value)}"


def _one_line(value: Any) -> str:
    return " ".join(str(value).splitlines())


def _is_secret(path: tuple[str, ...]) -> bool:
    """By type or by name; of a properties file, where a name may be anything, also what nobody knows."""
    from holdfast.config.broker import known_setting
    from holdfast.config.catalog import TOPIC
    from holdfast.doctor.client_defaults import Client, known_names

    name = path[-1]
    setting = known_setting(name)
    if setting is not None:
        return setting.is_sensitive
    if SOUNDS_SECRET.search(name):
        return True
    is_known = name in TOPIC or any(
        name in known_names(client, role) for client in Client for role in ("producer", "consumer")
    )
    return len(path) == 1 and "." in name and not is_known


def _directory(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        raise UsageError(f"--data-dir {path}: there is no such directory")
    room = os.statvfs(path)
    yield f"{path}: {room.f_bavail * room.f_frsize >> 20:,} MiB free of {room.f_blocks * room.f_frsize >> 20:,}"
    names = os.listdir(path)
    partitions = [name for name in names if os.path.isdir(os.path.join(path, name))]
    yield f"{len(partitions):,} directories of partitions, {len(names) - len(partitions):,} files"
    if "meta.properties" in names:
        with open(os.path.join(path, "meta.properties"), encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in file if not line.startswith("#"))
    else:
        yield "no meta.properties: it has never been used, or it is no log directory"


def _verdicts(directory: str) -> Iterator[str]:
    from holdfast.audit.certificate import verify

    for chain in verify([directory]):
        if chain.certificates:
            last = chain.certificates[-1]
            yield f"{chain.subject} number {last.number:,}: {last.verdict}"
        yield f"  the chain holds: {chain.problem or 'yes'}"


def _tail(path: str, count: int) -> list[str]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES_MAX))
            found = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise UsageError(f"--log {path}: cannot be read: {error.strerror}") from error
    return found[-count:] if count else []
