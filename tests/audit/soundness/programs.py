"""Random pipelines, each with its meaning in plain Python: what a step does to a row stands beside its SQL.

    program = make_program(seed)
    program.document(places)        # the definition, as YAML has it
    program.steps[0].of_row(row)    # what the SQL of that step means

`Program.origins` tells which column of the rows at the end of the steps is a field of the record unchanged, and which
one a step made: that is what an audit promises to recompute, and what it can find unaltered at best. Nothing of the
audit is used here, and nothing of what reads definitions.
"""

from __future__ import annotations

import datetime
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

import fastavro
import pyarrow as pa
from tests.audit.soundness.columns import Meaning, json_text, text_of

UTC: Final = datetime.UTC
BEGIN: Final = datetime.datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
WINDOW_MS: Final = 60_000
EVERY_MS: Final = 20_000
"""From one sliding window to the next."""
DELAY_MS: Final = 20_000
NEW_COLUMN: Final = "with a column"
Row = dict[str, Any]
Chance = random.Random


# ------------------------------------------------------------------------ fields


@dataclass(frozen=True)
class SourceField:
    name: str
    ddl: str
    arrow: pa.DataType
    make: Callable[[Chance], Any]
    is_optional: bool = False
    avro: Any = None

    @property
    def text(self) -> str:
        return self.ddl + ("?" if self.is_optional else "")


_WORDS: Final = ("", "naïve ☃", "gift", "plain", 'a "quoted", one', "x" * 40)
_HOUSE: Final = pa.struct([("street", pa.string()), ("number", pa.int32())])
_THING: Final = pa.struct([("sku", pa.string()), ("n", pa.int32())])
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


def _maybe(make: Callable[[Chance], Any]) -> Callable[[Chance], Any]:
    return lambda chance: None if chance.random() < 0.25 else make(chance)


def _house(chance: Chance) -> Row:
    return {
        "street": chance.choice(("Kade", "Gracht", "Weg")),
        "number": chance.choice((None, chance.randrange(100))),
    }


def _scores(chance: Chance) -> list[tuple[str, int]]:
    names = chance.sample(("a", "b", "c", "d"), chance.randrange(1, 4))
    return [(name, chance.randrange(1000)) for name in names]


def _things(chance: Chance) -> list[Row]:
    return [{"sku": f"s{chance.randrange(9)}", "n": chance.randrange(9)} for _ in range(chance.randrange(3))]


