"""The real seams: this machine's disk, clock and chance; and what the broker asks of the memory it runs in.

Linux has all that is asked for. macOS lacks some of it: what stands here does with what it has, and `missing_here` says
what that costs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Final, cast

from holdfast.atomic import flush_each, parent_of
from holdfast.seams import Buffer, FlushTarget, Now, OpenMode

HEAP_KEPT_BYTES: Final = 16 * 1024 * 1024
"""Freed memory that stays with the process. By itself the C library gives the end of its heap back after every large
request and takes it again for the next one: 256 page faults for each megabyte, more work than storing it."""
HEAP_BLOCK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Larger blocks go back to the system at once: the rare large request must not stay in memory."""
MOUNTS: Final = "/proc/self/mountinfo"
FLUSHED_WHOLE: Final = frozenset({"ext3", "ext4", "xfs"})
"""File systems whose `syncfs` writes every file and all that is needed to find it, and says when that failed. Others
may answer it without having written anything: the kernel asks no FUSE, NFS or 9p server, and an overlay only one of its
layers. btrfs gives its files a device of their own by which nothing is found, so it is not here."""
FLUSHED_WHOLE_SINCE: Final = (5, 8)
"""The Linux from which on `syncfs` tells of files that could not be written."""
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
        if not _TELLS_CACHED:
            return None
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

    def is_at_path(self) -> bool:
        found = _status_of(self.path)
        return found is not None and os.path.samestat(found, os.fstat(self.fd))

    def truncate(self, length: int) -> None:
        os.ftruncate(self.fd, length)

    def flush(self) -> None:
        if _HAS_FDATASYNC:
            os.fdatasync(self.fd)
        else:
            flush_descriptor(self.fd)

    def drop_cache(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class RealLock:
    def __init__(self, fd: int, directory_fd: int, directory: str) -> None:
        self._fd = fd
        self._directory_fd = directory_fd
        """Open, so that no other directory can have its number."""
        self._directory = directory

    def is_in_place(self) -> bool:
        found = _status_of(self._directory)
        return found is not None and os.path.samestat(found, os.fstat(self._directory_fd))

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            os.close(self._directory_fd)
            self._fd = -1


class RealFileSystem:
    def open(self, path: str, mode: OpenMode) -> RealFile:
        flags = os.O_CLOEXEC | (os.O_RDONLY if mode == "read" else os.O_RDWR)
        if mode == "create":
            flags |= os.O_CREAT
        return RealFile(os.open(path, flags, 0o644), path)

    def exists(self, path: str) -> bool:
        return _status_of(path) is not None

    def is_directory(self, path: str) -> bool:
        status = _status_of(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        os.utime(path, ns=(modified_ms * 1_000_000, modified_ms * 1_000_000))

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
            flush_descriptor(fd)
        finally:
            os.close(fd)

    def flush_many(self, targets: Sequence[FlushTarget]) -> None:
        file = file_of_whole(targets)
        if file is not None:
            try:
                flush_whole(file)
                return
            except WholeFlushFailed:
                pass  # each file has its say
        flush_each(self, targets)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def lock(self, path: str) -> RealLock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # A record lock as Kafka's JVM takes, so that the two exclude each other as well. Where the system descends
            # from BSD, as macOS does, the two kinds of lock exclude each other by themselves, even within one process.
            if _LOCKS_ARE_APART:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(errno.EAGAIN, "locked by another process", path) from None
            raise
        directory = parent_of(path)
        return RealLock(fd, os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), directory)


def _status_of(path: str) -> os.stat_result | None:
    """None only where the system says that there is nothing: what cannot be looked at is not absent."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


class RealClock:
    read_ns = 0
    monotonic_ns = staticmethod(time.monotonic_ns)

    def now(self) -> Now:
        self.read_ns = read_ns = time.monotonic_ns()
        return Now(time.time_ns() // 1_000_000, read_ns // 1_000_000)

    def since_boot_ms(self) -> int:
        # macOS calls it so: its monotonic clock goes on while the machine sleeps.
        return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


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
        return _boot_session() or str(uuid.uuid4())


def _boot_session() -> str:
    """macOS's name for the same; empty where there is none."""
    ask = getattr(_libc, "sysctlbyname", None)
    text, length = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
    if ask is None or ask(b"kern.bootsessionuuid", text, ctypes.byref(length), None, ctypes.c_size_t(0)) != 0:
        return ""
    return text.value.decode("ascii", "replace")


_libc = ctypes.CDLL(None, use_errno=True)
_TELLS_CACHED: Final = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")
_HAS_FDATASYNC: Final = hasattr(os, "fdatasync")
_LOCKS_ARE_APART: Final = sys.platform.startswith("linux")


def flush_descriptor(fd: int) -> None:
    """Make a file or directory durable. macOS's `fsync` leaves it in the disk's own cache; F_FULLFSYNC does not."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full)


def missing_here() -> str:
    """What this machine lacks of that which the broker uses, and what that costs, in one line; empty on Linux."""
    lacks = {
        "fdatasync (F_FULLFSYNC flushes instead, and takes longer)": not _HAS_FDATASYNC,
        "syncfs (each file is flushed by itself)": not hasattr(_libc, "syncfs"),
        "RWF_NOWAIT (every read of a log takes a thread)": not _TELLS_CACHED,
        "/proc (memory and open files are not among the metrics)": not os.path.exists("/proc/self/statm"),
        "PR_SET_PDEATHSIG (the background process looks itself whether the broker lives)": not hasattr(
            _libc, "prctl"
        ),
    }
    return ", ".join(what for what, is_missing in lacks.items() if is_missing)


class WholeFlushFailed(OSError):
    """`syncfs` could not write some file, which need not be ours. The kernel keeps the errors of each file apart: a
    flush of ours that follows tells, for the first time, whether it was."""


def flush_whole(file: RealFile) -> None:
    """Flush all of the file system a file is on, where `is_flushed_whole`.

    `syncfs` alone is not enough. On xfs, and on ext4 without a journal, what it wrote last may still be in the disk's
    own cache; and on a file system that went read-only after an error some kernels do nothing and say that all is
    well. A flush of any one file empties that cache, and fails where no file can be flushed.
    """
    if _libc.syncfs(file.fd) != 0:
        code = ctypes.get_errno()
        raise WholeFlushFailed(code, os.strerror(code), file.path)
    file.flush()


def file_of_whole(targets: Iterable[FlushTarget]) -> RealFile | None:
    """A file among the targets, if flushing all of the file system it is on is known to flush every one of them."""
    found: RealFile | None = None
    device: int | None = None
    for target in targets:
        if isinstance(target, str):
            try:
                on = os.stat(target).st_dev
            except OSError:
                return None
        elif isinstance(target, RealFile) and target.fd >= 0:
            on = target.device
            found = found or target
        else:
            return None
        if device is None:
            device = on
        elif on != device:
            return None
    return found if device is not None and is_flushed_whole(device) else None


@functools.cache
def is_flushed_whole(device: int) -> bool:
    """Whether `syncfs` is known to flush the file system on a device. It stays so while a file there is open."""
    try:
        with open(MOUNTS, encoding="ascii", errors="surrogateescape") as file:
            mounts = file.read()
    except OSError:
        return False
    return reports_every_flush(os.uname().release) and file_system_on(device, mounts) in FLUSHED_WHOLE


def reports_every_flush(release: str) -> bool:
    """Whether a kernel of this release says it when `syncfs` could not write a file."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= FLUSHED_WHOLE_SINCE


def file_system_on(device: int, mounts: str) -> str | None:
    """The kind of file system on a device as `MOUNTS` has it; None when it has none or several."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kinds: set[str] = set()
    for line in mounts.splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split(" ")[2:3] == [wanted]:
            kinds.add(file_system.partition(" ")[0])
    return kinds.pop() if len(kinds) == 1 else None


def keep_freed_memory() -> bool:
    """Have the C library keep some of what is freed; false when it is one that cannot be told."""
    try:
        mallopt = _libc.mallopt
    except AttributeError:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES_MAX) and mallopt(_M_TRIM_THRESHOLD, HEAP_KEPT_BYTES)
    )
