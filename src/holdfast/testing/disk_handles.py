"""What a process holds of a simulated disk: open files and locks, which die with it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from os import strerror
from typing import TYPE_CHECKING

from holdfast.atomic import parent_of
from holdfast.seams import Buffer
from holdfast.testing.disk_pages import Inode

if TYPE_CHECKING:
    from holdfast.testing.disk import SimulatedDisk


class StaleHandle(OSError):
    """A file that was opened before the crash or kill: its process is no more."""


class SimulatedFile:
    """One open file of a `SimulatedDisk`."""

    __slots__ = ("_disk", "_generation", "_inode", "_open", "_path", "_writable")

    def __init__(self, disk: SimulatedDisk, path: str, inode: Inode, writable: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._writable = writable
        self._generation = disk.generation
        self._open = True

    @property
    def path(self) -> str:
        return self._path

    def _check(self, writing: bool = False) -> None:
        if self._generation != self._disk.generation:
            raise StaleHandle(errno.ESTALE, "opened before the crash", self._path)
        if not self._open or (writing and not self._writable):
            raise os_error(errno.EBADF, self._path)

    def pread(self, length: int, position: int) -> bytes:
        self._check()
        if self._disk.unreadable:
            self._disk.look(self._path)
        if self._disk.watched:
            self._disk.before("read", self._path)
        return bytes(self._inode.cached[position : position + length])

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._check(writing=True)
        data = b"".join(buffers)
        self._disk.write(self._inode, self._path, data, position)
        return len(data)

    def size(self) -> int:
        self._check()
        return len(self._inode.cached)

    def is_at_path(self) -> bool:
        self._check()
        return self._disk.find(self._path) is self._inode

    def truncate(self, length: int) -> None:
        self._check(writing=True)
        self._disk.truncate(self._inode, self._path, length)

    def flush(self) -> None:
        self._check()
        self._disk.flush_inode(self._inode, self._path)

    def drop_cache(self) -> None:
        self._check()
        self._inode.drop_cache()

    def close(self) -> None:
        self._open = False


class SimulatedLock:
    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._directory = disk.find(parent_of(path))

    def is_in_place(self) -> bool:
        return self._disk.find(parent_of(self._path)) is self._directory

    def release(self) -> None:
        if self._disk.locks.get(self._path) is self:
            del self._disk.locks[self._path]


def os_error(code: int, path: str) -> OSError:
    return OSError(code, strerror(code), path)
