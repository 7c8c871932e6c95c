"""Whether rows hold what their record says: the evidence against values that stand under another's lineage.

Places alone cannot tell two rows whose lineage was exchanged, nor a value that was changed where it lies. So what each
record must look like in a sink is hashed (`cells`) and kept by offset, one array for each set of columns; the rows of
the sinks are hashed in the same form and compared, place by place. Two say what must be there: the walk of
the source, for columns that no step computes (`plain_columns`), and Spark, for those that steps compute.

Compared are rows that were made by the definition at hand, or by one that says the same of their sink. Of a topic, the
key, the value (as JSON of columns, or as bytes) and the headers are compared; of dead letters key, value and headers as
bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.cells import (
    Flags,
    Hashes,
    as_type,
    has_no_number,
    hash_rows,
    json_decoder,
    keeps_exactly,
)
from holdfast.audit.compare import Counts, finding
from holdfast.audit.coverage import ANY
from holdfast.audit.decoding import Decode, SourceDecoder
from holdfast.audit.lineage import Offsets, partitions_of
from holdfast.audit.model import ColumnCoverage, Examined, Fate
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.audit.sinks.headers import without
from holdfast.client.messages import ID_HEADER, ORIGIN_ID_HEADER
from holdfast.pipeline.definition.columns import PlainColumns, plain_columns
from holdfast.pipeline.definition.model import KafkaSink, PipelineDefinition, PostgresSink, SinkDefinition
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, dead_letter_sink
from holdfast.pipeline.definition.streams import has_own_rows
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

Columns = tuple[tuple[str, str], ...]
"""Of a sink, by name, and what of a record each must show: what one array of hashes is made of."""
Spans = Mapping[Place, tuple[int, int]]

KEY: Final = "_key"
RAW: Final = "_raw"
HEADERS: Final = "_headers"
NO_HEADERS: Final = "_no_headers"
TOMBSTONE: Final = "_tombstone"
TIME: Final = "_timestamp"
RECORD: Final[Columns] = (("headers", HEADERS), ("key", KEY), ("value", RAW))
"""A record as it came, in a topic of dead letters."""
LETTER: Final[Mapping[str, tuple[str, pa.DataType, str]]] = {
    "topic": ("_letter_topic", pa.string(), "string"),
    "partition": ("_letter_partition", pa.int32(), "int"),
    "offset": ("_letter_offset", pa.int64(), "bigint"),
    "timestamp": ("_letter_timestamp", pa.timestamp("us", tz="UTC"), "timestamp"),
    "key": (KEY, pa.binary(), "binary"),
    "value": (RAW, pa.binary(), "binary"),
    "headers": (
        "_letter_headers",
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        "array<struct<key:string,value:binary>>",
    ),
}
"""And in a table of them: by column, what it must be, and its type in Arrow's words and in Spark's."""
LETTER_HEADERS: Final = LETTER["headers"][0]
NO_TIME_FROM_US: Final = 253_402_300_800_000_000
"""The year 10000: dead letters in a table have no time from there on."""
KEY_BY: Final = "_key_by:"
"""Before the column that is a record's key in a topic: of a tombstone, which has none, the record's own."""
OF_RECORD: Final = {
    KEY: (pa.binary(), "binary"),
    TIME: (pa.timestamp("us", tz="UTC"), "timestamp"),
    TOMBSTONE: (pa.bool_(), "boolean"),
}
"""What a step knows of a record beside the columns of its value."""
FIELD: Final = "value."
OURS: Final = r"^hf-(dlt|retry)-|^hf-source$"
"""Headers that holdfast adds on the way."""
_STRUCT_JSON: Final = re.compile(r"\s*to_json\s*\(\s*struct\s*\(([\w\s,`]*)\)\s*\)\s*", re.IGNORECASE)
_NAME: Final = re.compile(r"\s*`?(\w+)`?\s*")
_TIMES: Final = re.compile(r"\btimestamp")


def made_by(marks: Collection[str], batches: Iterable[Entry], spans: Spans) -> dict[Place, Flags]:
    """The offsets that batches of definitions with these fingerprints have taken."""
    found = {place: np.zeros(max(0, end - start), np.bool_) for place, (start, end) in spans.items()}
    for entry in batches:
        for place, span in entry.range.spans.items() if entry.fingerprint in marks else ():
            if place in spans:
                start = spans[place][0]
                found[place][max(0, span.start - start) : max(0, span.end - start)] = True
    return found


# ---------------------------------------------------------------------------- what must be there


@dataclass
class Expected:
    """What rows must hold, as hashes by offset; 0 where nothing is known. An observer of the walk."""

    scope: Spans
    """First offset, and the one behind the last."""
    sets: Sequence[Columns] = ()
    """Of the source, while it is walked."""
    only: Mapping[Columns, Mapping[Place, Flags]] = field(default_factory=dict)
    """Of sets that are wanted for few offsets of the scope: for which."""
    hashes: dict[tuple[Place, Columns], Hashes] = field(default_factory=dict)
    counts: dict[tuple[Place, Columns], Counts] = field(default_factory=dict)
    """Rows of a record, where there may be several: the hash is the sum of theirs."""

    @property
    def needs_headers(self) -> bool:
        """Of few records, and none where there are no dead letters."""
        listed = (
            columns for columns in self.sets if columns == RECORD or LETTER_HEADERS in dict(columns).values()
        )
        return any(
            columns not in self.only or any(flags.any() for flags in self.only[columns].values())
            for columns in listed
        )

    def array(self, place: Place, columns: Columns) -> Hashes:
        start, end = self.scope[place]
        return self.hashes.setdefault((place, columns), np.zeros(max(0, end - start), np.uint64))

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        if not self.sets or place not in self.scope or batch.num_rows == 0:
            return
        start, end = self.scope[place]
        at = batch.column("offset").to_numpy(zero_copy_only=False) - start
        is_inside = (at >= 0) & (at < end - start)
        for columns in self.sets:
            chosen = is_inside
            if columns in self.only:
                chosen = is_inside.copy()
                chosen[is_inside] = self.only[columns][place][at[is_inside]]
                if not chosen.any():
                    continue
            found = {name: _of_source(must, batch, decoded) for name, must in columns}
            if not chosen.all():
                found = {name: values.filter(pa.array(chosen)) for name, values in found.items()}
            self.array(place, columns)[at[chosen]] = hash_rows(found)

    def put(self, columns: Columns, table: pa.Table) -> None:
        """Rows that must be there, with their lineage and these columns."""
        hashed = hash_rows({name: table.column(must) for name, must in columns})
        for place, rows, offsets in by_place(table, self.scope):
            at = offsets - self.scope[place][0]
            sums, counts = self.array(place, columns), self.counts.get((place, columns))
            if counts is None:
                counts = self.counts[place, columns] = np.zeros(len(sums), np.uint16)
            np.add.at(sums, at, hashed[rows])
            np.add.at(counts, at, 1)


def _of_source(name: str, batch: pa.RecordBatch, decoded: Decode) -> pa.Array:
    """What a record shows under this name."""
    match name:
        case "_raw":
            return batch.column("value")
        case "_tombstone":
            return batch.column("value").is_null()
        case "_timestamp" | "_letter_timestamp":
            times = batch.column("timestamp").cast(OF_RECORD[TIME][0])
            micros = times.cast(pa.int64())
            is_none = pc.less(micros, 0)  # -1: no time
            if name != TIME:
                is_none = pc.or_(is_none, pc.greater_equal(micros, NO_TIME_FROM_US))
            return pc.if_else(is_none, None, times)
        case "_headers":
            return without(batch.column("headers"), OURS, renamed=(ID_HEADER, ORIGIN_ID_HEADER))
        case "_key" | "_letter_topic" | "_letter_partition" | "_letter_offset" | "_letter_headers":
            return batch.column(name.removeprefix("_letter").removeprefix("_"))
        case "_no_headers":
            return pa.array(np.zeros(batch.num_rows, np.int32))
    if name.startswith(KEY_BY):
        column = decoded().columns[name.removeprefix(KEY_BY)].cast(pa.binary())
        of_tombstone = pc.if_else(
            batch.column("value").is_null(), batch.column("key").cast(pa.binary()), None
        )
        return pc.coalesce(column, of_tombstone)
    return decoded().columns[name]


# ---------------------------------------------------------------------------- what is there


@dataclass(frozen=True)
class Plan:
    """How one sink's rows are compared."""

    sink: str
    columns: Mapping[str, str]
    """Of the sink, with what they must be. Of a topic's value the fields, as `value.NAME`."""
    types: Mapping[str, tuple[pa.DataType, str]]
    """Of what they must be: in Arrow's words and in Spark's."""
    is_topic: bool = False
    covers: tuple[str, ...] = ()
    """The columns of the coverage that are compared."""
    made: Mapping[Place, Flags] | None = None
    """The offsets of which rows are compared; nothing: all of the scope."""

    @property
    def key(self) -> Columns:
        return tuple(sorted(self.columns.items()))

    @property
    def asked(self) -> tuple[str, ...]:
        """Of the reader."""
        return ("key", "value", "headers") if self.is_topic else tuple(self.columns)

    def cells(self, table: pa.Table) -> tuple[dict[str, pa.Array], Flags, Flags]:
        """In the types of what they must be; rows that cannot be read so, and rows of which that cannot be told."""
        found: dict[str, pa.Array] = {}
        wrong, unsure = np.zeros(table.num_rows, np.bool_), np.zeros(table.num_rows, np.bool_)
        fields = [name for name in self.columns if self.is_topic and name.startswith(FIELD)]
        if fields:
            texts = table.column("value").combine_chunks().cast(pa.binary())
            listed = tuple((name.removeprefix(FIELD), self.types[self.columns[name]][1]) for name in fields)
            columns, errors = json_decoder(listed).decode(texts)
            found |= dict(zip(fields, columns, strict=True))
            wrong |= errors.is_valid().to_numpy(zero_copy_only=False)
            unsure |= wrong & has_no_number(texts)
        for name, must in self.columns.items():
            kind, ddl = self.types[must]
            if name in found:
                continue
            if must in (HEADERS, NO_HEADERS):
                own = without(table.column("headers").combine_chunks(), OURS)
                found[name] = own if must == HEADERS else pc.list_value_length(own)
            elif must == TOMBSTONE and self.is_topic:
                found[name] = table.column("value").is_null()
            elif name in table.column_names:
                found[name], failed = as_type(table.column(name), kind, ddl)
                wrong |= failed
                if failed.any() and pa.types.is_nested(kind):
                    unsure |= failed & has_no_number(table.column(name))
            else:
                found[name] = pa.nulls(table.num_rows, kind)
        return found, wrong & ~unsure, unsure


