"""What goes into the package: holdfast itself and the installed distributions that its workers use.

Distributions are followed from holdfast's own requirements as they are installed here: native libraries come along,
since wheels keep them inside. Left out are Spark, which a cluster has; what only the driver, the broker or the command
line uses; tests, headers and sources of compiled modules; and compiled bytecode, which each Python makes for itself.

A requirement with a condition counts when it is installed: conditions on Python's version and the system were decided
by the installer already. One without a condition must be there.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.errors import HoldfastError

ROOT: Final = "holdfast"
EXTRAS: Final = ("spark", "registry")
"""Of ours: what pipelines need, and what a schema registry's client needs where it is installed."""
OWN_PACKAGES: Final = ("holdfast", "pyspark_holdfast")
OWN_LEFT_OUT: Final = ("holdfast/testing/*", "holdfast/cli/*", "holdfast/demo/*", "holdfast/broker/*")
NOT_SHIPPED: Final = frozenset({"pyspark", "py4j", "deltalake", "rich", "typer", "uvloop"})
"""Spark brings the first two; tables are committed by the driver; the others belong to broker and command line."""
LEFT_OUT_DIRECTORIES: Final = frozenset({"tests", "__pycache__", "include"})
LEFT_OUT_SUFFIXES: Final = (
    ".a",
    ".c",
    ".cpp",
    ".h",
    ".hpp",
    ".pth",
    ".pxd",
    ".pxi",
    ".pyc",
    ".pyi",
    ".pyx",
)
LEFT_OUT_FILES: Final = (
    "pyarrow/*flight*",
    "*.dist-info/RECORD",
    "*.dist-info/INSTALLER",
    "*.dist-info/REQUESTED",
    "*.dist-info/direct_url.json",
)
_REQUIREMENT: Final = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?", re.DOTALL)
_EXTRA: Final = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")


class PartMissing(HoldfastError):
    """Something the package needs is not installed as expected; the message says what to install."""

    exit_code = 3


@dataclass(frozen=True)
class Part:
    """One file of the package."""

    name: str
    """Its path within, with slashes."""
    path: str
    digest: str
    bytes: int
    is_own: bool = False
    """It is holdfast's, and changes more often than what it needs."""


@dataclass(frozen=True)
class Contents:
    parts: tuple[Part, ...]
    """By name."""
    versions: dict[str, str]
    """Of the distributions within, by name."""


def find_contents(more: Iterable[str] = ()) -> Contents:
    """All files; `more` names distributions that the author's own functions use."""
    found = find_distributions([(ROOT, EXTRAS), *((name, ()) for name in more)])
    parts = {part.name: part for name in OWN_PACKAGES for part in _own_parts(name)}
    versions = {}
    for name, distribution in found.items():
        versions[name] = distribution.version
        if name != ROOT:
            parts.update((part.name, part) for part in _parts_of(name, distribution))
    return Contents(tuple(parts[name] for name in sorted(parts)), dict(sorted(versions.items())))


# ---------------------------------------------------------------------------- which distributions


def find_distributions(
    wanted: Iterable[tuple[str, Iterable[str]]],
) -> dict[str, importlib.metadata.Distribution]:
    """These with these extras, and what they require, by normalised name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    extras: dict[str, set[str]] = {}
    waiting = [(name, frozenset(some), "") for name, some in wanted]
    while waiting:
        name, asked, condition = waiting.pop()
        name = normalised(name)
        if name in NOT_SHIPPED:
            continue
        known = extras.get(name)
        if known is not None and asked <= known:
            continue
        if name not in found:
            distribution = _installed(name)
            if distribution is None:
                if condition:
                    continue
                raise PartMissing(
                    f"{name} is not installed, and workers need it: pip install 'holdfast[spark]', or {name} itself"
                )
            found[name] = distribution
        extras[name] = (known or set()) | asked
        waiting += _requirements(found[name], extras[name])
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(
    distribution: importlib.metadata.Distribution, extras: set[str]
) -> Iterator[tuple[str, frozenset[str], str]]:
    for text in distribution.requires or ():
        match = _REQUIREMENT.match(text)
        assert match is not None, text
        condition = (match[3] or "").strip()
        of_extras = set(_EXTRA.findall(condition))
        if of_extras and not of_extras & extras:
            continue
        inner = frozenset(part.strip() for part in (match[2] or "").split(",") if part.strip())
        yield match[1], inner, condition


# ---------------------------------------------------------------------------- which files


def _own_parts(package: str) -> Iterator[Part]:
    """Of holdfast, wherever it lies: an editable installation lists no files."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PartMissing(f"the package {package} is not installed")
    root = next(iter(spec.submodule_search_locations))
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for file in sorted(files):
            path = os.path.join(directory, file)
            name = "/".join([package, *os.path.relpath(path, root).split(os.sep)])
            if not file.endswith(LEFT_OUT_SUFFIXES) and not _matches(name, OWN_LEFT_OUT):
                with open(path, "rb") as handle:
                    content = handle.read()
                yield Part(name, path, hashlib.sha256(content).hexdigest(), len(content), True)


def _parts_of(name: str, distribution: importlib.metadata.Distribution) -> Iterator[Part]:
    files = distribution.files
    if files is None:
        raise PartMissing(
            f"{name} keeps no list of its files here, so it cannot be packed: install it with pip, in the environment "
            "that runs holdfast"
        )
    for file in files:
        inside = file.as_posix()
        if inside.startswith(("../", "/")) or not _is_wanted(inside):
            continue
        path = str(distribution.locate_file(file))
        try:
            size = os.path.getsize(path)
        except FileNotFoundError:
            continue
        digest = f"{file.hash.mode}={file.hash.value}" if file.hash is not None else _digest_of(path)
        yield Part(inside, path, digest, size)


def _is_wanted(name: str) -> bool:
    directories = name.split("/")[:-1]
    return (
        not LEFT_OUT_DIRECTORIES.intersection(directories)
        and not name.endswith(LEFT_OUT_SUFFIXES)
        and not _matches(name, LEFT_OUT_FILES)
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
