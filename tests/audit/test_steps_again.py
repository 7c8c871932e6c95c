"""What the steps say, evaluated again, against dead letters and sinks: every disagreement is named once, no other."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np

from holdfast.audit.compare import Holding
from holdfast.audit.lineage import LineageBatch
from holdfast.audit.model import Fate
from holdfast.audit.source import RECORD, PartitionWalk
from holdfast.audit.spark.auditing import Due, _disagreements
from holdfast.pipeline.positions import BatchRange, Place, Span

PLACE = Place("orders", uuid.UUID(int=7), 0)
COUNT = 8
SPANS = {PLACE: (10, 10 + COUNT)}
MARK = "this definition"


def holding(name: str, *offsets: int) -> Holding:
    found = Holding(name, SPANS)
    places = np.array([10 + each for each in offsets], np.int64)
    found.add([LineageBatch("orders", 0, places, np.zeros(len(places), np.int32))])
    return found


def judged(sink: Holding, dead: Holding, *, made: int = COUNT, doubtful: tuple[int, ...] = ()) -> Any:
    """As the judge of sinks stands when places are compared; this definition has made the first `made` offsets."""
    part = PartitionWalk(PLACE, 10, 10 + COUNT, np.full(COUNT, RECORD, np.uint8), np.zeros(COUNT, np.int32))
    entry = SimpleNamespace(fingerprint=MARK, range=BatchRange({PLACE: Span(10, 10 + made)}))
    doubts = np.isin(np.arange(COUNT), doubtful)
    return SimpleNamespace(
        batches=[entry],
        scope=SimpleNamespace(spans=SPANS, sink_starts={}),
        routes={Fate.DEAD_LETTER: dead},
        parts=[part],
        mains={"sink": "sink"},
        rows=SimpleNamespace(of=lambda reader: sink),
        doubtful=lambda: {PLACE: doubts},
        has_forgotten_dead_letters=False,
    )


def named(judge: Any, due: Due) -> set[tuple[Fate, str, int]]:
    return {
        (each.fate, each.sink, offset - 10)
        for each in _disagreements(judge, due, MARK)
        for first, last in each.ranges
        for offset in range(first, last + 1)
    }


def test_where_the_steps_say_otherwise_is_named() -> None:
    due = Due(holding("due", 0, 1, 2), holding("due-dead", 3, 6), holding("due-left", 4, 5, 7))
    judge = judged(holding("sink", 0, 1, 4), holding("dead", 2, 6))
    assert named(judge, due) == {
        (Fate.LOST, "sink", 2),
        (Fate.DUPLICATED, "dead", 2),
        (Fate.LOST, "dead", 3),
        (Fate.DUPLICATED, "sink", 4),
    }


def test_what_was_found_before_or_made_by_another_definition_is_not() -> None:
    due = Due(holding("due", 0, 1), holding("due-dead"), holding("due-left"))
    judge = judged(holding("sink", 0), holding("dead"), doubtful=(1,))
    assert named(judge, due) == set()
    judge = judged(holding("sink"), holding("dead"), made=1)
    assert named(judge, due) == {(Fate.LOST, "sink", 0)}


def test_behind_a_step_that_is_not_run_only_those_that_left_before_are_judged() -> None:
    due = Due(None, holding("due-dead", 3), holding("due-left", 4))
    judge = judged(holding("sink", 0, 4), holding("dead", 1))
    assert named(judge, due) == {(Fate.LOST, "dead", 3), (Fate.DUPLICATED, "sink", 4)}
