"""What a Delta sink's log, ledger and files hold, read by the auditor, and what somebody did to them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow import fs
from tests.support.audit_sinks import DeltaBuilder, rows_of

from holdfast.audit.lineage import NOWHERE
from holdfast.audit.sinks import files
from holdfast.audit.sinks.base import SinkScope, SinkUnreadable
from holdfast.audit.sinks.delta import DeltaReader
from holdfast.audit.sinks.opening import open_sink
from holdfast.pipeline.definition.model import DeltaSink

if TYPE_CHECKING:
    from tests.audit.sinks.conftest import ReadingOnly, Shop


@pytest.fixture
def builder(tmp_path: Path) -> DeltaBuilder:
    return DeltaBuilder(str(tmp_path / "table"), "shop", "out", files=2)


def reader_of(shop: Shop, builder: DeltaBuilder) -> DeltaReader:
    sink = DeltaSink(builder.path, name=shop.sink, partition_by=builder.partition_by)
    reader = open_sink(shop.definition(sink), sink, {})
    assert isinstance(reader, DeltaReader)
    return reader


def filled(shop: Shop, builder: DeltaBuilder, batches: int = 3) -> list[list[str]]:
    """Version 0 makes the table, 1 is the opening, batch n is version n + 2; the paths of the batches' files."""
    builder.commit(shop.opening(), shop.rows(0).slice(0, 0))
    return [builder.commit(shop.entry(number), shop.rows(number)) for number in range(batches)]


def log(builder: DeltaBuilder, version: int) -> Path:
    return Path(builder.path, "_delta_log", f"{version:020d}.json")


def without(path: Path, kind: str, name: str = "") -> None:
    """Take actions out of a version by hand."""
    lines = path.read_text().splitlines()
    kept = [line for line in lines if kind not in json.loads(line) or name not in line]
    assert len(kept) < len(lines)
    path.write_text("\n".join(kept) + "\n")


def test_every_row_and_every_entry_is_read(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3]
    assert reader.positions().at[shop.place].offset == 30
    assert list(reader.problems()) == []
    assert list(reader.gaps()) == []


def test_a_sink_that_was_never_written_is_empty(shop: Shop, builder: DeltaBuilder) -> None:
    reader = reader_of(shop, builder)
    assert shop.found(reader) == []
    assert list(reader.entries()) == []


def test_the_table_is_the_one_that_delta_itself_reads(shop: Shop, builder: DeltaBuilder) -> None:
    builder.partition_by = ("country",)
    filled(shop, builder, 4)
    builder.compact()
    builder.checkpoint()
    builder.commit(shop.entry(4), shop.rows(4))
    reader = reader_of(shop, builder)
    theirs = DeltaTable(builder.path).to_pyarrow_table(columns=["id", "country"]).sort_by("id")
    ours = pa.concat_tables(reader.table_batches(["id", "country"])).select(["id", "country"]).sort_by("id")
    assert ours.to_pylist() == theirs.to_pylist()
    assert shop.offsets(reader) == list(range(50))
    assert list(reader.problems()) == []


def test_merged_files_replace_small_ones(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    builder.compact()
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert len({each.where for each in shop.batches(reader)}) == 1
    assert list(reader.problems()) == []


def test_a_log_whose_old_versions_were_cleaned_up_is_read_from_its_checkpoint(
    shop: Shop, builder: DeltaBuilder
) -> None:
    filled(shop, builder, 4)
    builder.checkpoint()
    for version in range(5):
        log(builder, version).unlink()
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(40))
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3, 4]
    assert list(reader.problems()) == []


def test_entries_that_are_gone_with_a_cleaned_log_are_no_fault(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder, 4)
    builder.checkpoint()
    for version in range(6):
        log(builder, version).unlink()
    kept = Path(builder.path, "_hf", "shop--out")
    for path in kept.iterdir():
        if json.loads(path.read_text())["number"] < 3:
            path.unlink()
    reader = reader_of(shop, builder)
    assert [entry.number for entry in reader.entries()] == [3, 4]
    assert list(reader.problems()) == []
    [gap] = reader.gaps()
    assert "entries 0 to 2" in gap.what


