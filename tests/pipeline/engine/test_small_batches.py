"""A batch that the driver writes leaves what tasks of Spark's would have left: the same log is played both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from deltalake import DeltaTable

from holdfast.pipeline.core import frames
from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    DeltaSink,
    Expect,
    Field,
    Filter,
    KafkaSink,
    ParquetSink,
    Sql,
)
from holdfast.pipeline.engine import staging
from holdfast.pipeline.engine.deployment import Deployment, build_sinks
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.sinks import staged as small
from holdfast.pipeline.sinks import writing
from holdfast.pipeline.sinks.base import SinkError
from holdfast.pipeline.sinks.files import Disk

from .conftest import order

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from holdfast.pipeline.definition.model import PipelineDefinition
    from holdfast.pipeline.sinks.writing import FileSet

    from .conftest import Bench

OF_THE_RUN = frozenset({"hf-dlt-group", "hf-dlt-time"})
"""Headers of a dead letter that tell of the pipeline and of the time."""
RULES = (
    Expect("paid", "amount > 0"),
    Expect("plausible", "amount < 30", otherwise="warn"),
    Filter("sevens", "id % 7 <> 3"),
)
WAYS = {
    "rules": RULES,
    "a query that makes rows": (
        *RULES,
        Sql("parts", "SELECT *, explode(array(1, 2, id)) AS part FROM input", expand=True),
    ),
    "a query": (
        *RULES,
        Sql(
            "more",
            "SELECT *, amount * 2 AS twice, map('a', id) AS `odd.name`, timestamp_millis(id) AS at FROM input",
        ),
    ),
    "a query that leaves rows out": (*RULES, Sql("fives", "SELECT * FROM input WHERE id % 5 <> 1")),
}
LONG = ("a query", "a query that leaves rows out")
FIELDS = (
    Field("id", "long"),
    Field("amount", "double", required=False),
    Field("city", "string", required=False),
    Field("tags", "array<string>", required=False),
)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.long) if way in LONG else way for way in WAYS]
)
def test_both_ways_leave_the_same(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    values: list[bytes | None] = [
        order(number, number % 41 - 2, city=["Oslo", "Łódź", ""][number % 3], tags=["x"] * (number % 4))
        for number in range(120)
    ]
    bench.produce([*values, b"{", None, b'{"id": "one"}'])
    tasks = tasks_of(monkeypatch)
    found = {}
    for name, offsets in (("driver", small.SMALL_OFFSETS), ("tasks", -1)):
        monkeypatch.setattr(staging, "SMALL_OFFSETS", offsets)
        found[name] = played(bench, tmp_path / name, way)
        assert (tasks.count > 0) == (name == "tasks")
    rows, ledgers = found["driver"]
    assert rows == found["tasks"][0]
    assert ledgers == found["tasks"][1]
    sent = {len(rows[name]) for name in ("files", "nested", "table", "topic")}
    assert sent == {sum(entry["rows"] for entry in ledgers["files"])}
    assert sent != {0}
    assert rows["dead"]


class Tasks:
    count = 0


def tasks_of(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """Counts what was handed to workers for the sinks."""
    tasks, real = Tasks(), frames.map_in_arrow

    def counted(*given: Any) -> Any:
        tasks.count += 1
        return real(*given)

    monkeypatch.setattr(frames, "map_in_arrow", counted)
    return tasks


def played(bench: Bench, home: Path, way: str) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """What the sinks hold, and what their ledgers say of it."""
    topic = f"out-{home.name}"
    bench.create(topic, 1)
    sinks = (
        ParquetSink(str(home / "files"), "files"),
        ParquetSink(str(home / "nested"), "nested", partition_by=("city",)),
        DeltaSink(str(home / "table"), "table"),
        KafkaSink(topic, "topic", headers={"city": "city"}),
    )
    definition = replace(
        bench.definition,
        name=home.name,  # or the ledgers in Kafka were those of the other way
        source=replace(bench.definition.source, value=Decoding("json", FIELDS), batch_records=80),
        steps=WAYS[way],
        sinks=tuple(sinks),
        home=str(home / "home"),
        digest_key="11" * 32,
        dead_letter=DeadLetter(f"dlt-{home.name}"),
    )
    run_pipeline(definition, spark=bench.spark, signals=False)
    paths = sorted(map(str, (home / "files").glob("batch=*/*.parquet")))
    rows = {
        "columns": sorted({str(pq.read_schema(path)) for path in paths}),
        "files": in_order(ds.dataset(paths).to_table()),
        "nested": in_order(ds.dataset(str(home / "nested"), partitioning="hive").to_table()),
        "table": in_order(DeltaTable(str(home / "table")).to_pyarrow_table()),
        "topic": records(bench, topic),
        "dead": records(bench, f"dlt-{home.name}"),
    }
    return rows, ledgers_of(home, definition)


def in_order(table: pa.Table) -> list[Any]:
    return sorted(table.to_pylist(), key=lambda row: tuple(row["_hf"].values()))


def records(bench: Bench, topic: str) -> list[Any]:
    """Key, value and headers of all that is committed there."""
    consumer = Consumer(
        {
            "bootstrap.servers": bench.broker.bootstrap_servers,
            "group.id": "both",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found: list[Any] = []
    try:
        while True:
            message = consumer.poll(10)
            assert message is not None
            if message.error():
                return found
            headers = [each for each in message.headers() or () if each[0] not in OF_THE_RUN]
            found.append((message.key(), message.value(), headers))
    finally:
        consumer.close()


def ledgers_of(home: Path, definition: PipelineDefinition) -> dict[str, list[Any]]:
    """What entries say of rows: every one of the files' sink, the newest of the others."""
    deployed = Deployment.of(definition)
    found: dict[str, list[Any]] = {
        "files": [
            json.loads(path.read_text()) for path in sorted((home / "files").glob("batch=*/_ledger.json"))
        ]
    }
    for name, sink in build_sinks(deployed.definition).items():
        sink.open(deployed.sink_context(), None)
        entry = sink.last_entry()
        sink.close()
        assert entry is not None
        found.setdefault(name, [entry.as_json()])
    said = ("number", "range", "intake", "routes", "rows", "digests", "content")
    return {
        # What is sent of a dead letter tells of the run: its digest too.
        name: [
            {word: entry.get(word) for word in said if (name, word) != ("dead-letter", "content")}
            for entry in entries
        ]
        for name, entries in found.items()
    }


