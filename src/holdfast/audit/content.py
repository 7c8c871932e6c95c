"""Whether rows hold what their record says: the evidence against values that stand under another's lineage.

Places alone cannot tell two rows whose lineage was exchanged, nor a value that was changed where it lies. So while the
source is walked, the fields of every record are hashed to 64 bits and kept by offset, one array for each set of fields
that some sink holds unchanged (`plain_columns`); the rows of the sinks are hashed in the same form and compared, place
by place. Dead letters are compared by the bytes of key and value.

The form is that of the source's type: what a sink keeps as text (PostgreSQL's copy, JSON in a topic) is read back as
that type first. Texts are hashed by Python's own keyed hash, so hashes mean something within one process only.

The contents of all sinks of a pipeline held against the source: which columns, which rows, and what differs.

Compared are the columns that no step computes (`plain_columns`), of rows that were made by the definition at hand: an
entry of the ledger with another fingerprint was made by other rules, and its rows are left alone and named as such. A
topic's values are compared where they are the JSON of columns; dead letters as the bytes of key and value.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.compare import finding
from holdfast.audit.decoding import Decode, SourceDecoder
from holdfast.audit.model import Examined, Fate, Finding, Unproven
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.pipeline.definition.columns import plain_columns
from holdfast.pipeline.definition.model import (
    Decoding,
    DeltaSink,
    Field,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.streams import is_tap
from holdfast.pipeline.formats import compile_decoder
from holdfast.pipeline.positions import Place

Hashes = npt.NDArray[np.uint64]
Columns = tuple[str, ...]
"""Names of the source's columns, in order: what one array of hashes is made of."""

RAW: Final[Columns] = ("_key", "_raw")
"""Key and value as bytes."""
_NULL: Final = np.uint64(0x9E3779B97F4A7C15)
_M1: Final = np.uint64(0xBF58476D1CE4E5B9)
_M2: Final = np.uint64(0x94D049BB133111EB)


class Incomparable(Exception):
    """Values that cannot be read as the source's type."""


def is_comparable(kind: pa.DataType) -> bool:
    """Nested values are not compared: their form differs from sink to sink."""
    return not pa.types.is_nested(kind)


# ---------------------------------------------------------------------------- hashing


def hash_rows(columns: Mapping[str, pa.Array]) -> Hashes:
    """One number for each row, of all its columns."""
    total: Hashes | None = None
    for name, values in columns.items():
        salt = np.uint64(zlib.crc32(name.encode()) * 0x9E3779B1 & 0xFFFFFFFFFFFFFFFF)
        hashed = _mixed(_hash_values(values) + salt)
        total = hashed if total is None else total + hashed
    assert total is not None, "rows without columns have nothing to compare"
    return total


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _M1
    values = (values ^ (values >> np.uint64(27))) * _M2
    return values ^ (values >> np.uint64(31))


def _hash_values(values: pa.Array) -> Hashes:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.dictionary_decode()
        kind = values.type
    if pa.types.is_floating(kind):
        numbers = pc.fill_null(values.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        numbers = np.where(np.isnan(numbers), np.nan, numbers) + 0.0  # one NaN, one zero
        hashed = numbers.view(np.uint64)
    elif _is_whole(kind):
        hashed = pc.fill_null(_as_integers(values), 0).to_numpy(zero_copy_only=False).view(np.uint64)
    else:
        if pa.types.is_decimal(kind):
            values = values.cast(pa.string())
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            values = values.cast(pa.large_binary())
        items = values.to_pylist()
        hashed = np.fromiter(map(hash, items), np.int64, len(items)).view(np.uint64)
    if values.null_count:
        hashed = np.where(values.is_null().to_numpy(zero_copy_only=False), _NULL, hashed)
    return hashed


def _is_whole(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind) or types.is_timestamp(kind)
    )


