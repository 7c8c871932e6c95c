"""Damage to the worlds of `audit_worlds`, one stroke each, and what an audit must name for it.

A stroke on rows is done before the world is written: the sink then holds other rows than its ledger says, in whatever
format it has, and nothing else shows it. An upsert table, files and logs are damaged after they were written. Every
stroke tells which sink and which offsets (or which words, for windows and spools) the audit has to name.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from glob import glob
from typing import TYPE_CHECKING, Any, Final

from tests.support.audit_world_writer import World, WorldWriter
from tests.support.audit_worlds import TOPIC, Held, Plan, Row, SinkKind, Told, make_plan

from holdfast.pipeline.definition.model import PostgresSink

if TYPE_CHECKING:
    from holdfast.audit.model import Finding, Report

FATES: Final = frozenset({"lost", "duplicated", "extra", "altered"})
"""What a finding can say: the words of a report, which lies above what tests are made of."""
PLAIN: Final[tuple[SinkKind, ...]] = ("parquet", "delta", "append", "kafka")
Offset = tuple[int, int]
"""Partition and offset."""


@dataclass
class Stroke:
    """What was done, and what has to be found."""

    what: str
    sink: str
    offsets: list[Offset] = field(default_factory=list)
    """All of them must be named."""
    words: list[str] = field(default_factory=list)
    """All of them must be somewhere in what was found."""
    some_words: list[str] = field(default_factory=list)
    """One of them at least: of many windows the first are named."""
    fates: frozenset[str] = FATES

    def missing(self, report: Report) -> list[str]:
        """What the report does not say; nothing: it says it all."""
        wrong: list[str] = []
        if report.verdict != "failed":
            wrong.append(f"the verdict is {report.verdict}")
        told = [each for each in report.findings if each.fate in self.fates]
        if self.sink and not any(each.sink == self.sink for each in told):
            wrong.append(f"{self.sink} is not named")
        wrong += [
            f"{TOPIC}-{partition}@{offset} is not named"
            for partition, offset in self.offsets
            if not any(_names(each, partition, offset) for each in told)
        ]
        text = " ".join(each.what() for each in told)
        if self.some_words and not any(word in text for word in self.some_words):
            wrong.append(f"none of {self.some_words} is in it")
        return wrong + [f"{word!r} is not in it" for word in self.words if word not in text]


def _names(finding: Finding, partition: int, offset: int) -> bool:
    place = finding.place
    return (
        place is not None
        and (place.topic, place.partition) == (TOPIC, partition)
        and any(first <= offset <= last for first, last in finding.ranges)
    )


Before = Callable[[Plan, Held, random.Random], Stroke]
After = Callable[[World, WorldWriter, Held, random.Random], Stroke]


@dataclass(frozen=True)
class Mutation:
    """One way to damage one kind of sink."""

    name: str
    kind: SinkKind | None
    """Nothing: the dead letters, or what the pipeline recorded of rows that left."""
    before: Before | None = None
    after: After | None = None
    is_window: bool = False
    loses_spooled: bool = False

    def __str__(self) -> str:
        where = (
            "dead letters" if self.kind is None else f"{self.kind}{' of windows' if self.is_window else ''}"
        )
        return f"{self.name}, {where}"

    def plan(self, seed: int) -> Plan:
        """A world in which it can be done."""
        for attempt in range(1000):
            number = seed * 1000 + attempt
            kind = () if self.kind is None or self.is_window else (self.kind,)
            plan = make_plan(
                number,
                kinds=kind or ("parquet",),
                window_kinds=(self.kind,) if self.kind is not None and self.is_window else (),
                has_spool=True if self.loses_spooled else None,
                loses_spooled=self.loses_spooled,
            )
            if self._fits(plan):
                return plan
        raise AssertionError(f"no world for {self}")

    def _fits(self, plan: Plan) -> bool:
        plan.lags.clear()
        if len(plan.dead.rows()) < 2 or not any(len(_leaving(left)) > 1 for left in plan.aside):
            return False
        if self.loses_spooled and not _shows(plan):
            return False
        return all(
            len(held.rows()) >= (2 if held.takes else 8) and any(held.batches[:-1])
            for held in plan.sinks.values()
        )

    def held(self, plan: Plan) -> Held:
        if self.kind is None:
            return plan.dead
        return next(held for held in plan.sinks.values() if bool(held.takes) == self.is_window)


def _shows(plan: Plan) -> bool:
    """Whether a message that was lost has others of its spool around it in what was taken."""
    _, partition, sequence = plan.lost_spool_id.split(":")
    taken = [each.spool_id.split(":") for each in plan.taken() if each.spool_id]
    numbers = [int(number) for _, place, number in taken if place == partition]
    return any(number > int(sequence) for number in numbers)


# ------------------------------------------------------------------------ rows


def _batch(held: Held, chance: random.Random, rows: int = 1) -> list[Row]:
    return chance.choice([batch for batch in held.batches if len(batch) >= rows])


def _of(row: Row) -> Offset:
    return row.lineage[1], row.lineage[2]


def _other_place(plan: Plan, chance: random.Random) -> Offset | None:
    """An offset of the scope that is no record; nothing when the log has none."""
    ends: dict[int, int] = {}
    for made in plan.batches:
        for partition, (_, end) in made.spans.items():
            ends[partition] = max(end, ends.get(partition, 0))
    found = [
        (each.partition, each.offset)
        for told in plan.log.values()
        for each in told
        if each.kind != "record" and each.offset < ends.get(each.partition, 0)
    ]
    return chance.choice(found) if found else None


def delete_row(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    batch = _batch(held, chance)
    row = batch.pop(chance.randrange(len(batch)))
    return Stroke("a row is deleted", held.name, [_of(row)], fates=frozenset({"lost"}))


def duplicate_row(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    batch = _batch(held, chance)
    row = chance.choice(batch)
    chance.choice(held.batches).append(Row(row.lineage, dict(row.values)))
    return Stroke("a row is there twice", held.name, [_of(row)], fates=frozenset({"duplicated"}))


def move_row(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    """The row's lineage is another one's: its own record is lost."""
    row = chance.choice(_batch(held, chance))
    own = _of(row)
    others = [_of(each) for each in held.rows() if _of(each) != own]
    elsewhere = _other_place(plan, chance)
    places = [(TOPIC, *chance.choice(others)), ("somewhere", *own), (TOPIC, 99, own[1])]
    if elsewhere is not None:
        places.append((TOPIC, *elsewhere))
    topic, partition, offset = chance.choice(places)
    row.lineage = (topic, partition, offset, 0)
    named = [own, *([(partition, offset)] if topic == TOPIC and partition != 99 else [])]
    return Stroke("a row has another's lineage", held.name, named)


def swap_rows(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    """Places are all there, each once: only what the rows hold tells."""
    rows = held.rows()
    while True:
        one, other = chance.sample(rows, 2)
        if _content(held, one) != _content(held, other):
            break
    if held.kind == "kafka" and not held.takes:  # a record's key goes with its content
        for row in (one, other):
            row.values.setdefault("_key", plan.at(*_of(row)).key)
    one.lineage, other.lineage = other.lineage, one.lineage
    return Stroke(
        "two rows have each other's lineage",
        held.name,
        [_of(one), _of(other)],
        fates=frozenset({"altered"}),
    )


def _content(held: Held, row: Row) -> dict[str, Any]:
    return {name: each for name, each in row.values.items() if name != "reason"}


def alter_value(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    row = chance.choice(_batch(held, chance))
    name = chance.choice(sorted(set(row.values) - {"reason", "_key"}))
    old = row.values[name]
    row.values[name] = b"x" if old is None and name == "key" else _changed(old, chance)
    return Stroke(f"{name} is changed", held.name, [_of(row)], fates=frozenset({"altered"}))


def _changed(value: Any, chance: random.Random) -> Any:
    match value:
        case None:
            return "x"
        case bytes():
            return value + b" "
        case str():
            return value + "."
        case float():
            return value + 0.01
    return value + 1


def plant_row(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    """A row of a record that was never there, or that went another way."""
    row = chance.choice(_batch(held, chance))
    elsewhere = _other_place(plan, chance)
    went = [_of(each) for each in plan.dead.rows()] if held is not plan.dead else []
    went += [
        (told.partition, told.offset) for left in plan.aside for told, route, _ in left if route != "late-for"
    ]
    if held is plan.dead:
        went += [_of(each) for sink in plan.sinks.values() if not sink.takes for each in sink.rows()]
    places: list[tuple[str, int, int]] = [(TOPIC, *chance.choice(went)), ("somewhere", *_of(row))]
    if elsewhere is not None:
        places.append((TOPIC, *elsewhere))
    topic, partition, offset = chance.choice(places)
    chance.choice(held.batches).append(Row((topic, partition, offset, 0), dict(row.values)))
    named = [(partition, offset)] if topic == TOPIC else []
    return Stroke("a row is planted", held.name, named, fates=frozenset({"extra", "duplicated", "altered"}))


def _leaving(left: list[tuple[Told, str, str]]) -> list[tuple[Told, str, str]]:
    return [each for each in left if each[1] != "late-for"]


def drop_aside(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    """A record that left the chain is not in the pipeline's own record any more."""
    # Of a batch that still has some: without any it has no file, which may also be a home that was lost.
    batch = chance.choice([each for each in plan.aside if len(_leaving(each)) > 1])
    told, route, step = chance.choice(_leaving(batch))
    batch.remove((told, route, step))
    return Stroke(f"a {route} record is not recorded", "", [(told.partition, told.offset)])


