"""What the function of a `keyed` step gets: the state of one key.

    from holdfast.pipeline.keyed import KeyState

    def rule(key: tuple, rows: pa.Table, state: KeyState) -> pa.Table | Iterable[dict] | None:
        seen = (state.value or {"count": 0})["count"] + rows.num_rows
        state.put({"count": seen})
        if seen >= 3:
            return [{"card": key[0], "seen": seen}]

It is called once for each key that a batch has rows of. `rows` has the columns that reach the step and `_event_time`,
ordered by topic, partition and offset. What it returns are the step's own rows, with the columns of its `schema`;
columns of the key may be left out, they are filled in. What it leaves in `state` is there in its next call.

Where a batch ends is nobody's decision, so a function's result should not depend on it: it must be a fold, for which
rows handed over in two calls come to the same as in one. `each_row` makes a fold of any function:

    @each_row
    def rule(key: tuple, row: dict | None, state: KeyState) -> dict | Iterable[dict] | None: ...

With it, and where all rows of a key come through one partition (which a topic keyed alike gives), rows, state and event
timers come out the same however the source is cut into batches. Without it, a timer that rows of a call set cannot go
off among rows of that same call.

Timers: a key has one at most. With `timers: event` it goes off when the watermark has passed it: the function is called
without rows (`rows` is empty, `row` is None), and `state.fired` is the timer's time. That is after the rows that came
before, and before the first row of the key that comes when the watermark of its own partition has passed the timer.
With `timers: processing` it goes off once the time of a batch has reached it, after that batch's rows. Either way
timers go off in a batch: when the source is silent, they wait for the next one.

A key that nothing came for is forgotten once the watermark is `ttl` past its last event, without a call; a timer that
is still to go off keeps it. A row whose own event is that far behind is late and is not handed over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_TIMER_MS_MIN: Final = -62_135_596_800_000
_TIMER_MS_MAX: Final = 253_402_300_799_999
"""The first and the last millisecond that a datetime can tell: the years 1 and 9999."""

Function = TypeVar("Function", bound=Callable[..., Any])
EACH_ROW: Final = "_holdfast_each_row"


def each_row(function: Function) -> Function:
    """The function takes one row at a time, as a dict; None instead of a row when a timer goes off."""
    setattr(function, EACH_ROW, True)
    return function


class WrongState(ValueError):
    """What was put is not what the step's `state` declares, or a timer is not a time."""


class KeyState:
    """The state of one key, while its function is called. For tests of a function it can be made by hand."""

    __slots__ = (
        "_columns",
        "_is_put",
        "_normal",
        "_value",
        "batch_time_ms",
        "fired_ms",
        "key",
        "timer_ms",
        "watermark_ms",
    )

    def __init__(
        self,
        key: tuple[Any, ...] = (),
        value: Mapping[str, Any] | None = None,
        *,
        timer_ms: int | None = None,
        watermark_ms: int | None = None,
        batch_time_ms: int = 0,
        fired_ms: int | None = None,
        columns: frozenset[str] | None = None,
        normal: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self.key = key
        self.timer_ms = timer_ms
        self.watermark_ms = watermark_ms
        self.batch_time_ms = batch_time_ms
        self.fired_ms = fired_ms
        self._value = None if value is None else dict(value)
        self._columns = columns
        self._normal = normal
        self._is_put = False

    def __repr__(self) -> str:
        return f"KeyState({self.key!r}, {self._value!r}, timer_ms={self.timer_ms})"

    # -------------------------------------------------------------------- the value

    @property
    def value(self) -> dict[str, Any] | None:
        """What was put last, by the declared columns; None for a key that has nothing. It is a copy: `put` keeps it."""
        if self._value is None:
            return None
        # What was put comes back as it will be read from the disk, also within the batch that put it.
        if self._is_put:
            self._value = self._normal(self._value)
            self._is_put = False
        return _copied(self._value)

    def put(self, value: Mapping[str, Any]) -> None:
        """Keep this, a value for each declared column, in the place of what was there."""
        if type(value) is not dict and not isinstance(value, Mapping):
            raise WrongState(f"state.put takes a dict by column, not {type(value).__name__}")
        if self._columns is not None and value.keys() != self._columns:
            raise WrongState(_differing(value.keys(), self._columns))
        self._value = dict(value)
        self._is_put = True

    def clear(self) -> None:
        """Forget the key: its value and its timer."""
        self._value = None
        self._is_put = False
        self.timer_ms = None

    # -------------------------------------------------------------------- times

    @property
    def watermark(self) -> datetime | None:
        """That of the last row handed over, or the time of the timer that went off; None before the first event."""
        return None if self.watermark_ms is None else to_time(self.watermark_ms)

    @property
    def batch_time(self) -> datetime:
        """When the batch was planned: the same when it is repeated, unlike the clock's time."""
        return to_time(self.batch_time_ms)

    @property
    def fired(self) -> datetime | None:
        """The time of the timer that this call is for; None when it is for rows."""
        return None if self.fired_ms is None else to_time(self.fired_ms)

    @property
    def timer(self) -> datetime | None:
        """When the key's timer will go off; None without one. One that goes off is gone before the call."""
        return None if self.timer_ms is None else to_time(self.timer_ms)

    def set_timer(self, at: datetime | int) -> None:
        """Have the function called at this time (milliseconds, or a datetime: UTC if it names no zone), in the place of
        a timer set before."""
        at_ms = to_ms(at)
        if self.fired_ms is not None and at_ms <= self.fired_ms:
            raise WrongState(
                f"a timer that is set while one goes off must be later than that one, {to_time(self.fired_ms)}"
            )
        self.timer_ms = at_ms

    def clear_timer(self) -> None:
        self.timer_ms = None


def _copied(value: dict[str, Any]) -> dict[str, Any]:
    if any(type(each) in (list, dict) for each in value.values()):
        return copy.deepcopy(value)
    return dict(value)


def _differing(given: Any, declared: frozenset[str]) -> str:
    unknown, missing = sorted(map(str, given - declared)), sorted(declared - given)
    parts = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(
        missing
    )
    return f"state.put takes the columns {', '.join(sorted(declared))}: {'; '.join(parts)}"


def to_time(at_ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=at_ms)


def to_ms(at: datetime | int) -> int:
    """Whole milliseconds, never before the time that was asked for."""
    if isinstance(at, datetime):
        aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return -((EPOCH - aware) // _MILLISECOND)
    if isinstance(at, bool) or not isinstance(at, int):
        raise WrongState(f"a timer is set to a datetime or to milliseconds, not to {type(at).__name__}")
    if not _TIMER_MS_MIN <= at <= _TIMER_MS_MAX:
        raise WrongState(f"a timer cannot be set to {at}: it counts milliseconds since 1970")
    return at
