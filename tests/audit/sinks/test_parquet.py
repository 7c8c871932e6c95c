"""What a Parquet sink holds, read by the auditor: every row, every entry, and what somebody did to it."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.audit_sinks import ParquetBuilder, rows_of

from holdfast.audit.lineage import NOWHERE
from holdfast.audit.model import Fate
from holdfast.audit.sinks import files
from holdfast.audit.sinks.base import SinkScope, SinkUnreadable
from holdfast.audit.sinks.opening import open_sink
from holdfast.audit.sinks.parquet import ParquetReader
from holdfast.pipeline.definition.model import ParquetSink, Window

if TYPE_CHECKING:
    from tests.audit.sinks.conftest import ReadingOnly, Shop


@pytest.fixture
def builder(tmp_path: Path) -> ParquetBuilder:
    return ParquetBuilder(str(tmp_path / "table"), files=2)


def reader_of(shop: Shop, builder: ParquetBuilder) -> ParquetReader:
    sink = ParquetSink(builder.path, name=shop.sink)
    reader = open_sink(shop.definition(sink), sink, {})
    assert isinstance(reader, ParquetReader)
    return reader


def batch(number: int) -> str:
    return f"batch={number:020d}"


def filled(shop: Shop, builder: ParquetBuilder, batches: int = 3) -> list[list[str]]:
    """The opening and some batches; the paths of their files."""
    builder.commit(shop.opening())
    return [builder.commit(shop.entry(number), shop.rows(number)) for number in range(batches)]


def test_every_row_and_every_entry_is_read(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3]
    assert reader.positions().at[shop.place].offset == 30
    assert list(reader.problems()) == []
    assert list(reader.gaps()) == []
    assert {each.topic for each in shop.batches(reader)} == {"orders"}


def test_a_sink_that_was_never_written_is_empty(shop: Shop, builder: ParquetBuilder) -> None:
    reader = reader_of(shop, builder)
    assert list(reader.entries()) == []
    assert shop.found(reader) == []
    assert reader.positions().at == {}


def test_columns_that_directories_are_named_by_come_back_with_their_types(
    shop: Shop, builder: ParquetBuilder
) -> None:
    builder.partition_by = ("id", "country")
    builder.commit(shop.opening())
    rows = rows_of(
        [("orders", 0, 0, 0), ("orders", 0, 1, 0)], {"id": [7, None], "country": ["a/b", "nl"], "n": [1, 2]}
    )
    builder.commit(shop.entry(0, 2), rows)
    reader = reader_of(shop, builder)
    found = pa.concat_tables(reader.table_batches(["id", "country", "n"])).sort_by("n").to_pylist()
    assert [(each["id"], each["country"], each["_hf_offset"]) for each in found] == [
        (7, "a/b", 0),
        (None, "nl", 1),
    ]
    assert shop.found(reader) == []


def test_merged_batches_keep_their_entries(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder, 4)
    builder.merge(1, 3)
    reader = reader_of(shop, builder)
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3, 4]
    assert shop.offsets(reader) == list(range(40))
    assert list(reader.problems()) == []


@pytest.mark.parametrize("change", [{"rows": 11}, {"batch_time_ms": 1}, {"generation": 1}])
def test_the_newest_entry_of_merged_batches_is_the_same_in_both_its_places(
    shop: Shop, builder: ParquetBuilder, change: dict[str, object]
) -> None:
    filled(shop, builder, 4)
    builder.merge(1, 3)
    path = Path(builder.path) / batch(3) / "_ledger.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    [finding] = reader_of(shop, builder).problems()
    assert "_ledger.json says another entry than the last of _entries.jsonl" in finding.detail


def test_what_a_reset_forgot_is_in_no_ledger_and_its_rows_are_there(
    shop: Shop, builder: ParquetBuilder
) -> None:
    filled(shop, builder)
    builder.forget()
    shop.ledger.last = None
    filled(shop, builder, 1)
    reader = reader_of(shop, builder)
    assert [entry.number for entry in reader.entries()] == [0, 1]
    assert reader.positions().at[shop.place].offset == 10
    assert shop.offsets(reader) == sorted([*range(30), *range(10)])
    assert list(reader.problems()) == []
    [gap] = reader.gaps()
    assert "4 batches" in gap.what
    assert not gap.is_gap


def test_a_column_that_came_later_is_there_where_it_is(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder, 1)
    more = shop.rows(1).append_column("note", pa.array(["x"] * 10))
    builder.commit(shop.entry(1), more)
    tables = list(reader_of(shop, builder).table_batches(["note"]))
    assert sum(each.num_rows for each in tables) == 20
    assert sum(each.num_rows for each in tables if "note" in each.column_names) == 10


def test_a_removed_file_is_named_by_the_offsets_it_had(shop: Shop, builder: ParquetBuilder) -> None:
    paths = filled(shop, builder)
    os.remove(paths[1][0])
    [finding] = shop.found(reader_of(shop, builder))
    assert finding.fate is Fate.ALTERED
    assert finding.place == shop.place
    assert finding.ranges == ((10, 14),)
    assert batch(2) in finding.detail


def test_where_rows_were_filtered_a_removed_file_is_known_up_to_those(
    shop: Shop, builder: ParquetBuilder
) -> None:
    builder.commit(shop.opening())
    paths = builder.commit(shop.entry(0, 8), shop.rows(0, leaving_out=(1, 7)))
    os.remove(paths[1])
    [finding] = shop.found(reader_of(shop, builder))
    assert finding.ranges == ()
    assert "4 rows are gone: among orders-0 1, 5-9" in finding.detail


def test_a_truncated_file_is_named_and_the_others_are_read(shop: Shop, builder: ParquetBuilder) -> None:
    paths = filled(shop, builder)
    with open(paths[2][1], "r+b") as file:
        file.truncate(os.path.getsize(paths[2][1]) - 20)
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(25))
    [finding] = reader.problems()
    assert os.path.basename(paths[2][1]) in finding.detail
    assert finding.ranges == ((25, 29),)


def test_a_file_damaged_in_the_middle_is_named(shop: Shop, builder: ParquetBuilder) -> None:
    paths = filled(shop, builder)
    size = os.path.getsize(paths[0][0])
    with open(paths[0][0], "r+b") as file:
        file.seek(4)
        file.write(b"\xff" * (size // 4))
    findings = shop.found(reader_of(shop, builder))
    assert any(os.path.basename(paths[0][0]) in each.detail for each in findings)


@pytest.mark.check
def test_no_byte_of_a_file_can_be_changed_so_that_reading_breaks_off(
    shop: Shop, builder: ParquetBuilder
) -> None:
    """Some bytes mean nothing for lineage; a change of any other is told, or shows in the rows."""
    builder.files = 1
    [path] = filled(shop, builder, 1)[0]
    whole = Path(path).read_bytes()
    chance = random.Random(7)
    told = 0
    for at in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[at] ^= chance.randrange(1, 256)
        Path(path).write_bytes(changed)
        reader = reader_of(shop, builder)
        found = [
            (each.topic, each.partition, offset)
            for each in shop.batches(reader)
            for offset in each.offsets.tolist()
        ]
        problems = reader.problems()
        list(reader.table_batches(["id"]))
        assert reader.find(shop.place, 3) or problems or ("orders", 0, 3) not in found
        told += bool(problems)
    assert told > 100


def test_an_empty_file_is_damaged(shop: Shop, builder: ParquetBuilder) -> None:
    paths = filled(shop, builder)
    with open(paths[0][0], "wb"):
        pass
    [finding] = shop.found(reader_of(shop, builder))
    assert finding.ranges == ((0, 4),)


def test_a_planted_file_is_named(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder)
    planted = os.path.join(builder.path, batch(1), "part-more.parquet")
    pq.write_table(rows_of([("orders", 0, 999, 0)]), planted)
    findings = shop.found(reader_of(shop, builder))
    assert any(
        "part-more.parquet" in each.detail and "1 that no entry counts" in each.detail for each in findings
    )
    assert any(each.ranges == ((999, 999),) for each in findings)


def test_a_copy_of_a_file_under_a_name_like_ours_is_named(shop: Shop, builder: ParquetBuilder) -> None:
    builder.files = 1
    paths = filled(shop, builder)
    copy = os.path.join(os.path.dirname(paths[0][0]), f"part-{'0' * 32}.parquet")
    rows = pq.read_table(paths[0][0])
    pq.write_table(rows.slice(0, 3), copy)
    [finding] = shop.found(reader_of(shop, builder))
    assert os.path.basename(copy) in finding.detail


def test_what_lies_beside_the_batches_is_named(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder)
    shutil.copytree(os.path.join(builder.path, batch(1)), os.path.join(builder.path, "batch=1"))
    [finding] = shop.found(reader_of(shop, builder))
    assert "batch=1 is in no batch" in finding.detail


def test_what_lies_beside_the_batches_and_holds_no_rows_is_only_mentioned(
    shop: Shop, builder: ParquetBuilder
) -> None:
    filled(shop, builder)
    Path(builder.path, "README").write_text("read me")
    Path(builder.path, "lost+found").mkdir()
    reader = reader_of(shop, builder)
    assert shop.found(reader) == []
    [gap] = reader.gaps()
    assert gap.what.startswith("README, lost+found")
    assert not gap.is_gap


def test_a_missing_directory_is_named_by_the_offsets_it_took(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder, 4)
    shutil.rmtree(os.path.join(builder.path, batch(2)))
    shutil.rmtree(os.path.join(builder.path, batch(3)))
    [finding] = shop.found(reader_of(shop, builder))
    assert finding.ranges == ((10, 29),)
    assert f"{batch(2)} to {batch(3)} missing" in finding.detail


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', "null"])
def test_an_entry_that_cannot_be_read_is_told(shop: Shop, builder: ParquetBuilder, content: str) -> None:
    filled(shop, builder)
    Path(builder.path, batch(2), "_ledger.json").write_text(content)
    reader = reader_of(shop, builder)
    findings = shop.found(reader)
    assert any(batch(2) in each.detail and "no ledger entry" in each.detail for each in findings)
    assert [entry.number for entry in reader.entries()] == [0, 1, 3]


def test_an_entry_of_another_pipeline_is_none(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder)
    path = Path(builder.path, batch(1), "_ledger.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "pipeline": "else"}))
    assert any("of the pipeline 'else'" in each.detail for each in shop.found(reader_of(shop, builder)))


def test_rows_that_change_places_between_batches_are_found(shop: Shop, builder: ParquetBuilder) -> None:
    builder.files = 1
    paths = filled(shop, builder)
    first, second = (pq.read_table(each[0]) for each in paths[:2])
    pq.write_table(pa.concat_tables([second.slice(3, 1), first.slice(1)]), paths[0][0])
    pq.write_table(pa.concat_tables([first.slice(0, 1), second.slice(0, 3), second.slice(4)]), paths[1][0])
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert {each.ranges for each in reader.problems()} == {((13, 13),), ((0, 0),)}


def test_rows_without_lineage_are_from_nowhere(shop: Shop, builder: ParquetBuilder) -> None:
    builder.files = 1
    paths = filled(shop, builder, 2)
    pq.write_table(pq.read_table(paths[0][0]).drop_columns(["_hf"]), paths[0][0])
    rows = pq.read_table(paths[1][0])
    places = rows.column("_hf").combine_chunks().to_pylist()
    places[4] = None
    pq.write_table(rows.set_column(0, "_hf", pa.array(places, rows.schema.field("_hf").type)), paths[1][0])
    found = shop.batches(reader_of(shop, builder))
    assert sum(len(each) for each in found if each.topic == NOWHERE) == 11
    assert sum(len(each) for each in found if each.topic == "orders") == 9


def test_a_record_is_found_by_file_and_row(shop: Shop, builder: ParquetBuilder) -> None:
    paths = filled(shop, builder)
    reader = reader_of(shop, builder)
    assert reader.find(shop.place, 17) == [f"{paths[1][1]} row 2"]
    assert reader.find(shop.place, 99) == []
    assert reader.find(shop.place._replace(topic="else"), 17) == []


def test_batches_below_the_scope_are_not_read(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    found = [
        each for batch in reader.rows(SinkScope({shop.place: (20, 30)})) for each in batch.offsets.tolist()
    ]
    assert sorted(found) == list(range(20, 30))
    tables = reader.table_batches(["id"], SinkScope({shop.place: (20, 30)}))
    assert sum(table.num_rows for table in tables) == 10


def test_windows_come_whole(shop: Shop, builder: ParquetBuilder) -> None:
    times = pa.array([0, 60_000_000], pa.timestamp("us", tz="UTC"))
    rows = rows_of(
        [("totals", 0, 1, 0), ("totals", 0, 1, 1)],
        {
            "country": ["nl", "be"],
            "window_start": times,
            "window_end": times,
            "_hf_count": [3, 4],
            "_hf_digest": [-5, 6],
        },
    )
    builder.files = 1
    builder.commit(shop.opening())
    builder.commit(shop.entry(0, 2), rows)
    sink = ParquetSink(builder.path, name=shop.sink, rows="totals")
    definition = replace(shop.definition(sink), steps=(Window("totals", {"n": "count(*)"}, size="1m"),))
    reader = open_sink(definition, sink, {})
    [found] = reader.values()
    assert found.table.column("_hf_digest").to_pylist() == [-5, 6]
    assert found.table.column("_hf_offset").to_pylist() == [1, 1]
    assert found.table.column("window_start").type == pa.timestamp("us", tz="UTC")
    assert list(reader.problems()) == []


def test_a_table_that_is_rebuilt_meanwhile_has_to_be_read_again(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    shutil.copytree(builder.path, builder.path + ".new")
    shutil.rmtree(builder.path)
    os.rename(builder.path + ".new", builder.path)
    ParquetBuilder(builder.path).merge(0, 3)
    with pytest.raises(SinkUnreadable, match="audit it again"):
        shop.offsets(reader)


def test_reading_needs_no_right_to_write(
    shop: Shop, public_directory: str, reading_only: ReadingOnly
) -> None:
    builder = ParquetBuilder(os.path.join(public_directory, "table"))
    filled(shop, builder)
    assert shop.offsets(reader_of(shop, builder)) == list(range(30))
    with reading_only(builder.path):
        reader = reader_of(shop, builder)
        assert shop.offsets(reader) == list(range(30))
        assert list(reader.problems()) == []
        with pytest.raises(PermissionError):
            open(os.path.join(builder.path, "new"), "w")  # noqa: SIM115  the test's own rights


def test_a_batch_that_may_not_be_read_is_no_empty_one(
    shop: Shop, public_directory: str, reading_only: ReadingOnly
) -> None:
    builder = ParquetBuilder(os.path.join(public_directory, "table"))
    filled(shop, builder)
    os.chmod(os.path.join(builder.path, batch(2)), 0o700 if os.geteuid() == 0 else 0)
    with reading_only(None), pytest.raises(SinkUnreadable, match="may not be read"):
        reader_of(shop, builder)
    os.chmod(os.path.join(builder.path, batch(2)), 0o700)


def test_a_reset_that_cannot_be_read_is_no_missing_one(shop: Shop, builder: ParquetBuilder) -> None:
    filled(shop, builder)
    Path(builder.path, "_hf", "forgotten.json").write_text("not a number")
    with pytest.raises(SinkUnreadable, match="forgotten"):
        reader_of(shop, builder)


def test_row_groups_of_any_size_are_read(tmp_path: Path) -> None:
    places = [{"topic": f"t{at % 2}", "partition": 0, "offset": at, "index": 0} for at in range(210)]
    kind = pa.struct(
        [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
    )
    path = str(tmp_path / "part-1.parquet")
    with pq.ParquetWriter(path, pa.schema([("_hf", kind)]), store_schema=False) as writer:
        for first, last in ((0, 100), (100, 110), (110, 210)):
            writer.write_table(pa.table({"_hf": pa.array(places[first:last], kind)}))
    assert sum(len(batch) for batch in files.lineage(path, path)) == 210
