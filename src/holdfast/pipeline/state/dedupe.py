"""Deduplication: of rows with the same key and near in event time, the first goes on.

Rows of a key are judged in the order of topic, partition and offset. A row is a duplicate when one that went on before
it, in this batch or an earlier one, has an event time less than `within` away; else it goes on and is remembered. So
where a key stays in its partition it does not matter how the log was cut into batches.

- A row is late when its time plus `within` is at or before its own watermark: it is not judged any more, and goes
  neither on nor into the state. One that is not late can meet a row `within` older than itself, so the state keeps
  what went on for twice `within`. What it has let go of lies further from every row that can still be judged.
- A row without a key (no `hf-id` among its headers, or nothing but nulls in the key's columns, as in a tombstone) has
  nothing to be compared with: it goes on. A single null in a key of several columns is a value like any other.
- Keys are compared as they are. A hash of them only finds those that may be equal.

What a batch reads and writes: narrow columns of its rows are written down once; of the state, what lies within
`within` of the batch's rows is scanned and compared by hash; of a batch that is not small, only rows that share a hash
with the state or with each other are judged one by one, in sorted order, in Python. Only duplicates are written down:
what goes on is everything else. Those that went on are a new segment of the state.

Times are whole milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.frames import map_in_arrow
from holdfast.pipeline.core.sql import PLACE, PLACE_COLUMNS, PLACE_DDL, quoted
from holdfast.pipeline.definition.model import Dedupe
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.digest import Tally, hash_sql, tally_of, tally_sql
from holdfast.pipeline.state.operator import DUPLICATES, LATE, OperatorContext, OperatorResult
from holdfast.pipeline.state.segments import merged, write_segment

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ID_HEADER: Final = "hf-id"
ID_COLUMN: Final = "hf_id"
REACH: Final = 2
"""How long a row is remembered, in times of `within`."""
SIFTED_ROWS_MIN: Final = 20_000
"""Of fewer rows all are judged one by one: finding those that need it costs more jobs."""
BROADCAST_ROWS_MAX: Final = 1_000_000
"""Hashes of a batch's rows that are handed to every task, some 50 MB of them; more are shuffled."""
BROADCAST_PLACES_MAX: Final = 250_000
"""The same of places, which are larger."""
_NOWHERE: Final = tuple(
    f"CAST(NULL AS {kind}) AS {name}" for name, kind in (part.split() for part in PLACE_DDL.split(", "))
)
_OF_ROWS: Final = tuple(f"_hf.`{part}`" for part in PLACE)
OWN_NAMES: Final = frozenset({"_t", "_h", "_until", "_route", "_new", "_dead", *PLACE_COLUMNS})
JUDGED, KEYLESS, TOO_LATE = 0, 1, 2

SIMPLE: Final = {
    "boolean": "{0}",
    "tinyint": "{0}",
    "smallint": "{0}",
    "int": "{0}",
    "bigint": "{0}",
    "string": "{0}",
    "binary": "{0}",
    "decimal": "{0}",
    "date": "unix_date({0})",
    "timestamp": "unix_micros({0})",
    "timestamp_ntz": "unix_micros(CAST({0} AS TIMESTAMP))",
}
"""Types that a key can have, and how Python gets their values: so that `==` there is equality here."""
FLOATING: Final = frozenset({"float", "double"})
"""Kept as text, which has one form for each value: 0 and -0 are equal, and so is not-a-number to itself."""


@dataclass(frozen=True)
class _Key:
    """One column of the key: its name in the state, its type there, and SQL for it over the rows and over itself."""

    name: str
    type: str
    of_row: str
    plain: str

    @property
    def quoted(self) -> str:
        return quoted(self.name)


