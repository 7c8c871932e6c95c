"""Work that recurs: retention, flushes by time, producer expiry, compaction, the scrub.

Each piece is short, or runs in the `Worker`. Settings are read anew at every check, so that a change takes effect
with the next one, and the time is the one that is proven. At most one compaction or scrub is under way, so that
neither reads files the other replaces.

The scrub reads everything below the durable end and checks its checksums, slowly, over and over. One stretch per
check goes to the worker. A pass over all partitions is followed by none until a day after it began. What is found
is said; the damaged partition stays in service, since most of it can still be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.broker.log.retention import expired, roll_due
from holdfast.broker.log.segment import Segment
from holdfast.broker.node.cleaning import Background, Cleaning
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import UpkeepServices
from holdfast.broker.node.troubles import Kind
from holdfast.broker.node.wall_clock import SAVE_INTERVAL_MS
from holdfast.config.definitions import LONG_MAX
from holdfast.seams import FlushJob, Now

FIRST_PASS_MS: Final = 600_000
"""After the start, which has checked what the last run left in doubt."""
PASS_INTERVAL_MS: Final = 86_400_000
STRETCH_BYTES: Final = 10 * 1024 * 1024
"""Read per check: with one every ten seconds, one megabyte per second."""


class Scrubbing:
    def __init__(self, node: UpkeepServices, background: Background) -> None:
        self._node = node
        self._background = background
        self._next_pass_ms: int | None = None
        self._left: deque[tuple[str, int]] = deque()
        # Where the pass is: a segment of the first partition left, and how far it was read.
        self._segment: Segment | None = None
        self._position = 0
        self._next_offset = 0
        self._done_below = -1

    def check(self, now: Now) -> None:
        """Read the next stretch, if it is time and nothing else is under way."""
        if self._next_pass_ms is None:
            self._next_pass_ms = now.monotonic_ms + FIRST_PASS_MS
        self._forget_removed()
        if self._background.is_busy:
            return
        if not self._left:
            if now.monotonic_ms < self._next_pass_ms:
                return
            self._next_pass_ms = now.monotonic_ms + PASS_INTERVAL_MS
            self._node.troubles.forget_all(Kind.DAMAGED)
            self._left.extend(sorted((hosted.topic, hosted.index) for hosted in self._node.partitions))
        while self._left:
            hosted = self._node.partitions.get(*self._left[0])
            if hosted is not None and not hosted.offline and self._begin(hosted):
                return
            self._left.popleft()
            self._segment, self._done_below = None, -1
        self._node.meter.scrub_passes += 1

    def _forget_removed(self) -> None:
        """A damaged segment that retention, compaction or a deletion has taken is nobody's trouble any more."""
        troubles = self._node.troubles
        if damaged := troubles.lasting(Kind.DAMAGED):
            present = {segment.path() for hosted in self._node.partitions for segment in hosted.log.segments}
            for trouble in damaged:
                if trouble.subject not in present:
                    troubles.forget(trouble.subject)

    def _begin(self, hosted: HostedPartition) -> bool:
        """Send the next stretch of a partition to the worker; false when none is left."""
        log, durable_end = hosted.log, hosted.offsets.durable_end
        if not any(segment is self._segment for segment in log.segments):
            self._segment = None  # removed, or replaced by a cleaned one: its positions mean nothing now
        if self._segment is None:
            for segment in log.segments:
                if self._done_below < segment.base_offset <= durable_end.segment_base and segment.size:
                    self._segment, self._position, self._next_offset = segment, 0, segment.base_offset
                    break
            else:
                return False
        segment = self._segment
        is_last = segment.base_offset == durable_end.segment_base
        arguments = {
            "path": segment.path(),
            "position": self._position,
            "end": durable_end.position if is_last else segment.size,
            "next_offset": self._next_offset,
            "bytes_max": STRETCH_BYTES,
            "drop_cache": segment is not log.active,
        }
        self._node.seams.worker.submit(
            "scrub", arguments, lambda result, error: self._scrubbed(hosted, segment, result, error)
        )
        self._background.is_busy = True
        return True

    def _scrubbed(
        self, hosted: HostedPartition, segment: Segment, result: Mapping[str, Any] | None, error: str | None
    ) -> None:
        self._background.is_busy = False
        if self._node.timers.is_stopped:
            return
        problem = error if result is None else result["damage"]
        if problem is not None and not hosted.is_deleted:
            self._node.troubles.begin(
                Kind.DAMAGED,
                segment.path(),
                f"{hosted.name}: the scrub found a problem below the recovery point: {problem}. Inspect it with "
                f"`holdfast dump-log --verify --files {segment.path()}` and restore the file from a copy",
            )
        if result is None or result["is_finished"]:
            self._done_below = segment.base_offset
            self._segment = None
        else:
            self._position, self._next_offset = result["position"], result["next_offset"]