def compare(reader: SinkReader, plan: Plan, expected: Expected, detail: str) -> Examined:
    """The rows of a sink against what must be there."""
    count, key = 0, plan.key
    differing: dict[Place, list[Offsets]] = {}
    sums: dict[Place, tuple[Hashes, Counts]] = {}
    for table in reader.table_batches(plan.asked, SinkScope(expected.scope)):
        if table.num_rows == 0:
            continue
        cells, wrong, unsure = plan.cells(table)
        hashed = hash_rows({name: cells[name] for name, _ in key})
        hashed[wrong] += np.uint64(1)
        for place, rows, offsets in by_place(table, expected.scope):
            at = offsets - expected.scope[place][0]
            must = expected.array(place, key)[at]
            # Expired, compacted away, aborted: whether a row may be there is not asked here.
            judged = ~unsure[rows] & (must != 0)
            if plan.made is not None:
                judged &= plan.made[place][at]
            if (place, key) in expected.counts:
                size = len(expected.counts[place, key])
                total, held = sums.setdefault(place, (np.zeros(size, np.uint64), np.zeros(size, np.uint16)))
                np.add.at(total, at[judged], hashed[rows[judged]])
                np.add.at(held, at[judged], 1)
                continue
            count += int(judged.sum())
            found = offsets[judged & (must != hashed[rows])]
            if len(found):
                differing.setdefault(place, []).append(found)
    for place, (total, held) in sums.items():
        # Where there are more or fewer rows than must be, that is told by whoever counts them.
        is_same = held == expected.counts[place, key]
        count += int(held[is_same].sum(dtype=np.int64))
        is_other = is_same & (held > 0) & (total != expected.array(place, key))
        if is_other.any():
            differing[place] = [np.flatnonzero(is_other) + expected.scope[place][0]]
    told = (
        finding(Fate.ALTERED, reader.name, place, np.unique(np.concatenate(parts)), detail)
        for place, parts in sorted(differing.items())
    )
    covered = (ColumnCoverage(reader.name, name, count) for name in plan.covers)
    return Examined(tuple(told), coverage=tuple(covered))