def test_sinks_that_are_alike_get_the_same_file_and_it_is_made_once(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.produce([order(number, number, city="Oslo", tags=[]) for number in range(50)])
    made, real = [], writing.write_task

    def counted(batches: Any, files: FileSet) -> Any:
        made.append(files.compression)
        return real(batches, files)

    monkeypatch.setattr(writing, "write_task", counted)
    names = ("one", "other", "denser")
    run_pipeline(
        replace(
            bench.definition,
            source=replace(bench.definition.source, value=Decoding("json", FIELDS)),
            sinks=tuple(
                ParquetSink(str(tmp_path / name), name, compression="zstd" if name == "denser" else "snappy")
                for name in names
            ),
        ),
        spark=bench.spark,
        signals=False,
    )
    one, other, denser = (
        {path.read_bytes() for path in (tmp_path / name).glob("batch=*/*.parquet")} for name in names
    )
    assert one == other != denser
    assert sorted(made) == ["snappy", "zstd"]
    assert ds.dataset(str(tmp_path / "denser")).count_rows() == 50


def test_a_file_of_another_sink_that_does_not_arrive_whole_is_found_out(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.produce([order(number, number, city="Oslo", tags=[]) for number in range(50)])

    def damaged(disk: Disk, path: str, data: bytes) -> None:
        real(disk, path, data[:-9] + b"?" + data[-8:] if path.endswith(".parquet") else data)

    real = Disk.write
    monkeypatch.setattr(Disk, "write", damaged)
    definition = replace(
        bench.definition,
        source=replace(bench.definition.source, value=Decoding("json", FIELDS)),
        sinks=tuple(ParquetSink(str(tmp_path / name), name) for name in ("one", "other")),
    )
    with pytest.raises(SinkError, match="other bytes than were written"):
        run_pipeline(definition, spark=bench.spark, signals=False)
    assert [path.parent.name for path in tmp_path.glob("*/batch=*") if any(path.glob("*.parquet"))] == []
