"""A keyed function in a running pipeline: whatever the batches and wherever it ends, the same rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.definition.model import Decoding, EventTime, Field, Keyed, ParquetSink, Sql
from holdfast.pipeline.engine.faults import Faults
from holdfast.pipeline.keyed import KeyState, each_row
from holdfast.pipeline.state.store import StateStore, state_path

if TYPE_CHECKING:
    from .conftest import Bench

CLICKS = Decoding("json", (Field("id", "long"), Field("user", "string"), Field("at", "timestamp")))


@each_row
def visits(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    """How many clicks a user made, told when none has come for half a minute."""
    seen = (state.value or {"n": 0})["n"]
    if row is None:
        state.clear()
        return {"n": seen}
    state.put({"n": seen + 1})
    state.set_timer(row["_event_time"] + timedelta(seconds=30))
    return None


def fails_on_thirteen(key: tuple[str], rows: Any, state: KeyState) -> None:
    if 13 in rows.column("id").to_pylist():
        raise LookupError("no luck")


@pytest.fixture
def clicks(bench: Bench) -> Bench:
    follow(bench, visits)
    for number in range(30):
        user = ("ann", "bob", "cat")[number % 3]
        second = number * 25 - (200 if number == 20 else 0)
        at = f"2026-03-01T00:{second // 60:02d}:{second % 60:02d}Z"
        bench.produce(
            [json.dumps({"id": number, "user": user, "at": at}).encode()], partition=int(user == "bob")
        )
    return bench


def follow(bench: Bench, function: Callable[..., Any]) -> None:
    streams = {"main": "", "visits": "visits", "late": "visits.late"}
    sink_type = type(bench.sinks["main"])
    bench.sinks = {name: sink_type(name) for name in ("dead-letter", *streams)}
    step = Keyed(
        "visits", key=("user",), function=function, schema="user string, n bigint", state="n bigint", ttl="2m"
    )
    bench.change(
        source=replace(bench.definition.source, value=CLICKS, event_time=EventTime("at")),
        steps=(Sql("lower", "SELECT _hf, id, lower(user) AS user FROM input"), step),
        sinks=tuple(ParquetSink(path="unused", name=name, rows=rows) for name, rows in streams.items()),
    )


def outputs(bench: Bench) -> dict[str, Any]:
    told = Counter((row["user"], row["n"], row["_timestamp"]) for row in bench.sinks["visits"].content)
    return {"visits": told, "main": bench.sinks["main"].places, "late": bench.sinks["late"].places}


def test_batches_and_crashes_do_not_change_what_comes_out(
    clicks: Bench, crash_at: Callable[[str, int], Faults], tmp_path: Any
) -> None:
    [whole] = clicks.run_batches()
    expected = outputs(clicks)
    assert (whole.step_counts["visits"]["taken"], whole.step_counts["visits"]["late"]) == (29, 1)
    assert clicks.sinks["late"].ids == [20]
    assert sum(expected["visits"].values()) == whole.step_counts["visits"]["fired"] > 5

    follow(clicks, visits)
    clicks.change(
        home=str(tmp_path / "again"),
        monitoring_group="again",
        source=replace(clicks.definition.source, batch_records=10),
    )
    for point, times in (("state-published", 2), ("committed:main", 1)):
        with pytest.raises(BaseException) as crashed:
            clicks.run(crash_at(point, times))
        assert type(crashed.value).__name__ == "Crash"
    clicks.run()
    assert outputs(clicks) == expected
    version = StateStore(state_path(clicks.definition.home), is_writer=False).newest()
    assert version is not None
    assert version.steps["visits"].notes["fired"] == whole.step_counts["visits"]["fired"]


def test_a_function_that_fails_commits_nothing(clicks: Bench) -> None:
    follow(clicks, fails_on_thirteen)
    with pytest.raises(
        StepError, match=r"fails_on_thirteen raised LookupError: no luck, for the key \('bob',\)"
    ):
        clicks.run()
    assert all(sink.content == [] for sink in clicks.sinks.values())
