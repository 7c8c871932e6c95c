"""What goes into the package: holdfast itself and the installed distributions that its workers use.

Distributions are followed from holdfast's own requirements as they are installed here: native libraries come along,
since wheels keep them inside. Left out are Spark, which a cluster has; what only the driver, the broker or the command
line uses; tests, headers and sources of compiled modules; and compiled bytecode, which each Python makes for itself.

A requirement with a condition counts when it is installed: conditions on Python's version and the system were decided
by the installer already. One without a condition must be there.

The package: one archive of the Python parts that workers of a cluster need, made once and kept.

    holdfast_worker.py        where a worker's Python starts (`worker_start`)
    holdfast-package.json     what the parts were made for, and their versions
    holdfast/…, numpy/…       what `find_contents` finds
    holdfast/reader/__pycache__/*.o    machine code of reader and decoders, for processors like this machine's

Spark unpacks it into the working directory of each executor, where it is on Python's path. It is made for one minor
version of Python on one kind of system: that of the driver, since functions travel between them as bytecode.

The same parts make the same bytes: names are sorted, times and owners fixed. So an archive is named by the digest of
what goes in, kept in the cache directory, and rebuilt only when something changed. A run links the archive into its
home and serves it from there: the cache may forget it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import gzip
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import holdfast
from holdfast.errors import HoldfastError, UsageError
from holdfast.pipeline.cluster import worker_start

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
                yield Part(name, path, hashlib.sha256(content).hexdigest(), len(content))


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


# ---------------------------------------------------------------------------- the package


FORMAT: Final = 1
SUFFIXES: Final = (".tar.gz", ".tgz")
"""Spark tells the kind of an archive by its name."""
START: Final = "holdfast_worker"
"""The module that Spark starts workers with."""
LEVEL: Final = 1
"""Most of it is machine code, which a better level makes little smaller and takes thrice the time for."""
TIME_S: Final = 315_532_800
"""1980: the oldest time that every archiver can write."""
KEPT: Final = 2
"""Archives in the cache; each is some hundred megabytes."""
KERNELS: Final = "holdfast/reader/__pycache__"
PART: Final = ".part"
ABANDONED_S: Final = 86_400
"""Whoever began an archive so long ago does not work on it any more."""

Progress = Callable[[int, int], None]
"""Bytes done, of how many."""


@dataclass(frozen=True)
class Package:
    path: str
    digest: str
    bytes: int
    unpacked_bytes: int
    files: int
    manifest: Mapping[str, Any]
    is_new: bool
    """It was made now; otherwise it was in the cache."""


def make_package(directory: str, *, more: Iterable[str] = (), progress: Progress | None = None) -> Package:
    """The archive for what is installed now, in this cache directory; from there if it has been made before."""
    contents = find_contents(more)
    kernels = machine_code()
    manifest = manifest_of(contents, kernels)
    digest = manifest["digest"]
    path = os.path.join(directory, f"holdfast-{digest[:24]}.tar.gz")
    total = sum(part.bytes for part in contents.parts) + sum(map(len, kernels.values()))
    is_new = not os.path.exists(path)
    if is_new:
        os.makedirs(directory, exist_ok=True)
        with _aside(path) as aside:
            _write(aside, contents, kernels, manifest, progress)
    else:
        os.utime(path)
    _forget_old(directory, path)
    size = os.path.getsize(path)
    return Package(path, digest, size, total, len(contents.parts) + len(kernels) + 2, manifest, is_new)


def cache_directory(home: str | None = None) -> str:
    """Where archives are kept: the cache of this user, else the pipeline's home."""
    chosen = os.environ.get("HOLDFAST_CACHE_DIR")
    if chosen:
        return os.path.join(os.path.abspath(chosen), "packages")
    caches = os.environ.get("XDG_CACHE_HOME")
    if not caches and os.path.expanduser("~") != "~":
        caches = os.path.expanduser("~/.cache")
    if caches and _is_writable(caches):
        return os.path.join(caches, "holdfast", "packages")
    if home is not None:
        return os.path.join(home, "packages")
    return os.path.join(tempfile.gettempdir(), f"holdfast-{os.getuid()}", "packages")


