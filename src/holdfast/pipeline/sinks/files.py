"""The file operations that file sinks stand on, as one object that tests can watch and break: of this machine, which
flushes, or of an object store, which keeps what it took.

The rule of every file sink: what a commit names is flushed before it, file by file and directory by directory, and the
commit itself is flushed before it is reported. `Disk` is the real one; it is pickled into Spark's workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from typing import IO, Any

from holdfast.pipeline.sinks.base import SinkError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_URL = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)


def _fsync(path: str, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Disk:
    """Files of the operating system. Every method raises `OSError`."""

    looks_at = 1000
    """How many of the newest files or commits a start looks at, within a second or so; an audit reads all of them."""

    def create_directory(self, path: str) -> None:
        """Make a directory and its missing parents, each durable in its own parent."""
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        for directory in reversed(missing):
            self.make_directory(directory)
            self.flush_directory(os.path.dirname(directory) or ".")

    def make_directory(self, path: str) -> None:
        """One directory, not durable yet; one that is there is fine."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)

    def open_new(self, path: str) -> IO[bytes]:
        return open(path, "xb")

    def open_existing(self, path: str) -> IO[bytes]:
        return open(path, "rb")

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def has(self, path: str, size: int) -> bool:
        """Whether a file is there, as long as it was, and can be read at its end."""
        try:
            with self.open_existing(path) as file:
                file.seek(size - 1)
                return len(file.read()) == 1
        except OSError:
            return False

    def remove(self, path: str) -> None:
        """Remove a file; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def flush_file(self, path: str) -> None:
        """Make the content of a file durable, whoever wrote it."""
        _fsync(path, os.O_RDONLY)

    def flush_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)

    def write(self, path: str, data: bytes) -> None:
        """A new small file, its content durable; its name is, once its directory is flushed."""
        with self.open_new(path) as file:
            file.write(data)
        self.flush_file(path)

    def rename(self, old: str, new: str) -> None:
        """One atomic step. A directory replaces no directory that has something in it: `OSError`."""
        os.rename(old, new)

    def exchange(self, one: str, other: str) -> None:
        """Two directories change places in one atomic step; Linux has it, on most of its file systems."""
        library = ctypes.CDLL(None, use_errno=True)
        function = getattr(library, "renameat2", None)
        if function is None:
            raise OSError(errno.ENOSYS, "this system cannot exchange two directories", other)
        if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"two directories cannot be exchanged here: {os.strerror(code)}", other)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)

    def flush_tree(self, root: str) -> None:
        """Flush every directory below and including `root`, the innermost first; the files were flushed before."""
        for directory, _, _ in os.walk(root, topdown=False):
            self.flush_directory(directory)

    def replace(self, path: str, data: bytes) -> None:
        """Put new content in the place of a small file, durably."""
        aside = path + ".new"
        self.remove(aside)
        self.write(aside, data)
        self.rename(aside, path)
        self.flush_directory(os.path.dirname(path))


def local_path(path: str) -> str | None:
    """The path on this machine, or None for one that lies elsewhere."""
    if path.startswith("file:"):
        path = path.removeprefix("file:")
        return "/" + path.lstrip("/")
    return None if _URL.match(path) else path


class ObjectStore(Disk):
    """Files under a URL, through Arrow's file systems; credentials come from the environment, as `deltalake`'s do."""

    looks_at = 32

    def open_new(self, path: str) -> IO[bytes]:
        system, where = self._find(path)
        stream: IO[bytes] = system.open_output_stream(where)
        return stream

    def open_existing(self, path: str) -> IO[bytes]:
        system, where = self._find(path)
        stream: IO[bytes] = system.open_input_file(where)
        return stream

    def size(self, path: str) -> int:
        system, where = self._find(path)
        return int(system.get_file_info(where).size)

    def remove(self, path: str) -> None:
        system, where = self._find(path)
        with contextlib.suppress(FileNotFoundError):
            system.delete_file(where)

    def create_directory(self, path: str) -> None:
        """An object store has none."""

    def flush_file(self, path: str) -> None:
        """An object is durable when its upload is done."""

    def flush_directory(self, path: str) -> None:
        """An object store has none."""

    def _find(self, path: str) -> tuple[Any, str]:
        from pyarrow import fs

        system, where = fs.FileSystem.from_uri(path)
        return system, where


def files_for(path: str, directory: str) -> tuple[str, Disk]:
    """Where a table is, and how its files are written."""
    local = local_path(path)
    if local is None:
        return path.rstrip("/"), ObjectStore()
    return os.path.abspath(os.path.join(directory, local)), Disk()


class Held:
    """An exclusive lock on a file, which dies with the process."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def release(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def hold(path: str) -> Held | None:
    """Lock a file, which is made if missing; None when another process has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return Held(handle)


def files_below(root: str) -> Iterator[str]:
    """Every file, as a path relative to `root`."""
    for directory, _, names in os.walk(root):
        for name in names:
            yield os.path.relpath(os.path.join(directory, name), root)


@contextlib.contextmanager
def explained(sink: str, path: str) -> Iterator[None]:
    """What the operating system refuses, in words that say what to do."""
    try:
        yield
    except PermissionError as error:
        raise SinkError(
            f"sink {sink!r}: no permission to write {error.filename or path}; nothing was committed. Give the user "
            "that runs the pipeline the right to write there"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SinkError(
                f"sink {sink!r}: the disk under {path} is full; nothing was committed. Make room and run again"
            ) from error
        where, why = error.filename or path, error.strerror or error
        raise SinkError(f"sink {sink!r}: {where} cannot be written: {why}; nothing was committed") from error
