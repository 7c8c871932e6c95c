"""A step with a state for each key: a card that is tried with less than 1 and charged with more than 500 next."""

from __future__ import annotations

from typing import Any

from holdfast.pipeline.keyed import KeyState, each_row


@each_row
def alarms(key: tuple[Any, ...], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    if row is None or key[0] is None:
        return None
    tried = state.value
    if row["paid"] < 1:
        state.put({"tried_at": row["at"]})
        return None
    state.clear()
    if tried is None or row["paid"] <= 500:
        return None
    return {"card": key[0], "paid": row["paid"], "at": row["at"]}
