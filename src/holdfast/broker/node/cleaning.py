"""Driving compaction: the dirtiest log that is due goes to the worker, then its result is swapped in.

The worker reads and writes; here only files are renamed, a few per step, and every flush between two steps is
the flusher's. A round is given up without harm when the topic was deleted, the directory went offline, retention
took one of the segments, or the broker stops: cleaned files that were not committed are deleted by the next round
or the next start, committed ones are completed by recovery.

A disk without room for a new name refuses a rename, and without descriptors nothing can be opened. A swap that was
not committed is given up then, and its log cleaned later; from the commit on the step that was refused, which has
changed nothing, is tried until it succeeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from uuid import UUID

from holdfast.broker.log.checkpoints import CLEANER_FILE, OffsetCheckpoint
from holdfast.broker.log.cleaner import Cleaned
from holdfast.broker.log.compaction import Dirt, Swap, examine, is_due, plan_round, room_needed
from holdfast.broker.log.segment import Segment
from holdfast.broker.node.directories import NO_DESCRIPTOR_ERRNOS, REFUSED_ERRNOS, LogDirectory
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import UpkeepServices
from holdfast.broker.node.troubles import Kind
from holdfast.errors import CorruptLog
from holdfast.saying import warn
from holdfast.seams import FlushJob, Now

RETRY_MS: Final = 600_000
"""How long a log is left alone after its cleaning failed."""
FREE_BYTES_MIN: Final = 64 * 1024 * 1024
"""Stays free on a disk beside what a round may write."""
STEP_RETRY_MS: Final = 10_000
"""Before a step of a committed swap is tried again that was refused."""


class Background:
    """Whether a compaction or scrub is under way: one at a time, since they share files."""

    __slots__ = ("is_busy",)

    def __init__(self) -> None:
        self.is_busy = False


class Cleaning:
    def __init__(self, node: UpkeepServices, background: Background) -> None:
        self._node = node
        self._background = background
        # How far each partition was cleaned; its topic's id tells it from a later one of the same name.
        self._clean_to: dict[tuple[str, int], tuple[UUID, int]] = {}
        self._not_before_ms: dict[HostedPartition, int] = {}
        self._unwritten: set[LogDirectory] = set()
        """Where a full disk refused the checkpoint; the one that stands makes a later round read more, no less."""
        self.rounds = 0
        for directory in node.directories:
            if not directory.offline:
                self._load(directory)

    def _load(self, directory: LogDirectory) -> None:
        try:
            offsets = OffsetCheckpoint(self._node.seams.fs, f"{directory.path}/{CLEANER_FILE}").read()
        except (CorruptLog, OSError) as error:
            self._node.say(warn(f"{error}; compaction begins anew"))
            return
        for (topic, index), offset in offsets.items():
            hosted = self._node.partitions.get(topic, index)
            if hosted is not None and hosted.directory is directory:
                self._clean_to[topic, index] = (hosted.topic_id, offset)

    def clean_to(self, hosted: HostedPartition) -> int | None:
        """The offset below which the partition is clean; None when it never was cleaned."""
        topic_id, offset = self._clean_to.get((hosted.topic, hosted.index), (None, None))
        return offset if topic_id == hosted.topic_id else None

    # Choosing

    def check(self, now: Now) -> None:
        """Begin the most useful round, if one is due and nothing else is under way."""
        node = self._node
        for directory in [due for due in self._unwritten if not due.offline]:
            self._write_checkpoint(directory)
        if self._background.is_busy or node.timers.is_stopped or not node.settings.broker.log_cleaner_enable:
            return
        best: tuple[HostedPartition, Dirt] | None = None
        for hosted in node.partitions:
            if "compact" not in hosted.log.config.cleanup_policy or hosted.offline:
                continue
            if self._not_before_ms.get(hosted, 0) > now.monotonic_ms:
                continue
            offsets = hosted.offsets
            # Compaction leaves gaps, and recovery takes a gap above the recovery point on disk for a lost tail.
            end = min(offsets.last_stable_offset, node.checkpoints.persisted_recovery_point(hosted))
            dirt = examine(hosted.log, self.clean_to(hosted), end, offsets.high_watermark, now)
            if is_due(hosted.log, dirt) and (best is None or dirt.ratio > best[1].ratio):
                best = hosted, dirt
        if best is not None:
            self._begin(*best, now)

    def _begin(self, hosted: HostedPartition, dirt: Dirt, now: Now) -> None:
        node = self._node
        directory = hosted.directory
        needed = room_needed(hosted.log, dirt) + FREE_BYTES_MIN
        try:
            free = node.seams.fs.free_bytes(directory.path)
        except OSError as error:
            self._cannot_measure(directory, error, now)
            return
        node.troubles.end(
            Kind.NOT_COMPACTED, directory.path, f"the free space of {directory.path} can be asked again"
        )
        if free < needed:
            self._put_off(hosted, f"cleaning may need {needed} bytes, and {directory.path} has less", now)
            return
        _Round(self, node, hosted, dirt).begin(now)
        self._background.is_busy = True

    def _cannot_measure(self, directory: LogDirectory, error: OSError, now: Now) -> None:
        """Leave the whole directory alone for a while; whether it works at all is found out by a write or flush."""
        self._leave_alone([hosted for hosted in self._node.partitions if hosted.directory is directory], now)
        self._node.troubles.begin(
            Kind.NOT_COMPACTED,
            directory.path,
            warn(
                f"nothing in {directory.path} is compacted: its free space cannot be asked: {error}; "
                f"trying again every {RETRY_MS // 60_000} minutes"
            ),
        )
        self.check(now)

    def _put_off(self, hosted: HostedPartition, reason: str, now: Now) -> None:
        self._leave_alone([hosted], now)
        self.tell(hosted, f"is not compacted: {reason}; trying again every {RETRY_MS // 60_000} minutes")

    def tell(self, hosted: HostedPartition, what: str) -> None:
        self._node.troubles.begin(Kind.NOT_COMPACTED, hosted.name, warn(f"{hosted.name} {what}"))

    def _leave_alone(self, logs: Iterable[HostedPartition], now: Now) -> None:
        self._not_before_ms = {
            other: deadline
            for other, deadline in self._not_before_ms.items()
            if deadline > now.monotonic_ms and not other.is_deleted
        }
        self._not_before_ms.update(dict.fromkeys(logs, now.monotonic_ms + RETRY_MS))

    # Ending

    def ended(
        self, hosted: HostedPartition, *, clean_to: int | None = None, failure: str | None = None
    ) -> None:
        """A round is over; `clean_to` when all of it was swapped in."""
        self._background.is_busy = False
        node = self._node
        if node.timers.is_stopped:
            return
        if failure is not None and not hosted.is_deleted and not hosted.offline:
            self._put_off(hosted, failure, node.seams.clock.now())
        if clean_to is None:
            return
        self.rounds += 1
        node.troubles.end(Kind.NOT_COMPACTED, hosted.name, f"{hosted.name} is compacted again")
        self._clean_to[hosted.topic, hosted.index] = (hosted.topic_id, clean_to)
        self._write_checkpoint(hosted.directory)
        self.check(node.wall_clock.proven())

    def _write_checkpoint(self, directory: LogDirectory) -> None:
        node = self._node
        self._clean_to = {
            key: (topic_id, offset)
            for key, (topic_id, offset) in self._clean_to.items()
            if (hosted := node.partitions.get(*key)) is not None and hosted.topic_id == topic_id
        }
        offsets = {
            (hosted.topic, hosted.index): offset
            for hosted in node.partitions
            if hosted.directory is directory and (offset := self.clean_to(hosted)) is not None
        }
        try:
            directory.write_checkpoint(CLEANER_FILE, offsets)
        except OSError as error:
            if directory.refuses(error):
                self._unwritten.add(directory)
            return
        self._unwritten.discard(directory)


class _Round:
    """One round under way, from the plan to the last rename."""

    def __init__(self, cleaning: Cleaning, node: UpkeepServices, hosted: HostedPartition, dirt: Dirt) -> None:
        self._cleaning = cleaning
        self._node = node
        self._hosted = hosted
        self._dirt = dirt
        self._seen: dict[int, Segment] = {}
        self._swaps: deque[Swap] = deque()
        self._end_offset = dirt.bound
        self._resume_base: int | None = None

    def begin(self, now: Now, first_base: int = 0) -> None:
        """Send the worker the part of the round that begins at `first_base`."""
        log, node = self._hosted.log, self._node
        self._seen = {segment.base_offset: segment for segment in log.segments}
        high_watermark = self._hosted.offsets.high_watermark
        map_bytes = node.settings.broker.log_cleaner_dedupe_buffer_size
        asked = plan_round(log, self._dirt, high_watermark, now, map_bytes, first_base)
        node.seams.worker.submit("compact", asked.to_json(), self._cleaned)

    def _guarded(self, action: Callable[[], None]) -> None:
        """A defect ends the round, so that others get their turn."""
        try:
            action()
        except Exception as defect:  # noqa: BLE001 - see above
            self._node.report(f"the compaction of {self._hosted.name}", defect)
            self._cleaning.ended(self._hosted, failure=repr(defect))

    def _cleaned(self, result: Mapping[str, Any] | None, error: str | None) -> None:
        self._guarded(lambda: self._swap_in(result, error))

    def _swap_in(self, result: Mapping[str, Any] | None, error: str | None) -> None:
        if result is None:
            # Without the segments that retention took meanwhile the worker could not but fail.
            self._cleaning.ended(self._hosted, failure=None if self._has_lost_segments() else error)
            return
        log = self._hosted.log
        cleaned = Cleaned.from_json(result)
        self._end_offset = min(self._end_offset, cleaned.end_offset)
        self._resume_base = cleaned.resume_base
        if cleaned.unreadable:
            self._node.say(
                warn(
                    f"{self._hosted.name}: {len(cleaned.unreadable)} batches, the first at offset "
                    f"{cleaned.unreadable[0]}, hold records that cannot be read; compaction keeps them as they are",
                    kind=f"unreadable in {self._hosted.name}",
                )
            )
        self._swaps.extend(
            Swap(self._node.seams.fs, log, segment, self._seen) for segment in cleaned.segments
        )
        self._next()

    @property
    def _is_pointless(self) -> bool:
        return self._node.timers.is_stopped or self._hosted.is_deleted or self._hosted.offline

    def _has_lost_segments(self) -> bool:
        present = {id(segment) for segment in self._hosted.log.segments}
        return any(id(segment) not in present for segment in self._seen.values())

    def _next(self) -> None:
        if not self._swaps:
            if self._resume_base is None or self._is_pointless:
                self._cleaning.ended(self._hosted, clean_to=None if self._is_pointless else self._end_offset)
            else:
                self.begin(self._node.wall_clock.proven(), self._resume_base)
            return
        swap = self._swaps.popleft()
        self._step(swap, swap.commit, lambda: self._exchange(swap))

    def _exchange(self, swap: Swap) -> None:
        def exchange() -> None:
            retired = swap.exchange()
            self._node.log_starts.remove_later(retired, self._hosted.log.config.file_delete_delay_ms)

        self._step(swap, exchange, lambda: self._finish(swap))

    def _finish(self, swap: Swap) -> None:
        self._step(None, swap.finish, self._next)

    def _step(self, revocable: Swap | None, action: Callable[[], None], then: Callable[[], None]) -> None:
        """Rename, have the directory flushed, and go on, unless there is nothing to go on for."""
        if self._is_pointless:
            self._cleaning.ended(self._hosted)
            return
        try:
            if revocable is not None and not revocable.is_possible:
                self._abandon(revocable)
                self._cleaning.ended(self._hosted)
                return
            action()
        except OSError as error:
            if error.errno not in REFUSED_ERRNOS:
                self._failed(error)
            elif revocable is not None and not revocable.is_committed:
                self._give_up(revocable, error)
            else:
                self._try_again(lambda: self._step(revocable, action, then), error)
            return
        self._flush(then)

    def _flush(self, then: Callable[[], None]) -> None:
        def flushed(error: OSError | None) -> None:
            if error is None:
                self._guarded(then)
            elif error.errno in NO_DESCRIPTOR_ERRNOS:
                self._try_again(lambda: self._flush(then), error)
            else:
                self._failed(error)

        if self._is_pointless:
            self._cleaning.ended(self._hosted)
            return
        job = FlushJob((self._hosted.log.directory,), flushed, is_background=True)
        self._node.seams.flusher.submit(job)

    def _abandon(self, swap: Swap) -> None:
        for unfinished in (swap, *self._swaps):
            unfinished.abandon()

    def _give_up(self, swap: Swap, refusal: OSError) -> None:
        """Nothing of `swap` was promised yet, and a cleaned file that cannot be removed goes with the next round."""
        try:
            self._abandon(swap)
        except OSError as error:
            if error.errno not in REFUSED_ERRNOS:
                self._failed(error)
                return
        self._cleaning.ended(self._hosted, failure=str(refusal))

    def _try_again(self, step: Callable[[], None], refusal: OSError) -> None:
        node = self._node
        self._cleaning.tell(
            self._hosted,
            f"cannot have its compaction completed now: {refusal}; trying again every {STEP_RETRY_MS // 1000} seconds",
        )
        node.timers.at(node.seams.clock.now().monotonic_ms + STEP_RETRY_MS, lambda: self._guarded(step))

    def _failed(self, error: OSError) -> None:
        if not self._hosted.is_deleted:
            self._hosted.directory.take_offline(error)
        self._cleaning.ended(self._hosted)