def _is_writable(path: str) -> bool:
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def place_package(package: Package, target: str) -> str:
    """The same archive under a name of its own: linked where that works, else copied."""
    if not target.endswith(SUFFIXES):
        raise UsageError(f"{target}: an archive's name ends in {' or '.join(SUFFIXES)}: Spark goes by it")
    target = os.path.abspath(target)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with _aside(target) as aside:
        os.unlink(aside)
        try:
            os.link(package.path, aside)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES):
                raise
            shutil.copyfile(package.path, aside)
    return target


def serve_from_home(package: Package, home: str) -> str:
    """Where the driver serves the archive from while it runs; those of earlier runs go."""
    directory = os.path.join(home, "package")
    name = os.path.basename(package.path)
    target = place_package(package, os.path.join(directory, name))
    for other in os.listdir(directory):
        if other != name:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(directory, other))
    return target


def machine_code() -> dict[str, bytes]:
    """The files of machine code, by name: made now if they were never needed here."""
    from holdfast.pipeline import row_digest
    from holdfast.pipeline.formats import machine
    from holdfast.reader import kernel

    for each in (kernel, machine, row_digest):
        each.load()
    return kernel.kept_files()


def manifest_of(contents: Contents, kernels: Mapping[str, bytes]) -> dict[str, Any]:
    """What is in it, and for whom; its digest stands for all of the content."""
    import pyspark

    document: dict[str, Any] = {
        "format": FORMAT,
        "holdfast": holdfast.__version__,
        "spark": pyspark.__version__,
        "made_for": worker_start.facts(),
        "distributions": contents.versions,
        "machine_code": sorted(kernels),
    }
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    digest.update(_start_module())
    for part in contents.parts:
        digest.update(f"{part.name}\0{part.digest}\0".encode())
    for name in sorted(kernels):
        digest.update(hashlib.sha256(kernels[name]).digest())
    return {**document, "digest": digest.hexdigest()}


def _start_module() -> bytes:
    with open(worker_start.__file__, "rb") as file:
        return file.read()


# ---------------------------------------------------------------------------- the archive


def _write(
    path: str,
    contents: Contents,
    kernels: Mapping[str, bytes],
    manifest: Mapping[str, Any],
    progress: Progress | None,
) -> None:
    total, done = sum(part.bytes for part in contents.parts), 0
    with (
        open(path, "wb") as file,
        gzip.GzipFile("", "wb", LEVEL, file, mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        _add(out, worker_start.MANIFEST, json.dumps(manifest, indent=2, sort_keys=True).encode())
        _add(out, f"{START}.py", _start_module())
        # Machine code is loaded only from a directory that others cannot write to, whatever the worker's umask is.
        folder = _entry(KERNELS, 0)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        out.addfile(folder)
        for name in sorted(kernels):
            _add(out, f"{KERNELS}/{name}", kernels[name])
        for part in contents.parts:
            with open(part.path, "rb") as source:
                out.addfile(_entry(part.name, os.fstat(source.fileno()).st_size), source)
            done += part.bytes
            if progress is not None:
                progress(done, total)


def _add(out: tarfile.TarFile, name: str, content: bytes) -> None:
    out.addfile(_entry(name, len(content)), io.BytesIO(content))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    entry.mtime = TIME_S
    entry.mode = 0o755 if ".so" in os.path.basename(name) else 0o644
    return entry


@contextlib.contextmanager
def _aside(path: str) -> Iterator[str]:
    """A file beside this one that takes its place when all went well."""
    descriptor, aside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".", suffix=PART)
    os.close(descriptor)
    try:
        yield aside
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def _forget_old(directory: str, path: str) -> None:
    """Archives beyond the newest few, and what a build that was killed left."""
    found = []
    for name in os.listdir(directory):
        each = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):
            if name.startswith("holdfast-") and not name.endswith(PART) and each != path:
                found.append((os.path.getmtime(each), each))
            elif name.endswith(PART) and os.path.getmtime(each) < time.time() - ABANDONED_S:
                os.unlink(each)
    for _, each in sorted(found, reverse=True)[KEPT - 1 :]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each)
