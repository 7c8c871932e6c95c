"""A real disk that fails on purpose: for tests whose threads write at the same time.

`SimulatedDisk` can forget and tear, and is for one thread. This one is the real file system, and
refuses what a test told it to, until the test takes it back.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from os import strerror
from typing import Literal, TypeAlias

from holdfast.real import RealFileSystem, RealLock
from holdfast.seams import Buffer, File, OpenMode

FaultyOperation: TypeAlias = Literal["write", "flush", "read", "rename", "lock"]


class FaultyFiles(RealFileSystem):
    def __init__(self) -> None:
        self._faults: dict[FaultyOperation, tuple[int, str]] = {}

    def fail(self, operation: FaultyOperation, code: int = errno.EIO, path_contains: str = "") -> None:
        """From now on the operation fails on files whose path contains this."""
        self._faults[operation] = (code, path_contains)

    def mend(self) -> None:
        self._faults.clear()

    def check(self, operation: FaultyOperation, path: str) -> None:
        fault = self._faults.get(operation)
        if fault is not None and fault[1] in path:
            raise OSError(fault[0], strerror(fault[0]), path)

    def open(self, path: str, mode: OpenMode) -> File:  # type: ignore[override]  # no descriptor, so nobody goes around it
        return _FaultyFile(self, super().open(path, mode))

    def rename(self, old: str, new: str) -> None:
        self.check("rename", new)
        super().rename(old, new)

    def lock(self, path: str) -> RealLock:
        self.check("lock", path)
        return super().lock(path)


class _FaultyFile:
    def __init__(self, files: FaultyFiles, real: File) -> None:
        self._files = files
        self._real = real

    @property
    def path(self) -> str:
        return self._real.path

    def pread(self, length: int, position: int) -> bytes:
        self._files.check("read", self.path)
        return self._real.pread(length, position)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._files.check("write", self.path)
        return self._real.pwritev(buffers, position)

    def size(self) -> int:
        return self._real.size()

    def is_at_path(self) -> bool:
        return self._real.is_at_path()

    def truncate(self, length: int) -> None:
        self._real.truncate(length)

    def flush(self) -> None:
        self._files.check("flush", self.path)
        self._real.flush()

    def drop_cache(self) -> None:
        self._real.drop_cache()

    def close(self) -> None:
        self._real.close()
