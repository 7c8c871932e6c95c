"""Merging small batches: the same rows and entries before and after, whenever it is cut short."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition, Source
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.sinks import compacting
from holdfast.pipeline.sinks.base import SinkContext, SinkError, SinkFenced
from holdfast.pipeline.sinks.compacting import Compacted, Merging, compact
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.sinks.parquet import (
    LEDGER,
    ParquetSinkWriter,
    ParquetStore,
    PreparedParquet,
    batch_directory,
)

LINEAGE = pa.struct(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
)


class Dies(BaseException):
    """The process is killed here."""


class Mortal(Disk):
    """Dies before its n-th change of the disk."""

    def __init__(self, changes: int) -> None:
        self.left = changes

    def _live(self) -> None:
        if self.left == 0:
            raise Dies
        self.left -= 1

    def open_new(self, path: str) -> Any:
        self._live()
        return super().open_new(path)

    def flush_file(self, path: str) -> None:
        self._live()
        super().flush_file(path)

    def flush_directory(self, path: str) -> None:
        self._live()
        super().flush_directory(path)

    def exchange(self, one: str, other: str) -> None:
        self._live()
        super().exchange(one, other)

    def remove_tree(self, path: str) -> None:
        self._live()
        super().remove_tree(path)


@pytest.fixture
def store(tmp_path: Path, batches: Any) -> ParquetStore:
    """A table of six batches, one of them empty, one with a column more, below two countries."""
    store = ParquetStore("parquet", "shop", str(tmp_path / "table"))
    cut = batches("parquet")
    entry = None
    for number in range(6):
        root = tmp_path / "table" / batch_directory(number)
        root.mkdir(parents=True)
        batch = cut.at(number * 10, number * 10 + 10)
        entry = cut.entry(batch, entry, 2 if number != 3 else 0)
        (root / LEDGER).write_text(json.dumps(entry.as_json()))
        for country in ("nl", "be") if number != 3 else ():
            columns: dict[str, Any] = {
                "_hf": pa.array(
                    [{"topic": "orders", "partition": 0, "offset": number * 10, "index": 0}], LINEAGE
                ),
                "id": pa.array([number]),
            }
            if number > 3:
                columns["extra"] = pa.array(["x"])
            (root / f"country={country}").mkdir()
            pq.write_table(pa.table(columns), root / f"country={country}" / f"part-{number}.parquet")
    (tmp_path / "table" / "readme.txt").write_text("somebody's own file")
    return store


def seen(store: ParquetStore) -> list[tuple[int, str]]:
    found = ds.dataset(store.path, format="parquet", partitioning="hive", exclude_invalid_files=True)
    rows = found.to_table(columns=["id", "country"]).to_pylist()
    return sorted((row["id"], row["country"]) for row in rows)


EVERY_ROW = sorted((number, country) for number in (0, 1, 2, 4, 5) for country in ("nl", "be"))


def definition(path: str) -> PipelineDefinition:
    return PipelineDefinition("shop", Source(), sinks=(ParquetSink(path, partition_by=("country",)),))


def parquet_files(store: ParquetStore) -> list[str]:
    return [name for _, _, names in os.walk(store.path) for name in names if name.endswith(".parquet")]


def test_small_batches_become_one_and_keep_their_entries(store: ParquetStore) -> None:
    entries = list(store.entries())
    (done,) = compact(definition(store.path))
    assert done == Compacted("parquet", 6, 10, 2, 10)
    assert str(done) == "parquet: 10 files of 6 batches merged into 2, 10 rows"
    assert seen(store) == EVERY_ROW
    assert (store.numbers(), list(store.entries())) == ([5], entries)
    assert (store.last_entry(), store.missing()) == (entries[-1], None)
    assert len(parquet_files(store)) == 2
    assert sorted(os.listdir(os.path.dirname(store.path))) == ["table"]
    assert sorted(os.listdir(store.path)) == ["_hf", batch_directory(5), "readme.txt"]
    assert compact(definition(store.path)) == []


def test_large_batches_stay_as_they_are(store: ParquetStore) -> None:
    large = ParquetSink(store.path, partition_by=("country",), file_bytes=10)
    assert compact(PipelineDefinition("shop", Source(), sinks=(large,))) == []


def test_batches_on_two_sides_of_a_reset_are_not_mixed(store: ParquetStore, batches: Any) -> None:
    """However often it runs: after the first time no directory has the number where the new life began."""
    store.forget()
    second = begun_again(store, batches("parquet"), 6, 9)
    for _ in range(2):
        compact(definition(store.path))
        assert store.numbers() == [5, 8]
        assert list(store.entries()) == second
        assert store.last_entry() == second[-1]
        assert seen(store) == EVERY_ROW
    second += begun_again(store, batches("parquet"), 9, 11, second[-1])
    for _ in range(2):
        compact(definition(store.path))
        assert store.numbers() == [5, 10]
        assert list(store.entries()) == second
        assert store.last_entry() == second[-1]
    store.forget()
    third = begun_again(store, batches("parquet"), 11, 12)
    compact(definition(store.path))
    assert store.numbers() == [10, 11]
    assert [entry.number for entry in store.entries_of(10)] == [*range(6), *range(5)]
    assert store.entry_of(10) == second[-1]
    assert list(store.entries()) == third
    assert seen(store) == EVERY_ROW


def begun_again(
    store: ParquetStore, cut: Any, first: int, end: int, entry: Entry | None = None
) -> list[Entry]:
    """Batches without rows, committed under these numbers of directories."""
    made = []
    for number in range(first, end):
        batch = cut.at(number * 10, number * 10 + 10)
        aside = os.path.join(store.control, "aside", batch.label + str(number))
        store.disk.create_directory(aside)
        entry = cut.entry(batch, entry)
        PreparedParquet(store, aside, None, []).commit(entry)
        made.append(entry)
    assert store.numbers()[-1] == end - 1
    return made


def test_a_crash_at_any_step_leaves_the_old_table_or_the_new_one(
    store: ParquetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = list(store.entries())
    sink = definition(store.path).sinks[0]
    assert isinstance(sink, ParquetSink)
    for changes in range(60):
        mortal = ParquetStore("parquet", "shop", store.path, Mortal(changes))
        try:
            compacting.compact_parquet(mortal, sink)
        except Dies:
            assert seen(store) == EVERY_ROW
            assert list(store.entries()) == entries
            continue
        break
    else:
        pytest.fail("it never came to an end")
    assert changes > 10
    compact(definition(store.path))
    assert sorted(os.listdir(tmp_path)) == ["table"]
    assert seen(store) == EVERY_ROW
    assert list(store.entries()) == entries


def merging(store: ParquetStore, at: int, disk: Disk | None = None, **given: Any) -> Merging:
    """As a run has it, with the sink's lock."""
    writer = ParquetSinkWriter(
        ParquetSink(store.path, partition_by=("country",), compact=at), "shop", disk=disk
    )
    return Merging(writer.store, writer.definition, **given)


