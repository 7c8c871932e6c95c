"""Values of records and values of rows, held against each other as multisets, out of core.

A value is bytes in canonical form, or null; null equals null. Records come with where they stand in the log and in
which zone: before the scope, in it, or after it; rows with where they were found. A `ScratchDatabase` counts them by
value, byte by byte.

The rules, for a value that the log has `before`, `scope` and `after` times, and the sink `rows` times:

- fewer rows than `scope`: the difference is *lost*, whatever the rows stand for; the last records are named;
- more rows than `before + scope + after`: the difference is *duplicated* where the log has the value at all (the first
  records are named), and *extra* where it does not;
- enough rows for the scope and too few for what came before it as well: *unsure*, since the rows may stand for either.

Where a sink keeps one row for each value (`is_distinct`), the log's records of one value are one, the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.audit.model import BUCKETS_MAX, Fate, Timeline
from holdfast.pipeline.scratch import ScratchDatabase

EXAMPLES_MAX: Final = 5
KEPT_EXTRA_MAX: Final = 100_000
"""Extra values that are looked for among records taken back; more than that is one finding anyway."""

Numbers = npt.NDArray[np.int64]


class Zone(IntEnum):
    BEFORE = 0
    SCOPE = 1
    AFTER = 2


_RECORDS: Final = pa.schema(
    {
        "value": pa.large_binary(),
        "place": pa.int32(),
        "log_offset": pa.int64(),
        "zone": pa.int8(),
        "time_ms": pa.int64(),
    }
)
_ROWS: Final = pa.schema({"value": pa.large_binary(), "source": pa.int32(), "number": pa.int64()})

_ODD: Final = pa.schema(
    {"value": pa.large_binary()}
    | dict.fromkeys(("before", "scope", "total", "there", "lost", "surplus"), pa.int64())
)
_JUDGED: Final = pa.schema(
    {"place": pa.int32(), "log_offset": pa.int64(), "zone": pa.int8(), "time_ms": pa.int64()}
    | {"is_lost": pa.bool_(), "is_twice": pa.bool_(), "rows": pa.int64(), "fate": pa.string()}
)
_COUNT: Final = """
INSERT INTO odd
SELECT *, {lost} AS lost, {surplus} AS surplus
FROM (
    SELECT value,
        count(*) FILTER (zone = 0) AS before,
        count(*) FILTER (zone = 1) AS scope,
        count(*) FILTER (zone < 3) AS total,
        count(*) FILTER (zone = 3) AS there
    FROM (SELECT value, zone FROM records UNION ALL SELECT value, 3 FROM rows)
    WHERE {chosen}
    GROUP BY value
)
WHERE total > 1 OR there <> total AND (scope > 0 OR there > 0)
"""
"""Of every value but those that stand once in the log, and as often in the sink or outside of the scope."""
_EACH: Final = {
    "lost": "greatest(scope - there, 0)",
    "surplus": "if(total > 0, greatest(there - total, 0), 0)",
}
_DISTINCT: Final = {
    "lost": "if(scope > 0 AND there = 0, 1, 0)",
    "surplus": "if(total > 0, greatest(there - 1, 0), 0)",
}
_JUDGE: Final = """
INSERT INTO judged
SELECT place, log_offset, zone, time_ms, is_lost, is_twice, if(is_twice AND rank = 1, surplus, 0) AS rows,
    CASE WHEN is_lost THEN 'lost' WHEN is_twice THEN 'duplicated' WHEN is_old THEN 'superseded' END AS fate
