"""A file system under a real process that forgets what was not flushed: `SimulatedDisk`, mounted by FUSE.

    with ForgetfulMount(directory, seed=7) as mount:
        broker = BrokerProcess(str(directory), prefix=mount.as_after_a_boot())
        ...
        broker.crash()
        mount.lose_power()          # of what was not flushed any subset is left
        broker = BrokerProcess(...) # finds it

The kernel is told to keep nothing: every read and write of the process comes here, a flush of a file or a directory is
one of the disk, and so the rules of `SimulatedDisk` are those of the mount. One thread serves it, request by request.

`syncfs` does not reach a file system of this kind: the kernel answers it by itself, and nothing is flushed. A process
that relies on it loses what it believes to have flushed. Mounting needs root and /dev/fuse; `why_not()` says what is
missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from holdfast.errors import HoldfastError
from holdfast.real import RealClock
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.disk_files import SimulatedFile

DEVICE: Final = "/dev/fuse"
IN_HEADER: Final = struct.Struct("<IIQQIIII")
OUT_HEADER: Final = struct.Struct("<IiQ")
ATTR: Final = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY: Final = struct.Struct("<QQQQII")
READ_IN: Final = struct.Struct("<QQIIQII")
WRITE_BYTES_MAX: Final = 1 << 17
REQUEST_BYTES_MAX: Final = WRITE_BYTES_MAX + 4096
ROOT_ID: Final = 1
PROTOCOL: Final = (7, 31)
DIRECT_IO: Final = 1
SETS_SIZE: Final = 1 << 3
DETACH: Final = 2
NO_ANSWER: Final = frozenset({2, 36, 42})
"""FORGET, INTERRUPT, BATCH_FORGET."""
Answer = Callable[["_Server", int, bytes], bytes]


class MountFailed(HoldfastError):
    """The file system cannot be mounted here; the message says why."""


def why_not() -> str | None:
    """What this machine lacks, or None."""
    if not sys.platform.startswith("linux") or not os.path.exists(DEVICE):
        return f"there is no {DEVICE}"
    if os.geteuid() != 0:
        return "only root may mount a file system"
    return None


class ForgetfulMount:
    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.directory = directory
        self.disk = SimulatedDisk(seed, RealClock())
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = -1
        self._thread: threading.Thread | None = None
        self._boots = 0

    def __enter__(self) -> Self:
        reason = why_not()
        if reason is not None:
            raise MountFailed(f"{self.directory} cannot be mounted: {reason}")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._descriptor},rootmode=40000,user_id=0,group_id=0".encode()
        if self._libc.mount(b"forgetful", os.fsencode(self.directory), b"fuse", 0, options) != 0:
            code = ctypes.get_errno()
            os.close(self._descriptor)
            raise MountFailed(f"{self.directory} cannot be mounted: {os.strerror(code)}")
        server = _Server(self.disk)
        self._thread = threading.Thread(target=self._serve, args=(server,), name="forgetful", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._libc.umount2(os.fsencode(self.directory), DETACH)
        if self._thread is not None:
            self._thread.join(10)
        os.close(self._descriptor)

    def lose_power(self) -> None:
        """What was not flushed may be gone. Whoever had files open here must be dead by then."""
        with self._lock:
            self.disk.crash()

    def as_after_a_boot(self) -> tuple[str, ...]:
        """A command to run a process under, so that it sees another boot each time, as after a power failure."""
        self._boots += 1
        told = self.directory.with_name(f"{self.directory.name}.boot-{self._boots}")
        told.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        script = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
        return ("unshare", "--mount", "sh", "-c", script, str(told))

    def _serve(self, server: _Server) -> None:
        while True:
            try:
                request = os.read(self._descriptor, REQUEST_BYTES_MAX)
            except OSError as error:
                if error.errno in (errno.ENODEV, errno.EBADF):
                    return  # unmounted
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            length, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
            with self._lock:
                code, answer = server.answer(opcode, node, request[IN_HEADER.size : length])
            if opcode in NO_ANSWER:
                continue
            head = OUT_HEADER.pack(OUT_HEADER.size + len(answer), -code, unique)
            with contextlib.suppress(FileNotFoundError):  # whoever asked was killed meanwhile
                os.write(self._descriptor, head + answer)


class _Server:
    """Requests in, answers out. Nodes are numbers for paths, as the kernel learnt them."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self._paths: dict[int, str] = {ROOT_ID: ""}
        self._numbers: dict[str, int] = {"": ROOT_ID}
        self._open: dict[int, SimulatedFile] = {}
        self._next = ROOT_ID + 1

    def answer(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        """An error code, or 0 and the answer."""
        handler = HANDLERS.get(opcode)
        if handler is None:
            return errno.ENOSYS, b""
        try:
            return 0, handler(self, node, body)
        except OSError as error:
            return error.errno or errno.EIO, b""

    # Names

    def path(self, node: int) -> str:
        if node not in self._paths:
            raise OSError(errno.ESTALE, "no such node")
        return self._paths[node]

    def child(self, node: int, name: bytes) -> str:
        text = name.rstrip(b"\0").decode()
        return f"{self.path(node)}/{text}"

    def number(self, path: str) -> int:
        if path not in self._numbers:
            self._numbers[path] = self._next
            self._paths[self._next] = path
            self._next += 1
        return self._numbers[path]

    def forget(self, path: str) -> None:
        """The name is gone: whatever bears it next is another node."""
        number = self._numbers.pop(path, None)
        if number is not None:
            del self._paths[number]

    # Attributes

    def attributes(self, path: str) -> bytes:
        if path and not self.disk.exists(path):
            raise OSError(errno.ENOENT, path)
        is_directory = not path or self.disk.is_directory(path)
        size = 0 if is_directory else self.disk.size(path)
        mode = (stat.S_IFDIR | 0o755) if is_directory else (stat.S_IFREG | 0o644)
        changed_s, changed_ms = (0, 0) if is_directory else divmod(self.disk.modified_ms(path), 1000)
        times = (changed_s, changed_s, changed_s, *[changed_ms * 1_000_000] * 3)
        blocks = (size + 511) // 512
        return ATTR.pack(self.number(path), size, blocks, *times, mode, 1, 0, 0, 0, 4096, 0)

    def entry(self, path: str) -> bytes:
        attributes = self.attributes(path)
        # Valid for no time at all: the kernel asks each time.
        return ENTRY.pack(self.number(path), 0, 0, 0, 0, 0) + attributes

    def attribute_answer(self, path: str) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attributes(path)

    # Files

    def opened(self, path: str, *, create: bool) -> bytes:
        file = self.disk.open(path, "create" if create else "write")
        self._next += 1
        self._open[self._next] = file
        return struct.pack("<QII", self._next, DIRECT_IO, 0)

    def file(self, handle: int) -> SimulatedFile:
        if handle not in self._open:
            raise OSError(errno.EBADF, "no such handle")
        return self._open[handle]

    def close(self, handle: int) -> None:
        self._open.pop(handle, None)


def _init(server: _Server, node: int, body: bytes) -> bytes:
    _, _, read_ahead, _ = struct.unpack_from("<IIII", body)
    head = (*PROTOCOL, read_ahead, 0, 16, 12, WRITE_BYTES_MAX, 1, 0, 0, 0)
    return struct.pack("<IIIIHHIIHHI28x", *head)


def _lookup(server: _Server, node: int, body: bytes) -> bytes:
    return server.entry(server.child(node, body))


def _forget(server: _Server, node: int, body: bytes) -> bytes:
    return b""


def _get_attributes(server: _Server, node: int, body: bytes) -> bytes:
    return server.attribute_answer(server.path(node))


def _set_attributes(server: _Server, node: int, body: bytes) -> bytes:
    valid, _, _, size = struct.unpack_from("<IIQQ", body)
    path = server.path(node)
    if valid & SETS_SIZE:
        server.disk.open(path, "write").truncate(size)
    return server.attribute_answer(path)


def _make_directory(server: _Server, node: int, body: bytes) -> bytes:
    path = server.child(node, body[8:])
    if server.disk.exists(path):
        raise OSError(errno.EEXIST, path)
    server.disk.make_directory(path)
    return server.entry(path)


def _unlink(server: _Server, node: int, body: bytes) -> bytes:
    path = server.child(node, body)
    server.disk.remove(path)
    server.forget(path)
    return b""


def _remove_directory(server: _Server, node: int, body: bytes) -> bytes:
    path = server.child(node, body)
    if server.disk.list(path):
        raise OSError(errno.ENOTEMPTY, path)
    server.disk.remove_tree(path)
    server.forget(path)
    return b""


def _rename(server: _Server, node: int, body: bytes, skip: int = 8) -> bytes:
    (target,) = struct.unpack_from("<Q", body)
    old_name, new_name = body[skip:].split(b"\0")[:2]
    old, new = server.child(node, old_name), server.child(target, new_name)
    server.disk.rename(old, new)
    moved = [path for path in server._numbers if path == old or path.startswith(f"{old}/")]
    server.forget(new)
    for path in moved:
        number = server._numbers.pop(path)
        renamed = new + path[len(old) :]
        server._numbers[renamed] = number
        server._paths[number] = renamed
    return b""


def _rename_2(server: _Server, node: int, body: bytes) -> bytes:
    (flags,) = struct.unpack_from("<I", body, 8)
    if flags:
        raise OSError(errno.EINVAL, "only plain renames")
    return _rename(server, node, body, skip=16)


def _open_file(server: _Server, node: int, body: bytes) -> bytes:
    return server.opened(server.path(node), create=False)


def _create(server: _Server, node: int, body: bytes) -> bytes:
    path = server.child(node, body[16:])
    opened = server.opened(path, create=True)
    return server.entry(path) + opened


def _read(server: _Server, node: int, body: bytes) -> bytes:
    handle, offset, size, *_ = READ_IN.unpack_from(body)
    return server.file(handle).pread(size, offset)


def _write(server: _Server, node: int, body: bytes) -> bytes:
    handle, offset, size, *_ = READ_IN.unpack_from(body)
    data = body[READ_IN.size : READ_IN.size + size]
    return struct.pack("<II", server.file(handle).pwritev([data], offset), 0)


def _flush_file(server: _Server, node: int, body: bytes) -> bytes:
    (handle,) = struct.unpack_from("<Q", body)
    server.file(handle).flush()
    return b""


def _flush_directory(server: _Server, node: int, body: bytes) -> bytes:
    server.disk.flush_directory(server.path(node) or "/")
    return b""


def _release(server: _Server, node: int, body: bytes) -> bytes:
    (handle,) = struct.unpack_from("<Q", body)
    server.close(handle)
    return b""


def _nothing(server: _Server, node: int, body: bytes) -> bytes:
    return b""


def _open_directory(server: _Server, node: int, body: bytes) -> bytes:
    server.disk.list(server.path(node) or "/")
    return struct.pack("<QII", 0, 0, 0)


def _read_directory(server: _Server, node: int, body: bytes) -> bytes:
    _, offset, size, *_ = READ_IN.unpack_from(body)
    path = server.path(node)
    answer = b""
    for index, name in enumerate(server.disk.list(path or "/")):
        if index < offset:
            continue
        child = f"{path}/{name}"
        kind = stat.S_IFDIR if server.disk.is_directory(child) else stat.S_IFREG
        data = name.encode()
        one = struct.pack("<QQII", server.number(child), index + 1, len(data), kind >> 12) + data
        one += b"\0" * (-len(one) % 8)
        if len(answer) + len(one) > size:
            break
        answer += one
    return answer


def _statistics(server: _Server, node: int, body: bytes) -> bytes:
    free = server.disk.free_bytes("/") // 4096
    return struct.pack("<QQQQQIIII24x", free, free, free, 1 << 20, 1 << 20, 4096, 255, 4096, 0)


HANDLERS: Final[Mapping[int, Answer]] = {
    1: _lookup,
    2: _forget,
    3: _get_attributes,
    4: _set_attributes,
    9: _make_directory,
    10: _unlink,
    11: _remove_directory,
    12: _rename,
    14: _open_file,
    15: _read,
    16: _write,
    17: _statistics,
    18: _release,
    20: _flush_file,
    25: _nothing,  # FLUSH: a close, which promises nothing
    26: _init,
    27: _open_directory,
    28: _read_directory,
    29: _nothing,
    30: _flush_directory,
    34: _nothing,  # ACCESS: everybody here is root
    35: _create,
    36: _forget,
    42: _forget,
    45: _rename_2,
}