def _as_integers(values: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", tz=values.type.tz))
    elif pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    return values.cast(pa.int64())


# ---------------------------------------------------------------------------- reading back


def as_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """What a sink holds, in the source's type; `Incomparable` where it cannot be read so."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if values.type == kind:
        return values
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    try:
        if is_text and pa.types.is_boolean(kind):
            is_true = pc.is_in(values, pa.array(["t", "true"], values.type))
            return pc.if_else(values.is_null(), pa.scalar(None, pa.bool_()), is_true)
        if is_text and pa.types.is_binary(kind):
            return pa.array(
                [None if each is None else bytes.fromhex(each[2:]) for each in values.to_pylist()], kind
            )
        if is_text and pa.types.is_timestamp(kind):
            return values.cast(pa.timestamp("us", tz=kind.tz))
        return values.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise Incomparable(str(error)) from error


# ---------------------------------------------------------------------------- the source's side


@dataclass
class SourceContent:
    """What the records of the scope hold, as hashes by offset. An observer of the walk."""

    scope: Mapping[Place, tuple[int, int]]
    """First offset, and the one behind the last."""
    sets: Sequence[Columns]
    """The sets of columns that sinks will ask for."""
    only: Mapping[Columns, Mapping[Place, npt.NDArray[np.bool_]]] = field(default_factory=dict)
    """Of sets that are wanted for few offsets of the scope: for which."""
    hashes: dict[tuple[Place, Columns], Hashes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, (start, end) in self.scope.items():
            for columns in self.sets:
                self.hashes[place, columns] = np.zeros(max(0, end - start), np.uint64)

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
            found = {name: _source_column(name, batch, decoded) for name in columns}
            if not chosen.all():
                found = {name: values.filter(pa.array(chosen)) for name, values in found.items()}
            self.hashes[place, columns][at[chosen]] = hash_rows(found)

    def inside(self, place: Place, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those in the scope."""
        start, end = self.scope[place]
        return offsets[(offsets >= start) & (offsets < end)]

    def different(
        self, place: Place, columns: Columns, offsets: npt.NDArray[np.int64], hashed: Hashes
    ) -> npt.NDArray[np.int64]:
        """The offsets of the scope whose record does not hold this.

        What is no record (expired, compacted away, aborted) has no hash: whether a row may be there is not asked here.
        """
        start, end = self.scope[place]
        is_inside = (offsets >= start) & (offsets < end)
        offsets, hashed = offsets[is_inside], hashed[is_inside]
        known = self.hashes[place, columns][offsets - start]
        found: npt.NDArray[np.int64] = offsets[(known != hashed) & (known != 0)]
        return found


def _source_column(name: str, batch: pa.RecordBatch, decoded: Decode) -> pa.Array:
    if name == "_raw":
        return batch.column("value")
    if name == "_key":
        return batch.column("key")
    return decoded().columns[name]


# ---------------------------------------------------------------------------- content check


Spans = Mapping[Place, tuple[int, int]]
LINEAGE: Final = ("_hf_topic", "_hf_partition", "_hf_offset", "_hf_index")
_STRUCT_JSON: Final = re.compile(r"\s*to_json\s*\(\s*struct\s*\(([\w\s,`]*)\)\s*\)\s*", re.IGNORECASE)
_NOT_NUMBERS: Final = re.compile(rb'"(?:NaN|-?Infinity)"')
_EXACT: Final[Mapping[str, tuple[str, ...]]] = {
    "boolean": ("boolean",),
    "tinyint": ("smallint", "integer", "bigint"),
    "smallint": ("smallint", "integer", "bigint"),
    "int": ("integer", "bigint"),
    "bigint": ("bigint",),
    "float": ("real", "double precision"),
    "double": ("double precision",),
    "string": ("text", "character varying"),
    "binary": ("bytea",),
    "date": ("date",),
    "timestamp": ("timestamp with time zone",),
    "timestamp_ntz": ("timestamp without time zone",),
}
"""Types of PostgreSQL that keep every value of ours as it is; a table made by hand may have others, which round."""


@dataclass(frozen=True)
class Plan:
    """How one sink's rows are compared."""

    columns: Columns
    """Of the source."""
    named: Mapping[str, str]
    """The source's name by the sink's."""
    is_json: bool = False
    is_raw: bool = False
    starts: Mapping[Place, int] = field(default_factory=dict)
    """By partition, from which offset on rows were made by this definition."""


class ContentCheck:
    """One audit's comparison of contents."""

    def __init__(self, definition: PipelineDefinition, decoder: SourceDecoder, fingerprint: str = "") -> None:
        self._definition = definition
        self._decoder = decoder
        self._fingerprint = fingerprint
        """Of the definition; nothing: every entry counts as made by it."""
        self._plans: dict[str, Plan] = {}
        self._unproven: list[Unproven] = []
        self.computed: dict[str, str] = {}
        """By sink with columns that steps compute: which steps."""
        self._source: SourceContent | None = None

    def begin(
        self,
        readers: Sequence[SinkReader],
        spans: Spans,
        dead: Mapping[Place, npt.NDArray[np.bool_]] | None = None,
    ) -> SourceContent | None:
        """What has to see the source for this; nothing when there is nothing to compare.

        `dead` says which offsets are dead letters: of no others are key and value needed as bytes.
        """
        sinks: dict[str, SinkDefinition] = {sink.name: sink for sink in self._definition.sinks}
        for reader in readers:
            plan = self._planned(reader, sinks.get(reader.name))
            if plan is not None and plan.columns:
                self._plans[reader.name] = plan
        sets = tuple(dict.fromkeys(plan.columns for plan in self._plans.values()))
        if sets:
            self._source = SourceContent(dict(spans), sets, {} if dead is None else {RAW: dead})
        return self._source

    def examine(self, readers: Sequence[SinkReader]) -> Examined:
        """After the walk."""
        findings: list[Finding] = []
        for reader in readers:
            plan = self._plans.get(reader.name)
            if plan is not None and self._source is not None:
                findings += _compared(reader, plan, self._source, self._decoder)
        return Examined(tuple(findings), tuple(self._unproven))

    def compared(self, sink: str) -> Collection[str]:
        """The columns of a sink that are compared."""
        return self._plans[sink].named if sink in self._plans else ()

    def not_evaluated(self) -> Examined:
        """What an audit says that does not evaluate the steps again."""
        return Examined(
            unproven=tuple(
                Unproven(
                    f"columns in {sink} that steps compute",
                    f"what {steps} made of the records is not evaluated again; --spark does",
                )
                for sink, steps in self.computed.items()
            )
        )

    # ------------------------------------------------------------------------ planning

    def _planned(self, reader: SinkReader, sink: SinkDefinition | None) -> Plan | None:
        if sink is None:  # the dead letters
            return self._since(reader, Plan(RAW, {"_key": "key", "_raw": "value"}, is_raw=True))
        if any(is_tap(step) and step.name == sink.rows for step in self._definition.steps):
            return None  # rows that a step made: aggregates are recomputed elsewhere, others are not proven
        plain = plain_columns(self._definition, self._decoder.types, sink.rows)
        types = self._decoder.types
        named = {name: source for name, source in plain.columns.items() if is_comparable(types[source])}
        named, is_json = self._held(reader, sink, named)
        if plain.computed:
            self.computed[sink.name] = ", ".join(repr(name) for name in plain.computed)
        elif not named:
            self._unproven.append(
                Unproven(f"the contents of {sink.name}", "none of its columns is a plain field of the source")
            )
        columns = tuple(sorted(set(named.values())))
        return self._since(reader, Plan(columns, named, is_json=is_json))

    def _held(
        self, reader: SinkReader, sink: SinkDefinition, named: dict[str, str]
    ) -> tuple[dict[str, str], bool]:
        """Those columns that the sink keeps, exactly; and whether as JSON."""
        match sink:
            case ParquetSink() | DeltaSink():
                return {name: each for name, each in named.items() if name not in sink.partition_by}, False
            case PostgresSink():
                types = cast("Mapping[str, str]", getattr(reader, "column_types", {}))
                return {
                    name: each
                    for name, each in named.items()
                    if keeps_exactly(types.get(name, ""), self._decoder.ddl[each])
                }, False
            case KafkaSink():
                if sink.value is None:
                    stored = {name: each for name, each in named.items() if not name.startswith("_")}
                    return stored, True
                match = _STRUCT_JSON.fullmatch(sink.value)
                listed = {each.strip(" `\n\t") for each in match[1].split(",")} if match else set()
                return {name: each for name, each in named.items() if name in listed}, True

    def _since(self, reader: SinkReader, plan: Plan) -> Plan | None:
        """Rows of entries that this definition made, and of all after them."""
        entries = reader.entries()
        if not self._fingerprint or plan.is_raw:
            return plan
        others = [entry for entry in entries if entry.fingerprint != self._fingerprint and entry.range]
        if not others:
            return plan
        last = others[-1]
        self._unproven.append(
            Unproven(
                f"the contents of rows in {reader.name} up to batch {last.number}",
                "they were made by another version of the definition; their places are compared, their values not",
            )
        )
        if last.number == entries[-1].number:
            return None
        starts = {place: at.offset for place, at in last.positions.at.items()}
        return Plan(plan.columns, plan.named, plan.is_json, plan.is_raw, starts)


def keeps_exactly(held: str, ddl: str) -> bool:
    """Whether a column of PostgreSQL of this type keeps every value of this type of ours as it is."""
    base = held.split("(")[0]
    if ddl.startswith("decimal"):
        return held in ("numeric", ddl.replace("decimal", "numeric"))
    if base == "character varying" and "(" in held:
        return True  # too long a text is refused, never cut
    return base in _EXACT.get(ddl, ())


# ---------------------------------------------------------------------------- comparing


def _compared(reader: SinkReader, plan: Plan, source: SourceContent, decoder: SourceDecoder) -> list[Finding]:
    wrong: dict[Place, list[npt.NDArray[np.int64]]] = {}
    by_name = {(place.topic, place.partition): place for place in source.scope}
    read = _reading(plan, decoder)
    columns = ("key", "value") if plan.is_json or plan.is_raw else tuple(plan.named)
    for table in reader.table_batches(columns, SinkScope(source.scope)):
        if table.num_rows == 0:
            continue
        hashed, states = read(table)
        for place, rows, offsets in _by_place(table, by_name):
            judged = (states[rows] != LEFT) & (offsets >= plan.starts.get(place, 0))
            rows, offsets = rows[judged], offsets[judged]
            is_read = states[rows] == READ
            found = np.union1d(
                source.different(place, plan.columns, offsets[is_read], hashed[rows[is_read]]),
                source.inside(place, offsets[~is_read]),
            )
            if len(found):
                wrong.setdefault(place, []).append(found)
    what = (
        "key and value are not those of the record"
        if plan.is_raw
        else (
            "the row does not hold what the record at its place says (" + ", ".join(sorted(plan.named)) + ")"
        )
    )
    return [
        finding(Fate.ALTERED, reader.name, place, np.unique(np.concatenate(parts)), what)
        for place, parts in sorted(wrong.items())
    ]


States = npt.NDArray[np.int8]
UNREADABLE: Final = np.int8(0)
READ: Final = np.int8(1)
LEFT: Final = np.int8(2)
"""JSON has no word for a number that is none; a value with one is left alone."""
Read = Callable[[pa.Table], tuple[Hashes, States]]
"""The hashes of a table's rows, and what each of them is."""


def _reading(plan: Plan, decoder: SourceDecoder) -> Read:
    if plan.is_raw:
        return _read_raw
    if plan.is_json:
        return _json_reading(plan, decoder)

    def read(table: pa.Table) -> tuple[Hashes, States]:
        columns: dict[str, pa.Array] = {}
        for name, source in plan.named.items():
            try:
                columns[source] = as_type(table.column(name), decoder.types[source])
            except Incomparable:
                return np.zeros(table.num_rows, np.uint64), np.full(table.num_rows, UNREADABLE)
        return _in_order(columns, plan), np.full(table.num_rows, READ)

    return read


def _in_order(columns: Mapping[str, pa.Array], plan: Plan) -> Hashes:
    return hash_rows({name: columns[name] for name in plan.columns})


def _read_raw(table: pa.Table) -> tuple[Hashes, States]:
    columns = {"_key": table.column("key"), "_raw": table.column("value")}
    return hash_rows({name: columns[name] for name in RAW}), np.full(table.num_rows, READ)


def _json_reading(plan: Plan, decoder: SourceDecoder) -> Read:
    fields = tuple(Field(name, decoder.ddl[source], required=False) for name, source in plan.named.items())
    values = compile_decoder(Decoding("json", fields))

    def read(table: pa.Table) -> tuple[Hashes, States]:
        texts = table.column("value").combine_chunks().cast(pa.binary())
        columns, errors = values.decode(texts)
        by_name = dict(zip(plan.named.values(), columns, strict=True))
        states = np.full(table.num_rows, READ)
        for row in np.flatnonzero(errors.is_valid().to_numpy(zero_copy_only=False)).tolist():
            states[row] = LEFT if _NOT_NUMBERS.search(texts[row].as_py()) else UNREADABLE
        return _in_order(by_name, plan), states

    return read


def _by_place(
    table: pa.Table, places: Mapping[tuple[str, int], Place]
) -> Iterator[tuple[Place, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
    """The rows of each partition, and their offsets; rows from elsewhere are not ours to compare."""
    topics = table.column(LINEAGE[0]).combine_chunks()
    if not pa.types.is_dictionary(topics.type):
        topics = pc.dictionary_encode(topics)
    names = topics.dictionary.to_pylist()
    codes, partitions, offsets = (
        pc.fill_null(column.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
        for column in (topics.indices, *(table.column(name).combine_chunks() for name in LINEAGE[1:3]))
    )
    mixed = np.where((codes >= 0) & (partitions >= 0), (codes << 32) | partitions, -1)
    for code in np.unique(mixed).tolist():
        place = None if code < 0 else places.get((names[code >> 32], code & 0xFFFFFFFF))
        if place is not None:
            rows = np.flatnonzero(mixed == code)
            yield place, rows, offsets[rows]