def test_a_reset_begins_the_ledger_anew(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    builder.forget()
    assert list(reader_of(shop, builder).entries()) == []
    shop.ledger.last = None
    builder.commit(shop.opening())
    builder.commit(shop.entry(0), shop.rows(0))
    reader = reader_of(shop, builder)
    assert [entry.number for entry in reader.entries()] == [0, 1]
    assert shop.offsets(reader) == sorted([*range(30), *range(10)])
    assert list(reader.problems()) == []


def test_an_entry_of_an_attempt_that_failed_counts_for_nothing(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder, 2)
    kept = Path(builder.path, "_hf", "shop--out")
    failed = json.loads(next(iter(kept.iterdir())).read_text())
    (kept / "12345.json").write_text(json.dumps({**failed, "number": 3, "rows": 77}))
    reader = reader_of(shop, builder)
    assert [entry.number for entry in reader.entries()] == [0, 1, 2]
    assert shop.found(reader) == []


def test_a_file_taken_out_of_the_log_is_named_by_the_offsets_it_has(
    shop: Shop, builder: DeltaBuilder
) -> None:
    paths = filled(shop, builder)
    name = os.path.basename(paths[1][1])
    without(log(builder, 3), "add", name)
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == [*range(15), *range(20, 30)]
    [finding] = reader.problems()
    assert (finding.place, finding.ranges) == (shop.place, ((15, 19),))
    assert name in finding.detail


def test_a_file_taken_out_of_log_and_directory_is_named_by_what_is_missing(
    shop: Shop, builder: DeltaBuilder
) -> None:
    paths = filled(shop, builder)
    without(log(builder, 3), "add", os.path.basename(paths[1][0]))
    os.remove(paths[1][0])
    [finding] = shop.found(reader_of(shop, builder))
    assert finding.ranges == ((10, 14),)
    assert "version 3" in finding.detail


def test_a_version_that_is_missing_is_named_with_the_offsets_it_took(
    shop: Shop, builder: DeltaBuilder
) -> None:
    filled(shop, builder)
    log(builder, 3).unlink()
    findings = shop.found(reader_of(shop, builder))
    assert any("version 3 is missing" in each.detail for each in findings)
    assert any(each.ranges == ((10, 19),) for each in findings)


def test_versions_left_without_their_checkpoint_are_no_whole_table(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    log(builder, 0).unlink()
    log(builder, 1).unlink()
    findings = shop.found(reader_of(shop, builder))
    assert any("versions 0 to 1 are missing" in each.detail for each in findings)


def test_a_version_missing_before_a_checkpoint_is_found_too(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    builder.checkpoint()
    log(builder, 3).unlink()
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert any("version 3 is missing" in each.detail for each in reader.problems())


def test_a_checkpoint_that_hides_a_file_is_found(shop: Shop, builder: DeltaBuilder) -> None:
    paths = filled(shop, builder)
    builder.checkpoint()
    [path] = Path(builder.path, "_delta_log").glob("*.checkpoint.parquet")
    table = pq.read_table(path)
    name = os.path.basename(paths[0][0])
    kept = [(row["add"] or {}).get("path") != name for row in table.to_pylist()]
    pq.write_table(table.filter(pa.array(kept)), path)
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(5, 30))
    assert any(name in each.detail and "not in checkpoint" in each.detail for each in reader.problems())


def test_an_add_taken_out_before_a_checkpoint_is_found(shop: Shop, builder: DeltaBuilder) -> None:
    paths = filled(shop, builder)
    builder.checkpoint()
    without(log(builder, 2), "add", os.path.basename(paths[0][0]))
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert any("no version up to it adds it" in each.detail for each in reader.problems())


def test_a_data_file_that_is_gone_is_named_by_its_offsets(shop: Shop, builder: DeltaBuilder) -> None:
    paths = filled(shop, builder)
    os.remove(paths[2][0])
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == [*range(20), *range(25, 30)]
    [finding] = reader.problems()
    assert finding.ranges == ((20, 24),)
    assert os.path.basename(paths[2][0]) in finding.detail


def test_a_table_that_is_vacuumed_meanwhile_has_to_be_read_again(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    builder.compact()
    DeltaTable(builder.path).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(SinkUnreadable, match="audit it again"):
        shop.offsets(reader)
    again = reader_of(shop, builder)
    assert shop.offsets(again) == list(range(30))
    assert list(again.problems()) == []


def test_a_truncated_data_file_is_named(shop: Shop, builder: DeltaBuilder) -> None:
    paths = filled(shop, builder)
    with open(paths[0][1], "r+b") as file:
        file.truncate(100)
    [finding] = shop.found(reader_of(shop, builder))
    assert finding.ranges == ((5, 9),)
    assert os.path.basename(paths[0][1]) in finding.detail


def test_a_file_written_again_is_found_by_its_rows_or_its_size(shop: Shop, builder: DeltaBuilder) -> None:
    paths = filled(shop, builder)
    pq.write_table(pq.read_table(paths[0][0]).slice(1), paths[0][0])
    pq.write_table(pq.read_table(paths[1][0]), paths[1][0], compression="none")
    details = [each.detail for each in shop.found(reader_of(shop, builder))]
    assert any("holds 4 rows, and the log says 5" in each for each in details)
    assert any("it was written again" in each for each in details)


def test_rows_deleted_by_delta_itself_are_found(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    DeltaTable(builder.path).delete("id = 13")
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == [each for each in range(30) if each != 13]
    assert any(
        "as a change of data" in each.detail and each.ranges == ((10, 14),) for each in reader.problems()
    )
    texts = pa.concat_tables(reader.table_batches(["country"])).column("country")
    assert texts.type == pa.string()


def test_rows_that_others_appended_are_told_by_whether_they_name_a_record(
    shop: Shop, builder: DeltaBuilder
) -> None:
    filled(shop, builder)
    planted = rows_of([("orders", 0, 999, 0)], {"id": [1], "country": ["nl"]})
    write_deltalake(builder.path, planted, mode="append")
    nameless = pa.table(
        {"_hf": pa.nulls(2, planted.schema.field("_hf").type), "id": [1, 2], "country": ["nl", "nl"]}
    )
    write_deltalake(builder.path, nameless, mode="append")
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == [*range(30), 999]
    assert NOWHERE not in {each.topic for each in shop.batches(reader)}
    [gap] = reader.gaps()
    assert gap.what.startswith("2 rows")


def test_an_entry_that_is_gone_or_changed_is_told(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    kept = {
        json.loads(path.read_text())["number"]: path
        for path in Path(builder.path, "_hf", "shop--out").iterdir()
    }
    kept[1].unlink()
    kept[2].write_text(json.dumps({**json.loads(kept[2].read_text()), "rows": 9}))
    reader = reader_of(shop, builder)
    details = [each.detail for each in shop.found(reader)]
    assert any("is gone or no entry" in each for each in details)
    assert any("says another entry" in each for each in details)
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3]


def test_positions_that_do_not_fit_the_entry_are_told(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    path = log(builder, 4)
    path.write_text(path.read_text().replace('/0","version":30', '/0","version":31'))
    [finding] = shop.found(reader_of(shop, builder))
    assert "application transactions" in finding.detail


@pytest.mark.parametrize("content", ["", "{", '{"add": {}}', "[1]"])
def test_a_version_that_cannot_be_read_is_told(shop: Shop, builder: DeltaBuilder, content: str) -> None:
    filled(shop, builder)
    log(builder, 3).write_text(content)
    findings = shop.found(reader_of(shop, builder))
    assert any("version 3 of the log cannot be read" in each.detail for each in findings)


def test_rows_that_change_places_between_batches_are_found(shop: Shop, builder: DeltaBuilder) -> None:
    builder.files = 1
    paths = filled(shop, builder, 2)
    tables: list[Any] = [pq.read_table(each[0]) for each in paths]
    pq.write_table(pa.concat_tables([tables[1].slice(0, 1), tables[0].slice(1)]), paths[0][0])
    pq.write_table(pa.concat_tables([tables[0].slice(0, 1), tables[1].slice(1)]), paths[1][0])
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(20))
    assert {((0, 0),), ((10, 10),)} <= {each.ranges for each in reader.problems()}


def test_files_below_the_scope_are_not_read(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    reader = reader_of(shop, builder)
    found = [
        each for batch in reader.rows(SinkScope({shop.place: (20, 30)})) for each in batch.offsets.tolist()
    ]
    assert sorted(found) == list(range(20, 30))
    tables = reader.table_batches(["id"], SinkScope({shop.place: (20, 30)}))
    assert sum(table.num_rows for table in tables) == 10


def test_a_record_is_found_by_file_and_row(shop: Shop, builder: DeltaBuilder) -> None:
    paths = filled(shop, builder)
    assert reader_of(shop, builder).find(shop.place, 17) == [f"{paths[1][1]} row 2"]


def test_reading_needs_no_right_to_write(
    shop: Shop, public_directory: str, reading_only: ReadingOnly
) -> None:
    builder = DeltaBuilder(os.path.join(public_directory, "table"), "shop", "out")
    filled(shop, builder)
    with reading_only(builder.path):
        reader = reader_of(shop, builder)
        assert shop.offsets(reader) == list(range(30))
        assert list(reader.problems()) == []


def test_checkpoints_in_parts_count_when_every_part_is_there(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    builder.checkpoint()
    logs = Path(builder.path, "_delta_log")
    [whole] = logs.glob("*.checkpoint.parquet")
    table = pq.read_table(whole)
    whole.unlink()
    stem = whole.name.removesuffix(".parquet")
    for part, rows in enumerate((table.slice(0, 4), table.slice(4)), start=1):
        pq.write_table(rows, logs / f"{stem}.{part:010d}.{2:010d}.parquet")
    for version in range(5):
        log(builder, version).unlink()
    reader = reader_of(shop, builder)
    assert shop.offsets(reader) == list(range(30))
    assert list(reader.problems()) == []
    (logs / f"{stem}.{2:010d}.{2:010d}.parquet").unlink()
    with pytest.raises(SinkUnreadable, match="no whole checkpoint"):
        reader_of(shop, builder)


def test_deletion_vectors_and_mapped_columns_are_gaps(shop: Shop, builder: DeltaBuilder) -> None:
    filled(shop, builder)
    path = log(builder, 4)
    vector = {"storageType": "u", "pathOrInlineDv": "x", "offset": 1, "sizeInBytes": 1, "cardinality": 1}
    actions = [json.loads(line) for line in path.read_text().splitlines()]
    for action in actions:
        if "add" in action:
            action["add"]["deletionVector"] = vector
    path.write_text("".join(json.dumps(each) + "\n" for each in actions))
    first = log(builder, 0)
    first.write_text(
        first.read_text().replace('"configuration":{}', '"configuration":{"delta.columnMapping.mode":"name"}')
    )
    gaps = list(reader_of(shop, builder).gaps())
    assert [gap.is_gap for gap in gaps] == [True, True]


def test_a_table_under_a_url_is_read_through_arrows_file_systems(
    shop: Shop, builder: DeltaBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(shop, builder)
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    (tmp_path / "bucket").mkdir()
    os.rename(builder.path, tmp_path / "bucket" / "table")
    monkeypatch.setattr(files, "_file_system", lambda scheme, bucket: store)
    sink = DeltaSink("s3://bucket/table", name=shop.sink)
    reader = open_sink(shop.definition(sink), sink, {})
    assert shop.offsets(reader) == list(range(30))
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3]
    assert list(reader.problems()) == []
    assert len(reader.find(shop.place, 3)) == 1


@pytest.mark.parametrize("path", ["file:{}", "file://{}", "{}/"])
def test_a_path_may_be_written_as_the_sink_takes_it(shop: Shop, builder: DeltaBuilder, path: str) -> None:
    filled(shop, builder, 1)
    sink = DeltaSink(path.format(builder.path), name=shop.sink)
    assert shop.offsets(open_sink(shop.definition(sink), sink, {})) == list(range(10))