ALWAYS: Final = (
    SourceField("id", "long", pa.int64(), lambda chance: 0, avro="long"),
    SourceField("who", "string", pa.string(), lambda chance: "", avro="string"),
    SourceField(
        "amount", "double", pa.float64(), lambda chance: round(chance.uniform(-40, 400), 2), avro="double"
    ),
    SourceField(
        "at", "timestamp", _TIMESTAMP, lambda chance: BEGIN,
        avro={"type": "long", "logicalType": "timestamp-micros"},
    ),
    SourceField(
        "note", "string", pa.string(), _maybe(lambda chance: chance.choice(_WORDS)), True, ["null", "string"]
    ),
)  # fmt: skip
SOMETIMES: Final = (
    SourceField(
        "price", "decimal(10,2)", pa.decimal128(10, 2),
        lambda chance: Decimal(chance.randrange(-99999, 99999)).scaleb(-2),
        avro={"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
    ),
    SourceField("paid", "boolean", pa.bool_(), lambda chance: chance.random() < 0.5, avro="boolean"),
    SourceField(
        "day", "date", pa.date32(),
        _maybe(lambda chance: datetime.date(2026, 1, 1) + datetime.timedelta(chance.randrange(3))),
        True, ["null", {"type": "int", "logicalType": "date"}],
    ),
    SourceField(
        "rank", "int", pa.int32(), _maybe(lambda chance: chance.randrange(-5, 5)), True, ["null", "int"]
    ),
)  # fmt: skip
TEXT: Final = (
    SourceField(
        "value", "string", pa.string(),
        lambda chance: f"{chance.choice(_WORDS)} {chance.randrange(1000)}", True,
    ),
)  # fmt: skip
NESTED: Final = (
    SourceField(
        "tags", "array<string>", pa.list_(pa.string()),
        lambda chance: [chance.choice(_WORDS) for _ in range(chance.randrange(4))],
        avro={"type": "array", "items": "string"},
    ),
    SourceField(
        "house", "struct<street:string,number:int>", _HOUSE, _maybe(_house), True,
        ["null", {"type": "record", "name": "House", "fields": [
            {"name": "street", "type": ["null", "string"]}, {"name": "number", "type": ["null", "int"]}]}],
    ),
    SourceField(
        "scores", "map<string,long>", pa.map_(pa.string(), pa.int64()), _scores,
        avro={"type": "map", "values": "long"},
    ),
    SourceField(
        "things", "array<struct<sku:string,n:int>>", pa.list_(_THING), _things,
        avro={"type": "array", "items": {"type": "record", "name": "Thing", "fields": [
            {"name": "sku", "type": "string"}, {"name": "n", "type": "int"}]}},
    ),
)  # fmt: skip


# ------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Step:
    """One step: its words in YAML, and what it does to a row."""

    kind: str
    name: str
    words: Mapping[str, Any]
    of_row: Callable[[Row], Any] = lambda row: row
    """A rule: whether it holds. A query: the row after it, or none. An expanding one: the rows."""
    gives: Mapping[str, pa.DataType] = field(default_factory=dict)
    """The columns it adds."""
    drops: tuple[str, ...] = ()
    is_plain: Mapping[str, str] = field(default_factory=dict)
    """Of the columns it gives, those that are others under a new name."""

    def document(self) -> dict[str, Any]:
        return {self.kind: {"name": self.name, **self.words}}


@dataclass(frozen=True)
class Sink:
    kind: str
    """parquet, delta, append, kafka; upsert is PostgreSQL's, merge Delta's."""
    name: str
    takes: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)

    @property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self.words.get("partition_by", ()))

    @property
    def key(self) -> tuple[str, ...]:
        by = [self.words["order_by"]] if self.words.get("mode") == "scd2" else []
        return (*self.words.get("key", ()), *by) if self.kind in ("upsert", "merge") else ()


@dataclass(frozen=True)
class Places:
    """Where the parts of one pipeline are."""

    directory: str
    bootstrap: str
    database: str


def with_column(name: str, function: Callable[[Row], Any]) -> Callable[[Row], Row]:
    return lambda row: {**row, name: function(row)}


QUERIES: Final[tuple[tuple[str, str, pa.DataType, Callable[[Row], Any]], ...]] = (
    ("shouted", "upper(who)", pa.string(), lambda row: row["who"].upper()),
    ("doubled", "amount * 2", pa.float64(), lambda row: row["amount"] * 2),
    ("label", "concat(who, '-', id)", pa.string(), lambda row: f"{row['who']}-{row['id']}"),
    ("bucket", "id % 3", pa.int64(), lambda row: row["id"] % 3),
    (
        "pair",
        "named_struct('who', who, 'id', id)",
        pa.struct([("who", pa.string()), ("id", pa.int64())]),
        lambda row: {"who": row["who"], "id": row["id"]},
    ),
)
MARK: Final = """\
import pyarrow as pa
import pyarrow.compute as pc


def mark(batch):
    return batch.append_column("marked", pc.add(batch.column("id"), 1000))


def mark_frame(frame):
    return frame.withColumn("marked", frame.id + 1000).where("id % 7 <> 3")
"""
LETTERS: Final = "dead-letter"
"""What the sink of dead letters is called, and where it is when it is a table."""
AGGREGATES: Final[Mapping[str, tuple[str, pa.DataType, Callable[[list[Row]], Any]]]] = {
    "orders": ("count(*)", pa.int64(), len),
    "total": ("sum(amount)", pa.float64(), lambda rows: sum(row["amount"] for row in rows)),
    "most": ("max(amount)", pa.float64(), lambda rows: max(row["amount"] for row in rows)),
    "lowest": ("min(id)", pa.int64(), lambda rows: min(row["id"] for row in rows)),
    "mean": (
        "avg(amount)",
        pa.float64(),
        lambda rows: sum(row["amount"] for row in rows) / len(rows),
    ),
    "ids": ("sum(id)", pa.int64(), lambda rows: sum(row["id"] for row in rows)),
    "kinds": (
        "count(DISTINCT note)",
        pa.int64(),
        lambda rows: len({row["note"] for row in rows if row["note"] is not None}),
    ),
    "spread": (
        "max(amount) - min(amount)",
        pa.float64(),
        lambda rows: max(row["amount"] for row in rows) - min(row["amount"] for row in rows),
    ),
}


