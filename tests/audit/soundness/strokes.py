"""Damage to messages: of topics that are sinks, of dead letters, of the source itself; and all damages in one list."""

from __future__ import annotations

import csv
import datetime
import glob
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import TopicPartition
from tests.audit.soundness import damages as files
from tests.audit.soundness import damages_tables as tables
from tests.audit.soundness.damages import LINEAGE, NOT_PASSED, Chance, Damage, Undone, paths_of
from tests.audit.soundness.damages_tables import Table
from tests.audit.soundness.logs import Stored, records
from tests.audit.soundness.programs import Program, Row, Sink, avro_schema
from tests.audit.soundness.worlds import World


def _patched(world: World, topic: str, chance: Chance, sink: str, parts: Sequence[str]) -> Damage:
    found = list(records(world.estate.log_files(topic)))
    chance.shuffle(found)
    for stored in found:
        part = chance.choice(parts)
        span = _span(stored, part)
        if span is None or span[0] == span[1]:
            continue
        old = stored.bytes_at(span)
        at = chance.randrange(len(old))
        new = old[:at] + bytes([(old[at] + 1) % 256]) + old[at + 1 :]
        stored.patch(span, new)
        column = "headers" if part not in ("key", "value") else part
        return Damage(f"a byte of {part} is changed", sink, (column,))
    raise Undone


def _span(stored: Stored, part: str) -> tuple[int, int] | None:
    if part in ("key", "value"):
        return stored.key if part == "key" else stored.value
    return dict(stored.headers).get(part)


def change_message(world: World, sink: Sink, chance: Chance) -> Damage:
    parts = ["key", "value", "value", "hf-source", *sink.words.get("headers", ())]
    topic = f"{world.program.name}-{sink.name}"
    return _patched(world, topic, chance, sink.name, parts)


def change_dead_letter(world: World, sink: Sink, chance: Chance) -> Damage:
    if world.program.letter_sink is not None:
        raise Undone
    return _patched(world, world.program.dead_letter, chance, "dead-letter", ["key", "value", "trace"])


def trim_topic(world: World, sink: Sink, chance: Chance) -> Damage:
    """Records are deleted from the beginning of a sink's topic: they may have expired."""
    topic = f"{world.program.name}-{sink.name}"
    if not list(records(world.estate.log_files(topic))):
        raise Undone
    stored = chance.choice(list(records(world.estate.log_files(topic))))
    place = TopicPartition(topic, stored.partition, stored.offset + 1)
    for future in world.estate.admin.delete_records([place]).values():
        future.result(30)
    return Damage("the topic was trimmed", sink.name, answers=NOT_PASSED)


def lose_topic(world: World, sink: Sink, chance: Chance) -> Damage:
    topic = f"{world.program.name}-{sink.name}"
    if not list(records(world.estate.log_files(topic))):
        raise Undone
    world.estate.forget([topic])
    return Damage("the topic is gone", sink.name)


def decoded(program: Program, value: bytes) -> Row | None:
    """A message as its format says, without types; nothing for one that cannot be read."""
    try:
        match program.format:
            case "json":
                found = json.loads(value)
                return found if isinstance(found, dict) else None
            case "csv":
                [cells] = csv.reader([value.decode()])
                names = [each.name for each in program.fields]
                return dict(zip(names, cells, strict=True))
            case "text":
                return {"value": value.decode()}
            case _:
                stream = io.BytesIO(value)
                schema = fastavro.parse_schema(avro_schema(program.fields))
                row = fastavro.schemaless_reader(stream, schema, None)
                return dict(row) if not stream.read() else None  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - whatever a decoder says of bytes that are none of its own
        return None