FROM (
    SELECT *, zone = 1 AND from_end <= lost AS is_lost,
        rank <= {named} AS is_twice,
        {distinct} AND zone = 1 AND from_end > 1 AS is_old
    FROM (
        SELECT place, log_offset, zone, time_ms, lost, surplus,
            row_number() OVER (PARTITION BY odd.value, zone = 1 ORDER BY place DESC, log_offset DESC) AS from_end,
            row_number() OVER (PARTITION BY odd.value ORDER BY {order}) AS rank
        FROM (SELECT * FROM records WHERE {chosen}) AS records
        JOIN (SELECT * FROM odd WHERE {chosen} AND (lost > 0 OR surplus > 0 OR {distinct})) AS odd
        ON records.value IS NOT DISTINCT FROM odd.value
    )
)
"""
_SUMS: Final = """
SELECT
    sum(total) FILTER (total > 1) AS repeats,
    sum(there) FILTER (total = 0 AND {asked}) AS extra,
    sum(there) FILTER (total = 0 AND NOT {asked}) AS null_rows,
    sum(least(scope, greatest(before + scope - there, 0))) FILTER (scope > 0 AND lost = 0) AS unsure
FROM odd
"""
_FATES: Final = """
SELECT place, coalesce(fate, 'output') AS fate, bucket, sum(count)::BIGINT AS count
FROM (
    SELECT place, NULL AS fate, {bucket} AS bucket, count(*) AS count FROM records WHERE zone = 1 GROUP BY ALL
    UNION ALL
    SELECT place, unnest([fate, NULL]), {bucket}, unnest([1, -1]) FROM judged
    WHERE zone = 1 AND fate IS NOT NULL
)
GROUP BY ALL HAVING sum(count) > 0
"""
_LAST: Final = """
SELECT place, max(log_offset) AS log_offset FROM records
ANTI JOIN (SELECT place, log_offset FROM judged WHERE is_lost) USING (place, log_offset)
WHERE zone = 1 GROUP BY place
"""
_EXAMPLES: Final = """
SELECT rows.value, source, number FROM rows JOIN odd ON rows.value IS NOT DISTINCT FROM odd.value
WHERE total = 0 AND {asked} ORDER BY source, number, rows.value LIMIT {limit}
"""


class Extra(NamedTuple):
    """A row that no record explains."""

    value: bytes | None
    source: int
    row: int


@dataclass
class Outcome:
    """What records and rows say of each other."""

    rows: int = 0
    fates: dict[int, dict[Fate, int]] = field(default_factory=dict)
    """Of the records of the scope, by place."""
    lost: dict[int, Numbers] = field(default_factory=dict)
    """Offsets by place, ascending."""
    last_there: dict[int, int] = field(default_factory=dict)
    """By place: the greatest offset of the scope that a row stands for."""
    duplicated: dict[int, Numbers] = field(default_factory=dict)
    duplicated_rows: dict[int, int] = field(default_factory=dict)
    """How many rows there are too many, by the place of the record they repeat."""
    extra: int = 0
    extra_examples: list[Extra] = field(default_factory=list)
    extra_values: pa.Array = field(default_factory=lambda: pa.array([], pa.large_binary()))
    """The values of extra rows, at most `KEPT_EXTRA_MAX`."""
    extra_counts: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    """How many rows each of them has."""
    null_rows: int = 0
    """Rows whose value is null and which no record explains; they are not among the extra ones."""
    unsure: int = 0
    repeats: int = 0
    """How many records have a value that another one has too."""
    times: dict[Fate, Numbers] = field(default_factory=dict)
    """Records of the scope by fate, one number for each bucket of time."""


@dataclass(frozen=True)
class Buckets:
    """Of time, for the plots."""

    start_ms: int
    step_ms: int
    count: int

    @classmethod
    def between(cls, first_ms: int, last_ms: int) -> Buckets:
        span = max(0, last_ms - first_ms) + 1
        step = max(1, -(-span // BUCKETS_MAX))
        return cls(first_ms, step, -(-span // step))

    @property
    def expression(self) -> str:
        """The number of a record's bucket."""
        return f"least(greatest((time_ms - {self.start_ms}) // {self.step_ms}, 0), {self.count - 1})"

    def timeline(self, times: Mapping[Fate, Numbers]) -> Timeline:
        starts = tuple(self.start_ms + self.step_ms * place for place in range(self.count))
        counts = {str(fate): tuple(numbers.tolist()) for fate, numbers in times.items() if numbers.any()}
        return Timeline(self.step_ms, starts, counts) if counts else Timeline()