def nothing_before(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    """The message was lost before the broker."""
    spool, _, sequence = plan.lost_spool_id.split(":")
    return Stroke(f"message {sequence} of a spool never arrived", "", words=[spool, sequence])


# ------------------------------------------------------------------------ windows


def _window(held: Held, chance: random.Random) -> tuple[list[Row], Row]:
    batch = _batch(held, chance)
    return batch, chance.choice(batch)


def alter_total(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    _, row = _window(held, chance)
    name = chance.choice(("total", "orders", "most", "_hf_count", "_hf_digest"))
    row.values[name] = _changed(row.values[name], chance)
    return Stroke(f"{name} of a window is changed", held.name, words=[row.values["customer"]])


def drop_window(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    batch, row = _window(held, chance)
    batch.remove(row)
    return Stroke("a window is gone", held.name, words=[row.values["customer"]])


def repeat_window(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    batch, row = _window(held, chance)
    topic, partition, offset, index = row.lineage
    lineage = row.lineage if chance.random() < 0.5 else (topic, partition, offset, index + 1000)
    batch.append(Row(lineage, dict(row.values)))
    return Stroke("a window is there twice", held.name, words=[row.values["customer"]])


def plant_window(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    batch, row = _window(held, chance)
    topic, partition, offset, _ = row.lineage
    batch.append(Row((topic, partition, offset, 1000), {**row.values, "customer": "nobody"}))
    return Stroke("a window is planted", held.name, words=["nobody"])


def swap_windows(plan: Plan, held: Held, chance: random.Random) -> Stroke:
    """Two windows have each other's totals."""
    rows = held.rows()
    for _ in range(1000):
        one, other = chance.sample(rows, 2)
        if one.values["total"] != other.values["total"]:
            break
    one.values["total"], other.values["total"] = other.values["total"], one.values["total"]
    words = [one.values["customer"], other.values["customer"]]
    return Stroke("two windows have each other's total", held.name, words=words)


# ------------------------------------------------------------------------ upsert tables


def _table(world: World, held: Held) -> str:
    sink = next(each for each in world.definition.sinks if each.name == held.name)
    assert isinstance(sink, PostgresSink)
    return f'"{sink.schema_name}"."{sink.table}"'


def _standing(world: World, writer: WorldWriter, held: Held) -> list[tuple[str, int, int]]:
    found = writer.ask(f"SELECT customer, _hf_partition, _hf_offset FROM {_table(world, held)} ORDER BY 1")
    return [(customer, partition, offset) for customer, partition, offset in found]


def delete_key(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    customer, partition, offset = chance.choice(_standing(world, writer, held))
    writer.run(f"DELETE FROM {_table(world, held)} WHERE customer = '{customer}'")
    return Stroke("a key is deleted", held.name, [(partition, offset)], fates=frozenset({"lost"}))


def turn_back_key(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    """The row of a key is an older one of the same key: its last change is lost."""
    found = _standing(world, writer, held)
    chance.shuffle(found)
    for customer, partition, offset in found:
        older = [row for row in held.rows() if row.values["customer"] == customer and row.lineage[2] < offset]
        if older:
            row = chance.choice(older)
            note = "NULL" if row.values["note"] is None else f"'{row.values['note']}'"
            writer.run(
                f"UPDATE {_table(world, held)} SET id = {row.values['id']}, amount = {row.values['amount']!r}, "
                f"at = to_timestamp({row.values['at']}/1000.0), note = {note}, _hf_offset = {row.lineage[2]} "
                f"WHERE customer = '{customer}'"
            )
            return Stroke("a key has an older row", held.name, [(partition, offset)])
    raise AssertionError("no key has two rows")


def swap_keys(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    one, other = chance.sample(_standing(world, writer, held), 2)
    for (customer, *_), (_, partition, offset) in ((one, other), (other, one)):
        writer.run(
            f"UPDATE {_table(world, held)} SET _hf_partition = {partition}, _hf_offset = {offset} "
            f"WHERE customer = '{customer}'"
        )
    return Stroke("two keys have each other's lineage", held.name, [one[1:], other[1:]])


def alter_key(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    customer, partition, offset = chance.choice(_standing(world, writer, held))
    change = chance.choice(("amount = amount + 0.01", "id = id + 1", "note = coalesce(note, '') || '!'"))
    writer.run(f"UPDATE {_table(world, held)} SET {change} WHERE customer = '{customer}'")
    return Stroke(change, held.name, [(partition, offset)], fates=frozenset({"altered"}))


def plant_key(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    """A row of a key that no record has, with the place of one that has another."""
    row = chance.choice(held.rows())
    _, partition, offset, _ = row.lineage
    writer.run(
        f"INSERT INTO {_table(world, held)} (customer, id, amount, at, _hf_topic, _hf_partition, _hf_offset, "
        f"_hf_index) VALUES ('nobody', 1, 1, now(), '{TOPIC}', {partition}, {offset}, 0)"
    )
    return Stroke("a key is planted", held.name, [(partition, offset)])


# ------------------------------------------------------------------------ files and logs


def _file(world: World, held: Held, chance: random.Random) -> tuple[str, list[Offset], list[str]]:
    """A data file, the places of its rows, and the customers of windows in it."""
    import pyarrow.parquet as pq

    path = chance.choice(world.files[held.name])
    rows = pq.read_table(path, partitioning=None).to_pylist()
    if held.takes:
        return path, [], sorted({row["customer"] for row in rows})
    return path, [(row["_hf"]["partition"], row["_hf"]["offset"]) for row in rows], []


def truncate_file(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    path, offsets, customers = _file(world, held, chance)
    os.truncate(path, chance.randrange(os.path.getsize(path)))
    return Stroke("a file is cut short", held.name, offsets, [os.path.basename(path)], customers)


def remove_file(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    path, offsets, customers = _file(world, held, chance)
    os.remove(path)
    return Stroke("a file is gone", held.name, offsets, some_words=customers)


def remove_batch(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    """A whole batch of a Parquet sink, its ledger entry with it; not the last: that is how it stood before."""
    import shutil

    directories = sorted(glob(os.path.join(world.directory, held.name, "batch=*")))
    number = chance.choice([at for at, batch in enumerate(held.batches[:-1]) if batch]) + 1
    shutil.rmtree(directories[number])
    rows = held.batches[number - 1]
    if held.takes:
        customers = sorted({row.values["customer"] for row in rows})
        return Stroke("a batch is gone", held.name, some_words=customers)
    return Stroke("a batch is gone", held.name, [_of(row) for row in rows])


def take_from_delta_log(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    """The line that names a file is taken out of the commit: the file is there, and no table has it."""
    path, offsets, customers = _file(world, held, chance)
    for log in sorted(glob(os.path.join(world.directory, held.name, "_delta_log", "*.json"))):
        with open(log, encoding="utf-8") as file:
            lines = file.read().splitlines()
        kept = [
            line for line in lines if json.loads(line).get("add", {}).get("path") != os.path.basename(path)
        ]
        if len(kept) < len(lines):
            with open(log, "w", encoding="utf-8") as file:
                file.write("\n".join(kept) + "\n")
    return Stroke("a file is out of the log", held.name, offsets, some_words=customers)


def delete_by_delta(world: World, writer: WorldWriter, held: Held, chance: random.Random) -> Stroke:
    """Somebody deletes a row by the table's own means."""
    from deltalake import DeltaTable

    table = DeltaTable(os.path.join(world.directory, held.name))
    row = chance.choice(held.rows())
    if held.takes:
        table.delete(f"customer = '{row.values['customer']}'")
        return Stroke("windows are deleted", held.name, words=[row.values["customer"]])
    gone = [each for each in held.rows() if each.values["id"] == row.values["id"]]
    table.delete(f"id = {row.values['id']}")
    return Stroke("a row is deleted by Delta", held.name, [_of(each) for each in gone])


# ------------------------------------------------------------------------ all of them


def all_mutations() -> list[Mutation]:
    """Every stroke for every kind of sink it can be done to."""
    found: list[Mutation] = []
    strokes = (delete_row, duplicate_row, move_row, swap_rows, alter_value, plant_row)
    for kind in (*PLAIN, None):
        found += [Mutation(stroke.__name__, kind, before=stroke) for stroke in strokes]
    for kind in PLAIN:
        found += [
            Mutation(stroke.__name__, kind, before=stroke, is_window=True)
            for stroke in (alter_total, drop_window, repeat_window, plant_window, swap_windows)
        ]
    found += [
        Mutation(stroke.__name__, "upsert", after=stroke)
        for stroke in (delete_key, turn_back_key, swap_keys, alter_key, plant_key)
    ]
    on_files: tuple[tuple[SinkKind, After], ...] = (
        ("parquet", truncate_file),
        ("parquet", remove_file),
        ("parquet", remove_batch),
        ("delta", truncate_file),
        ("delta", remove_file),
        ("delta", take_from_delta_log),
        ("delta", delete_by_delta),
    )
    for is_window in (False, True):
        found += [
            Mutation(stroke.__name__, kind, after=stroke, is_window=is_window) for kind, stroke in on_files
        ]
    found.append(Mutation("drop_aside", None, before=drop_aside))
    found.append(Mutation("lose_spooled", "parquet", before=nothing_before, loses_spooled=True))
    return found
