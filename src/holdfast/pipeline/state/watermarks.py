"""How far event time has come: by partition, and for the whole pipeline. Pure.

- Every record has an *own watermark*: the greatest event time of the records before it in its partition, less the
  delay. It follows from the log alone, wherever batches were cut.
- The pipeline's watermark is the least over its partitions of (greatest event time - delay). A partition that has had
  no record yet holds it back, and so does one that has had none for long: what it will bring may be old. Where the
  definition says `idle`, one that has had no record for so long, by the times of batches, or none ever, is left out.
  The watermark never goes back.
- A row is late for something that ends at `e` when e <= max(own watermark, the pipeline's where the batch began).
  Without idle partitions the second is never greater than the first, so what is late depends on the log alone; and
  nothing that is not late can belong to something that was closed.
- An event further ahead of its record's own time than `ahead` moves no watermark: its clock is wrong. A record that has
  no time of its own has nothing to be ahead of: its event counts.

Times are whole milliseconds, rounded down: the same number whether a value came through a row, a report or a version.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from holdfast.pipeline.definition.model import EventTime
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.positions import Place

NOTHING: Final = -(2**63)
"""Stands for "no event yet" where numbers are compared."""


@dataclass(frozen=True)
class Clock:
    """The rules of one source's event time, in milliseconds."""

    delay_ms: int = 0
    idle_ms: int | None = None
    ahead_ms: int = 3_600_000

    @classmethod
    def of(cls, event: EventTime) -> Clock:
        idle_ms = None if event.idle is None else parse_duration_ms(event.idle)
        return cls(parse_duration_ms(event.delay), idle_ms, parse_duration_ms(event.ahead))


class Seen(NamedTuple):
    """What one partition has shown."""

    greatest_ms: int | None
    """Of its events; nothing before the first."""
    active_ms: int | None
    """The time of the last batch that had a record of it."""


@dataclass(frozen=True)
class Watermarks:
    """Event time as it stands at one version of the state."""

    places: Mapping[Place, Seen] = field(default_factory=dict)
    watermark_ms: int | None = None

    def greatest_ms(self, place: Place) -> int | None:
        seen = self.places.get(place)
        return None if seen is None else seen.greatest_ms

    def after(
        self,
        clock: Clock,
        batch_time_ms: int,
        known: Iterable[Place],
        greatest: Mapping[Place, int | None],
    ) -> Watermarks:
        """Where event time stands after a batch.

        `known` are all partitions the pipeline reads, and only they are kept; `greatest` has those with records in the
        batch, and the greatest event time among them that counts.
        """
        places: dict[Place, Seen] = {}
        for place in known:
            seen = self.places.get(place, Seen(None, None))
            if place in greatest:
                seen = Seen(_later(seen.greatest_ms, greatest[place]), batch_time_ms)
            places[place] = seen
        return Watermarks(places, _later(self.watermark_ms, _least(places, clock, batch_time_ms)))

    def waits_for(self, clock: Clock, batch_time_ms: int) -> Place | None:
        """The partition that holds the watermark back: the first without an event, else the one furthest behind."""
        awake = {
            place: seen for place, seen in self.places.items() if not _is_idle(seen, clock, batch_time_ms)
        }
        if not awake:
            return None
        return min(sorted(awake), key=lambda place: _number(awake[place].greatest_ms))

    def as_json(self) -> dict[str, Any]:
        return {
            "watermark_ms": self.watermark_ms,
            "places": [
                [place.topic, str(place.topic_id), place.partition, *seen]
                for place, seen in sorted(self.places.items())
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Watermarks:
        """Of nothing: none yet."""
        places = {
            Place(topic, uuid.UUID(topic_id), partition): Seen(greatest_ms, active_ms)
            for topic, topic_id, partition, greatest_ms, active_ms in document.get("places", ())
        }
        return cls(places, document.get("watermark_ms"))


def own_watermark_ms(seen_ms: int | None, watermark_ms: int | None, clock: Clock) -> int | None:
    """Below which a row is late: `seen_ms` is the greatest event before it in its partition."""
    return _later(None if seen_ms is None else seen_ms - clock.delay_ms, watermark_ms)


def is_late(end_ms: int, watermark_ms: int | None) -> bool:
    """Whether something that ends then is over for a row with this watermark."""
    return watermark_ms is not None and end_ms <= watermark_ms


def running(events_ms: Any, before_ms: int = NOTHING) -> tuple[Any, int]:
    """For each event the greatest before it, and the greatest of all; int64 arrays, `NOTHING` where there is none."""
    import numpy as np

    greatest = np.maximum.accumulate(np.concatenate(([np.int64(before_ms)], events_ms)))
    return greatest[:-1], int(greatest[-1])


def counted(events_ms: Any, timestamps_ms: Any, clock: Clock) -> Any:
    """The events that move the watermark; `NOTHING` in place of those whose clock is ahead of their record's.

    A negative timestamp is none.
    """
    import numpy as np

    # Written so that no difference overflows: an event may lie anywhere in 64 bits.
    limits = timestamps_ms + np.int64(clock.ahead_ms)
    return np.where((events_ms <= limits) | (timestamps_ms < 0), events_ms, np.int64(NOTHING))


def _least(places: Mapping[Place, Seen], clock: Clock, batch_time_ms: int) -> int | None:
    awake = [seen.greatest_ms for seen in places.values() if not _is_idle(seen, clock, batch_time_ms)]
    known = [each for each in awake if each is not None]
    if not known or len(known) < len(awake):
        return None
    return min(known) - clock.delay_ms


def _is_idle(seen: Seen, clock: Clock, batch_time_ms: int) -> bool:
    if clock.idle_ms is None:
        return False
    silent_ms = None if seen.active_ms is None else batch_time_ms - seen.active_ms
    return silent_ms is None or (silent_ms > 0 and silent_ms >= clock.idle_ms)


def _later(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _number(greatest_ms: int | None) -> int:
    return NOTHING if greatest_ms is None else greatest_ms