FIRST_CHECK_MS: Final = 30_000
"""Before the first check of retention and compaction, so that a start is over before they begin."""
RECHECK_MS: Final = 1_000
"""After the active segment was rolled by retention: by then the flush has returned that lets it go."""
FLUSH_CHECK_MS: Final = 1_000
FLUSH_CHECK_MIN_MS: Final = 10
EXPIRY_CHECK_MS: Final = 600_000
SCRUB_CHECK_MS: Final = 10_000
SPACE_CHECK_MS: Final = 30_000
"""A log that was not flushed between two of these checks gives back what was written ahead."""
RESERVE_CHECK_MS: Final = 600_000
BACKOFF_MIN_MS: Final = 100
REMIND_CHECK_MS: Final = 60_000


def schedule(node: UpkeepServices, now: Now) -> Housekeeping:
    """Arrange the recurring work of a node that has started."""
    return Housekeeping(node, now)


class Housekeeping:
    def __init__(self, node: UpkeepServices, now: Now) -> None:
        self._node = node
        background = Background()
        self.cleaning = Cleaning(node, background)
        self.scrubbing = Scrubbing(node, background)
        self._flush_checked_ms = now.monotonic_ms
        self._unflushed_since: dict[HostedPartition, int] = {}
        self._every(now, self._retention_interval_ms, self.check_retention)
        self._every(now, self._cleaner_interval_ms, self.check_compaction)
        self._every(now, self._flush_interval_ms, self.check_flushes)
        self._every(now, lambda: EXPIRY_CHECK_MS, self.expire_producers)
        self._every(now, lambda: SCRUB_CHECK_MS, self.scrubbing.check)
        self._every(now, lambda: SPACE_CHECK_MS, self.give_back_space)
        self._every(now, lambda: SAVE_INTERVAL_MS, lambda now: node.wall_clock.save())
        self._every(now, lambda: RESERVE_CHECK_MS, self.keep_reserve)
        self._every(now, lambda: REMIND_CHECK_MS, lambda now: node.troubles.remind())

    def _every(self, now: Now, interval_ms: Callable[[], int], action: Callable[[Now], None]) -> None:
        node = self._node

        def run() -> None:
            if node.timers.is_stopped:
                return
            now = node.wall_clock.proven()
            try:
                action(now)
            finally:
                node.timers.at(now.monotonic_ms + interval_ms(), run)

        node.timers.at(now.monotonic_ms + min(interval_ms(), FIRST_CHECK_MS), run)

    def _retention_interval_ms(self) -> int:
        return self._node.settings.broker.log_retention_check_interval_ms

    def _cleaner_interval_ms(self) -> int:
        return max(BACKOFF_MIN_MS, self._node.settings.broker.log_cleaner_backoff_ms)

    # Retention

    def check_retention(self, now: Now) -> None:
        """Roll what is idle, and delete what the topics no longer keep."""
        node = self._node
        moves = []
        reasons = []
        waits_for_flush = False
        for hosted in list(node.partitions):
            if hosted.offline:
                continue
            node.log_starts.remove_below(hosted)
            due = expired(hosted.log, hosted.offsets.high_watermark, now)
            if due is not None and due.segments:
                moves.append((hosted, due.start_offset))
                reasons.append(
                    f"{hosted.name}: {due.segments} segments below offset {due.start_offset} "
                    f"deleted by {due.reason}"
                )
            if due is not None and due.rolls_active:
                waits_for_flush |= roll(node, hosted, now)
            elif roll_due(hosted.log, now):
                roll(node, hosted, now)
        if waits_for_flush:
            node.timers.at(now.monotonic_ms + RECHECK_MS, self._recheck_retention)
        node.log_starts.move(moves, even_if_full=True)
        for reason in reasons:
            node.say(reason)

    def _recheck_retention(self) -> None:
        if not self._node.timers.is_stopped:
            self.check_retention(self._node.wall_clock.proven())

    # Compaction

    def check_compaction(self, now: Now) -> None:
        """Roll compacted logs whose idle records wait for it, then clean the dirtiest one that is due."""
        node = self._node
        for hosted in list(node.partitions):
            if (
                "compact" in hosted.log.config.cleanup_policy
                and not hosted.offline
                and roll_due(hosted.log, now)
            ):
                roll(node, hosted, now)
        self.cleaning.check(now)

    # Flushes by time

    def _flush_interval_ms(self) -> int:
        shortest = min((hosted.log.config.flush_ms for hosted in self._node.partitions), default=LONG_MAX)
        return max(FLUSH_CHECK_MIN_MS, min(FLUSH_CHECK_MS, shortest // 2))

    def check_flushes(self, now: Now) -> None:
        """Flush logs that have had unflushed appends for `flush.ms`; in group commit they never have."""
        node = self._node
        checked_ms, self._flush_checked_ms = self._flush_checked_ms, now.monotonic_ms
        unflushed: dict[HostedPartition, int] = {}
        for hosted in node.partitions:
            flush_ms = hosted.log.config.flush_ms
            if flush_ms == LONG_MAX or hosted.offline or not hosted.log.needs_flush:
                continue
            # Appended to after the last check at the earliest.
            since_ms = self._unflushed_since.get(hosted, checked_ms)
            if now.monotonic_ms - since_ms >= flush_ms:
                node.commit.request(hosted)
            else:
                unflushed[hosted] = since_ms
        self._unflushed_since = unflushed

    # Producers

    def expire_producers(self, now: Now) -> None:
        expiration_ms = self._node.settings.broker.producer_id_expiration_ms
        for hosted in self._node.partitions:
            hosted.log.producers.remove_expired(now.wall_ms, expiration_ms)

    # Space written ahead

    def give_back_space(self, now: Now) -> None:
        """Cut off what was written ahead in logs that are idle."""
        node = self._node
        for hosted in list(node.partitions):
            if hosted.offline:
                continue
            try:
                hosted.log.give_back_when_idle()
            except OSError as error:
                hosted.directory.refuses(error)  # then it is given back at a later check

    def keep_reserve(self, now: Now) -> None:
        """Keep room for the next start where it has to write: beside the metadata log."""
        metadata = self._node.metadata.hosted
        if metadata.offline:
            return

        def flushed(error: OSError | None) -> None:
            if error is not None and not metadata.offline:
                metadata.directory.refuses(error)

        try:
            targets = metadata.directory.keep_reserve()
        except OSError as error:
            flushed(error)
        else:
            if targets:
                self._node.seams.flusher.submit(FlushJob(targets, flushed, is_background=True))


def roll(node: UpkeepServices, hosted: HostedPartition, now: Now) -> bool:
    """Seal the active segment and ask for the flush that makes it so; false when the disk refuses."""
    try:
        hosted.log.roll(now)
    except OSError as error:
        hosted.directory.refuses(error)
        return False
    node.commit.request(hosted)
    return True
