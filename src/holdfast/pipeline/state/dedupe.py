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

What a batch reads and writes: narrow columns of its rows are written down once, and counted on the way; of the state,
what lies within `within` of the batch's rows is scanned for their hashes. One shuffle by hash then brings together what
may be equal. A worker judges one by one only rows that share a hash, and writes two files: the places of duplicates
(what goes on is everything else), and those that went on, as a part of the state's new segment. A file counts only when
its worker's report names it. The driver does the worker's part of a small batch.

Times are whole milliseconds.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import StepError, Unbalanced
from holdfast.pipeline.core.frames import failure_report, metrics_of, raise_reported, reports_of
from holdfast.pipeline.core.sql import PLACE, PLACE_COLUMNS, PLACE_DDL, quoted
from holdfast.pipeline.definition.model import Dedupe
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.digest import Tally, digest_of_offsets, hash_sql, tally_of, tally_sql
from holdfast.pipeline.state.operator import DUPLICATES, LATE, OperatorContext, OperatorResult
from holdfast.pipeline.state.segments import UNTIL, Segment, merged, not_seen

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ID_HEADER: Final = "hf-id"
ID_COLUMN: Final = "hf_id"
REACH: Final = 2
"""How long a row is remembered, in times of `within`."""
SMALL_ROWS: Final = 10_000
"""Up to so many rows the driver judges itself: handing them to a task costs more."""
TASK_ROWS: Final = 25_000
"""Of fewer rows there are fewer tasks than cores: starting one costs as much as judging these."""
TASK_ROWS_MAX: Final = 500_000
"""About so many rows of a batch are held and judged by one task: some 50 MB of narrow columns."""
SLAB_ROWS: Final = 65_536
"""Rows that are made Python objects at a time."""
BROADCAST_ROWS_MAX: Final = 1_000_000
"""Hashes of a batch's rows that are handed to every task, some 50 MB of them; more are shuffled."""
BROADCAST_PLACES_MAX: Final = 250_000
"""The same of places, which are larger."""
_NOWHERE: Final = tuple(
    f"CAST(NULL AS {kind}) AS {name}" for name, kind in (part.split() for part in PLACE_DDL.split(", "))
)
OWN_NAMES: Final = frozenset({"_t", "_h", UNTIL, "_route", "_new", "_hash", *PLACE_COLUMNS})
JUDGED, KEYLESS, TOO_LATE = 0, 1, 2

SIMPLE: Final = "boolean tinyint smallint int bigint string binary decimal date timestamp timestamp_ntz"
"""Types that a key can have: of their values, as `_comparable` gives them to Python, `==` there is equality here."""
FLOATING: Final = frozenset({"float", "double"})
"""Kept as text, which has one form for each value: 0 and -0 are equal, and so is not-a-number to itself."""


