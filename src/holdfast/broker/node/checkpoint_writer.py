"""Recovery points reach the disk without anybody waiting for them.

The file is written aside, flushed, renamed, and its directory flushed, as `atomic` does, but each flush is a job of
the `Flusher`: once a second, while requests go on. What was asked for meanwhile is written by the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.atomic import write_atomically
from holdfast.broker.log.checkpoints import RECOVERY_POINT_FILE, encode_offsets
from holdfast.broker.node.directories import LogDirectory
from holdfast.seams import FileSystem, Flusher, FlushJob

ASIDE: Final = ".new"
"""Not the suffix of `atomic`: the two may be at work on one file around a stop."""


@dataclass(eq=False, repr=False)
class CheckpointWriter:
    _fs: FileSystem
    _flusher: Flusher
    _directory: LogDirectory
    _failed: Callable[[LogDirectory, OSError], None]
    _is_busy: bool = field(default=False, init=False)
    _is_superseded: bool = field(default=False, init=False)
    """The round under way writes what is no longer so; it must not reach the file's name."""
    _written: bytes | None = field(default=None, init=False)
    _offsets: dict[tuple[str, int], int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._path = f"{self._directory.path}/{RECOVERY_POINT_FILE}"

    def write(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Begin a round, unless one is under way or nothing has changed."""
        data = encode_offsets(offsets)
        if self._is_busy or data == self._written or self._directory.offline:
            return
        self._is_busy = True
        self._offsets = dict(offsets)
        try:
            file = self._fs.open(self._path + ASIDE, "create")
            file.pwritev([data], 0)
            file.truncate(len(data))
        except OSError as error:
            self._end(error)
            return
        except Exception:
            self._give_up()
            raise
        self._written = data
        self._flusher.submit(FlushJob((file,), self._flushed, is_background=True))

    def write_now(self, offsets: Mapping[tuple[str, int], int]) -> bool:
        """Whether it is durable now; if not, the directory is offline or full. Gives up a round under way. Blocks."""
        self._is_superseded = self._is_busy
        data = encode_offsets(offsets)
        try:
            write_atomically(self._fs, self._path, data)
        except OSError as error:
            self._written = None
            self._failed(self._directory, error)
            return False
        self._written = data
        self._directory.recovery_points = dict(offsets)
        return True

    def _flushed(self, error: OSError | None) -> None:
        if self._is_superseded:
            self._end(error)
        elif error is None and not self._directory.offline and not self._directory.is_closed:
            try:
                self._fs.rename(self._path + ASIDE, self._path)
            except OSError as failure:
                self._end(failure)
                return
            except Exception:
                self._give_up()
                raise
            self._flusher.submit(FlushJob((self._directory.path,), self._end, is_background=True))
        else:
            self._end(error)

    def _give_up(self) -> None:
        """A defect ends this round, and none after it."""
        self._is_busy = self._is_superseded = False
        self._written = None

    def _end(self, error: OSError | None) -> None:
        if error is None and not self._is_superseded:
            self._directory.recovery_points = self._offsets
        self._is_busy = self._is_superseded = False
        if error is not None:
            self._written = None
            if not self._directory.is_closed:
                self._failed(self._directory, error)
