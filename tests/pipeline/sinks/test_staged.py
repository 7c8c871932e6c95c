"""Rows that sinks take from the stage by their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.pipeline.core.failures import Unbalanced
from holdfast.pipeline.sinks.staged import LocalRows, read_staged, row_numbers

LINEAGE = pa.struct(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
)
SCHEMA = pa.schema([pa.field("_hf", LINEAGE, False), ("name", pa.string()), ("gone", pa.int64())])
SIZES = {0: 7, 3: 5}
"""Rows by file."""


def stage(directory: Path) -> dict[int, str]:
    """Two files in row groups of three."""
    found = {}
    for file, size in SIZES.items():
        columns = {
            "_topic": [f"t{file}"] * size,
            "_partition": pa.array([file] * size, pa.int32()),
            "_offset": list(range(100, 100 + size)),
            "_row": row_numbers(file, 0, size),
            "name": [None if at == 1 else f"{file}-{at}" for at in range(size)],
        }
        found[file] = str(directory / f"{file}.parquet")
        pq.write_table(pa.table(columns), found[file], row_group_size=3)
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return stage(tmp_path_factory.mktemp("stage"))


def numbered(rows: Iterable[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
    for file, at in rows:
        yield pa.record_batch([row_numbers(file, at, 1)], names=["_row"])


@settings(max_examples=examples(50), deadline=None)
@given(st.sets(st.sampled_from([(file, at) for file, size in SIZES.items() for at in range(size)])).map(list))
def test_the_rows_asked_for_come_in_the_order_of_the_stage(
    files: dict[int, str], chosen: list[tuple[int, int]]
) -> None:
    batches = list(read_staged(numbered(chosen), files, SCHEMA))
    found = [row for batch in batches for row in batch.to_pylist()]
    assert found == [
        {
            "_hf": {"topic": f"t{file}", "partition": file, "offset": 100 + at, "index": 0},
            "name": None if at == 1 else f"{file}-{at}",
            "gone": None,
        }
        for file, at in sorted(chosen)
    ]
    assert all(batch.schema.field("_hf").nullable is False for batch in batches)


def test_a_file_with_other_rows_than_were_asked_for_stops_the_batch(files: Mapping[int, str]) -> None:
    exchanged = {0: files[3], 3: files[0]}
    with pytest.raises(Unbalanced, match="others are there"):
        list(read_staged(numbered([(0, 0), (0, 1), (0, 2)]), exchanged, SCHEMA))


def test_a_column_that_the_stage_lacks_may_be_null_whatever_the_sink_had(
    files: Mapping[int, str], tmp_path: Path
) -> None:
    """The step that made it of nothing null is gone; a file says which of its columns may be null."""
    never_null = pa.schema([*SCHEMA, pa.field("one", pa.int32(), False)])
    rows = pa.Table.from_batches(read_staged(numbered([(0, 0)]), files, never_null))
    pq.write_table(rows, tmp_path / "written.parquet")
    assert pq.read_table(tmp_path / "written.parquet")["one"].to_pylist() == [None]
    assert not rows.schema.field("_hf").nullable


def test_so_may_a_column_that_rows_in_the_driver_lack() -> None:
    there = pa.table({"name": ["a"]})
    rows: Any = SimpleNamespace(toArrow=lambda: there)
    (batch,) = LocalRows(rows).batches(pa.schema([("name", pa.string()), pa.field("one", pa.int32(), False)]))
    assert batch.to_pylist() == [{"name": "a", "one": None}]
    assert batch.schema.field("one").nullable
