"""The Parquet sink: whole batches, once, whatever fails when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from holdfast.pipeline.definition.model import ParquetSink
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.sinks.base import RowsRejected, SchemaChanged, SinkContext, SinkError, SinkFenced
from holdfast.pipeline.sinks.parquet import ParquetSinkWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def table(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def make(table: str, context: SinkContext, spark: SparkSession) -> Iterator[Callable[..., ParquetSinkWriter]]:
    opened: list[ParquetSinkWriter] = []

    def build(*, is_open: bool = True, disk: Any = None, **settings: Any) -> ParquetSinkWriter:
        sink = ParquetSinkWriter(ParquetSink(table, **settings), "shop", disk=disk)
        if is_open:
            sink.open(context, spark)
            opened.append(sink)
        return sink

    yield build
    for sink in opened:
        sink.close()


def seen(table: str) -> list[tuple[int, int]]:
    """Offsets and ids, as a plain reader finds them."""
    found = ds.dataset(table, format="parquet", partitioning="hive").to_table().to_pylist()
    return sorted((row["_hf"]["offset"], row["id"]) for row in found)


def ids(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"n{number}"} for number in numbers]


def test_a_batch_is_stored_with_its_entry_and_found_by_a_plain_reader(
    make: Any, table: str, rows: Any, batches: Any, spark: SparkSession
) -> None:
    sink, cut = make(), batches("parquet")
    assert sink.last_entry() is None
    entry = cut.write(sink, cut.at(0, 3), rows(ids(1, 2, 3)))
    assert entry.rows == 3
    assert sink.last_entry() == entry
    assert seen(table) == [(0, 1), (1, 2), (2, 3)]
    second = cut.write(sink, cut.at(3, 5), rows(ids(4, 5), start=3))
    assert list(sink.store.entries()) == [entry, second]
    found = spark.read.parquet(table)
    assert sorted(found.columns) == ["_hf", "batch", "id", "name"]
    assert {row.batch: row["count"] for row in found.groupBy("batch").count().collect()} == {0: 3, 1: 2}


def test_a_column_is_stored_under_whatever_name_its_field_has(
    make: Any, table: str, rows: Any, batches: Any, spark: SparkSession
) -> None:
    sink, cut = make(), batches("parquet")
    cut.write(sink, cut.at(0, 1), rows(ids(1)).withColumnRenamed("name", "user.na`me"))
    [row] = spark.read.parquet(table).collect()
    assert row["user.na`me"] == "n1"


def test_rows_and_digest_are_those_of_the_files(make: Any, rows: Any, batches: Any) -> None:
    sink, cut = make(), batches("parquet")
    prepared = sink.prepare(cut.at(0, 4), rows(ids(*range(8)), partitions=2).repartition(3))
    assert prepared.rows == 8
    assert prepared.digest == sum(place_hash("orders", p, o) for p in (0, 1) for o in range(4)) & MASK


def test_nothing_is_seen_of_a_batch_before_its_commit_or_after_a_crash(
    make: Any, table: str, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("parquet")
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    sink.prepare(cut.at(1, 2), rows(ids(2), start=1))
    assert seen(table) == [(0, 1)]
    # The process dies here: its lock goes, what it prepared stays.
    sink._open.clear()
    sink.close()
    again = make()
    assert again.last_entry().number == 0
    assert os.listdir(f"{table}/_hf") == ["lock"]
    cut.write(again, cut.at(1, 2), rows(ids(2), start=1))
    assert seen(table) == [(0, 1), (1, 2)]


def test_an_empty_batch_and_an_opening_entry_advance_the_ledger(
    make: Any, table: str, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("parquet")
    opening = cut.write(sink, cut.at(0, 0), rows([], "other string"))
    assert [place.partition for place in sink.last_entry().positions] == [0]
    cut.write(sink, cut.at(0, 5), rows([]))
    last = cut.write(sink, cut.at(5, 6), rows(ids(1), start=5))
    assert (opening.number, last.number) == (0, 2)
    assert seen(table) == [(5, 1)]


def test_the_slower_of_two_writers_is_fenced(make: Any, table: str, rows: Any, batches: Any) -> None:
    """HF408: two copies of one pipeline."""
    os.makedirs(table)
    slow, fast, cut = make(), make(is_open=False), batches("parquet")
    with pytest.raises(SinkFenced, match="another process"):
        fast.open(SinkContext("shop", "", {}, ""), slow)
    one = slow.prepare(cut.at(0, 1), rows(ids(1)))
    # Even where locks do not hold, as on some network file systems.
    two = fast.prepare(cut.at(0, 1), rows(ids(1)))
    entry = cut.entry(cut.at(0, 1), None, 1)
    two.commit(entry)
    with pytest.raises(SinkFenced, match="written nothing"):
        one.commit(entry)
    one.discard()
    assert seen(table) == [(0, 1)]


def test_the_rename_itself_lets_one_writer_through(make: Any, rows: Any, batches: Any, table: str) -> None:
    sink, cut = make(), batches("parquet")
    one, two = (sink.prepare(cut.at(0, 1), rows(ids(1))) for _ in range(2))
    entry = cut.entry(cut.at(0, 1), None, 1)
    for prepared in (one, two):
        prepared._check_turn = lambda number: None
    one.commit(entry)
    with pytest.raises(SinkFenced):
        two.commit(entry)
    assert seen(table) == [(0, 1)]


def test_a_second_process_is_refused(make: Any, table: str) -> None:
    os.makedirs(table)
    make()
    code = (
        "from holdfast.pipeline.sinks.parquet import ParquetStore\n"
        f"ParquetStore('parquet', 'shop', {table!r}).lock()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "SinkFenced" in done.stderr


def test_a_task_that_fails_and_runs_again_leaves_one_copy(
    make: Any, table: str, rows: Any, batches: Any, spark: SparkSession, tmp_path: Path
) -> None:
    from pyspark import TaskContext

    marker = str(tmp_path / "failed")

    def fail_once(parts: Any) -> Any:
        yield from parts
        if TaskContext.get().partitionId() == 1 and not os.path.exists(marker):  # type: ignore[union-attr]
            open(marker, "w").close()
            os._exit(1)

    sink, cut = make(), batches("parquet")
    frame = rows(ids(*range(10))).repartition(2)
    flaky = frame.mapInArrow(fail_once, frame.schema)
    # A local master gives a task one attempt; with an attempt more the job goes on.
    with pytest.raises(Exception, match=r"exited unexpectedly|crashed"):
        sink.prepare(cut.at(0, 10), flaky)
    assert os.listdir(f"{table}/_hf/scratch") == []
    cut.write(sink, cut.at(0, 10), flaky)
    assert seen(table) == [(n, n) for n in range(10)]


def test_rows_are_nested_by_partition_columns(
    make: Any, table: str, rows: Any, batches: Any, spark: SparkSession
) -> None:
    sink, cut = make(partition_by=("country", "day")), batches("parquet")
    values = [
        {"id": at, "country": country, "day": None}
        for at, country in enumerate(["nl", "be", "nl", "a/b=c", None, "Österreich 日本"])
    ]
    prepared = sink.prepare(cut.at(0, 6), rows(values, "id bigint, country string, day date"))
    assert prepared.rows == 6
    prepared.commit(cut.entry(cut.at(0, 6), None, 6))
    first = f"{table}/{sorted(os.listdir(table))[-1]}"
    assert "country=nl" in os.listdir(first)
    found = spark.read.parquet(table).select("id", "country").collect()
    assert {row.id: row.country for row in found} == {
        0: "nl",
        1: "be",
        2: "nl",
        3: "a/b=c",
        4: None,
        5: "Österreich 日本",
    }
    named = ds.partitioning(pa.schema({"country": pa.string(), "day": pa.date32()}), flavor="hive")
    read = ds.dataset(first, partitioning=named).to_table(columns=["id", "country"]).to_pylist()
    assert {row["id"]: row["country"] for row in read} == {row.id: row.country for row in found}


def test_partition_values_that_readers_would_take_for_others_are_rejected_row_by_row(
    make: Any, table: str, rows: Any, batches: Any
) -> None:
    sink, cut = make(partition_by=("country",)), batches("parquet")
    values = [{"id": at, "country": each} for at, each in enumerate(["nl", "", None, "x" * 300, "be"])]
    with pytest.raises(RowsRejected) as caught:
        sink.prepare(cut.at(0, 5), rows(values, "id bigint, country string"))
    assert {each.offset: each.why for each in caught.value.rows} == {
        1: "column 'country' is '', which readers of its partition take for null",
        3: "column 'country' has 300 characters, and names a directory",
    }
    assert os.listdir(f"{table}/_hf/scratch") == []


def test_files_have_about_the_wanted_size(make: Any, table: str, batches: Any, spark: SparkSession) -> None:
    from pyspark.sql import functions

    sink, cut = make(file_bytes=20_000), batches("parquet")
    frame = spark.range(0, 5000, 1, 1).select(
        functions.expr("struct('orders' AS topic, 0 AS partition, id AS offset, 0 AS index) AS _hf"),
        functions.col("id"),
        functions.expr("sha2(cast(id AS string), 256) AS text"),
    )
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "200")
    try:
        cut.write(sink, cut.at(0, 5000), frame)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    sizes = [path.stat().st_size for path in Path(table).glob("batch=*/*.parquet")]
    assert len(sizes) > 5
    assert max(sizes) < 60_000
    assert len(seen(table)) == 5000


def test_a_new_column_needs_leave_and_a_changed_type_never_gets_it(
    make: Any, table: str, rows: Any, batches: Any, spark: SparkSession
) -> None:
    sink, cut = make(), batches("parquet")
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    wider = rows([{"id": 2, "name": "b", "size": 1.5}], "id bigint, name string, size double", start=1)
    with pytest.raises(SchemaChanged, match=r"new 'size'.*add-columns"):
        sink.prepare(cut.at(1, 2), wider)
    with pytest.raises(SchemaChanged, match="missing 'name'"):
        sink.prepare(cut.at(1, 2), rows([{"id": 2}], "id bigint", start=1))
    sink.close()
    sink = make(schema="add-columns")
    with pytest.raises(SchemaChanged, match=r"'id' as bigint.*as string"):
        sink.prepare(cut.at(1, 2), rows([{"id": "x"}], "id string", start=1))
    cut.write(sink, cut.at(1, 2), wider)
    cut.write(sink, cut.at(2, 3), rows([{"id": 3}], "id bigint", start=2))
    found = spark.read.option("mergeSchema", "true").parquet(table).orderBy("id").collect()
    assert [(row["id"], row["name"], row["size"]) for row in found] == [
        (1, "n1", None),
        (2, "b", 1.5),
        (3, None, None),
    ]


def test_a_reset_keeps_rows_and_begins_a_new_ledger(make: Any, table: str, rows: Any, batches: Any) -> None:
    sink, cut = make(), batches("parquet")
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    sink.forget()
    assert sink.last_entry() is None
    entry = cut.write(sink, cut.at(0, 1), rows(ids(9)))
    assert entry.number == 0
    assert sink.last_entry() == entry
    assert seen(table) == [(0, 1), (0, 9)]


def test_a_path_of_another_pipeline_is_refused(make: Any, table: str, rows: Any, batches: Any) -> None:
    sink, cut = make(), batches("parquet")
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    with pytest.raises(SinkError, match="pipeline 'shop'"):
        ParquetSinkWriter(ParquetSink(table), "other").last_entry()


@pytest.mark.parametrize("path", ["s3://bucket/table", "gs://b/t", "abfss://c@a/t", "hdfs://n/t"])
def test_object_stores_are_refused_in_favour_of_delta(path: str, spark: SparkSession, rows: Any) -> None:
    sink = ParquetSinkWriter(ParquetSink(path), "shop")
    assert any("use Delta" in problem.message for problem in sink.check(rows([]).schema))
    with pytest.raises(SinkError, match="use Delta"):
        sink.open(SinkContext("shop", "", {}, ""), spark)


def test_a_table_cannot_change_what_it_is_partitioned_by(
    make: Any, rows: Any, batches: Any, table: str
) -> None:
    sink, cut = make(), batches("parquet")
    cut.write(sink, cut.at(0, 1), rows(ids(1)))
    sink.close()
    sink = make(partition_by=("name",))
    with pytest.raises(SinkError, match="partitioned by nothing, and the definition says name"):
        sink.prepare(cut.at(1, 2), rows(ids(2), start=1))


def test_a_batch_without_a_readable_entry_is_told(make: Any, rows: Any, batches: Any, table: str) -> None:
    sink, cut = make(), batches("parquet")
    cut.write(sink, cut.at(0, 0), rows([]))
    entry = Path(table) / "batch=00000000000000000000" / "_ledger.json"
    entry.write_text("{")
    with pytest.raises(SinkError, match="no ledger entry that can be read"):
        sink.last_entry()
    entry.unlink()
    with pytest.raises(SinkError, match="no ledger entry that can be read"):
        sink.last_entry()


def test_columns_no_file_can_hold_are_told(spark: SparkSession, table: str) -> None:
    frame = spark.sql(
        "SELECT 1 AS Batch, NULL AS none, INTERVAL 1 DAY AS span, 2 AS b, 3 AS B, array() AS empty, "
        "TIME'12:00:00' AS noon, struct(1 AS variant, 2 AS `interval`) AS fine"
    )
    problems = [
        problem.message for problem in ParquetSinkWriter(ParquetSink(table), "shop").check(frame.schema)
    ]
    parts = ["'Batch'", "'none' is always NULL", "'span' is interval day", "'b' and 'B' differ"]
    parts += ["'empty' is array<void>", "'noon' is time(6)"]
    for part in parts:
        assert any(part in problem for problem in problems), part
    assert len(problems) == len(parts)


def test_a_definition_that_does_not_fit_the_rows_is_told(rows: Any, table: str) -> None:
    sink = ParquetSinkWriter(ParquetSink(table, partition_by=("id", "no", "id"), compression="zip"), "shop")
    problems = sink.check(rows([]).schema)
    assert {problem.where for problem in problems} == {"partition_by", "compression"}
    assert any("no column 'no'" in problem.message for problem in problems)
    by_time = ParquetSinkWriter(ParquetSink(table, partition_by=("at",)), "shop")
    [problem] = by_time.check(rows([], "id bigint, at timestamp").schema)
    assert "readers in another than UTC" in problem.message
    assert by_time.check(rows([], "id bigint, at timestamp_ntz").schema) == []


def test_a_directory_without_permission_is_explained(
    make: Any, table: str, rows: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(), batches("parquet")
    prepared = sink.prepare(cut.at(0, 1), rows(ids(1)))

    def refuse(path: str, data: bytes) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(sink.store.disk, "write", refuse)
    with pytest.raises(SinkError, match=r"no permission to write .*nothing was committed"):
        prepared.commit(cut.entry(cut.at(0, 1), None, 1))
    assert sink.last_entry() is None


def test_a_batch_or_a_file_of_one_that_is_gone_is_missed(
    make: Any, table: str, rows: Any, batches: Any, tmp_path: Path
) -> None:
    sink, cut = make(), batches("parquet")
    assert sink.missing() is None
    for at in range(3):
        cut.write(sink, cut.at(at, at + 1), rows(ids(at), start=at))
    assert sink.missing() is None
    first, second = (Path(table) / f"batch={at:020d}" for at in range(2))
    first.rename(tmp_path / "away")
    assert sink.missing() == f"{first.name} is gone from {table}, and later batches are there"
    (tmp_path / "away").rename(first)
    [file] = second.glob("part-*")
    content = file.read_bytes()
    for damaged, words in ((b"", "cannot be read"), (None, "has 0 rows, and had 1")):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        assert words in str(sink.missing())
    file.write_bytes(content)
    assert sink.missing() is None
    sink.forget()
    first.rename(tmp_path / "away")
    assert sink.missing() is None
    cut.write(sink, cut.at(0, 1), rows(ids(7)))
    assert sink.missing() is None
