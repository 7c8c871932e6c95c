"""Damage to tables of PostgreSQL, and to their ledgers, by whoever may write to the database."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from tests.audit.soundness.damages import LINEAGE, SPANS, Chance, Damage, Undone
from tests.audit.soundness.programs import Sink
from tests.audit.soundness.worlds import World

CONTENT: Final = "_hf_content"
"""The digest that an upsert keeps beside each row: no cell of the pipeline's."""


@dataclass(frozen=True)
class Table:
    connection: psycopg.Connection[tuple[Any, ...]]
    name: sql.Identifier
    ledger: sql.Identifier
    kinds: Mapping[str, str]

    @classmethod
    def of(cls, world: World, sink: Sink) -> Table:
        connection = world.estate.database
        schema = world.program.name
        found = connection.execute(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = %s AND table_name = %s",
            (schema, sink.name),
        ).fetchall()
        if not found:
            raise Undone
        name, ledger = sql.Identifier(schema, sink.name), sql.Identifier(schema, "holdfast_ledger")
        return cls(connection, name, ledger, dict(found))

    def run(self, statement: str, *given: Any, **names: sql.Composable) -> list[tuple[Any, ...]]:
        text = sql.SQL(statement).format(table=self.name, ledger=self.ledger, **names)
        cursor = self.connection.execute(text, given or None)
        return cursor.fetchall() if cursor.description else []

    def row(self, chance: Chance) -> str:
        found = sorted(str(row[0]) for row in self.run("SELECT ctid::text FROM {table}"))
        if not found:
            raise Undone
        return chance.choice(found)


_CHANGES: Final = {
    "bigint": "coalesce({c}, 0) + 1",
    "integer": "coalesce({c}, 0) + 1",
    "double precision": "coalesce({c}, 0) + 0.01",
    "numeric": "coalesce({c}, 0) + 0.01",
    "text": "coalesce({c}, '') || '!'",
    "bytea": "coalesce({c}, '') || '!'",
    "boolean": "NOT coalesce({c}, false)",
    "date": "coalesce({c}, '2026-01-01') + 1",
    "timestamp with time zone": "coalesce({c}, '2026-01-01') + interval '1 microsecond'",
}


def _json_changed(value: Any) -> Any:
    match value:
        case dict() if value:
            name = sorted(value)[-1]
            return {**value, name: _json_changed(value[name])}
        case list() if value:
            return [*value[:-1], _json_changed(value[-1])]
        case int():
            return value + 1
        case str():
            return value + "!"
        case None | {} | []:
            return "forged"
    return None


def change_table_cell(world: World, sink: Sink, chance: Chance) -> Damage:
    names = [name for name in sorted(Table.of(world, sink).kinds) if name != CONTENT]
    return _changed(world, sink, chance, chance.choice(names))


def change_table_span(world: World, sink: Sink, chance: Chance) -> Damage:
    """A version begins or ends at another time, or says of itself that it is current, or is not."""
    if sink.words.get("mode") != "scd2":
        raise Undone
    return _changed(world, sink, chance, chance.choice(SPANS))


def _changed(world: World, sink: Sink, chance: Chance, column: str) -> Damage:
    table = Table.of(world, sink)
    row = table.row(chance)
    name = sql.Identifier(column)
    kind = table.kinds[column]
    if kind == "jsonb":
        from psycopg.types.json import Jsonb

        [(value,)] = table.run("SELECT {c} FROM {table} WHERE ctid = %s::tid", row, c=name)
        changed = Jsonb(_json_changed(value))
        table.run("UPDATE {table} SET {c} = %s WHERE ctid = %s::tid", changed, row, c=name)
    else:
        change = _CHANGES[kind].replace("{c}", sql.Identifier(column).as_string(table.connection))
        try:
            table.run(f"UPDATE {{table}} SET {{c}} = {change} WHERE ctid = %s::tid", row, c=name)
        except psycopg.errors.UniqueViolation as error:
            raise Undone from error
    return Damage(f"a cell of {column} is changed", sink.name, (_of_lineage(column),))


def table_cell_without_digest(world: World, sink: Sink, chance: Chance) -> Damage:
    """A cell is changed, and the row looks as if it had never had a digest."""
    if sink.kind != "upsert":
        raise Undone
    damage = change_table_cell(world, sink, chance)
    table = Table.of(world, sink)
    table.run("UPDATE {table} SET {c} = NULL", c=sql.Identifier(CONTENT))
    return Damage(f"{damage.what}, and no row has a digest any more", sink.name)