class MatchedValues:
    """Takes the rows of a sink and the records of a log, and compares them once."""

    def __init__(self, database: ScratchDatabase) -> None:
        self._database = database
        self._row_count = 0
        database.create("records", _RECORDS)
        database.create("rows", _ROWS)
        database.create("odd", _ODD)
        database.create("judged", _JUDGED)

    def add_rows(self, values: pa.Array, source: int, numbers: npt.NDArray[Any]) -> None:
        self._row_count += len(values)
        sources = np.full(len(values), source, np.int32)
        self._database.add("rows", pa.table([values, sources, numbers], schema=_ROWS))

    def add_records(
        self, values: pa.Array, place: int, zone: Zone, offsets: Numbers, times_ms: Numbers
    ) -> None:
        places, zones = np.full(len(values), place, np.int32), np.full(len(values), zone, np.int8)
        columns = [values, places, offsets, zones, times_ms]
        self._database.add("records", pa.table(columns, schema=_RECORDS))

    def compare(self, buckets: Buckets, *, is_distinct: bool = False, nulls_apart: bool = False) -> Outcome:
        """`nulls_apart`: rows that are null and have no record are counted, not called extra."""
        ask = self._database.query
        order = "zone DESC, place DESC, log_offset DESC" if is_distinct else "zone, place, log_offset"
        named = "least(surplus, 1)" if is_distinct else "surplus"
        for chosen in self._database.passes(["value"]):
            rules = _DISTINCT if is_distinct else _EACH
            self._database.execute(_COUNT.format(chosen=chosen, **rules))
            self._database.execute(
                _JUDGE.format(chosen=chosen, distinct=is_distinct, named=named, order=order)
            )
        asked = "odd.value IS NOT NULL" if nulls_apart else "true"
        [sums] = ask(_SUMS.format(asked=asked)).to_pylist()
        repeats, extra, null_rows, unsure = (int(sums[name] or 0) for name in sums)
        outcome = Outcome(self._row_count, extra=extra, null_rows=null_rows, repeats=repeats)
        outcome.unsure = 0 if is_distinct else unsure
        self._note_fates(outcome, buckets)
        outcome.last_there = {row["place"]: row["log_offset"] for row in ask(_LAST).to_pylist()}
        for found, which in ((outcome.lost, "is_lost"), (outcome.duplicated, "is_twice")):
            named = ask(f"SELECT place, log_offset FROM judged WHERE {which} ORDER BY ALL")
            places, offsets = (named.column(name).to_numpy() for name in ("place", "log_offset"))
            found |= {int(place): offsets[places == place] for place in np.unique(places)}
        rows = ask("SELECT place, sum(rows)::BIGINT AS rows FROM judged GROUP BY place HAVING sum(rows) > 0")
        outcome.duplicated_rows = {row["place"]: row["rows"] for row in rows.to_pylist()}
        if extra:
            examples = ask(_EXAMPLES.format(asked=asked, limit=EXAMPLES_MAX)).to_pylist()
            outcome.extra_examples = [Extra(*row.values()) for row in examples]
            kept = ask(f"SELECT value, there FROM odd WHERE total = 0 AND {asked} LIMIT {KEPT_EXTRA_MAX}")
            outcome.extra_values = kept.column("value").cast(pa.large_binary()).combine_chunks()
            outcome.extra_counts = kept.column("there").to_numpy()
        return outcome

    def _note_fates(self, outcome: Outcome, buckets: Buckets) -> None:
        for row in self._database.query(_FATES.format(bucket=buckets.expression)).to_pylist():
            fate = Fate(row["fate"])
            known = outcome.fates.setdefault(row["place"], {})
            known[fate] = known.get(fate, 0) + row["count"]
            times = outcome.times.setdefault(fate, np.zeros(buckets.count, np.int64))
            times[row["bucket"]] += row["count"]