@dataclass(frozen=True)
class _Key:
    """One column of the key: its name in the state, its type there, and SQL for it over the rows."""

    name: str
    type: str
    of_row: str

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
        written, found = self._written(rows, keys, context)
        verdict = self._verdict(written.where(f"_route = {JUDGED}"), found[JUDGED], keys, context)
        added = () if verdict.added is None else (verdict.added,)
        grown = replace(context.state, segments=(*context.state.segments, *added))
        state = replace(grown, segments=merged(context, self.name, _state_ddl(keys), grown.segments))
        taken = verdict.passed + found[KEYLESS].tally
        route = self._route_sql(keys)
        return OperatorResult(
            rows=verdict.others(rows.where(f"({route}) <> {TOO_LATE}")),
            state=state,
            taken=taken,
            late=found[TOO_LATE].tally,
            duplicate=verdict.doubled,
            row_count=taken.rows,
            streams={LATE: rows.where(f"({route}) = {TOO_LATE}"), DUPLICATES: verdict.duplicates(rows)},
            places={DUPLICATES: verdict.lineage} if verdict.doubles is not None else {},
            counters={"expired": verdict.dead + grown.rows - state.rows},
        )

    def _verdict(
        self, judged: DataFrame, given: _Route, keys: Sequence[_Key], context: OperatorContext
    ) -> _Verdict:
        if not given.tally.rows:
            return _Verdict(Tally(), Tally(), 0, None, None)
        job = _Job(
            self._within_ms,
            tuple(key.name for key in keys),
            context.next_watermark_ms,
            context.store.segment_dir(context.label, self.name),
            self._scratch(context, "duplicates"),
        )
        for directory in (job.state_directory, job.places_directory):
            os.makedirs(directory, exist_ok=True)
        rows = given.tally.rows
        lines = self._lines(judged, given, keys, context)
        is_small = rows <= SMALL_ROWS
        if not is_small:
            cores = context.spark.sparkContext.defaultParallelism
            tasks = max(-(-rows // TASK_ROWS_MAX), min(cores, -(-rows // TASK_ROWS)))
            lines = lines.repartition(tasks, "_h")
        found = reports_of(lines, partial(_judge, job), REPORT, is_small=is_small)
        reports = [json.loads(row["report"]) for row in found]
        raise_reported(reports)
        doubled = sum((Tally(*report["doubled"]) for report in reports), Tally())
        dead = sum(report["dead"] for report in reports)
        places = [report["places_file"] for report in reports if report["places_file"]]
        for path in places:
            if not os.path.exists(path):
                raise not_seen(f"a task wrote places to {path}, and this machine does not see it there")
        added = context.store.adopt(
            job.state_directory, reported=[report["state_file"] for report in reports]
        )
        if rows != doubled.rows + dead + (added.rows if added else 0):
            raise Unbalanced(
                f"step {self.name!r}: of {rows} rows {doubled.rows} are duplicates, {dead} are over already and "
                f"{added.rows if added else 0} went into the state. Nothing was committed; please report this"
            )
        doubles = context.spark.read.schema(PLACE_DDL).parquet(*places) if places else None
        return _Verdict(given.tally - doubled, doubled, dead, added, doubles)

    # -------------------------------------------------------------------- keys and times

    def _keys(self, rows: StructType) -> tuple[_Key, ...]:
        if self._step.by == "hf-id":
            value = f"get(filter(_hf.headers, h -> h.key = '{ID_HEADER}'), 0).value"
            return (_Key(ID_COLUMN, "binary", value),)
        if not self._step.key:
            raise StepError(self.name, "it has no key: name the columns, or say `by: hf-id`")
        types = {field.name: field.dataType.simpleString() for field in rows.fields}
        return tuple(self._key(name, types) for name in self._step.key)

    def _key(self, name: str, types: Mapping[str, str]) -> _Key:
        if name not in types or name in OWN_NAMES:
            raise StepError(self.name, f"the rows have no column {name!r} to be a key")
        column = quoted(name)
        if types[name] in FLOATING:
            return _Key(name, "string", f"CAST(CAST({column} AS DOUBLE) + 0D AS STRING)")
        if types[name].partition("(")[0] not in SIMPLE.split():
            raise StepError(
                self.name,
                f"the key's column {name!r} is {types[name]}; keys are made of simple values (text, numbers, times, "
                "binary): take its parts in a step before",
            )
        return _Key(name, types[name], column)

    def _route_sql(self, keys: Sequence[_Key]) -> str:
        """Of a row, by itself: whether it has a key, and whether it is too late to be judged."""
        keyless = " AND ".join(f"{key.of_row} IS NULL" for key in keys)
        end = f"unix_millis(_hf.event_time) + {self._within_ms}L"
        late = f"_hf.event_time IS NULL OR coalesce({end} <= unix_millis(_hf.watermark), false)"
        return f"CASE WHEN {keyless} THEN {KEYLESS} WHEN {late} THEN {TOO_LATE} ELSE {JUDGED} END"

    # -------------------------------------------------------------------- the batch's rows

    def _written(
        self, rows: DataFrame, keys: Sequence[_Key], context: OperatorContext
    ) -> tuple[DataFrame, Mapping[int, _Route]]:
        """What is needed of each row, written down: the steps before are not run again for it. And its counts."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        chosen = rows.selectExpr(
            *(f"{key.of_row} AS {key.quoted}" for key in keys),
            f"xxhash64({', '.join(key.of_row for key in keys)}) AS _h",
            "unix_millis(_hf.event_time) AS _t",
            *(f"_hf.`{part}` AS _hf_{part}" for part in PLACE),
            f"{self._route_sql(keys)} AS _route",
        )
        counts = f.expr(_counts_sql())
        counted = Observation()
        path = self._scratch(context, "rows")
        # Read twice and gone: dictionaries of keys that hardly repeat cost more than they save.
        chosen.observe(counted, counts).write.options(
            compression="lz4_raw", **{"parquet.enable.dictionary": "false"}
        ).parquet(path)
        ddl = f"{_columns_ddl(keys)}, _h bigint, _t bigint, {PLACE_DDL}, _route int"
        written = context.spark.read.schema(ddl).parquet(path)
        found = metrics_of(counted) or written.agg(counts).collect()[0]
        return written, _routes(json.loads(found["counts"]))

    def _lines(
        self, judged: DataFrame, given: _Route, keys: Sequence[_Key], context: OperatorContext
    ) -> DataFrame:
        """What may be equal in one task each: the batch's rows, and of the state what has the hash of one."""
        names = [key.quoted for key in keys]
        lines = judged.selectExpr("_h", *names, "true AS _new", *PLACE_COLUMNS, "_t")
        remembered = context.store.frame(
            context.spark,
            context.state,
            _state_ddl(keys),
            until_above=_greatest(context.watermark_ms, given.low_ms + (REACH - 1) * self._within_ms),
            until_to=given.high_ms + (REACH + 1) * self._within_ms - 1,
            whole=True,
        )
        if remembered is not None:
            hashed = remembered.selectExpr(
                f"xxhash64({', '.join(names)}) AS _h", *names, "false AS _new", *_NOWHERE, "_t"
            )
            known = hashed.join(_small(judged.select("_h"), given.tally.rows), "_h", "left_semi")
            lines = lines.unionAll(known)
        return lines

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


@dataclass(frozen=True)
class _Job:
    """What a worker is told; pickled to it."""

    within_ms: int
    keys: tuple[str, ...]
    dead_to_ms: int | None
    """Rows that end at or before it are over where the batch ends."""
    state_directory: str
    places_directory: str


REPORT: Final = "report string"


def _judge(job: _Job, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One report of all rows here: those of the batch, and those of the state that share a hash with one."""
    try:
        report = _judged(job, list(batches))
    except (HoldfastError, OSError) as error:
        report = failure_report(error)
    yield pa.RecordBatch.from_arrays([pa.array([json.dumps(report)], pa.string())], names=["report"])


def _judged(job: _Job, batches: Sequence[pa.RecordBatch]) -> Mapping[str, Any]:
    if not batches:
        return {"doubled": [0, 0], "dead": 0, "state_file": None, "places_file": None}
    table = pa.Table.from_batches(batches)
    is_double = _duplicates(job, table)
    has_passed = np.asarray(table.column("_new")) & ~is_double
    times = table.column("_t").to_numpy()
    until = times + REACH * job.within_ms
    lives = has_passed if job.dead_to_ms is None else has_passed & (until > job.dead_to_ms)
    kept = np.flatnonzero(lives)
    kept = kept[np.argsort(times[kept], kind="stable")]
    added = table.select([*job.keys, "_t"]).take(pa.array(kept)).append_column(UNTIL, pa.array(until[kept]))
    places = table.select(PLACE_COLUMNS).filter(pa.array(is_double))
    doubled = _tally_of_places(places)
    return {
        "doubled": [doubled.rows, doubled.digest],
        "dead": int(np.count_nonzero(has_passed)) - len(kept),
        # A key of one column hardly repeats; times in order take less than half when only their steps are stored.
        "state_file": _file(
            job.state_directory,
            added,
            use_dictionary=list(job.keys) if len(job.keys) > 1 else False,
            column_encoding=dict.fromkeys(("_t", UNTIL), "DELTA_BINARY_PACKED"),
        ),
        "places_file": _file(job.places_directory, places),
    }


def _duplicates(job: _Job, table: pa.Table) -> npt.NDArray[np.bool_]:
    """Which rows are duplicates; only those that share a hash are looked at one by one."""
    is_double = np.zeros(table.num_rows, np.bool_)
    chains: defaultdict[tuple[Any, ...], Chain] = defaultdict(lambda: Chain(job.within_ms))
    suspected = _in_order(table, _sharing(table.column("_h").to_numpy()))
    narrow = table.select(["_h", "_new", "_t", *job.keys])
    last: int | None = None
    for first in range(0, len(suspected), SLAB_ROWS):
        slab = suspected[first : first + SLAB_ROWS]
        columns = [_comparable(column).to_pylist() for column in narrow.take(pa.array(slab)).columns]
        for row, hashed, is_new, time_ms, *key in zip(slab.tolist(), *columns, strict=True):
            if hashed != last:
                last = hashed
                chains.clear()
            chain = chains[tuple(key)]
            if not is_new:
                chain.remember(time_ms)
            elif not chain.goes_on(time_ms):
                is_double[row] = True
    return is_double


def _sharing(hashes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows whose hash another one has too."""
    order = np.argsort(hashes, kind="stable")
    is_same = np.diff(hashes[order]) == 0
    shared: npt.NDArray[np.int64] = order[np.append(is_same, False) | np.append(False, is_same)]
    return shared


def _in_order(table: pa.Table, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """These rows by hash, and of each those of the state first, then the batch's by place."""
    chosen = table.select(["_h", "_new", *PLACE_COLUMNS]).take(pa.array(rows))
    by_place = [(name, "ascending") for name in chosen.column_names]
    ordered: npt.NDArray[np.int64] = rows[pc.sort_indices(chosen, sort_keys=by_place).to_numpy()]
    return ordered


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times as numbers: Python's own do not reach as far."""
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64())
    return column.cast(pa.int32()) if pa.types.is_date32(column.type) else column


def _tally_of_places(places: pa.Table) -> Tally:
    topic, partition, offset, _ = PLACE_COLUMNS
    groups = places.group_by([topic, partition]).aggregate([(offset, "list")]).to_pylist()
    found = ((each[topic], each[partition], np.array(each[f"{offset}_list"])) for each in groups)
    return sum((Tally(len(each[2]), digest_of_offsets(*each)) for each in found), Tally())


def _file(directory: str, table: pa.Table, **options: Any) -> str | None:
    """A file of these rows under a name of its own; none without rows."""
    if not table.num_rows:
        return None
    path = os.path.join(directory, f"part-{uuid.uuid4().hex}.parquet")
    pq.write_table(table, path, compression="lz4", write_page_checksum=True, **options)
    return path


# ---------------------------------------------------------------------------- counting


@dataclass(frozen=True)
class _Route:
    tally: Tally
    low_ms: int = 0
    high_ms: int = 0


def _counts_sql() -> str:
    """Over the columns as they are written down: one text, since each number by itself would be several questions."""
    place = hash_sql("_hf").replace("_hf.", "_hf_")
    counts = [
        text
        for route in (JUDGED, KEYLESS, TOO_LATE)
        for text in tally_sql(place, when=f"_route = {route}", prefix=f"r{route}_")
    ]
    counts += [f"{each}(CASE WHEN _route = {JUDGED} THEN _t END) AS {each}" for each in ("min", "max")]
    named = ", ".join(f"'{name}', {sql}" for sql, _, name in (text.rpartition(" AS ") for text in counts))
    return f"to_json(named_struct({named})) AS counts"


def _routes(counts: Mapping[str, Any]) -> Mapping[int, _Route]:
    tallies = {route: tally_of(counts, f"r{route}_") for route in (JUDGED, KEYLESS, TOO_LATE)}
    low_ms, high_ms = (counts.get(name, 0) for name in ("min", "max"))
    return {route: _Route(tally, low_ms, high_ms) for route, tally in tallies.items()}


@dataclass(frozen=True)
class _Verdict:
    """What became of the rows that were judged."""

    passed: Tally
    doubled: Tally
    dead: int
    """Of those that passed, how many the state need not keep at all."""
    added: Segment | None
    """Of those that passed, what the state gets; None without any."""
    doubles: DataFrame | None
    """The places of duplicates; None without any."""

    @property
    def lineage(self) -> DataFrame:
        """Of the duplicates: all that is asked of rows that leave."""
        assert self.doubles is not None
        parts = ", ".join(f"'{part}', _hf_{part}" for part in PLACE)
        return self.doubles.selectExpr(f"named_struct({parts}) AS _hf")

    def others(self, rows: DataFrame) -> DataFrame:
        return rows if self.doubles is None else self._joined(rows, self.doubles, "left_anti")

    def duplicates(self, rows: DataFrame) -> DataFrame:
        return rows.where("false") if self.doubles is None else self._joined(rows, self.doubles, "left_semi")

    def _joined(self, rows: DataFrame, doubles: DataFrame, kind: str) -> DataFrame:
        from pyspark.sql import functions as f

        theirs = doubles.selectExpr(*(f"{name} AS _dup{name}" for name in PLACE_COLUMNS))
        equal = " AND ".join(f"_hf.`{part}` = _dup_hf_{part}" for part in PLACE)
        return rows.join(_small(theirs, self.doubled.rows, BROADCAST_PLACES_MAX), f.expr(equal), kind)


def _greatest(one: int | None, other: int) -> int:
    return other if one is None else max(one, other)


# ---------------------------------------------------------------------------- frames


def _columns_ddl(keys: Sequence[_Key]) -> str:
    return ", ".join(f"{key.quoted} {key.type}" for key in keys)


def _state_ddl(keys: Sequence[_Key]) -> str:
    return f"{_columns_ddl(keys)}, _t bigint, _until bigint"


def _small(frame: DataFrame, rows_max: int, limit: int = BROADCAST_ROWS_MAX) -> DataFrame:
    """Handed to every task where it is small enough."""
    from pyspark.sql import functions as f

    return f.broadcast(frame) if rows_max <= limit else frame