class DedupeOperator:
    """One `dedupe` step."""

    has_own_rows = False

    def __init__(self, step: Dedupe) -> None:
        self.name = step.name
        self._step = step
        self._within_ms = parse_duration_ms(step.within)
        if self._within_ms <= 0:
            raise StepError(step.name, f"`within` is {step.within}: nothing is that near")

    def schemas(self, spark: SparkSession, rows: StructType) -> Mapping[str, StructType]:
        self._keys(rows)
        return {"": rows, LATE: rows, DUPLICATES: rows}

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        keys = self._keys(rows.schema)
        places = self._written(rows, keys, context)
        found = _count_routes(places)
        judged = places.where(f"_route = {JUDGED}").drop("_route")
        verdict = self._verdict(judged, found[JUDGED], keys, context)
        segments = context.state.segments
        if verdict.passed.rows > verdict.dead:
            added = write_segment(context, self.name, self._remembered(judged, verdict, keys, context))
            segments = segments if added is None else (*segments, added)
        segments = merged(context, self.name, _state_ddl(keys), segments)
        taken = verdict.passed + found[KEYLESS].tally
        route = self._route_sql(keys)
        return OperatorResult(
            rows=verdict.others(rows.where(f"({route}) <> {TOO_LATE}"), _OF_ROWS),
            state=replace(context.state, segments=segments),
            taken=taken,
            late=found[TOO_LATE].tally,
            duplicate=verdict.doubled,
            row_count=taken.rows,
            streams={LATE: rows.where(f"({route}) = {TOO_LATE}"), DUPLICATES: verdict.duplicates(rows)},
            counters={"expired": verdict.dead + _count_expired(context)},
        )

    def _verdict(
        self, judged: DataFrame, given: _Route, keys: Sequence[_Key], context: OperatorContext
    ) -> _Verdict:
        from pyspark.sql import functions as f

        if not given.tally.rows:
            return _Verdict(Tally(), Tally(), 0, None)
        remembered = context.frame(
            _state_ddl(keys),
            until_above=_greatest(context.watermark_ms, given.low_ms + (REACH - 1) * self._within_ms),
            until_to=given.high_ms + (REACH + 1) * self._within_ms - 1,
        )
        doubles = self._duplicates(judged, given.tally.rows, remembered, keys, context)
        doubled = tally_of(doubles.agg(*map(f.expr, _SUMS)).collect()[0])
        verdict = _Verdict(given.tally - doubled, doubled, 0, doubles if doubled.rows else None)
        # Asked only where the answer can be yes: it is a pass over the rows.
        dead_to_ms = context.next_watermark_ms
        if dead_to_ms is None or given.low_ms + REACH * self._within_ms > dead_to_ms:
            return verdict
        over = f"_t + {REACH * self._within_ms}L <= {dead_to_ms}L"
        return replace(verdict, dead=verdict.others(judged, PLACE_COLUMNS).where(over).count())

    def _remembered(
        self, judged: DataFrame, verdict: _Verdict, keys: Sequence[_Key], context: OperatorContext
    ) -> DataFrame:
        """What the state gets: those that went on and can still matter."""
        until = f"_t + {REACH * self._within_ms}L AS _until"
        fresh = verdict.others(judged, PLACE_COLUMNS).selectExpr(*(key.quoted for key in keys), "_t", until)
        return fresh.where(f"_until > {context.next_watermark_ms}L") if verdict.dead else fresh

    # -------------------------------------------------------------------- keys and times

    def _keys(self, rows: StructType) -> tuple[_Key, ...]:
        if self._step.by == "hf-id":
            value = f"get(filter(_hf.headers, h -> h.key = '{ID_HEADER}'), 0).value"
            return (_Key(ID_COLUMN, "binary", value, f"`{ID_COLUMN}`"),)
        if not self._step.key:
            raise StepError(self.name, "it has no key: name the columns, or say `by: hf-id`")
        types = {field.name: field.dataType.simpleString() for field in rows.fields}
        return tuple(self._key(name, types) for name in self._step.key)

    def _key(self, name: str, types: Mapping[str, str]) -> _Key:
        if name not in types or name in OWN_NAMES:
            raise StepError(self.name, f"the rows have no column {name!r} to be a key")
        column = quoted(name)
        if types[name] in FLOATING:
            return _Key(name, "string", f"CAST(CAST({column} AS DOUBLE) + 0D AS STRING)", column)
        plain = SIMPLE.get(types[name].partition("(")[0])
        if plain is None:
            raise StepError(
                self.name,
                f"the key's column {name!r} is {types[name]}; keys are made of simple values (text, numbers, times, "
                "binary): take its parts in a step before",
            )
        return _Key(name, types[name], column, plain.format(column))

    def _route_sql(self, keys: Sequence[_Key]) -> str:
        """Of a row, by itself: whether it has a key, and whether it is too late to be judged."""
        keyless = " AND ".join(f"{key.of_row} IS NULL" for key in keys)
        end = f"unix_millis(_hf.event_time) + {self._within_ms}L"
        late = f"_hf.event_time IS NULL OR coalesce({end} <= unix_millis(_hf.watermark), false)"
        return f"CASE WHEN {keyless} THEN {KEYLESS} WHEN {late} THEN {TOO_LATE} ELSE {JUDGED} END"

    # -------------------------------------------------------------------- the batch's rows

    def _written(self, rows: DataFrame, keys: Sequence[_Key], context: OperatorContext) -> DataFrame:
        """What is needed of each row, written down: the steps before are not run again for it."""
        chosen = rows.selectExpr(
            *(f"{key.of_row} AS {key.quoted}" for key in keys),
            f"xxhash64({', '.join(key.of_row for key in keys)}) AS _h",
            "unix_millis(_hf.event_time) AS _t",
            *(f"_hf.`{part}` AS _hf_{part}" for part in PLACE),
            f"{self._route_sql(keys)} AS _route",
        )
        ddl = f"{_columns_ddl(keys)}, _h bigint, _t bigint, {PLACE_DDL}, _route int"
        return _written_down(chosen, self._scratch(context, "rows"), ddl)

    def _duplicates(
        self,
        judged: DataFrame,
        count: int,
        remembered: DataFrame | None,
        keys: Sequence[_Key],
        context: OperatorContext,
    ) -> DataFrame:
        """The places of rows that are duplicates."""
        known = None if remembered is None else self._known(judged, count, remembered, keys, context)
        suspected = judged
        if count > SIFTED_ROWS_MIN:
            hashes = judged.groupBy("_h").count().where("count > 1").select("_h")
            hashes = hashes if known is None else hashes.unionAll(known.select("_h"))
            suspected = judged.join(_small(hashes, count), "_h", "left_semi")
        plain = [f"{key.plain} AS {key.quoted}" for key in keys]
        lines = suspected.selectExpr("_h", *plain, "true AS _new", *PLACE_COLUMNS, "_t")
        if known is not None:
            lines = lines.unionAll(known.selectExpr("_h", *plain, "false AS _new", *_NOWHERE, "_t"))
        order = ["_h", *(key.quoted for key in keys), "_new", *PLACE_COLUMNS]
        sorted_lines = lines.repartition("_h").sortWithinPartitions(*order)
        found = map_in_arrow(sorted_lines, partial(_judge, self._within_ms, len(keys)), PLACE_DDL)
        return _written_down(found, self._scratch(context, "duplicates"), PLACE_DDL)

    def _known(
        self,
        judged: DataFrame,
        count: int,
        remembered: DataFrame,
        keys: Sequence[_Key],
        context: OperatorContext,
    ) -> DataFrame:
        """What the state has under a hash of the batch."""
        names = [key.quoted for key in keys]
        hashed = remembered.selectExpr(f"xxhash64({', '.join(names)}) AS _h", "_t", *names)
        hits = hashed.join(_small(judged.select("_h"), count), "_h", "left_semi")
        ddl = f"_h bigint, _t bigint, {_columns_ddl(keys)}"
        return _written_down(hits, self._scratch(context, "known"), ddl)

    def _scratch(self, context: OperatorContext, what: str) -> str:
        return os.path.join(context.scratch, f"{self.name}-{context.label}-{what}")


