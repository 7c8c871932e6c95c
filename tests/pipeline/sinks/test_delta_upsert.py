"""Delta tables with one row for each key: merge and ledger in one commit, without Spark: rows are Arrow tables."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyspark.sql
import pytest
from deltalake import DeltaTable, write_deltalake
from tests.audit.soundness.columns import Frame, Functions
from tests.audit.soundness.executor import RESERVED
from tests.pipeline.sinks.conftest import Batches

from holdfast.pipeline.definition.model import DeltaSink
from holdfast.pipeline.ledger import Entry, Erasure
from holdfast.pipeline.positions import BatchRange
from holdfast.pipeline.row_digest import MASK, DigestKey, RowHasher
from holdfast.pipeline.sealing import Written, resealed, sealed
from holdfast.pipeline.sinks.base import RowsRejected, SinkContext, SinkFenced
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.delta_upsert import DeltaUpsertWriter
from holdfast.pipeline.sinks.erasing import DeltaEraser, Request

pytestmark = pytest.mark.check
KEY = DigestKey(b"k" * 32)
COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("at", pa.int64())])
Row = dict[str, Any]
Make = Callable[..., DeltaUpsertWriter]


@pytest.fixture(autouse=True)
def functions() -> Iterator[Functions]:
    known = Functions()
    known.known["name = 'gone'"] = (lambda row: row["name"] == "gone", pa.bool_())
    with patch.object(pyspark.sql, "functions", known):
        yield known


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def make(path: str, context: SinkContext) -> Make:
    def build(**settings: Any) -> DeltaUpsertWriter:
        definition = DeltaSink(path, mode="upsert", **{"key": ("id",), **settings})
        sink = DeltaUpsertWriter(definition, "shop")
        sink.open(context, None)
        sink.key = KEY
        return sink

    return build


def frame(rows: Sequence[tuple[int, int, Row]]) -> Frame:
    """Rows by partition and offset."""
    listed = [
        {"_hf": {"topic": "orders", "partition": partition, "offset": offset, "index": 0}, **row}
        for partition, offset, row in rows
    ]
    return Frame(pa.Table.from_pylist(listed, pa.schema([*RESERVED, *COLUMNS])))


def write(sink: DeltaUpsertWriter, cut: Batches, start: int, rows: Sequence[tuple[int, int, Row]]) -> Entry:
    """What the engine does with one batch; the range is only counted here."""
    batch = cut.at(start, start + 1)
    prepared = sink.prepare(batch, frame(rows))  # type: ignore[arg-type]
    previous = sink.last_entry()
    entry = sealed(cut.entry(batch, previous, prepared.rows), previous, prepared.written, KEY)
    return prepared.commit(entry) or entry


def table(path: str, *columns: str) -> list[tuple[Any, ...]]:
    found = DeltaTable(path).to_pyarrow_table().to_pylist()
    return sorted(tuple(row[name] for name in columns or ("id", "name")) for row in found)


def require_digests(path: str, entry: Entry) -> None:
    """Every row has its digest beside it, and their sum stands in the ledger."""
    found = DeltaTable(path).to_pyarrow_table()
    hasher, total = RowHasher(KEY), 0
    for batch in found.combine_chunks().to_batches():
        place = batch.column("_hf")
        lineage = dict(zip((each.name for each in place.type), place.flatten(), strict=True))
        names = [name for name in batch.schema.names if name in COLUMNS.names]
        made = hasher.digests({name: batch.column(name) for name in names}, lineage)
        for row, kept in enumerate(batch.column("_hf_content").to_pylist()):
            assert int.from_bytes(kept, "little") == int(made[row, 0]) | int(made[row, 1]) << 64
            total += int.from_bytes(kept, "little")
    assert entry.content is not None
    assert entry.content.total == total & MASK


def row(number: int, name: str, at: int | None = None) -> Row:
    return {"id": number, "name": name, "at": at}


def test_the_last_row_of_a_key_stays_and_never_an_older_one(make: Make, path: str) -> None:
    sink, cut = make(), Batches("delta")
    entry = write(sink, cut, 0, [(0, 0, row(1, "a")), (0, 1, row(2, "b")), (0, 2, row(1, "c"))])
    assert (entry.rows, table(path)) == (3, [(1, "c"), (2, "b")])
    write(sink, cut, 1, [(0, 3, row(2, "d"))])
    # A replay from before: the table knows better. Of another partition, what is read last counts.
    write(sink, cut, 2, [(0, 0, row(1, "a")), (0, 1, row(2, "b"))])
    assert table(path) == [(1, "c"), (2, "d")]
    entry = write(sink, cut, 3, [(1, 0, row(1, "other"))])
    assert table(path) == [(1, "other"), (2, "d")]
    assert sink.last_entry() == entry
    require_digests(path, entry)


@pytest.mark.parametrize("seed", range(4))
def test_the_greatest_of_order_by_stands_however_batches_and_partitions_lie(
    make: Make, path: str, seed: int
) -> None:
    chance = random.Random(seed)
    by = ("name",) if seed % 2 else ()
    sink, cut = make(order_by="at", partition_by=by), Batches("delta")
    rows = [
        (
            partition,
            offset,
            row(chance.randrange(5), f"{partition}-{offset % 3}", chance.choice((None, 1, 2, 3))),
        )
        for partition in range(3)
        for offset in range(12)
    ]
    wanted: dict[int, tuple[Any, ...]] = {}
    for partition, offset, each in rows:
        rank = (-1 if each["at"] is None else each["at"], partition, offset)
        wanted[each["id"]] = max(wanted.get(each["id"], ((-2,), "")), (rank, each["name"]))
    chance.shuffle(rows)
    entry = None
    while rows:
        taken = chance.randrange(1, 9)
        entry = write(sink, cut, len(rows), rows[:taken])
        rows = rows[taken:]
    assert table(path) == sorted((key, name) for key, (_, name) in wanted.items())
    if not by:
        assert entry is not None
        require_digests(path, entry)


def test_rows_that_delete_take_their_key_and_a_row_without_one_is_named(make: Make, path: str) -> None:
    sink, cut = make(delete_when="name = 'gone'"), Batches("delta")
    write(sink, cut, 0, [(0, 0, row(1, "a")), (0, 1, row(2, "b")), (0, 2, row(3, "gone"))])
    entry = write(sink, cut, 1, [(0, 3, row(1, "gone")), (0, 4, row(4, "d")), (0, 5, row(4, "gone"))])
    assert table(path) == [(2, "b")]
    require_digests(path, entry)
    with pytest.raises(
        RowsRejected, match="orders-0 at offset 6: column 'id' is null, and is part of the key"
    ):
        sink.prepare(cut.at(2, 3), frame([(0, 6, {"name": "x"})]))  # type: ignore[arg-type]
    write(sink, cut, 2, [(0, 6, row(2, "gone"))])
    assert (table(path), sink.missing()) == ([], None)
    assert len([name for name in os.listdir(path) if name.endswith(".parquet")]) >= 2, "old versions stay"


def test_a_merge_that_is_killed_before_its_commit_is_neither_lost_nor_done_twice(
    make: Make, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(order_by="at"), Batches("delta")
    write(sink, cut, 0, [(0, 0, row(1, "a", 1)), (0, 1, row(2, "b", 1))])
    more = [(0, 2, row(1, "c", 2)), (0, 3, row(3, "d", 2))]

    def die(*given: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(DeltaSinkWriter, "commit_actions", die)
        with pytest.raises(KeyboardInterrupt):
            write(sink, cut, 1, more)
    again = make(order_by="at")
    assert (again.last_entry().number, table(path)) == (0, [(1, "a"), (2, "b")])  # type: ignore[union-attr]
    entry = write(again, cut, 1, more)
    assert table(path) == [(1, "c"), (2, "b"), (3, "d")]
    require_digests(path, entry)
    # A commit whose answer was lost is found by its name.
    honest = DeltaSinkWriter.commit_actions
    monkeypatch.setattr(DeltaSinkWriter, "commit_actions", lambda *given: honest(*given) and False)
    entry = write(again, cut, 2, [(0, 4, row(1, "e", 3))])
    assert (make(order_by="at").last_entry(), table(path)[0]) == (entry, (1, "e"))


def test_rows_that_somebody_else_adds_meanwhile_are_merged_and_the_rest_is_kept(
    make: Make, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, cut = make(order_by="at"), Batches("delta")
    write(sink, cut, 0, [(0, 0, row(1, "a", 5))])
    honest, calls = DeltaSinkWriter._checked, list[Any]()

    def late(self: Any, entry: Entry) -> DeltaTable:
        found = honest(self, entry)
        if not calls:
            theirs = pa.table({"id": [2, 7], "name": ["theirs", "kept"]})
            calls.append(write_deltalake(path, theirs, mode="append", schema_mode="merge"))
        return found

    monkeypatch.setattr(DeltaSinkWriter, "_checked", late)
    entry = write(sink, cut, 1, [(0, 1, row(2, "ours", 1))])
    assert table(path) == [(1, "a"), (2, "ours"), (7, "kept")]
    assert entry.number == 1
    files = [name for name in DeltaTable(path).file_uris() if "/rest-" in name]
    assert len(files) == 1, "what is left of their file is known as theirs"


def test_the_slower_of_two_copies_is_fenced(make: Make, path: str) -> None:
    one, other, cut = make(), make(), Batches("delta")
    write(one, cut, 0, [(0, 0, row(1, "a"))])
    slow = one.prepare(cut.at(1, 2), frame([(0, 1, row(1, "slow"))]))  # type: ignore[arg-type]
    entry = cut.entry(cut.at(1, 2), one.last_entry(), 1)
    write(other, cut, 1, [(0, 1, row(1, "quick"))])
    with pytest.raises(SinkFenced):
        slow.commit(entry)
    assert table(path) == [(1, "quick")]


def test_after_a_reset_the_table_takes_whatever_comes(make: Make, path: str) -> None:
    sink, cut = make(), Batches("delta")
    write(sink, cut, 0, [(0, 5, row(1, "a")), (0, 6, row(2, "b"))])
    sink.forget()
    assert (sink.last_entry(), sink.holds_rows()) == (None, False)
    found = DeltaTable(path).to_pyarrow_table().to_pylist()
    assert [(each["_hf"]["offset"], each["_hf_content"]) for each in found] == [(-1, None)] * 2
    entry = write(sink, cut, 0, [(0, 0, row(1, "low"))])
    assert table(path) == [(1, "low"), (2, "b")]
    assert entry.content is not None
    assert entry.content.total == entry.content.digest


def test_a_row_that_is_erased_leaves_the_total_with_its_digest(make: Make, path: str) -> None:
    sink, cut = make(), Batches("delta")
    before = write(sink, cut, 0, [(0, 0, row(1, "a")), (0, 1, row(2, "b"))])

    def seal(erasure: Erasure, went: int) -> Entry:
        entry = replace(before, number=1, range=BatchRange({}), rows=0, erased=erasure)
        return resealed(sealed(entry, before, Written(0, {}), KEY), before, 0, went, KEY)

    assert DeltaEraser(sink._definition, sink, Request("id = 1", "asked", KEY)).erase(seal) is not None
    assert table(path) == [(2, "b")]
    entry = sink.last_entry()
    assert entry is not None
    assert entry.erased is not None
    require_digests(path, entry)