def flipped(program: Program, value: bytes, chance: Chance, wanted: str = "") -> tuple[bytes, str] | None:
    """The same message but for one field, which has another value of the same length."""
    row = decoded(program, value)
    if row is None:
        return None
    for _ in range(300):
        at = chance.randrange(len(value))
        if program.format != "avro" and not chr(value[at]).isalnum():
            continue
        byte = value[at] ^ 1 if chr(value[at]).isalnum() else (value[at] + 2) % 256
        new = value[:at] + bytes([byte]) + value[at + 1 :]
        other_row = decoded(program, new)
        if other_row is None or set(other_row) != set(row):
            continue
        fields = [name for name in row if row[name] != other_row[name]]
        if any(_names(row[name]) != _names(other_row[name]) for name in fields if name != "scores"):
            continue  # a field of another name is one that is not there
        if len(fields) == 1 and wanted in ("", fields[0]):
            return new, fields[0]
    return None


def _names(value: Any) -> Any:
    """The names of fields in it, at every depth."""
    match value:
        case dict():
            return {name: _names(each) for name, each in value.items()}
        case list():
            return [_names(each) for each in value]
    return None


def change_source(world: World, sink: Sink, chance: Chance) -> Damage:
    """A message of the source says something else than the row that was made of it."""
    if sink.takes or sink.kind in ("upsert", "merge"):
        raise Undone
    origins = world.program.origins()
    # An expression for a topic's value leaves the other columns out.
    there = ("id", "who") if "value" in sink.words else tuple(origins)
    places = _places(world, sink)
    stored = [
        each
        for each in records(world.estate.log_files(world.program.topic))
        if (each.partition, each.offset) in places and each.value is not None
    ]
    chance.shuffle(stored)
    for each in stored[:5]:
        assert each.value is not None
        found = flipped(world.program, each.bytes_at(each.value), chance)
        columns = (
            ()
            if found is None
            else tuple(name for name, origin in origins.items() if origin == found[1] and name in there)
        )
        if found is not None and columns:
            each.patch(each.value, found[0])
            columns = columns if sink.kind != "kafka" else ("value",)
            return Damage(f"the source has another {found[1]}", sink.name, columns, is_of_source=True)
    raise Undone


def _places(world: World, sink: Sink) -> set[tuple[int, int]]:
    """Partition and offset of the records that a sink has rows of."""
    if sink.kind in ("parquet", "delta"):
        rows = [row for path in paths_of(world, sink) for row in pq.ParquetFile(path).read().to_pylist()]
        return {(row[LINEAGE]["partition"], row[LINEAGE]["offset"]) for row in rows}
    if sink.kind == "append":
        return set(Table.of(world, sink).run("SELECT _hf_partition, _hf_offset FROM {table}"))
    found = set()
    for each in records(world.estate.log_files(f"{world.program.name}-{sink.name}")):
        span = dict(each.headers)["hf-source"]
        assert span is not None
        place = re.fullmatch(r".*:(\d+)@(\d+)#\d+", each.bytes_at(span).decode())
        assert place is not None
        found.add((int(place[1]), int(place[2])))
    return found


