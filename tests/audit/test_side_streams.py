"""Sinks that take a stream beside the chain of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast
from uuid import UUID

import numpy as np
import pytest
from tests.support.audit_sinks import Ledger

from holdfast.audit.left import SideStream, check_turns, side_stream
from holdfast.audit.lineage import LineageBatch
from holdfast.audit.model import Examined, Fate
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.pipeline.aside import DUPLICATE, LATE, LATE_FOR
from holdfast.pipeline.definition.model import Dedupe, PipelineDefinition, Source, Window
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

PLACE = Place("orders", UUID(int=1), 0)


class Rows:
    """A sink with these rows: turn and number."""

    name, kind, takes = "visits", "parquet", "sessions"
    erased = ()

    def __init__(
        self, rows: Sequence[tuple[int, int]], step: str = "sessions", *, is_exact: bool = True
    ) -> None:
        self.is_exact = is_exact
        self._rows, self._step = rows, step

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        turns = np.array([turn for turn, _ in self._rows], np.int64)
        yield LineageBatch(self._step, 0, turns, np.array([at for _, at in self._rows], np.int32))


def entries_of(*turns: tuple[int, int], first: int = 0) -> list[Entry]:
    """Of turns, each with the number of its rows."""
    ledger = Ledger("shop", "visits")
    made: list[Entry] = [ledger.opening({PLACE: 0})]
    for at, (turn, rows) in enumerate(turns):
        made.append(ledger.entry({PLACE: (at, at + 1)}, rows=rows, state=turn))
    return made[first:]


def told(rows: Any, entries: list[Entry]) -> list[tuple[Fate, int, str]]:
    examined = Examined.of(check_turns(cast("SinkReader", rows), entries))
    assert [each.why for each in examined.coverage] == [
        "step 'sessions' made it, which is not made again here"
    ]
    return [(each.fate, each.count, each.detail) for each in examined.findings]


def test_turns_with_the_rows_that_the_ledger_counts_pass() -> None:
    assert told(Rows([(1, 0), (1, 64), (2, 0)]), entries_of((1, 2), (2, 1), (3, 0))) == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1, 0), (2, 0)], (Fate.LOST, 1, "turn 1 of 'sessions' gave 2 rows by the ledger, and 1 are there")),
        ([(1, 0), (1, 0), (2, 0)], (Fate.DUPLICATED, 1, "rows of turn 1 twice")),
        (
            [(1, 0), (1, 1), (2, 0), (9, 0)],
            (Fate.EXTRA, 1, "turn 9 of 'sessions' gave 0 rows by the ledger, and 1 are there"),
        ),
        (
            [(1, 0), (1, 1), (2, 0), (2, 1)],
            (Fate.DUPLICATED, 1, "turn 2 of 'sessions' gave 1 rows by the ledger, and 2 are there"),
        ),
    ],
)
def test_rows_that_are_gone_repeated_or_planted_are_told(
    rows: list[tuple[int, int]], expected: tuple[Fate, int, str]
) -> None:
    assert expected in told(Rows(rows), entries_of((1, 2), (2, 1)))


def test_rows_that_another_step_made_are_told() -> None:
    assert (Fate.EXTRA, 1, "rows that step 'sessions' did not make") in told(
        Rows([(1, 0)], "totals"), entries_of((1, 0))
    )


def test_turns_whose_entry_is_not_kept_or_younger_than_the_ledger_are_left_alone() -> None:
    assert told(Rows([(1, 0), (2, 0)]), entries_of((1, 1), (2, 1), first=2)) == []
    assert told(Rows([(1, 0), (5, 0)], is_exact=False), entries_of((1, 1))) == []


def test_streams_have_the_words_of_the_record_of_rows_that_left() -> None:
    steps = (Dedupe("once", ("id",)), Window("totals", {"n": "count(*)"}, size="1m"))
    definition = PipelineDefinition("shop", Source(topics=("orders",)), steps)
    assert side_stream(definition, "once.duplicates") == SideStream(DUPLICATE, "once")
    assert side_stream(definition, "once.late") == SideStream(LATE, "once")
    assert side_stream(definition, "totals.late") == SideStream(LATE_FOR, "totals")
    assert side_stream(definition, "totals") is None
    assert side_stream(definition, "") is None