def by_place(table: pa.Table, scope: Spans) -> Iterator[tuple[Place, Offsets, Offsets]]:
    """The rows of each partition that lie in the scope, and their offsets; rows from elsewhere are not ours."""
    places = {(place.topic, place.partition): place for place in scope}
    for topic, partition, rows, offsets in partitions_of(table):
        place = places.get((topic, partition))
        if place is not None:
            start, end = scope[place]
            inside = (offsets >= start) & (offsets < end)
            yield place, rows[inside], offsets[inside]


# ---------------------------------------------------------------------------- what is compared with what


def plan_of(
    reader: SinkReader,
    sink: SinkDefinition | None,
    names: Mapping[str, str],
    types: Mapping[str, tuple[pa.DataType, str]],
    *,
    is_all: bool,
) -> tuple[Plan, list[ColumnCoverage]]:
    """Of the columns that are known of a sink's rows, by their names there: which are compared, and why others not.

    `is_all`: there are no others.
    """
    whys: list[ColumnCoverage] = []
    match sink:
        case None:
            kinds = dict.fromkeys((KEY, RAW, HEADERS), OF_RECORD[KEY])
            return Plan(reader.name, dict(RECORD), kinds, is_topic=True, covers=tuple(dict(RECORD))), whys
        case _ if sink.name == DEAD_LETTER_NAME:
            names = {name: must for name, (must, _, _) in LETTER.items()}
            types = {must: (kind, ddl) for must, kind, ddl in LETTER.values()}
        case KafkaSink():
            found, covers = _topic(sink, names, types, is_all=is_all)
            kinds = {**types, NO_HEADERS: (pa.int32(), "int")}
            kinds |= {must: OF_RECORD[KEY] for must in found.values() if must.startswith(KEY_BY)}
            return Plan(reader.name, found, kinds, is_topic=True, covers=covers), whys
    stored = _stored(names)
    if isinstance(sink, PostgresSink):
        held = cast("Mapping[str, str]", getattr(reader, "column_types", {}))
        for name, must in list(stored.items()):
            if not keeps_exactly(held.get(name, ""), types[must][1]):
                del stored[name]
                why = f"the table's type {held.get(name, '')} does not keep every {types[must][1]}"
                whys.append(ColumnCoverage(reader.name, name, why=why))
    return Plan(reader.name, stored, types, covers=tuple(stored)), whys