def test_a_run_merges_neighbours_when_there_are_enough_of_them(store: ParquetStore) -> None:
    entries = list(store.entries())
    held = store.lock()
    assert merging(store, 7).turn() is None
    assert merging(store, 0).turn() is None
    assert merging(store, 6).turn() == Compacted("parquet", 6, 10, 2, 10)
    assert (store.numbers(), seen(store), list(store.entries())) == ([5], EVERY_ROW, entries)
    with pytest.raises(SinkFenced):
        store.lock()  # the table is another directory now, and the lock is still held
    held.release()
    assert merging(store, 2).turn() is None


def test_a_turn_takes_what_its_bounds_allow_and_the_next_one_waits(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacting, "TURN_FILES", 5)
    ticks = iter([0.0, 1.0, 1.0, 10.0, 21.0, 22.0, 22.0])
    turns = merging(store, 2, now=lambda: next(ticks))
    assert turns.turn() is not None
    assert store.numbers() == [1, 2, 3, 4, 5]
    assert turns.turn() is None, "a turn took a second, and twenty are not over"
    assert turns.turn() is not None
    assert seen(store) == EVERY_ROW


def test_a_table_of_many_directories_waits_for_more_of_them(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacting, "PART", 2)
    monkeypatch.setattr(compacting, "SIZES", (1,))  # the empty batch alone is small
    assert merging(store, 2).turn() is None
    monkeypatch.setattr(compacting, "SIZES", (1 << 20,))
    assert merging(store, 2).turn() is not None


