"""What the checkpoints of the log directories say: how far each log is flushed, and where each starts.

Recovery points reach the disk without anybody waiting for them. The file is written aside, flushed, renamed, and
its directory flushed, as `atomic` does, but each flush is a job of the `Flusher`: once a second, while requests go
on. What was asked for meanwhile is written by the next round.

`LogStarts` moves the start of a log: records below it are deleted, for retention or because a client asks. The new
start is durable before any file goes. Files go in two steps: renaming them is quick and happens at once;
`file.delete.delay.ms` later, when nobody has them open any more, the worker deletes them, which frees their blocks
and may take long. What a stop leaves behind goes at the next start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from holdfast.atomic import write_atomically
from holdfast.broker.log.checkpoints import LOG_START_FILE, RECOVERY_POINT_FILE, encode_offsets
from holdfast.broker.log.recovery_steps import name_start
from holdfast.broker.node.directories import LogDirectory, Offsets
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.partitions import Deletions, HostedPartitions
from holdfast.broker.node.timers import Timers
from holdfast.saying import Say, warn
from holdfast.seams import Clock, FileSystem, Flusher, FlushJob, Worker

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


class Checkpoints:
    def __init__(self, fs: FileSystem, flusher: Flusher, partitions: HostedPartitions, say: Say) -> None:
        self._partitions = partitions
        self._writers = {
            directory: CheckpointWriter(fs, flusher, directory, self._failed)
            for directory in partitions.directories
        }
        self.deletions = Deletions(fs, self.forget_deleted, say)
        self.are_due = True
        """Something was flushed since the recovery points were written."""
        self._starts_due: set[LogDirectory] = set()
        """Where a full disk refused the checkpoint of log starts."""

    def write_due(self) -> None:
        if self.are_due:
            self.are_due = False
            self.write_recovery_points()
        for directory in [due for due in self._starts_due if not due.offline]:
            self.write_log_starts(directory)

    def write_recovery_points(self) -> None:
        """Begin to write how far everything is flushed; nobody waits for it."""
        for directory, writer in self._writers.items():
            writer.write(self.recovery_points(directory))

    def persisted_recovery_point(self, hosted: HostedPartition) -> int:
        """Below this offset the next recovery will verify nothing, whatever happens now."""
        if self.deletions.hides(hosted):
            return 0
        persisted = hosted.directory.recovery_points.get((hosted.topic, hosted.index), 0)
        return min(persisted, hosted.log.recovery_point)

    def write_log_starts(
        self, directory: LogDirectory, moved: Mapping[HostedPartition, int] = MappingProxyType({})
    ) -> bool:
        """Whether the starts are durable now; if not, the directory is offline or full.

        `moved` are starts that shall be from now on.
        """
        try:
            directory.write_checkpoint(LOG_START_FILE, self.log_starts(directory, moved))
        except OSError as error:
            self._failed(directory, error)
            self._starts_due.add(directory)
            return False
        self._starts_due.discard(directory)
        return True

    def _failed(self, directory: LogDirectory, error: OSError) -> None:
        """A full disk leaves the old checkpoint standing, which is still true; it is tried again."""
        if directory.refuses(error):
            self.are_due = True

    def recovery_points(self, directory: LogDirectory) -> Offsets:
        """Of what is hosted; a partition that could not be opened keeps what the last run knew of it."""
        points = self._kept(directory.recovery_points)
        for hosted in self._partitions.in_directory(directory):
            points[hosted.topic, hosted.index] = hosted.log.recovery_point
        return self.deletions.tell(directory, points, lambda doomed: doomed.recovery_point)

    def log_starts(
        self, directory: LogDirectory, moved: Mapping[HostedPartition, int] = MappingProxyType({})
    ) -> Offsets:
        starts = self._kept(directory.log_starts)
        for hosted in self._partitions.in_directory(directory):
            start_offset = moved.get(hosted, hosted.log.start_offset)
            if start_offset:
                starts[hosted.topic, hosted.index] = start_offset
        return self.deletions.tell(directory, starts, lambda doomed: doomed.start_offset)

    def _kept(self, offsets: Offsets) -> Offsets:
        if not self._partitions.are_open:
            return dict(offsets)
        return {key: offset for key, offset in offsets.items() if self._partitions.is_damaged(*key)}

    def forget_deleted(self, directory: LogDirectory) -> bool:
        """Take what is not hosted any more out of the checkpoints: a new topic may have its name.

        Whether that is durable; if not, the directory is offline or full.
        """
        if directory.offline or not self.write_log_starts(directory):
            return False
        # The next round writes what is hosted under a name that was given back.
        self.are_due = True
        return self._writers[directory].write_now(self.recovery_points(directory))


@dataclass(eq=False, repr=False)
class LogStarts:
    _fs: FileSystem
    _worker: Worker
    _clock: Clock
    _timers: Timers
    _checkpoints: Checkpoints
    _say: Say

    def move(self, moves: Sequence[tuple[HostedPartition, int]], *, even_if_full: bool = False) -> None:
        """Let logs begin at these offsets, with one write of the checkpoint for each directory.

        No client is shown a start that is not durable, so the logs learn of theirs last. Where a full disk refuses
        the checkpoint nothing moves, unless it must `even_if_full`: what expires is what makes room again.
        """
        moved = {hosted: offset for hosted, offset in moves if offset > hosted.log.start_offset}
        directories = dict.fromkeys(hosted.directory for hosted in moved)
        durable = {
            directory for directory in directories if self._checkpoints.write_log_starts(directory, moved)
        }
        for hosted, offset in moved.items():
            if hosted.offline:
                continue
            is_durable = hosted.directory in durable and not self._checkpoints.deletions.hides(hosted)
            if is_durable or (even_if_full and self._name_start(hosted, offset)):
                hosted.advance_start(offset)
                self.remove_below(hosted)

    def _name_start(self, hosted: HostedPartition, offset: int) -> bool:
        """Whether the start is durable without the checkpoint, by the name of a file: see `named_start`."""
        try:
            name_start(self._fs, hosted.log.segments[0], offset)
        except OSError as error:
            hosted.directory.refuses(error)
            return False
        return True

    def remove_below(self, hosted: HostedPartition) -> None:
        """Take segments that lie below the log start, which is durable, out of the log, oldest first.

        Where the directory has no room for a name, the next check of retention removes the rest.
        """
        log = hosted.log
        if hosted.offline or len(log.segments) < 2 or log.segments[1].base_offset > log.start_offset:
            return
        retired: list[str] = []
        try:
            for segment in log.segments_before(log.start_offset):
                retired += log.remove([segment])
        except OSError as error:
            if not hosted.directory.refuses(error):
                return
        self.remove_later(retired, log.config.file_delete_delay_ms)

    def remove_later(self, paths: list[str], delay_ms: int) -> None:
        """Have the worker delete files that were renamed out of the way."""

        def done(result: object, error: str | None) -> None:
            if error is not None:
                self._say(warn(f"files of removed segments could not be deleted: {error}", kind="removal"))

        def remove() -> None:
            if not self._timers.is_stopped:
                self._worker.submit("remove", {"paths": paths}, done)

        if paths:
            self._timers.at(self._clock.now().monotonic_ms + delay_ms, remove)