def _topic(
    sink: KafkaSink,
    names: Mapping[str, str],
    types: Mapping[str, tuple[pa.DataType, str]],
    *,
    is_all: bool,
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Of a topic: the parts of a record with what they must be, and which of them are known whole."""
    found: dict[str, str] = {}
    covers: list[str] = []
    key = names.get(KEY, "") if sink.key is None else _plain_name(sink.key, names)
    if key and types[key][1] in ("string", "binary"):
        found["key"] = key if key in OF_RECORD or TOMBSTONE not in names else KEY_BY + key
        covers.append("key")
    fields = _stored(names)
    is_whole = is_all
    raw = "" if sink.value is None else _plain_name(sink.value, names)
    if sink.value is not None:
        listed = _STRUCT_JSON.fullmatch(sink.value)
        named = {each.strip(" `\n\t") for each in listed[1].split(",")} if listed else set()
        # Without options, `to_json` writes times with three digits, and leaves out what is null.
        fields = {
            name: must for name, must in fields.items() if name in named and not _TIMES.search(types[must][1])
        }
        is_whole = bool(named) and named == set(fields)
    if is_whole:
        found |= {FIELD + name: must for name, must in fields.items()}
        if TOMBSTONE in names:
            found["tombstone"] = TOMBSTONE
    if raw and types[raw][1] in ("string", "binary"):
        found["value"], is_whole = raw, True
    if is_whole:
        covers.append("value")
    if not sink.headers:
        found["headers"] = NO_HEADERS
        covers.append("headers")
    return found, tuple(covers)


def _stored(names: Mapping[str, str]) -> dict[str, str]:
    return {name: must for name, must in names.items() if not name.startswith("_") or name == "_unknown"}


def _plain_name(expression: str, names: Mapping[str, str]) -> str:
    """What an expression that is a name must be; nothing for others."""
    match = _NAME.fullmatch(expression)
    return "" if match is None else names.get(match[1], "")


class ContentCheck:
    """One audit's comparison of contents with the source."""

    def __init__(
        self,
        definition: PipelineDefinition,
        decoder: SourceDecoder,
        marks: Callable[[str], Collection[str]] | None = None,
    ) -> None:
        self._definition = definition
        self._types = {name: (kind, decoder.ddl[name]) for name, kind in decoder.types.items()} | OF_RECORD
        self._marks = marks
        """By sink, the fingerprints of definitions that say the same of it; nothing: every entry counts."""
        self._plans: dict[str, Plan] = {}
        self._unspoken: list[ColumnCoverage] = []
        self.computed: dict[str, str] = {}
        """By sink with columns that steps compute: which steps."""
        self._expected = Expected({})

    def begin(
        self, readers: Sequence[SinkReader], spans: Spans, dead: Mapping[Place, Flags] | None = None
    ) -> Expected | None:
        """What has to see the source for this; nothing when there is nothing to compare.

        `dead` says which offsets are dead letters: of no others is the record needed as it came.
        """
        letters = dead_letter_sink(self._definition)
        sinks: dict[str, SinkDefinition] = {sink.name: sink for sink in self._definition.sinks}
        if not isinstance(letters, KafkaSink):
            sinks[letters.name] = letters
        for reader in readers:
            sink = sinks.get(reader.name)
            if sink is not None and any(
                has_own_rows(step) and step.name == sink.rows for step in self._definition.steps
            ):
                continue  # rows that a step made: aggregates are recomputed elsewhere, others are not proven
            plain = self._plain(sink)
            if plain.computed:
                self.computed[reader.name] = ", ".join(map(repr, plain.computed))
            plan, whys = plan_of(reader, sink, plain.columns, self._types, is_all=not plain.computed)
            self._unspoken += whys
            if plan.columns:
                self._plans[reader.name] = self._since(reader, plan, spans)
        sets = tuple(dict.fromkeys(plan.key for plan in self._plans.values()))
        of_letters = self._plans.get(letters.name)
        only = {} if dead is None or of_letters is None else {of_letters.key: dead}
        self._expected = Expected(dict(spans), sets, only)
        return self._expected if sets else None

    def _plain(self, sink: SinkDefinition | None) -> PlainColumns:
        if sink is None or sink.name == DEAD_LETTER_NAME:
            return PlainColumns({})
        return plain_columns(self._definition, self._types, sink.rows)

    def _since(self, reader: SinkReader, plan: Plan, spans: Spans) -> Plan:
        """Rows of entries that this definition made, or one that says the same of the sink."""
        marks = () if self._marks is None else self._marks(reader.name)
        others = [entry for entry in reader.entries() if entry.fingerprint not in marks and entry.range]
        if self._marks is None or plan.sink == DEAD_LETTER_NAME or not others:
            return plan
        why = f"rows up to batch {others[-1].number} were made by another version of the definition"
        self._unspoken += [ColumnCoverage(reader.name, name, why=why) for name in (ANY, *plan.covers)]
        made = made_by(marks, reader.entries(), spans)
        return replace(plan, made=made)

    def examine(self, readers: Sequence[SinkReader]) -> Examined:
        """After the walk."""
        examined = Examined(coverage=tuple(self._unspoken))
        for reader in readers:
            plan = self._plans.get(reader.name)
            if plan is not None:
                examined += compare(reader, plan, self._expected, _detail(plan))
        return examined

    def compared(self, sink: str) -> Collection[str]:
        """The columns of a sink that are compared."""
        return self._plans[sink].covers if sink in self._plans else ()

    def not_evaluated(self) -> Examined:
        """What an audit says that does not evaluate the steps again."""
        computed = self.computed.items()
        whys = ((sink, f"{steps} made it, which --spark evaluates again") for sink, steps in computed)
        return Examined.of(ColumnCoverage(sink, ANY, why=why) for sink, why in whys)


def _detail(plan: Plan) -> str:
    if plan.sink == DEAD_LETTER_NAME:
        return "key, value and headers are not those of the record"
    names = sorted(name.removeprefix(FIELD) for name in plan.columns)
    return f"the row does not hold what the record at its place says ({', '.join(names)})"