# ------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Program:
    """A pipeline as it stands: a change of its definition is another one."""

    seed: int
    name: str
    format: str
    fields: tuple[SourceField, ...]
    partitions: int
    steps: tuple[Step, ...]
    sinks: tuple[Sink, ...]
    batch_records: int
    has_event_time: bool = False
    expressions: Mapping[str, Meaning] = field(default_factory=dict)
    """By text: of rules and sinks."""
    compression: str = "none"
    letters: str = "topic"
    """Where dead letters go: topic, parquet, delta, append."""

    @property
    def letter_sink(self) -> Sink | None:
        """The sink that has dead letters as rows; nothing: they are in a topic."""
        return None if self.letters == "topic" else Sink(self.letters, LETTERS)

    @property
    def topic(self) -> str:
        return f"{self.name}-source"

    @property
    def dead_letter(self) -> str:
        return f"{self.name}-dead"

    def columns(self, upto: int | None = None) -> dict[str, pa.DataType]:
        """At the end of the steps, or before the one with this number."""
        found = {each.name: each.arrow for each in self.fields}
        for step in self.steps[:upto]:
            if step.kind in ("window", "dedupe"):
                continue
            found = {name: kind for name, kind in found.items() if name not in step.drops}
            found |= step.gives
        return found

    def origins(self, upto: int | None = None) -> dict[str, str | None]:
        """By column at the end of the steps: the field of the record that it is, or nothing for one that is made."""
        found: dict[str, str | None] = {each.name: each.name for each in self.fields}
        for step in self.steps[:upto]:
            if step.kind in ("window", "dedupe"):
                continue
            before = found
            found = {name: origin for name, origin in before.items() if name not in step.drops}
            for name in step.gives:
                found[name] = before.get(step.is_plain[name]) if name in step.is_plain else None
        return found

    def before(self, name: str) -> int:
        return next(at for at, step in enumerate(self.steps) if step.name == name)

    def rows_columns(self, takes: str) -> dict[str, pa.DataType]:
        """Of the rows that a sink with this `rows` has, without lineage."""
        step_name, _, stream = takes.partition(".")
        if not step_name:
            return self.columns()
        step = self.steps[self.before(step_name)]
        if stream or step.kind != "window":
            return self.columns(self.before(step_name))
        return self.window_columns(step)

    def window_columns(self, step: Step) -> dict[str, pa.DataType]:
        before = self.columns(self.before(step.name))
        return {
            **{name: before[name] for name in step.words["key"]},
            "window_start": _TIMESTAMP,
            "window_end": _TIMESTAMP,
            **{name: AGGREGATES[name][1] for name in step.words["aggregates"]},
            "_hf_count": pa.int64(),
            "_hf_digest": pa.int64(),
        }

    # -------------------------------------------------------------------- the definition

    def document(self, places: Places) -> dict[str, Any]:
        value: dict[str, Any] = {"format": self.format}
        if self.format == "avro":
            value["schema"] = json_schema(self.fields)
        elif self.format != "text":
            value["fields"] = {each.name: each.text for each in self.fields}
        source: dict[str, Any] = {
            "topics": [self.topic],
            "bootstrap": places.bootstrap,
            "batch_records": self.batch_records,
            "value": value,
        }
        if self.has_event_time:
            source["event_time"] = {"field": "at", "delay": f"{DELAY_MS}ms", "ahead": "36500d"}
        return {
            "pipeline": self.name,
            "home": "home",
            "source": source,
            "steps": [step.document() for step in self.steps],
            "sinks": [self._sink(sink, places) for sink in self.sinks],
            "dead_letter": self._letters(places),
        }

    def _letters(self, places: Places) -> dict[str, Any]:
        match self.letters:
            case "topic":
                return {"topic": self.dead_letter, "settings": {"compression.type": self.compression}}
            case "append":
                table = {"url": places.database, "table": LETTERS, "schema_name": self.name}
                return {"postgres": table}
        return {self.letters: LETTERS}

    def _sink(self, sink: Sink, places: Places) -> dict[str, Any]:
        words: dict[str, Any] = {"name": sink.name, **sink.words}
        if sink.takes:
            words["rows"] = sink.takes
        match sink.kind:
            case "parquet" | "delta":
                if sink.kind == "parquet" and self.seed % 3 == 0:
                    words["compact"] = 2  # merged by the runs themselves, after every other batch
                return {sink.kind: {"path": sink.name, "schema": "add-columns", **words}}
            case "merge":
                return {"delta": {"path": sink.name, "schema": "add-columns", "mode": "upsert", **words}}
            case "kafka":
                topic = f"{self.name}-{sink.name}"
                settings = {"compression.type": self.compression}
                return {"kafka": {"topic": topic, "settings": settings, **words}}
            case _:
                more = {"url": places.database, "table": sink.name, "schema_name": self.name}
                return {"postgres": {**more, "schema": "add-columns", "mode": sink.kind, **words}}

    # -------------------------------------------------------------------- records

    def encode(self, row: Row) -> bytes:
        match self.format:
            case "json":
                kind = pa.struct([(each.name, each.arrow) for each in self.fields])
                text = json_text(row, kind)
                assert text is not None
                return text.encode()
            case "csv":
                return ",".join(_cell(row[each.name]) for each in self.fields).encode()
            case "text":
                return str(row["value"]).encode()
            case _:
                sink = io.BytesIO()
                schema = fastavro.parse_schema(avro_schema(self.fields))
                fastavro.schemaless_writer(sink, schema, {name: _of_avro(each) for name, each in row.items()})
                return sink.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"'
    if isinstance(value, datetime.datetime):
        return value.isoformat().replace("+00:00", "Z")
    return text_of(value) or ""


