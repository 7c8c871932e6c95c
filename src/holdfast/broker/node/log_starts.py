"""Moving the start of a log: records below it are deleted, for retention or because a client asks.

The new start is durable before any file goes. Files go in two steps: renaming them is quick and happens at once;
`file.delete.delay.ms` later, when nobody has them open any more, the worker deletes them, which frees their blocks and
may take long. What a stop leaves behind goes at the next start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.broker.log.named_start import name_start
from holdfast.broker.node.checkpoints import Checkpoints
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.timers import Timers
from holdfast.saying import Say, warn
from holdfast.seams import Clock, FileSystem, Worker


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