def change_source_of_window(world: World, sink: Sink, chance: Chance) -> Damage:
    """A message says another amount than the window that it is in counts."""
    program = world.program
    if sink.takes != "totals" or sink.kind not in ("parquet", "delta") or program.format != "json":
        raise Undone
    step = program.steps[program.before("totals")]
    chosen = [name for name in ("total", "mean") if name in step.words["aggregates"]]
    expands = any("expand" in each.words for each in program.steps) or "every" in step.words
    if tuple(step.words["key"]) != ("who",) or not chosen or expands or "who" in sink.partition_by:
        raise Undone
    inside: dict[tuple[str, int], list[Stored]] = {}
    for each in records(world.estate.log_files(program.topic)):
        row = None if each.value is None else decoded(program, each.bytes_at(each.value))
        if row is not None and set(row) == {field.name for field in program.fields}:
            at = datetime.datetime.fromisoformat(row["at"])
            inside.setdefault((row["who"], int(at.timestamp()) // 60), []).append(each)
    for path in paths_of(world, sink):
        for row in pq.ParquetFile(path).read().to_pylist():
            window = inside.get((row["who"], int(row["window_start"].timestamp()) // 60), [])
            if len(window) != row["_hf_count"]:
                continue
            stored = chance.choice(window)
            assert stored.value is not None
            found = flipped(program, stored.bytes_at(stored.value), chance, "amount")
            if found is not None:
                stored.patch(stored.value, found[0])
                return Damage("the source has another amount", sink.name, tuple(chosen), is_of_source=True)
    raise Undone


def change_source_of_letter(world: World, sink: Sink, chance: Chance) -> Damage:
    """A message is another than the dead letter that was made of it."""
    if world.program.letter_sink is not None:
        letters = _places(world, world.program.letter_sink)
    else:
        letters = {
            (int(_text(each, "hf-dlt-partition")), int(_text(each, "hf-dlt-offset")))
            for each in records(world.estate.log_files(world.program.dead_letter))
            if "hf-dlt-partition" in dict(each.headers)
        }
    for each in records(world.estate.log_files(world.program.topic)):
        if (
            (each.partition, each.offset) in letters
            and each.value is not None
            and each.value[1] > each.value[0]
        ):
            old = each.bytes_at(each.value)
            each.patch(each.value, bytes([old[0] ^ 1]) + old[1:])
            return Damage(
                "the source of a dead letter is changed", "dead-letter", ("value",), is_of_source=True
            )
    raise Undone


def damage_letter_rows(world: World, sink: Sink, chance: Chance) -> Damage:
    """What is done to any sink of rows, done to the one that has the dead letters."""
    letters = world.program.letter_sink
    if letters is None:
        raise Undone
    return chance.choice(TO_LETTER_TABLE if letters.kind == "append" else TO_LETTER_FILES)(
        world, letters, chance
    )


def _text(stored: Stored, header: str) -> str:
    span = dict(stored.headers)[header]
    assert span is not None
    return stored.bytes_at(span).decode()


# ------------------------------------------------------------------------ the home


def lose_home(world: World, sink: Sink, chance: Chance) -> Damage:
    shutil.rmtree(world.home)
    return Damage("the home is gone", answers=NOT_PASSED)


def lose_state(world: World, sink: Sink, chance: Chance) -> Damage:
    found = sorted(glob.glob(str(world.home / "state" / "data" / "**" / "*.parquet"), recursive=True))
    if not found:
        raise Undone
    what = chance.choice(("directory", "segment", "bytes"))
    if what == "directory":
        shutil.rmtree(world.home / "state")
    elif what == "segment":
        os.unlink(chance.choice(found))
    else:
        _flip(Path(chance.choice(found)), chance)
    return Damage(f"the state: {what}", answers=NOT_PASSED)


def _flip(path: Path, chance: Chance) -> None:
    """A bit of a file is another, and so is what it says: not all of its bytes say something."""
    whole, held = path.read_bytes(), pq.read_table(path)
    for _ in range(20):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1
        path.write_bytes(bytes(data))
        try:
            if pq.read_table(path).equals(held):
                continue
        except (OSError, pa.ArrowException):
            pass
        return
    path.write_bytes(whole)
    raise Undone


def lose_aside(world: World, sink: Sink, chance: Chance) -> Damage:
    found = sorted(glob.glob(str(world.home / "aside" / "*.parquet")))
    if not found:
        raise Undone
    os.unlink(chance.choice(found))
    return Damage("a file of the record of rows that left is gone", answers=NOT_PASSED)


def change_aside(world: World, sink: Sink, chance: Chance) -> Damage:
    """A row that left is recorded under another step or route."""
    found = sorted(glob.glob(str(world.home / "aside" / "*.parquet")))
    if not found:
        raise Undone
    path = chance.choice(found)
    table = pq.read_table(path)
    rows = table.to_pylist()
    row = chance.choice(rows)
    row["offset"] += 1
    changed = pa.Table.from_pylist(rows, table.schema).replace_schema_metadata(table.schema.metadata)
    pq.write_table(changed, path)
    return Damage("the record of rows that left has another place", answers=NOT_PASSED)


# ------------------------------------------------------------------------ all of them

Stroke = Callable[[World, Sink, Chance], Damage]
TO_FILES: Final[tuple[Stroke, ...]] = (
    files.change_cell, files.change_cell, files.change_cell, files.change_cell, files.swap_cells, files.swap_cells,
    files.swap_columns, files.drop_row, files.double_row, files.replace_row, files.remove_file, files.cut_file,
    files.copy_file, files.swap_files, files.rename_partition, files.rename_partition, files.lose_directory,
    files.lose_last_batch, files.older_copy, files.older_copy_and_home, files.change_ledger, files.row_and_ledger,
    files.row_and_ledger_gone, files.change_entry_digest, change_source, change_source, change_source_of_window,
)  # fmt: skip
TO_MERGED: Final[tuple[Stroke, ...]] = (
    *TO_FILES, files.cell_without_digest, files.cell_without_digest, files.change_span, files.change_span,
)  # fmt: skip
TO_TABLES: Final[tuple[Stroke, ...]] = (
    tables.change_table_cell, tables.change_table_cell, tables.change_table_cell, tables.change_table_cell,
    tables.swap_table_cells, tables.swap_table_cells, tables.delete_table_row, tables.double_table_row,
    tables.table_cell_without_digest, tables.drop_table, tables.drop_table_and_ledger, tables.older_table,
    tables.change_table_ledger, tables.change_table_span, tables.change_table_span, change_source,
)  # fmt: skip
TO_TOPICS: Final[tuple[Stroke, ...]] = (
    change_message, change_message, change_message, change_message, trim_topic, lose_topic, change_source,
)  # fmt: skip
TO_LETTER_FILES: Final[tuple[Stroke, ...]] = (
    files.change_cell, files.change_cell, files.swap_cells, files.swap_columns, files.drop_row, files.double_row,
    files.replace_row, files.remove_file, files.cut_file, files.copy_file, files.lose_directory,
    files.lose_last_batch, files.older_copy, files.change_ledger, files.row_and_ledger,
)  # fmt: skip
TO_LETTER_TABLE: Final[tuple[Stroke, ...]] = (
    tables.change_table_cell, tables.change_table_cell, tables.swap_table_cells, tables.delete_table_row,
    tables.double_table_row, tables.drop_table, tables.drop_table_and_ledger, tables.older_table,
    tables.change_table_ledger,
)  # fmt: skip
TO_ALL: Final[tuple[Stroke, ...]] = (
    change_dead_letter, change_dead_letter, damage_letter_rows, change_source_of_letter, lose_home, lose_state,
    lose_state, lose_aside, change_aside,
)  # fmt: skip
BY_KIND: Final[Mapping[str, tuple[Stroke, ...]]] = {
    "parquet": TO_FILES, "delta": TO_FILES, "merge": TO_MERGED, "append": TO_TABLES, "upsert": TO_TABLES,
    "kafka": TO_TOPICS,
}  # fmt: skip


STROKES: Final = tuple(dict.fromkeys((*TO_MERGED, *TO_TABLES, *TO_TOPICS, *TO_ALL)))


KINDS: Final = tuple(BY_KIND)


def can(stroke: Stroke, sink: Sink, kinds: Collection[str] = KINDS) -> bool:
    """Whether such damage is done to this kind of sink."""
    return sink.kind in kinds and stroke in (*BY_KIND[sink.kind], *TO_ALL)


def damage(
    world: World, chance: Chance, only: Sequence[Stroke] = (), kinds: Collection[str] = KINDS
) -> Damage | None:
    """Some damage to this world, first the one whose turn it is by the seed; nothing if none could be done.

    With `only`, it is one of those, to a sink of these kinds.
    """
    wanted = only or (STROKES[world.seed % len(STROKES)],)
    tries = [(sink, each) for each in wanted for sink in world.program.sinks if can(each, sink, kinds)]
    chance.shuffle(tries)
    for _ in range(0 if only else 12):
        sink = chance.choice(world.program.sinks)
        tries.append((sink, chance.choice(TO_ALL if chance.random() < 0.15 else BY_KIND[sink.kind])))
    for sink, stroke in tries:
        try:
            return replace(stroke(world, sink, chance), stroke=stroke.__name__)
        except Undone:
            continue
    return None
