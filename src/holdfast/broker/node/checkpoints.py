"""What the checkpoints of the log directories say: how far each log is flushed, and where each starts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from holdfast.broker.log.checkpoints import LOG_START_FILE
from holdfast.broker.node.checkpoint_writer import CheckpointWriter
from holdfast.broker.node.deletions import Deletions
from holdfast.broker.node.directories import LogDirectory, Offsets
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.partitions import HostedPartitions
from holdfast.saying import Say
from holdfast.seams import FileSystem, Flusher


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
