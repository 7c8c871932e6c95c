"""Records aside: read back in source order, by slices or by sorting; standings of a ledger."""

from __future__ import annotations

import random
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import BatchRange, Place, Positions, Span
from holdfast.pipeline.sinks.kafka_ledger import LedgerRecord, Standing, standing_of
from holdfast.pipeline.sinks.kafka_records import in_source_order
from holdfast.pipeline.sinks.lineage import digest_of_lineage

Row = tuple[str, int, int, int]
ROWS = st.lists(
    st.tuples(st.sampled_from(["b", "a", "ab"]), st.integers(0, 3), st.integers(0, 2**40), st.integers(0, 2)),
    max_size=60,
)


def lineage(rows: list[Row]) -> pa.StructArray:
    return pa.StructArray.from_arrays(
        [
            pa.array([row[0] for row in rows], pa.string()),
            pa.array([row[1] for row in rows], pa.int32()),
            pa.array([row[2] for row in rows], pa.int64()),
            pa.array([row[3] for row in rows], pa.int32()),
        ],
        ["topic", "partition", "offset", "index"],
    )


def ordered(rows: list[Row]) -> list[Row]:
    table = pa.table({"_hf": lineage(rows), "value": pa.array([repr(row) for row in rows], pa.string())})
    found = [row for batch in in_source_order(table) for row in batch.to_pylist()]
    places: list[Row] = [tuple(row["_hf"].values()) for row in found]
    assert [repr(place) for place in places] == [row["value"] for row in found]
    return places


@given(ROWS)
def test_any_rows_come_back_in_source_order(rows: list[Row]) -> None:
    assert ordered(rows) == sorted(rows)


def test_long_runs_are_not_sorted_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [[("t", partition, offset, 0) for offset in range(100)] for partition in range(20)]
    random.Random(1).shuffle(runs)

    monkeypatch.setattr(np, "lexsort", _only_small(np.lexsort))
    rows = [row for run in runs for row in run]
    assert ordered(rows) == sorted(rows)


def _only_small(honest: Any) -> Any:
    def lexsort(keys: Any) -> Any:
        assert len(keys[0]) <= 20
        return honest(keys)

    return lexsort


@given(ROWS)
def test_the_digest_of_lineage_is_that_of_its_places(rows: list[Row]) -> None:
    expected = sum(place_hash(topic, partition, offset) for topic, partition, offset, _ in rows) & MASK
    assert digest_of_lineage(lineage(rows)) == expected


def entry(number: int) -> Entry:
    place = Place("t", uuid.UUID(int=1), 0)
    spans = BatchRange({place: Span(number * 10, number * 10 + 10)})
    return Entry("p", "s", number, spans, Positions({}).moved(spans), 0, "f")


def record(number: int, writers: int) -> LedgerRecord:
    return LedgerRecord(entry(number), writers, entry(number - 1) if number else None)


@pytest.mark.parametrize(
    ("records", "standing"),
    [
        ([], Standing()),
        ([None, None], Standing()),
        ([record(0, 1)], Standing(entry(0))),
        ([record(4, 2), record(4, 2)], Standing(entry(4))),
        # The number of writers went down: those that are left decide.
        ([record(5, 1), record(4, 2)], Standing(entry(5))),
        # Cut between two writers.
        ([record(4, 2), record(5, 2)], Standing(entry(4), record(5, 2), frozenset({1}))),
        # Cut in the first batch with more writers: only the newest record knows the entry before.
        ([record(5, 2), None], Standing(entry(4), record(5, 2), frozenset({0}))),
        ([record(0, 2), None], Standing(None, record(0, 2), frozenset({0}))),
    ],
)
def test_the_last_records_of_all_writers_say_where_the_sink_stands(
    records: list[LedgerRecord | None], standing: Standing
) -> None:
    assert standing_of(records) == standing


def test_a_ledger_record_survives_its_encoding() -> None:
    for number in (0, 3):
        assert LedgerRecord.decode(record(number, 2).encode()) == record(number, 2)