def _of_avro(value: Any) -> Any:
    is_map = isinstance(value, list) and value and isinstance(value[0], tuple)
    return dict(value) if is_map else value


def avro_schema(fields: Sequence[SourceField]) -> dict[str, Any]:
    listed = [{"name": each.name, "type": each.avro} for each in fields]
    return {"type": "record", "name": "Order", "fields": listed}


def json_schema(fields: Sequence[SourceField]) -> str:
    import json

    return json.dumps(avro_schema(fields))


# ------------------------------------------------------------------------ making them


class Maker:
    """Makes one program, choice by choice."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(f"program {seed}")
        self.others = random.Random(f"others {seed}")
        """For what was added later: the rest of a seed stays as it is."""
        self.expressions: dict[str, Meaning] = {}
        self.steps: list[Step] = []

    def make(self) -> Program:
        chance = self.chance
        form = chance.choice(("json", "json", "json", "json", "avro", "avro", "csv", "csv", "text"))
        if form == "text":
            return self.of_text()
        others = [*SOMETIMES, *(NESTED if form != "csv" else ())]
        chosen = chance.sample(others, chance.randrange(0, min(4, len(others)) + 1))
        fields = (*ALWAYS, *chosen)
        has_memory = chance.random() < 0.45
        program = Program(
            self.seed,
            f"p{self.seed}",
            form,
            fields,
            chance.choice((1, 2, 3)),
            (),
            (),
            chance.choice((6, 9, 1000)),
            has_memory,
        )
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            program = self.with_step(program)
        if has_memory:
            program = self.with_memory(program)
            if chance.random() < 0.4:
                program = self.with_step(program)
        for number in range(chance.choice((1, 2, 2, 3))):
            program = self.with_sink(program, number)
        return replace(program, expressions=self.expressions)

    def of_text(self) -> Program:
        """One column and no steps: what a format without fields can have."""
        chance = self.chance
        partitions, batch_records = chance.choice((1, 2, 3)), chance.choice((6, 9, 1000))
        program = Program(self.seed, f"p{self.seed}", "text", TEXT, partitions, (), (), batch_records)
        kinds = chance.sample(("parquet", "delta", "append", "kafka"), chance.choice((1, 2)))
        sinks = tuple(Sink(kind, f"{kind}-{number}") for number, kind in enumerate(kinds))
        return replace(program, sinks=sinks)

    # -------------------------------------------------------------------- steps

    def with_step(self, program: Program) -> Program:
        kinds = ["expect", "filter", "sql", "sql", "sql", "rename", "drop", "lookup", "python", "expand"]
        there = program.columns()
        used = {step.name for step in program.steps}
        for _ in range(20):
            step = self._step(self.chance.choice(kinds), there, len(program.steps))
            if step is None or step.name in used or (step.kind == "expand" and _expands(program)):
                continue
            if {*step.gives} & {*there} - {*step.drops}:
                continue
            return replace(program, steps=(*program.steps, step))
        return program

    def _step(self, kind: str, there: Mapping[str, pa.DataType], number: int) -> Step | None:
        chance = self.chance
        words: dict[str, Any]
        match kind:
            case "expect":
                otherwise = chance.choice(("quarantine", "drop", "warn"))
                return Step(
                    "expect", f"rule-{number}", {"that": "amount > 0", "else": otherwise},
                    lambda row: row["amount"] > 0,
                )  # fmt: skip
            case "filter":
                return Step(
                    "filter", f"some-{number}", {"where": "who <> 'trial'"}, lambda row: row["who"] != "trial"
                )
            case "sql":
                name, text, arrow, function = chance.choice(QUERIES)
                words = {"query": f"SELECT *, {text} AS {name} FROM input"}
                return Step("sql", f"make-{name}", words, with_column(name, function), {name: arrow})
            case "rename" if "note" in there:
                words = {"query": "SELECT * EXCEPT (note), note AS remark FROM input"}
                return Step(
                    "sql", "rename", words, _renamed("note", "remark"), {"remark": there["note"]}, ("note",),
                    {"remark": "note"},
                )  # fmt: skip
            case "drop" if "paid" in there:
                words = {"query": "SELECT * EXCEPT (paid) FROM input"}
                return Step("sql", "drop", words, _without("paid"), {}, ("paid",))
            case "lookup":
                words = {"table": "people.csv", "on": {"who": "login"}, "columns": ["city"], "refresh": "1ms"}
                return Step("lookup", "people", words, gives={"city": pa.string()})
            case "python" if self.others.random() < 0.5:
                listed = {**there, "marked": pa.int64()}
                words = {"file": "steps.py", "function": "mark_frame", "mode": "spark"}
                return Step(
                    "python", "mark", words,
                    lambda row: {**row, "marked": row["id"] + 1000} if row["id"] % 7 != 3 else None,
                    listed, tuple(there),
                )  # fmt: skip
            case "python":
                listed = {**there, "marked": pa.int64()}
                words = {
                    "file": "steps.py", "function": "mark",
                    "schema": {name: ddl_of(each) for name, each in listed.items()},
                }  # fmt: skip
                return Step(
                    "python", "mark", words, with_column("marked", lambda row: row["id"] + 1000),
                    listed, tuple(there),
                )  # fmt: skip
            case "expand":
                words = {"query": "SELECT *, explode(array(1, 2)) AS copy FROM input", "expand": True}
                return Step(
                    "sql", "expand", words, lambda row: [{**row, "copy": 1}, {**row, "copy": 2}],
                    {"copy": pa.int32()},
                )  # fmt: skip
        return None

    def with_memory(self, program: Program) -> Program:
        chance = self.chance
        there = program.columns()
        kinds = [chance.choice(("dedupe", "window", "window"))]
        if chance.random() < 0.2:
            kinds = ["dedupe", "window"]
        for kind in kinds:
            if kind == "dedupe":
                key = chance.choice([name for name in ("id", "label", "marked") if name in there] or ["id"])
                # Rows of one record are not each other's duplicates.
                by = [key, *(["copy"] if "copy" in there else [])]
                words = {"key": by, "within": "1d", "unordered": True}
                step = Step("dedupe", "once", words)
            else:
                names = [name for name in ("who", "shouted", "bucket", "city") if name in there]
                by = [chance.choice(names)]
                usable = [name for name in AGGREGATES if name != "kinds" or "note" in there]
                chosen = chance.sample(usable, chance.randrange(1, 4))
                aggregates = {name: AGGREGATES[name][0] for name in chosen}
                words = {"key": by, "size": "60s", "aggregates": aggregates}
                if chance.random() < 0.3:
                    words |= {"kind": "sliding", "every": f"{EVERY_MS // 1000}s"}
                step = Step("window", "totals", words)
            program = replace(program, steps=(*program.steps, step))
        return program

    # -------------------------------------------------------------------- sinks

    def with_sink(self, program: Program, number: int) -> Program:
        chance = self.chance
        takes = ""
        streams = [
            each
            for step in program.steps
            for each in {"window": ["totals", "totals.late"], "dedupe": ["once.duplicates"]}.get(
                step.kind, []
            )
        ]
        if streams and chance.random() < (0.65 if number == 0 else 0.4):
            takes = chance.choice(streams)
        kind = chance.choice(("parquet", "parquet", "delta", "delta", "append", "upsert", "kafka", "kafka"))
        there = program.rows_columns(takes)
        # A window of a city that nobody knows has no key.
        if kind == "upsert" and (takes not in ("", "totals") or (takes and "city" in there)):
            kind = "append"
        words: dict[str, Any] = {}
        by = [name for name in ("who", "day", "bucket", "paid", "rank", "shouted") if name in there]
        match kind:
            case "parquet" | "delta" if by and chance.random() < 0.4:
                words["partition_by"] = chance.sample(by, chance.choice((1, 1, min(2, len(by)))))
            case "upsert":
                words = self._upsert(program, takes, there)
                if self.seed % 2:
                    kind = "merge"
                    others = [name for name in by if name not in words.get("delete_when", "")]
                    if others and self.seed % 3 == 0:
                        words["partition_by"] = others[:1]
            case "kafka":
                words = self._kafka(program, takes, there)
        return replace(program, sinks=(*program.sinks, Sink(kind, f"{kind}-{number}", takes, words)))

    def _upsert(self, program: Program, takes: str, there: Mapping[str, pa.DataType]) -> dict[str, Any]:
        if takes == "totals":
            step = program.steps[program.before("totals")]
            return {"key": [*step.words["key"], "window_start"]}
        names = [name for name in ("who", "shouted", "bucket", "label", "marked") if name in there]
        key = [self.chance.choice(names)]
        versions = (
            {"mode": "scd2", "order_by": "at" if self.seed % 4 < 2 else "id"} if self.seed % 5 < 3 else {}
        )
        if self.chance.random() < 0.7:
            return {"key": key, "order_by": "id", **versions}
        gone = self.chance.choice([name for name in ("note", "remark", "paid", "who") if name in there])
        text = {"paid": "paid", "who": "who = 'cat'"}.get(gone, f"{gone} IS NULL")
        meaning: Callable[[Row], Any] = {
            "paid": lambda row: row["paid"], "who": lambda row: row["who"] == "cat",
        }.get(gone, lambda row: row[gone] is None)  # fmt: skip
        self.expressions[text] = (meaning, pa.bool_())
        return {"key": key, "delete_when": text, **versions}

    def _kafka(self, program: Program, takes: str, there: Mapping[str, pa.DataType]) -> dict[str, Any]:
        chance, words = self.chance, dict[str, Any]()
        own = "who" if "who" in there else next(iter(there))
        if chance.random() < 0.4:
            words["key"] = f"CAST({own} AS STRING)"
            self._mean(words["key"], lambda row: text_of(row[own]))
        if chance.random() < 0.3 and "id" in there and "who" in there:
            words["value"] = chance.choice(("concat(id, '|', who)", "to_json(struct(id, who))"))
            self._mean("concat(id, '|', who)", lambda row: f"{row['id']}|{row['who']}")
            kind = pa.struct([("id", pa.int64()), ("who", pa.string())])
            self._mean("to_json(struct(id, who))", lambda row: json_text(row, kind))
        if chance.random() < 0.3 and "amount" in there:
            words["headers"] = {"worth": "CAST(amount AS STRING)"}
            self._mean("CAST(amount AS STRING)", lambda row: text_of(row["amount"]))
        if not takes and chance.random() < 0.2:
            words["writers"] = 2
        return words

    def _mean(self, text: str, function: Callable[[Row], Any]) -> None:
        self.expressions[text] = (function, pa.string())


def _renamed(old: str, new: str) -> Callable[[Row], Row]:
    def of_row(row: Row) -> Row:
        found = dict(row)
        found[new] = found.pop(old)
        return found

    return of_row


def _without(name: str) -> Callable[[Row], Row]:
    return lambda row: {each: value for each, value in row.items() if each != name}


def _expands(program: Program) -> bool:
    return any("expand" in step.words for step in program.steps)


def ddl_of(kind: pa.DataType) -> str:
    """A type in Spark's words."""
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{each.name}:{ddl_of(each.type)}' for each in kind)}>"
    if pa.types.is_map(kind):
        return f"map<string,{ddl_of(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{ddl_of(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    names = {
        pa.int64(): "long", pa.int32(): "int", pa.float64(): "double", pa.string(): "string",
        pa.bool_(): "boolean", pa.date32(): "date", _TIMESTAMP: "timestamp",
    }  # fmt: skip
    return names[kind]


