"""Damage done to a world behind the pipeline's back, and what an audit has to say about it.

Each damage changes something for certain, and says what: the sink, the column where it is one, and which answers will
do. Cells, rows and files of a sink must be named as a finding (`FAILED`). A thing that may be gone for a good reason
(a topic that was trimmed, a part of the home) must at least not be passed over (`NOT_PASSED`).
"""

from __future__ import annotations

import datetime
import glob
import json
import math
import os
import random
import shutil
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from tests.audit.soundness.programs import Row, Sink
from tests.audit.soundness.worlds import World

FAILED: Final = frozenset({1})
NOT_PASSED: Final = frozenset({1, 3, 4})
LINEAGE: Final = "_hf"
SPANS: Final = ("valid_from", "valid_to", "is_current")
"""Of a version: they follow from the table's other rows."""
Chance = random.Random


class Undone(Exception):
    """There is nothing here that could be damaged so."""


@dataclass(frozen=True)
class Damage:
    what: str
    sink: str = ""
    columns: tuple[str, ...] = ()
    """The columns with other cells than before; none: rows, files or more."""
    answers: frozenset[int] = FAILED
    stroke: str = ""
    is_of_source: bool = False
    """The sinks are as they were: only what is recomputed can tell."""

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{self.sink}.{column}" for column in self.columns)


# ------------------------------------------------------------------------ other values


def other(value: Any, kind: pa.DataType, chance: Chance) -> Any:
    """Another value of this type; sometimes none."""
    if value is not None and chance.random() < 0.1:
        return None
    found = _other(value, kind, chance)
    assert found != value, (value, kind)
    return found


def _other(value: Any, kind: pa.DataType, chance: Chance) -> Any:
    types = pa.types
    if types.is_struct(kind):
        held = dict(value) if value is not None else {each.name: None for each in kind}
        part = chance.choice(list(kind))
        held[part.name] = other(held[part.name], part.type, chance)
        return held
    if types.is_map(kind):
        pairs = list(value or ())
        if not pairs or chance.random() < 0.3:
            return [*pairs, ("zz", other(None, kind.item_type, chance))]
        at = chance.randrange(len(pairs))
        name, held = pairs[at]
        if chance.random() < 0.5:
            pairs[at] = (name + "z", held)
        else:
            pairs[at] = (name, other(held, kind.item_type, chance))
        return pairs
    if types.is_list(kind):
        items = list(value or ())
        if not items or chance.random() < 0.4:
            return [*items, _other(None, kind.value_type, chance)]
        at = chance.randrange(len(items))
        items[at] = _other(items[at], kind.value_type, chance)
        return items
    if types.is_string(kind):
        return chance.choice(("forged", (value or "") + "!", (value or "") + " "))
    if types.is_boolean(kind):
        return not value
    if types.is_integer(kind):
        return (value or 0) + chance.choice((1, 7))
    if types.is_floating(kind):
        return math.nextafter(value or 0.0, 1e9) if chance.random() < 0.2 else (value or 0.0) + 0.01
    if types.is_decimal(kind):
        return (value or Decimal(0)) + Decimal("0.01")
    if types.is_date(kind):
        return (value or datetime.date(2026, 1, 1)) + datetime.timedelta(1)
    if types.is_timestamp(kind):
        start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        return (value or start) + datetime.timedelta(microseconds=chance.choice((1, 1000, 10**6)))
    return (value or b"") + b"!"


# ------------------------------------------------------------------------ files of rows


@dataclass
class DataFile:
    path: str
    table: pa.Table
    rows: list[Row]

    @classmethod
    def read(cls, path: str) -> DataFile:
        table = pq.ParquetFile(path).read()
        return cls(path, table, table.to_pylist())

    def write(self) -> None:
        table = pa.Table.from_pylist(self.rows, self.table.schema)
        pq.write_table(table, self.path, compression="snappy", store_schema=False)


def paths_of(world: World, sink: Sink) -> list[str]:
    directory = str(world.directory / sink.name)
    if sink.kind == "parquet":
        return sorted(glob.glob(f"{directory}/batch=*/**/part-*.parquet", recursive=True))
    return sorted(path.removeprefix("file://") for path in DeltaTable(directory).file_uris())


def _file(world: World, sink: Sink, chance: Chance) -> DataFile:
    paths = paths_of(world, sink)
    if not paths:
        raise Undone
    return DataFile.read(chance.choice(paths))


def change_cell(world: World, sink: Sink, chance: Chance) -> Damage:
    file = _file(world, sink, chance)
    row = chance.choice(file.rows)
    column = chance.choice(file.table.column_names)
    row[column] = other(row[column], file.table.schema.field(column).type, chance)
    if column == LINEAGE and row[column] is None:
        raise Undone
    file.write()
    return Damage(f"a cell of {column} is changed", sink.name, (column,))


