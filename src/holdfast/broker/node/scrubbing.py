"""Driving the scrub: everything below the durable end is read and its checksums checked, slowly, over and over.

One stretch per check goes to the worker. A pass over all partitions is followed by none until a day after it
began. What is found is said; the damaged partition stays in service, since most of it can still be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from holdfast.broker.log.segment import Segment
from holdfast.broker.node.cleaning import Background
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import UpkeepServices
from holdfast.broker.node.troubles import Kind
from holdfast.seams import Now

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
        self.passes = 0

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
        self.passes += 1

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