def make_program(seed: int) -> Program:
    maker = Maker(seed)
    kinds = ("topic", "topic", "topic", "parquet", "delta", "append")
    return replace(maker.make(), letters=maker.others.choice(kinds))


def changed(program: Program, chance: Chance) -> tuple[Program, str]:
    """The program after a change that a guide allows while it runs, and what was changed."""
    kind = chance.choice(("column", "sink", "without"))
    if kind == "without" and len(program.sinks) > 1:
        gone = chance.choice(program.sinks)
        return replace(
            program, sinks=tuple(each for each in program.sinks if each != gone)
        ), f"without {gone.name}"
    if kind == "sink":
        number = len(program.sinks) + 10
        sink = Sink(chance.choice(("parquet", "delta", "append")), f"later-{number}")
        return replace(program, sinks=(*program.sinks, sink)), f"with {sink.name}"
    there = program.columns()
    if (
        any(step.kind in ("window", "dedupe") for step in program.steps)
        or "later" in there
        or "id" not in there
    ):
        return program, ""
    step = Step(
        "sql", "later", {"query": "SELECT *, id + 1 AS later FROM input"},
        with_column("later", lambda row: row["id"] + 1), {"later": pa.int64()},
    )  # fmt: skip
    return replace(program, steps=(*program.steps, step)), NEW_COLUMN
