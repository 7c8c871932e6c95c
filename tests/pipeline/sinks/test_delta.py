"""The Delta sink: files, ledger and rows in one commit on one handle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable, write_deltalake

from holdfast.pipeline.definition.model import DeltaSink
from holdfast.pipeline.ledger import LedgerMismatch
from holdfast.pipeline.sinks import delta
from holdfast.pipeline.sinks.base import RowsRejected, SchemaChanged, SinkContext, SinkError, SinkFenced
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.delta_upsert import DeltaUpsertWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Make = Callable[..., DeltaSinkWriter]


@pytest.fixture
def table(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def make(table: str, context: SinkContext, spark: SparkSession) -> Make:
    def build(**settings: Any) -> DeltaSinkWriter:
        sink = DeltaSinkWriter(DeltaSink(table, **settings), "shop")
        sink.open(context, spark)
        return sink

    return build


def ids(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"n{number}"} for number in numbers]


def seen(table: str) -> list[int]:
    return sorted(DeltaTable(table).to_pyarrow_table().column("id").to_pylist())


def test_rows_and_ledger_are_one_commit(make: Make, table: str, rows: Any, batches: Any) -> None:
    sink, cut = make(), batches("delta")
    assert sink.last_entry() is None
    cut.write(sink, cut.at(0, 0), rows([]))
    entry = cut.write(sink, cut.at(0, 4), rows(ids(*range(4))).repartition(2))
    assert (entry.rows, sink.last_entry()) == (4, entry)
    last = cut.write(sink, cut.at(4, 9), rows([]))
    assert make().last_entry() == last
    assert seen(table) == [0, 1, 2, 3]
    held = DeltaTable(table)
    application = f"hf-shop--delta/{cut.place.topic_id}/0"
    assert held.transaction_version(application) == 9
    assert json.loads(held.history(1)[0]["holdfast"])["number"] == 2


def test_rows_are_partitioned_by_values_of_their_columns(
    make: Make, table: str, rows: Any, batches: Any
) -> None:
    sink, cut = make(partition_by=("country",)), batches("delta")
    values = [{"id": at, "country": name} for at, name in enumerate(["nl", "a/b %", None, "nl"])]
    cut.write(sink, cut.at(0, 4), rows(values, "id bigint, country string"))
    found = DeltaTable(table).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["country"] for row in found} == {0: "nl", 1: "a/b %", 2: None, 3: "nl"}
    files = sorted(os.listdir(table))
    with pytest.raises(RowsRejected, match="orders-0 at offset 4: column 'country' is ''"):
        sink.prepare(cut.at(4, 5), rows([{"id": 4, "country": ""}], "id bigint, country string", start=4))
    assert sorted(os.listdir(table)) == files
    with pytest.raises(SinkError, match="partitioned by country"):
        make()
    assert sink.last_entry() is not None
    shutil.rmtree(table)
    with pytest.raises(SinkError, match="has vanished"):
        sink.prepare(cut.at(4, 5), rows([{"id": 4, "country": "nl"}], "id bigint, country string", start=4))
    assert not os.path.exists(table)


def test_nothing_is_seen_of_files_no_commit_names(
    make: Make, table: str, rows: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(), batches("delta")
    cut.write(sink, cut.at(0, 1), rows(ids(0)))
    prepared = sink.prepare(cut.at(1, 2), rows(ids(1), start=1))
    assert seen(table) == [0]
    prepared.discard()
    assert len([name for name in os.listdir(table) if name.endswith(".parquet")]) == 1

    def die(*arguments: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeltaSinkWriter, "commit_actions", die)
        with pytest.raises(KeyboardInterrupt):
            cut.write(sink, cut.at(1, 2), rows(ids(1), start=1))
    again = make()
    assert again.last_entry().number == 0  # type: ignore[union-attr]
    cut.write(again, cut.at(1, 2), rows(ids(1), start=1))
    assert seen(table) == [0, 1]


def test_a_commit_whose_answer_was_lost_is_found(
    make: Make, table: str, rows: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(), batches("delta")
    honest = DeltaSinkWriter.commit_actions

    def lost(*arguments: Any) -> bool:
        honest(*arguments)
        return False

    prepared = sink.prepare(cut.at(0, 2), rows(ids(0, 1)))
    entry = cut.entry(cut.at(0, 2), None, 2)
    with monkeypatch.context() as patch:
        patch.setattr(DeltaSinkWriter, "commit_actions", lost)
        prepared.commit(entry)
    assert sink.last_entry() == entry
    prepared.discard()
    assert seen(table) == [0, 1]


def test_the_slower_of_two_copies_is_fenced(make: Make, table: str, rows: Any, batches: Any) -> None:
    """HF408: `deltalake` itself takes the same application transaction twice."""
    one, two, cut = make(), make(), batches("delta")
    batch = cut.at(0, 2)
    prepared = [sink.prepare(cut.at(0, 2), rows(ids(0, 1))) for sink in (one, two)]
    entry = cut.entry(batch, None, 2)
    prepared[1].commit(entry)
    with pytest.raises(SinkFenced):
        prepared[0].commit(entry)
    prepared[0].discard()
    assert seen(table) == [0, 1]


def test_a_copy_that_commits_between_check_and_commit_is_noticed(
    make: Make, table: str, rows: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast, cut = make(), make(), batches("delta")
    prepared = [sink.prepare(cut.at(0, 2), rows(ids(0, 1))) for sink in (slow, fast)]
    entry = cut.entry(cut.at(0, 2), None, 2)
    honest = slow.commit_actions

    def late(*arguments: Any) -> bool:
        if fast.last_entry() is None:
            prepared[1].commit(entry)
        return honest(*arguments)

    monkeypatch.setattr(slow, "commit_actions", late)
    with pytest.raises(SinkFenced):
        prepared[0].commit(entry)
    assert seen(table) == [0, 1]


def test_somebody_else_writing_to_the_table_costs_a_try_and_nothing_more(
    make: Make, table: str, rows: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(), batches("delta")
    cut.write(sink, cut.at(0, 1), rows(ids(0)))
    honest, calls = sink.commit_actions, 0

    def crowded(*arguments: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            write_deltalake(table, DeltaTable(table).to_pyarrow_table(), mode="append")
        return honest(*arguments)

    monkeypatch.setattr(sink, "commit_actions", crowded)
    cut.write(sink, cut.at(1, 2), rows(ids(1), start=1))
    assert (calls, seen(table)) == (2, [0, 0, 1])


def test_columns_are_added_where_that_is_allowed(make: Make, table: str, rows: Any, batches: Any) -> None:
    cut = batches("delta")
    strict = make()
    cut.write(strict, cut.at(0, 1), rows(ids(1)))
    wider = rows([{"id": 2, "name": "b", "size": 1.5}], "id bigint, name string, size double", start=1)
    with pytest.raises(SchemaChanged, match="'size'"):
        strict.prepare(cut.at(1, 2), wider)
    adding = make(schema="add-columns")
    with pytest.raises(SchemaChanged, match=r"'id' as bigint.*as string"):
        adding.prepare(cut.at(1, 2), rows([{"id": "x"}], "id string", start=1))
    cut.write(adding, cut.at(1, 2), wider)
    cut.write(adding, cut.at(2, 3), rows([{"id": 3}], "id bigint", start=2))
    found = DeltaTable(table).to_pyarrow_table().sort_by("id").to_pylist()
    assert [(row["id"], row["name"], row["size"]) for row in found] == [
        (1, "n1", None),
        (2, "b", 1.5),
        (3, None, None),
    ]


def test_the_ledger_outlives_checkpoints_and_its_file_can_be_found_again(
    make: Make, table: str, rows: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "CHECKPOINT_EVERY", 2)
    sink, cut = make(), batches("delta")
    for at in range(4):
        entry = cut.write(sink, cut.at(at, at + 1), rows([]))
    assert any("checkpoint.parquet" in name for name in os.listdir(f"{table}/_delta_log"))
    assert make().last_entry() == entry
    for name in os.listdir(sink.ledger.directory):
        os.unlink(f"{sink.ledger.directory}/{name}")
    assert make().last_entry() == entry


def test_an_entry_that_contradicts_the_table_is_refused(
    make: Make, table: str, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("delta")
    cut.write(sink, cut.at(0, 3), rows(ids(0)))
    (name,) = os.listdir(sink.ledger.directory)
    path = Path(sink.ledger.directory) / name
    document = json.loads(path.read_text())
    document["positions"]["orders"]["partitions"]["0"][0] = 99
    path.write_text(json.dumps(document))
    with pytest.raises(LedgerMismatch, match="stands at 99"):
        sink.last_entry()


def test_a_reset_keeps_rows_and_begins_a_new_ledger(make: Make, table: str, rows: Any, batches: Any) -> None:
    sink, cut = make(), batches("delta")
    cut.write(sink, cut.at(0, 1), rows(ids(0)))
    sink.forget()
    assert sink.last_entry() is None
    entry = cut.write(sink, cut.at(0, 1), rows(ids(0)))
    assert (entry.number, sink.last_entry(), seen(table)) == (0, entry, [0, 0])


def test_rows_that_the_table_no_longer_has_are_missed(
    make: Make, table: str, rows: Any, batches: Any
) -> None:
    sink, cut = make(), batches("delta")
    assert sink.missing() is None
    cut.write(sink, cut.at(0, 1), rows(ids(0)))
    before = DeltaTable(table).version()
    cut.write(sink, cut.at(1, 2), rows(ids(1), start=1))
    cut.write(sink, cut.at(2, 3), rows([]))
    assert sink.missing() is None
    [path, _] = DeltaTable(table).file_uris()
    file = Path(path)
    content = file.read_bytes()
    for damaged in (content[:-1], content + b"x", None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        assert "is gone, cut short or cannot be read" in str(sink.missing())
    file.write_bytes(content)
    assert sink.missing() is None
    DeltaTable(table).delete("id = 0")  # somebody's right
    assert sink.missing() is None
    DeltaTable(table).restore(before)
    assert "was restored to an earlier version" in str(sink.missing())
    cut.write(sink, cut.at(3, 4), rows(ids(3), start=3))  # of a run that was under way
    assert "was restored to an earlier version" in str(sink.missing())
    sink.forget()
    assert sink.missing() is None
    cut.write(sink, cut.at(0, 1), rows(ids(0)))
    DeltaTable(table).delete()
    assert sink.missing() == f"{table} has no rows any more, and had some"


def test_versions_by_spark_have_their_spans(
    make: Make, table: str, rows: Any, batches: Any, context: SinkContext, spark: SparkSession
) -> None:
    """What tasks and expressions do; `test_delta_upsert` and `test_scd2` have the rules, without Spark."""
    words = {"mode": "scd2", "key": ("id",), "order_by": "at", "delete_when": "_tombstone"}
    sink = DeltaUpsertWriter(DeltaSink(table, **words), "shop")  # type: ignore[arg-type]
    sink.open(context, spark)
    columns, cut = "id bigint, name string, at timestamp, _key_id bigint", batches("delta")
    days = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    first = rows([{"id": 1, "name": "a", "at": days[0]}, {"id": 2, "name": "b", "at": days[0]}], columns)
    assert sink.check(first.schema) == []
    assert [each.where for each in sink.check(rows([], "id bigint, at string, valid_to int").schema)] == [
        "",
        "order_by",
    ]
    cut.write(sink, cut.at(0, 2), first.repartition(2))
    gone = {"_key_id": 1, "at": days[2], "_tombstone": True}
    cut.write(sink, cut.at(2, 3), rows([gone], columns, start=2))
    cut.write(sink, cut.at(3, 4), rows([{"id": 1, "name": "late", "at": days[1]}], columns, start=3))
    found = (
        DeltaTable(table).to_pyarrow_table().sort_by([("id", "ascending"), ("at", "ascending")]).to_pylist()
    )
    assert [
        (row["id"], row["name"], row["valid_to"], row["is_current"], row["is_deleted"]) for row in found
    ] == [
        (1, "a", days[1], False, False),
        (1, "late", days[2], False, False),
        (1, None, days[2], False, True),
        (2, "b", None, True, False),
    ]
    with pytest.raises(RowsRejected, match="orders-0 at offset 4: column 'at' is null"):
        sink.prepare(cut.at(4, 5), rows([{"id": 1, "name": "c"}], columns, start=4))