def change_span(world: World, sink: Sink, chance: Chance) -> Damage:
    """A version begins or ends at another time, or says of itself that it is current, or is not."""
    if sink.words.get("mode") != "scd2":
        raise Undone
    file = _file(world, sink, chance)
    row, column = chance.choice(file.rows), chance.choice(SPANS)
    row[column] = other(row[column], file.table.schema.field(column).type, chance)
    file.write()
    return Damage(f"{column} of a version is changed", sink.name, (column,))


def cell_without_digest(world: World, sink: Sink, chance: Chance) -> Damage:
    """A cell is changed, and the rows look as if they had never had a digest."""
    if sink.kind != "merge":
        raise Undone
    damage = change_cell(world, sink, chance)
    for path in paths_of(world, sink):
        file = DataFile.read(path)
        for row in file.rows:
            row["_hf_content"] = None
        file.write()
    return Damage(f"{damage.what}, and no row has a digest any more", sink.name)


def swap_cells(world: World, sink: Sink, chance: Chance) -> Damage:
    """Two rows, of one file or of two, have each other's value."""
    one = _file(world, sink, chance)
    path = chance.choice(paths_of(world, sink))
    two = one if path == one.path else DataFile.read(path)
    for _ in range(30):
        column = chance.choice(one.table.column_names)
        first, second = chance.choice(one.rows), chance.choice(two.rows)
        rest = [name for name in one.table.column_names if name != column]
        is_other = any(first[name] != second.get(name) for name in rest) or one is not two
        if column in second and first[column] != second[column] and is_other:
            first[column], second[column] = second[column], first[column]
            one.write()
            two.write()
            return Damage(f"two rows have each other's {column}", sink.name, (column,))
    raise Undone


def swap_columns(world: World, sink: Sink, chance: Chance) -> Damage:
    file = _file(world, sink, chance)
    for _ in range(30):
        row = chance.choice(file.rows)
        one, two = chance.sample(file.table.column_names, 2)
        schema = file.table.schema
        if schema.field(one).type == schema.field(two).type and row[one] != row[two]:
            row[one], row[two] = row[two], row[one]
            file.write()
            return Damage(f"a row has its {one} as {two}", sink.name, (one, two))
    raise Undone


def drop_row(world: World, sink: Sink, chance: Chance) -> Damage:
    file = _file(world, sink, chance)
    file.rows.pop(chance.randrange(len(file.rows)))
    file.write()
    return Damage("a row is gone", sink.name)


def double_row(world: World, sink: Sink, chance: Chance) -> Damage:
    file = _file(world, sink, chance)
    file.rows.append(dict(chance.choice(file.rows)))
    file.write()
    return Damage("a row is there twice", sink.name)


def replace_row(world: World, sink: Sink, chance: Chance) -> Damage:
    """A row in the place of another: numbers stay."""
    one = _file(world, sink, chance)
    path = chance.choice(paths_of(world, sink))
    two = one if path == one.path else DataFile.read(path)
    first = chance.randrange(len(one.rows))
    others = [row for row in two.rows if row[LINEAGE] != one.rows[first][LINEAGE]]
    if not others or set(others[0]) != set(one.rows[first]):
        raise Undone
    one.rows[first] = dict(chance.choice(others))
    one.write()
    return Damage("a row stands in the place of another", sink.name)


def remove_file(world: World, sink: Sink, chance: Chance) -> Damage:
    file = _file(world, sink, chance)
    os.unlink(file.path)
    return Damage("a file is gone", sink.name)


def cut_file(world: World, sink: Sink, chance: Chance) -> Damage:
    file = _file(world, sink, chance)
    os.truncate(file.path, chance.randrange(os.path.getsize(file.path)))
    return Damage("a file is cut short", sink.name)


def copy_file(world: World, sink: Sink, chance: Chance) -> Damage:
    """Of Parquet, whoever reads the directory reads it too."""
    if sink.kind != "parquet":
        raise Undone
    file = _file(world, sink, chance)
    name = f"part-{chance.getrandbits(128):032x}.parquet"
    shutil.copy(file.path, os.path.join(os.path.dirname(file.path), name))
    return Damage("a file is there twice", sink.name)


def swap_files(world: World, sink: Sink, chance: Chance) -> Damage:
    """Two partitions have each other's files."""
    paths = paths_of(world, sink)
    if not sink.partition_by or len(paths) < 2:
        raise Undone
    for _ in range(20):
        one, two = chance.sample(paths, 2)
        if sink.kind != "parquet" or os.path.dirname(one) != os.path.dirname(two):
            break
    else:
        raise Undone
    if sink.kind != "parquet" and not _differ(world, sink, one, two):
        raise Undone
    kept = Path(one).read_bytes()
    Path(one).write_bytes(Path(two).read_bytes())
    Path(two).write_bytes(kept)
    return Damage("two files have each other's rows", sink.name)


