"""The log of a Delta table, read by the auditor: the files that Delta itself names, whatever happened to the table."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable, write_deltalake
from tests.support.audit_sinks import DeltaBuilder, rows_of

from holdfast.audit.sinks.base import SinkUnreadable
from holdfast.audit.sinks.delta import DeltaReader
from holdfast.audit.sinks.delta_log import DeltaLog
from holdfast.pipeline.definition.model import DeltaSink

if TYPE_CHECKING:
    from tests.audit.sinks.conftest import Shop

STEPS = 12


def one_more(chance: random.Random, shop: Shop, builder: DeltaBuilder, number: int) -> None:
    """Something that befalls a table."""
    match chance.choice(("batch", "batch", "merge", "checkpoint", "delete", "append", "optimize")):
        case "batch":
            builder.commit(shop.entry(number), shop.rows(number))
        case "merge":
            builder.compact()
        case "checkpoint":
            builder.checkpoint()
        case "delete":
            DeltaTable(builder.path).delete(f"id % {chance.randrange(2, 9)} = 0")
        case "append":
            rows = rows_of([("orders", 0, 999, 0)], {"id": [chance.randrange(99)], "country": ["a b/c%"]})
            write_deltalake(
                builder.path, rows, mode="append", partition_by=list(builder.partition_by) or None
            )
        case "optimize":
            DeltaTable(builder.path).optimize.compact()


@pytest.mark.parametrize("seed", range(6))
def test_the_files_of_a_table_are_those_that_delta_names(shop: Shop, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    by = chance.choice(((), ("country",)))
    builder = DeltaBuilder(
        str(tmp_path / "table"), "shop", "out", files=chance.randrange(1, 3), partition_by=by
    )
    builder.commit(shop.opening(), shop.rows(0).slice(0, 0))
    for number in range(STEPS):
        one_more(chance, shop, builder, number)
    theirs = DeltaTable(builder.path)
    ours = DeltaLog(builder.path)
    assert ours.version == theirs.version()
    named = {os.path.normpath(uri.removeprefix("file://")) for uri in theirs.file_uris()}
    assert {os.path.normpath(os.path.join(builder.path, path)) for path in ours.state.files} == named
    assert list(ours.disagreements()) == []
    assert ours.holes == []
    sink = DeltaSink(builder.path, name="out", partition_by=by)
    reader = DeltaReader(shop.definition(sink), sink)
    found = sorted(each for table in reader.table_batches(["id"]) for each in table.column("id").to_pylist())
    assert found == sorted(theirs.to_pyarrow_table(columns=["id"]).column("id").to_pylist())


def test_whatever_becomes_of_a_log_it_is_told(shop: Shop, tmp_path: Path) -> None:
    """Bytes changed or cut off in a version, a checkpoint or an entry: something is found, or nothing has changed."""
    builder = DeltaBuilder(str(tmp_path / "table"), "shop", "out")
    builder.commit(shop.opening(), shop.rows(0).slice(0, 0))
    for number in range(3):
        builder.commit(shop.entry(number), shop.rows(number))
    builder.checkpoint()
    builder.commit(shop.entry(3), shop.rows(3))
    paths = sorted(
        [*Path(builder.path, "_delta_log").iterdir(), *Path(builder.path, "_hf", "shop--out").iterdir()]
    )
    sink = DeltaSink(builder.path, name="out")
    chance = random.Random(11)
    told = 0
    for _ in range(150):
        path = chance.choice(paths)
        whole = path.read_bytes()
        changed = bytearray(whole)
        if chance.random() < 0.3:
            del changed[chance.randrange(len(changed)) :]
        else:
            changed[chance.randrange(len(changed))] ^= chance.randrange(1, 256)
        path.write_bytes(changed)
        try:
            told += bool(shop.found(DeltaReader(shop.definition(sink), sink)))
        except SinkUnreadable:
            told += 1
        path.write_bytes(whole)
    assert told > 50
    assert shop.found(DeltaReader(shop.definition(sink), sink)) == []