def test_what_is_merged_already_is_not_merged_again_with_each_new_batch(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = os.path.getsize(store.data_files(0)[0])
    monkeypatch.setattr(compacting, "SIZES", (3 * first, 100 * first))
    turns = merging(store, 4, now=lambda: 0.0)
    assert turns.turn() is not None
    assert store.numbers() == [5]
    assert turns.turn() is None


def test_a_run_that_dies_while_it_merges_leaves_the_old_table_or_the_new_one(
    store: ParquetStore, tmp_path: Path
) -> None:
    entries = list(store.entries())
    for changes in range(60):
        try:
            merging(store, 2, Mortal(changes)).turn()
        except Dies:
            assert (seen(store), list(store.entries())) == (EVERY_ROW, entries)
            continue
        break
    else:
        pytest.fail("it never came to an end")
    assert changes > 10
    merging(store, 2).turn()
    assert sorted(os.listdir(tmp_path)) == ["table"]
    assert (store.numbers(), seen(store), list(store.entries())) == ([5], EVERY_ROW, entries)


def test_a_table_in_use_is_left_alone(store: ParquetStore) -> None:
    held = store.lock()
    with pytest.raises(SinkFenced):
        compact(definition(store.path))
    held.release()


def test_rows_that_went_missing_in_a_merge_stop_it(
    store: ParquetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = compacting.merge_files
    monkeypatch.setattr(compacting, "merge_files", lambda paths, files: honest(paths[1:], files))
    with pytest.raises(SinkError, match="left as it is"):
        compact(definition(store.path))
    assert seen(store) == EVERY_ROW


def test_a_sink_without_files_is_refused_by_name() -> None:
    from holdfast.pipeline.definition.model import KafkaSink

    pipeline = PipelineDefinition("shop", Source(), sinks=(KafkaSink("out"),))
    assert compact(pipeline) == []
    with pytest.raises(SinkError, match="keeps no files"):
        compact(pipeline, sink="kafka")


def test_small_files_of_a_delta_table_are_merged_in_one_commit(
    tmp_path: Path, rows: Any, batches: Any, context: SinkContext, spark: Any
) -> None:
    path = str(tmp_path / "table")
    definition = DeltaSink(path, partition_by=("day",), schema="add-columns")
    sink, cut = DeltaSinkWriter(definition, "shop"), batches("delta")
    sink.open(context, spark)
    for at in range(3):
        columns = "id bigint, day date" if at < 2 else "id bigint, day date, more string"
        values = [{"id": at, "day": None}, {"id": at + 10, "day": datetime.date(2026, 1, 2)}]
        entry = cut.write(sink, cut.at(at * 2, at * 2 + 2), rows(values, columns, start=at * 2))
    before = DeltaTable(path).to_pyarrow_table().sort_by("id").to_pylist()
    pipeline = PipelineDefinition("shop", Source(), sinks=(definition,))
    assert compact(pipeline) == [Compacted("delta", None, 6, 2, 6)]
    table = DeltaTable(path)
    assert len(table.file_uris()) == 2
    assert table.to_pyarrow_table().sort_by("id").to_pylist() == before
    assert (sink.last_entry(), sink.missing()) == (entry, None)
    assert compact(pipeline) == []
    cut.write(sink, cut.at(6, 7), rows([], columns))