def _differ(world: World, sink: Sink, one: str, two: str) -> bool:
    """Two files of a Delta table are of different partitions."""
    found: dict[str, str] = {}
    for path in glob.glob(str(world.directory / sink.name / "_delta_log" / "*.json")):
        for line in Path(path).read_text().splitlines():
            added = json.loads(line).get("add")
            if added:
                found[os.path.basename(added["path"])] = json.dumps(added["partitionValues"], sort_keys=True)
    return found.get(os.path.basename(one)) != found.get(os.path.basename(two))


def rename_partition(world: World, sink: Sink, chance: Chance) -> Damage:
    if not sink.partition_by:
        raise Undone
    if sink.kind != "parquet":
        return _rename_in_log(world, sink, chance)
    found = [
        path
        for path in glob.glob(str(world.directory / sink.name / "batch=*" / "**" / "*=*"), recursive=True)
        if os.path.isdir(path)
    ]
    if not found:
        raise Undone
    path = chance.choice(found)
    column, _, value = os.path.basename(path).partition("=")
    to = os.path.join(os.path.dirname(path), f"{column}={_moved(column, value)}")
    if os.path.exists(to):
        raise Undone
    os.rename(path, to)
    return Damage(f"a directory of {column} has another name", sink.name, (column,))


def _moved(column: str, value: str) -> str:
    """Another value of the column's type."""
    if value == "__HIVE_DEFAULT_PARTITION__":
        return {"day": "2026-01-02", "rank": "3", "bucket": "2", "paid": "true"}.get(column, "forged")
    match column:
        case "day":
            return "2026-02-01" if value != "2026-02-01" else "2026-02-02"
        case "rank" | "bucket":
            return str(int(value) + 1)
        case "paid":
            return "false" if value == "true" else "true"
    return value + "x"


def _rename_in_log(world: World, sink: Sink, chance: Chance) -> Damage:
    """The commit that names a file says that it is of another partition."""
    current = {os.path.basename(path) for path in paths_of(world, sink)}
    logs = sorted(glob.glob(str(world.directory / sink.name / "_delta_log" / "*.json")))
    chance.shuffle(logs)
    for log in logs:
        lines = [json.loads(line) for line in Path(log).read_text().splitlines()]
        for line in lines:
            added = line.get("add")
            if added and added["partitionValues"] and os.path.basename(added["path"]) in current:
                column = chance.choice(sorted(added["partitionValues"]))
                value = added["partitionValues"][column]
                value = "__HIVE_DEFAULT_PARTITION__" if value is None else value
                added["partitionValues"][column] = _moved(column, value)
                Path(log).write_text("\n".join(map(json.dumps, lines)) + "\n")
                return Damage(f"a commit says another {column}", sink.name, (column,))
    raise Undone


def lose_directory(world: World, sink: Sink, chance: Chance) -> Damage:
    if not paths_of(world, sink):
        raise Undone
    shutil.rmtree(world.directory / sink.name)
    return Damage("the directory is gone", sink.name)


def lose_last_batch(world: World, sink: Sink, chance: Chance) -> Damage:
    """The newest batch, its entry with it."""
    if sink.kind != "parquet":
        raise Undone
    found = sorted(glob.glob(str(world.directory / sink.name / "batch=*")))
    if len(found) < 2 or not glob.glob(f"{found[-1]}/**/part-*.parquet", recursive=True):
        raise Undone
    shutil.rmtree(found[-1])
    return Damage("the newest batch is gone", sink.name)


def older_copy(world: World, sink: Sink, chance: Chance) -> Damage:
    """The sink as it was before, restored from a copy."""
    kept = _older(world, sink)
    shutil.rmtree(world.directory / sink.name)
    shutil.copytree(kept / sink.name, world.directory / sink.name)
    return Damage("the sink is an older copy", sink.name)


def older_copy_and_home(world: World, sink: Sink, chance: Chance) -> Damage:
    """Sink and home as they were before; what others know stays: other sinks, the cluster."""
    kept = _older(world, sink)
    for name in (sink.name, "home"):
        shutil.rmtree(world.directory / name)
        shutil.copytree(kept / name, world.directory / name)
    return Damage("sink and home are older copies", sink.name)


def _older(world: World, sink: Sink) -> Path:
    for kept in world.snapshots:
        if _entries_at(kept, sink) and _entries_at(kept, sink) < _entries_at(world.directory, sink):
            return kept
    raise Undone


