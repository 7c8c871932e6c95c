"""The Python steps of the example pipelines: each is called row by row, with the state of the row's key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from holdfast.pipeline.keyed import KeyState, each_row

MINUTE = timedelta(minutes=1)
WRONG = 4
"""A minute is bad when one line in so many is an error."""


@each_row
def stolen_cards(key: tuple[Any, ...], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    """A card that is tried with less than 1 and charged with more than 500 next, within a minute."""
    if row is None:  # the timer went off: nothing came
        state.clear()
        return None
    tried = state.value
    if row["amount"] < 1:
        state.put({"tried_at": row["at"]})
        state.set_timer(row["at"] + MINUTE)
        return None
    state.clear()
    if tried is None or row["amount"] <= 500 or row["at"] - tried["tried_at"] > MINUTE:
        return None
    return {"card": key[0], "amount": row["amount"], "at": row["at"]}


@each_row
def bad_minutes(key: tuple[Any, ...], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    """Counts a service's lines by minute; when the minute is over, says so if too many were errors."""
    if row is None:
        return _alert(key, state)
    minute = row["at"].replace(second=0, microsecond=0)
    before = state.value
    alert = None
    if before is None or before["minute"] != minute:
        alert = _alert(key, state)
        before = {"minute": minute, "lines": 0, "errors": 0}
    state.put(
        {
            "minute": minute,
            "lines": before["lines"] + 1,
            "errors": before["errors"] + (row["level"] == "ERROR"),
        }
    )
    state.set_timer(minute + MINUTE)
    return alert


def _alert(key: tuple[Any, ...], state: KeyState) -> dict[str, Any] | None:
    counted = state.value
    state.clear()
    if counted is None or counted["errors"] * WRONG <= counted["lines"]:
        return None
    return {"service": key[0], **counted}