def _of_lineage(column: str) -> str:
    return LINEAGE if re.fullmatch(r"_hf_(topic|partition|offset|index)", column) else column


def swap_table_cells(world: World, sink: Sink, chance: Chance) -> Damage:
    table = Table.of(world, sink)
    columns = [name for name in sorted(table.kinds) if name not in (*sink.key, CONTENT)]
    for _ in range(10):
        column = chance.choice(columns)
        one, two = table.row(chance), table.row(chance)
        name = sql.Identifier(column)
        [(is_other,)] = table.run(
            "SELECT a.{c} IS DISTINCT FROM b.{c} FROM {table} a, {table} b WHERE a.ctid = %s::tid AND b.ctid = %s::tid",
            one, two, c=name,
        )  # fmt: skip
        if is_other:
            table.run(
                "UPDATE {table} t SET {c} = o.{c} FROM {table} o WHERE (t.ctid = %s::tid AND o.ctid = %s::tid) "
                "OR (t.ctid = %s::tid AND o.ctid = %s::tid)",
                one, two, two, one, c=name,
            )  # fmt: skip
            return Damage(f"two rows have each other's {column}", sink.name, (_of_lineage(column),))
    raise Undone


def delete_table_row(world: World, sink: Sink, chance: Chance) -> Damage:
    table = Table.of(world, sink)
    table.run("DELETE FROM {table} WHERE ctid = %s::tid", table.row(chance))
    return Damage("a row is deleted", sink.name)


def double_table_row(world: World, sink: Sink, chance: Chance) -> Damage:
    if sink.kind == "upsert":
        raise Undone
    table = Table.of(world, sink)
    table.run("INSERT INTO {table} SELECT * FROM {table} WHERE ctid = %s::tid", table.row(chance))
    return Damage("a row is there twice", sink.name)


def drop_table(world: World, sink: Sink, chance: Chance) -> Damage:
    table = Table.of(world, sink)
    table.row(chance)
    what = chance.choice(("DROP TABLE {table}", "TRUNCATE {table}"))
    table.run(what)
    return Damage(what.split()[0].lower() + " of the table", sink.name)


def drop_table_and_ledger(world: World, sink: Sink, chance: Chance) -> Damage:
    table = Table.of(world, sink)
    table.row(chance)
    table.run("DROP TABLE {table}")
    table.run("DELETE FROM {ledger} WHERE sink = %s", sink.name)
    return Damage("table and ledger are gone", sink.name)


def older_table(world: World, sink: Sink, chance: Chance) -> Damage:
    """The newest batch with rows and its entry are gone, as after a restore."""
    if sink.kind == "upsert":
        raise Undone
    table = Table.of(world, sink)
    found = table.run(
        "SELECT number, entry FROM {ledger} WHERE sink = %s AND (entry->>'rows')::int > 0 ORDER BY number DESC LIMIT 1",
        sink.name,
    )
    if not found:
        raise Undone
    number, entry = found[0]
    if sink.takes and "." not in sink.takes:
        table.run("DELETE FROM {table} WHERE _hf_offset >= %s", entry["state"])
    else:
        for span in _spans(entry):
            table.run("DELETE FROM {table} WHERE _hf_partition = %s AND _hf_offset >= %s", *span)
    table.run("DELETE FROM {ledger} WHERE sink = %s AND number >= %s", sink.name, number)
    return Damage("the newest batch and its entry are gone", sink.name)


def _spans(entry: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Partition and first offset, of what a batch took."""
    found = [topic["partitions"] for topic in entry["range"].values()]
    return [(int(partition), span[0]) for each in found for partition, span in each.items()]


def change_table_ledger(world: World, sink: Sink, chance: Chance) -> Damage:
    table = Table.of(world, sink)
    found = table.run(
        "SELECT number, entry FROM {ledger} WHERE sink = %s AND entry->>'rows' <> '0'", sink.name
    )
    if not found:
        raise Undone
    number, entry = chance.choice(sorted(found))
    what = chance.choice([name for name in ("rows", "intake", "content") if name in entry])
    if what == "rows":
        entry["rows"] += 1
    elif what == "intake":
        entry["intake"]["records"] += 1
    else:
        del entry["content"]
    text = json.dumps(entry)
    table.run(
        "UPDATE {ledger} SET entry = %s::jsonb WHERE sink = %s AND number = %s", text, sink.name, number
    )
    return Damage(f"an entry has another {what}", sink.name)