def _entries_at(directory: Path, sink: Sink) -> int:
    """How much a sink of files has: batches with rows that its ledger counts."""
    if sink.kind == "parquet":
        return len(
            glob.glob(str(directory / sink.name / "batch=*" / "**" / "part-*.parquet"), recursive=True)
        )
    try:
        return int(DeltaTable(str(directory / sink.name)).to_pyarrow_table().num_rows)
    except Exception:  # noqa: BLE001 - there was no table yet
        return 0


# ------------------------------------------------------------------------ ledgers of files


def _ledger_files(world: World, sink: Sink) -> list[str]:
    directory = world.directory / sink.name
    if sink.kind == "parquet":
        return sorted(glob.glob(str(directory / "batch=*" / "_ledger.json")))
    return sorted(glob.glob(str(directory / "_hf" / "*" / "*.json")))


def change_ledger(world: World, sink: Sink, chance: Chance) -> Damage:
    """An entry says something else: a count, a digest, a range."""
    found = [path for path in _ledger_files(world, sink) if json.loads(Path(path).read_text()).get("rows")]
    if sink.kind != "parquet" or not found:
        raise Undone  # a Delta table has its entries in the log too, and the file is a copy
    path = Path(chance.choice(found))
    entry = json.loads(path.read_text())
    what = chance.choice(
        [name for name in ("rows", "routes", "digests", "intake", "content") if name in entry]
    )
    match what:
        case "rows":
            entry["rows"] += 1
        case "routes":
            entry["routes"]["main"] += 1
        case "digests":
            name = chance.choice(sorted(entry["digests"]))
            entry["digests"][name] = f"{int(entry['digests'][name], 16) ^ 1:016x}"
        case "intake":
            entry["intake"]["records"] += 1
        case "content":
            if chance.random() < 0.5:
                entry["content"]["digest"] = f"{int(entry['content']['digest'], 16) ^ 1:032x}"
            else:
                del entry["content"]
    path.write_text(json.dumps(entry))
    return Damage(f"an entry has another {what}", sink.name)


def change_entry_digest(world: World, sink: Sink, chance: Chance) -> Damage:
    """An entry says that other rows went to the sinks."""
    found = [path for path in _ledger_files(world, sink) if json.loads(Path(path).read_text()).get("rows")]
    if sink.kind != "parquet" or not found:
        raise Undone
    path = Path(chance.choice(found))
    entry = json.loads(path.read_text())
    entry["digests"]["main"] = f"{int(entry['digests']['main'], 16) ^ 1:016x}"
    path.write_text(json.dumps(entry))
    return Damage("an entry tells of other rows", sink.name)


def row_and_ledger(world: World, sink: Sink, chance: Chance) -> Damage:
    """A cell and the digest that covers it go together: the entry is made to look like one of before digests."""
    if sink.kind != "parquet":
        raise Undone
    damage = change_cell(world, sink, chance)
    paths = [path for path in _ledger_files(world, sink) if "content" in json.loads(Path(path).read_text())]
    if not paths:
        return damage
    for path in paths:
        entry = json.loads(Path(path).read_text())
        for name in ("content", "chain"):
            entry.pop(name, None)
        Path(path).write_text(json.dumps(entry))
    return Damage(f"{damage.what}, and no entry has a digest any more", sink.name)


def row_and_ledger_gone(world: World, sink: Sink, chance: Chance) -> Damage:
    """A row is gone, and its entry counts one less, with the digests of places that go with it."""
    from holdfast.pipeline.digest import place_hash

    if sink.kind != "parquet" or sink.takes:
        raise Undone
    batches = [path for path in _ledger_files(world, sink) if json.loads(Path(path).read_text())["rows"] > 1]
    if not batches:
        raise Undone
    ledger = Path(chance.choice(batches))
    files = glob.glob(f"{ledger.parent}/**/part-*.parquet", recursive=True)
    file = DataFile.read(chance.choice(sorted(files)))
    row = file.rows.pop(chance.randrange(len(file.rows)))
    file.write()
    entry = json.loads(ledger.read_text())
    entry["rows"] -= 1
    entry["routes"]["main"] -= 1
    at = row[LINEAGE]
    known = int(entry["digests"]["main"], 16)
    gone = place_hash(at["topic"], at["partition"], at["offset"])
    entry["digests"]["main"] = f"{(known - gone) % (1 << 64):016x}"
    entry["intake"]["records"] -= 1
    entry["intake"]["missing"] += 1
    entry["intake"]["digest"] = (entry["intake"]["digest"] - gone) % (1 << 64)
    ledger.write_text(json.dumps(entry))
    return Damage("a row is gone, and its entry agrees", sink.name)
