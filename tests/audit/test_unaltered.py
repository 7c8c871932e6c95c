"""Rows of a sink held against the digests that its ledger has of them, after somebody changed something."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.pipeline.absent.without_spark import LINEAGE, Frame

from holdfast.audit.sinks.parquet import ParquetReader
from holdfast.audit.unaltered import BEFORE, Keeper, Unaltered, Witness, check
from holdfast.pipeline.definition.model import ParquetSink, PipelineDefinition, Source
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import BatchRange, Place, Positions, Span
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sealing import sealed
from holdfast.pipeline.sinks import parquet, writing
from holdfast.pipeline.sinks.base import Batch, SinkContext

KEY = DigestKey(b"k" * 32)
PLACE = Place("orders", uuid.UUID(int=7), 0)
COLUMNS = pa.schema(
    [
        ("_hf", LINEAGE),
        ("id", pa.int64()),
        ("price", pa.float64()),
        ("inner", pa.struct([("name", pa.string()), ("tags", pa.list_(pa.string()))])),
        ("country", pa.string()),
    ]
)


def rows(start: int, end: int) -> pa.Table:
    found = [
        {
            "_hf": {"topic": "orders", "partition": 0, "offset": offset, "index": 0},
            "id": offset * 10,
            "price": offset / 3,
            "inner": {"name": f"n{offset}", "tags": ["a", None]},
            "country": "nl" if offset % 2 else "de",
        }
        for offset in range(start, end)
    ]
    return pa.Table.from_pylist(found, COLUMNS)


class Shop:
    """One sink, written batch by batch as the engine does it."""

    def __init__(self, path: Path, partition_by: tuple[str, ...] = (), key: DigestKey | None = KEY) -> None:
        self.definition = ParquetSink(str(path / "files"), "files", partition_by=partition_by)
        self.whole = PipelineDefinition(
            "shop", Source(("orders",)), sinks=(self.definition,), directory=str(path)
        )
        self.path = path / "files"
        self.key = key
        self.last: Entry | None = None
        self.labels = 0

    def write(self, start: int, end: int) -> Entry:
        sink = parquet.ParquetSinkWriter(self.definition, "shop")
        spark: Any = object()
        sink.open(SinkContext("shop", "", {}, ""), spark)
        try:
            self.labels += 1
            batch = Batch(BatchRange({PLACE: Span(start, end, 0)}), 0, f"b{self.labels}")
            sink.key = self.key
            frame: Any = Frame(rows(start, end))
            if self.definition.partition_by:
                frame = frame  # nothing is partitioned without Spark
            with patch.object(writing, "projected", lambda given, schema: given):
                prepared = sink.prepare(batch, frame)
            before = self.last
            entry = Entry(
                "shop", "files", 0 if before is None else before.number + 1, batch.range,
                (Positions({}) if before is None else before.positions).moved(batch.range), 0, "f", rows=prepared.rows,
            )  # fmt: skip
            if self.key is not None:
                entry = sealed(entry, before, prepared.written, self.key)
            prepared.commit(entry)
            self.last = entry
            return entry
        finally:
            sink.close()

    def check(self, *witnesses: Witness, keeper: Keeper | None = None) -> Unaltered:
        return check(ParquetReader(self.whole, self.definition), keeper or Keeper(KEY), witnesses)

    def batch(self, number: int) -> Path:
        return self.path / f"batch={number:020d}"

    def file(self, number: int) -> Path:
        [found] = self.batch(number).glob("**/*.parquet")
        return found

    def change(self, number: int, change: Callable[[pa.Table], pa.Table]) -> None:
        path = self.file(number)
        pq.write_table(change(pq.read_table(path, partitioning=None)), path)

    def ledger(self, number: int, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.batch(number) / "_ledger.json"
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    found = Shop(tmp_path)
    for start in (0, 10, 20):
        found.write(start, start + 10)
    return found


def setting(column: str, row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table.column(column).to_pylist()
        values[row] = value(values[row]) if callable(value) else value
        at = table.schema.get_field_index(column)
        return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))

    return change


def swapped(column: str) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table.column(column).to_pylist()
        values[0], values[1] = values[1], values[0]
        at = table.schema.get_field_index(column)
        return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))

    return change


def test_what_was_written_is_unaltered(shop: Shop) -> None:
    found = shop.check(Witness(0, 2, shop.last.chain if shop.last else "", "the home"))
    assert found == Unaltered("files", ("_hf", "country", "id", "inner", "price"), 30, 30)


@pytest.mark.parametrize(
    "change",
    [
        setting("id", 3, 7),
        setting("price", 0, -0.0),
        setting("price", 2, None),
        setting("inner", 3, lambda it: {**it, "tags": ["a", "b"]}),
        setting("inner", 3, lambda it: {**it, "name": "other"}),
        setting("country", 4, "fr"),
        setting("_hf", 5, lambda it: {**it, "index": 1}),
        swapped("id"),
        swapped("inner"),
        lambda table: table.slice(1),
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),
        lambda table: table.drop_columns(["price"]),
        lambda table: table.rename_columns(["_hf", "price_", "id", "inner", "country"]),
    ],
    ids=[
        "another integer",
        "a negative zero",
        "a null",
        "a longer list inside",
        "another text inside",
        "another partition",
        "another index of the lineage",
        "rows swap an integer",
        "rows swap a struct",
        "a row less",
        "a row twice",
        "a column less",
        "a column renamed",
    ],
)
def test_a_changed_batch_is_found_and_named(
    shop: Shop, change: Callable[[pa.Table], pa.Table], request: pytest.FixtureRequest
) -> None:
    shop.change(1, change)
    found = shop.check()
    assert found.unaltered == 20
    [finding] = found.findings
    assert (finding.sink, finding.place, finding.ranges) == ("files", PLACE, ((10, 19),))
    assert "entry 1" in finding.detail


def test_rows_in_another_order_or_other_files_are_unaltered(shop: Shop) -> None:
    shop.change(1, lambda table: table.take(pa.array(list(reversed(range(10))))))
    table = pq.read_table(shop.file(2), partitioning=None)
    shop.file(2).unlink()
    for at in (0, 5):
        pq.write_table(table.slice(at, 5), shop.batch(2) / f"part-{at:032x}.parquet")
    assert shop.check().findings == ()


def test_a_batch_and_its_entry_changed_together_break_the_chain(shop: Shop) -> None:
    def forge(document: dict[str, Any]) -> None:
        document["content"]["digest"] = "0" * 32
        document["rows"] = 9

    shop.change(1, lambda table: table.slice(1))
    shop.ledger(1, forge)
    details = [finding.detail for finding in shop.check().findings]
    assert any("entry 1 of its ledger was altered" in detail for detail in details)


def test_an_older_batch_put_back_with_its_entry_is_found(shop: Shop, tmp_path: Path) -> None:
    other = Shop(tmp_path / "other")
    for start in (0, 10, 21):
        other.write(start, start + 10)
    shutil.rmtree(shop.batch(1))
    shutil.copytree(other.batch(1), shop.batch(1))
    assert shop.check().findings == (), "rows and entry are the same, and so is the chain"
    shutil.rmtree(shop.batch(2))
    shutil.copytree(other.batch(2), shop.batch(2))
    assert shop.last is not None
    [finding] = shop.check(Witness(0, 2, shop.last.chain, "the home")).findings
    assert "entry 2 of its ledger is not the one that was written, as the home says" in finding.detail


def test_a_ledger_that_went_back_is_found_by_whoever_knew_its_head(shop: Shop) -> None:
    assert shop.last is not None
    shutil.rmtree(shop.batch(2))
    [finding] = shop.check(Witness(0, 2, shop.last.chain, "the home")).findings
    assert "it went back" in finding.detail
    assert shop.check().findings == (), "the ledger alone does not know"


def test_seals_taken_off_are_found(shop: Shop) -> None:
    for name in ("chain", "content"):
        shop.ledger(2, lambda document, name=name: document.pop(name))  # type: ignore[misc]
    details = [finding.detail for finding in shop.check().findings]
    assert any("entry 2 of its ledger was altered" in detail for detail in details)


def test_rows_from_before_there_were_digests_are_trusted(tmp_path: Path) -> None:
    shop = Shop(tmp_path, key=None)
    shop.write(0, 10)
    assert shop.check() == Unaltered("files", why=BEFORE)
    shop.key = KEY
    shop.write(10, 20)
    found = shop.check()
    assert (found.rows, found.unaltered, found.trusted, found.why) == (20, 10, 10, BEFORE)
    shop.change(1, setting("id", 3, 7))
    assert len(shop.check().findings) == 1


def test_a_lost_key_is_a_finding_and_another_one_vouches_for_nothing(shop: Shop) -> None:
    [finding] = shop.check(keeper=Keeper(None, lost="the key is gone")).findings
    assert "the key is gone" in finding.detail
    other = shop.check(keeper=Keeper(DigestKey(b"o" * 32)))
    assert other.unaltered == 0
    assert KEY.id in other.why
    hidden = shop.check(keeper=Keeper(None, unreadable="may not be read"))
    assert (hidden.unaltered, hidden.why, hidden.findings) == (0, "may not be read", ())


def test_columns_that_come_later_leave_the_rows_before_unaltered(shop: Shop) -> None:
    shop.change(0, lambda table: table.append_column("later", pa.nulls(10, pa.string())))
    assert shop.last is not None
    assert shop.check().findings == ()


def test_entries_keep_content_and_chain_in_json(shop: Shop) -> None:
    assert shop.last is not None
    assert Entry.from_json(json.loads(json.dumps(shop.last.as_json()))) == shop.last
    assert shop.last.content is not None
    assert replace(shop.last, content=None) != shop.last
