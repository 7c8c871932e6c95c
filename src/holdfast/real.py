"""The real seams: this machine's disk, clock and chance; and what the broker asks of the memory it runs in."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from typing import Final, cast

from holdfast.seams import Buffer, Now, OpenMode

HEAP_KEPT_BYTES: Final = 16 * 1024 * 1024
"""Freed memory that stays with the process. By itself the C library gives the end of its heap back after every large
request and takes it again for the next one: 256 page faults for each megabyte, more work than storing it."""
HEAP_BLOCK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Larger blocks go back to the system at once: the rare large request must not stay in memory."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

_bytearray_of_size = ctypes.pythonapi.PyByteArray_FromStringAndSize
_bytearray_of_size.restype = ctypes.py_object
_bytearray_of_size.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]


def unfilled_buffer(length: int) -> bytearray:
    """A buffer whose bytes are whatever memory held: `bytearray(length)` writes, and so occupies, all of it."""
    return cast(bytearray, _bytearray_of_size(None, length))


class RealFile:
    """A descriptor closed when the last reference goes, so that a slice being sent outlives a deletion."""

    __slots__ = ("_device", "fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path
        self._device: int | None = None

    @property
    def device(self) -> int:
        """The number of the device its file system is on, which an open file never leaves."""
        if self._device is None:
            self._device = os.fstat(self.fd).st_dev
        return self._device

    def pread(self, length: int, position: int) -> bytes:
        data = os.pread(self.fd, length, position)
        if len(data) == length or not data:
            return data
        # A short read before the end of the file: go on until it is whole or the file ends.
        pieces = [data]
        got = len(data)
        while got < length:
            data = os.pread(self.fd, length - got, position + got)
            if not data:
                break
            pieces.append(data)
            got += len(data)
        return b"".join(pieces)

    def pread_cached(self, length: int, position: int) -> Buffer | None:
        """Bytes that need no disk, perhaps fewer than asked for; None when the first is not in memory."""
        data = unfilled_buffer(length)
        try:
            got = os.preadv(self.fd, (data,), position, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            # This file system cannot tell what is cached, so the loop must not risk it.
            return None
        return data if got == length else memoryview(data)[:got] if got else None

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        written = os.pwritev(self.fd, buffers, position)
        total = sum(map(len, buffers))
        while written < total:
            rest = memoryview(b"".join(buffers))[written:]
            count = os.pwrite(self.fd, rest, position + written)
            if not count:
                raise OSError(errno.EIO, "wrote nothing", self.path)
            written += count
        return written

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def truncate(self, length: int) -> None:
        os.ftruncate(self.fd, length)

    def flush(self) -> None:
        os.fdatasync(self.fd)

    def drop_cache(self) -> None:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class RealLock:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealFileSystem:
    def open(self, path: str, mode: OpenMode) -> RealFile:
        flags = os.O_CLOEXEC | (os.O_RDONLY if mode == "read" else os.O_RDWR)
        if mode == "create":
            flags |= os.O_CREAT
        return RealFile(os.open(path, flags, 0o644), path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def list(self, directory: str) -> list[str]:
        return sorted(os.listdir(directory))

    def make_directory(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def flush_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def flush_all(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_file_system(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def lock(self, path: str) -> RealLock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A record lock as Kafka's JVM takes, so that the two exclude each other as well.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(errno.EAGAIN, "locked by another process", path) from None
            raise
        return RealLock(fd)


class RealClock:
    def now(self) -> Now:
        return Now(time.time_ns() // 1_000_000, time.monotonic_ns() // 1_000_000)


class RealRandomness:
    def uuid_bytes(self) -> bytes:
        return uuid.uuid4().bytes

    def below(self, bound: int) -> int:
        return int.from_bytes(os.urandom(8), "big") % bound


def boot_id() -> str:
    """Another value after each boot of the machine; without one, every start counts as after a power loss."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return str(uuid.uuid4())


_libc = ctypes.CDLL(None, use_errno=True)


def sync_file_system(fd: int) -> None:
    """Flush everything of the file system `fd` is on (syncfs), reporting write-back errors."""
    if _libc.syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def keep_freed_memory() -> bool:
    """Have the C library keep some of what is freed; false when it is one that cannot be told."""
    try:
        mallopt = _libc.mallopt
    except AttributeError:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES_MAX) and mallopt(_M_TRIM_THRESHOLD, HEAP_KEPT_BYTES)
    )