# ---------------------------------------------------------------------------- judging


class Chain:
    """The times of one key's rows that went on.

    Any two of them are `within` or more apart, so that each has a slot of that width for itself, and what is near a
    time stands in its slot or in one beside it: a key with many rows costs no more for each.
    """

    def __init__(self, within_ms: int) -> None:
        self._within_ms = within_ms
        self._slots: dict[int, int] = {}

    def remember(self, time_ms: int) -> None:
        self._slots[time_ms // self._within_ms] = time_ms

    def goes_on(self, time_ms: int) -> bool:
        """Whether a row of this time is the first of its kind; then it is remembered."""
        slot = time_ms // self._within_ms
        for near in (slot - 1, slot, slot + 1):
            other = self._slots.get(near)
            if other is not None and abs(time_ms - other) < self._within_ms:
                return False
        self._slots[slot] = time_ms
        return True


def _judge(within_ms: int, key_count: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Of rows sorted by hash, key, those of the state before new ones, and place: the places of duplicates."""
    import pyarrow as pa

    last: tuple[Any, ...] | None = None
    chain = Chain(within_ms)
    for batch in batches:
        columns = [column.to_pylist() for column in batch.columns[: key_count + 2]]
        times = batch.column(batch.num_columns - 1).to_pylist()
        doubles = []
        for number, (*key, is_new) in enumerate(zip(*columns, strict=True)):
            if (this := tuple(key)) != last:
                last = this
                chain = Chain(within_ms)
            if not is_new:
                chain.remember(times[number])
            elif not chain.goes_on(times[number]):
                doubles.append(number)
        if doubles:
            chosen = batch.take(pa.array(doubles, pa.int64()))
            yield chosen.select(list(PLACE_COLUMNS))


# ---------------------------------------------------------------------------- counting


@dataclass(frozen=True)
class _Route:
    tally: Tally
    low_ms: int = 0
    high_ms: int = 0


_SUMS: Final = tally_sql(hash_sql("_hf").replace("_hf.", "_hf_"))
"""Over the columns of a place as they are written down."""


def _count_routes(places: DataFrame) -> Mapping[int, _Route]:
    from pyspark.sql import functions as f

    sums = [f.expr(text) for text in (*_SUMS, "min(_t) AS first", "max(_t) AS last")]
    found = {route: _Route(Tally()) for route in (JUDGED, KEYLESS, TOO_LATE)}
    for row in places.groupBy("_route").agg(*sums).collect():
        found[row["_route"]] = _Route(tally_of(row), row["first"] or 0, row["last"] or 0)
    return found


@dataclass(frozen=True)
class _Verdict:
    """What became of the rows that were judged."""

    passed: Tally
    doubled: Tally
    dead: int
    """Of those that passed, how many the state need not keep at all."""
    doubles: DataFrame | None
    """The places of duplicates; None without any."""

    def others(self, frame: DataFrame, columns: Sequence[str]) -> DataFrame:
        """Without the duplicates; `columns` have the place."""
        return frame if self.doubles is None else self._joined(frame, self.doubles, columns, "left_anti")

    def duplicates(self, rows: DataFrame) -> DataFrame:
        if self.doubles is None:
            return rows.where("false")
        return self._joined(rows, self.doubles, _OF_ROWS, "left_semi")

    def _joined(self, frame: DataFrame, doubles: DataFrame, columns: Sequence[str], kind: str) -> DataFrame:
        from pyspark.sql import functions as f

        theirs = doubles.selectExpr(*(f"{name} AS _dup{name}" for name in PLACE_COLUMNS))
        equal = " AND ".join(f"{own} = _dup{name}" for own, name in zip(columns, PLACE_COLUMNS, strict=True))
        return frame.join(_small(theirs, self.doubled.rows, BROADCAST_PLACES_MAX), f.expr(equal), kind)


def _count_expired(context: OperatorContext) -> int:
    """Rows that the state lets go of between the watermark of the batch's start and that of its end."""
    if context.next_watermark_ms is None:
        return 0
    over = context.frame(
        "_until bigint", until_above=context.watermark_ms, until_to=context.next_watermark_ms
    )
    return 0 if over is None else over.count()


def _greatest(one: int | None, other: int) -> int:
    return other if one is None else max(one, other)


# ---------------------------------------------------------------------------- frames


def _columns_ddl(keys: Sequence[_Key]) -> str:
    return ", ".join(f"{key.quoted} {key.type}" for key in keys)


def _state_ddl(keys: Sequence[_Key]) -> str:
    return f"{_columns_ddl(keys)}, _t bigint, _until bigint"


def _written_down(frame: DataFrame, path: str, ddl: str) -> DataFrame:
    # Read a few times and gone: dictionaries of keys that hardly repeat cost more than they save.
    frame.write.options(compression="lz4_raw", **{"parquet.enable.dictionary": "false"}).parquet(path)
    return frame.sparkSession.read.schema(ddl).parquet(path)


def _small(frame: DataFrame, rows_max: int, limit: int = BROADCAST_ROWS_MAX) -> DataFrame:
    """Handed to every task where it is small enough."""
    from pyspark.sql import functions as f

    return f.broadcast(frame) if rows_max <= limit else frame
