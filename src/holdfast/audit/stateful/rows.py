"""The records of the scope as arrays: what stateful steps are recomputed from.

One pass over the source fills them, partition by partition in the order of offsets; when it is done they stand by
topic, partition and offset, the order in which the pipeline itself judges rows of one batch. Of the values only the
columns that some step goes by are kept.

What event time does is decided here, from the log alone (docs/adr/0010): a record's event in whole milliseconds,
rounded down, and the greatest event *before* it in its own partition, of those that are not too far ahead of the time
Kafka keeps with their record. A record that cannot be decoded has no event.

Keys of rows as numbers, the same for records of the source and for rows of a sink.

A sink may hold a key's column in another form: PostgreSQL gives text, a topic JSON. It is brought to the type that
decoding gave the source's column; what cannot be, is no key of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.decoding import Decode
from holdfast.audit.sinks.headers import first_header
from holdfast.pipeline.definition.model import EventTime
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.digest import hashes_of_offsets
from holdfast.pipeline.positions import Place

Numbers = npt.NDArray[np.int64]
"""Keys, times in milliseconds, offsets, numbers of rows."""
Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]
WIDE: Final = 2**62


class KeysDiffer(ValueError):
    """A sink's column cannot be read as the source's."""


def key_codes(*sides: tuple[int, Sequence[pa.ChunkedArray]]) -> list[Numbers]:
    """The keys of rows as numbers: equal numbers, equal keys, on all sides. Nulls are equal to each other.

    Each side is how many rows it has, and the columns of their key; the first says of which types they are."""
    sizes = [rows for rows, _ in sides]
    codes = np.zeros(sum(sizes), np.int64)
    for columns in zip(*(columns for _, columns in sides), strict=True):
        parts = [_comparable(_as_type(column, columns[0].type)) for column in columns]
        chunks = [chunk for part in parts for chunk in part.chunks]
        encoded = _combined(pa.chunked_array(chunks, parts[0].type)).dictionary_encode()
        size = len(encoded.dictionary) + 1
        if len(codes) and int(codes.max()) > WIDE // size:
            codes = np.unique(codes, return_inverse=True)[1]
        codes = codes * size + _numbers(pc.fill_null(encoded.indices, -1)) + 1
    return np.split(codes, np.cumsum(sizes)[:-1])


def _combined(column: pa.ChunkedArray) -> pa.Array:
    made = column.combine_chunks()
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def _as_type(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise KeysDiffer(f"{column.type} is not {kind}: {error}") from error


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """In a type that can hold many, and in which what Spark takes for equal is equal."""
    if pa.types.is_floating(column.type):
        return pc.add(column, pa.scalar(0.0, column.type))  # of -0 and 0 one
    if pa.types.is_string(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_binary(column.type):
        return column.cast(pa.large_binary())
    return column


def key_text(names: Sequence[str], columns: Mapping[str, pa.ChunkedArray], row: int) -> str:
    """One key, to be read: `customer=7, shop=north`."""
    return ", ".join(f"{name}={_shown(columns[name][row].as_py())}" for name in names)


def _shown(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def sorting(*columns: Numbers) -> Numbers:
    """The order by these columns, the first before all: as one number where that fits, which is much quicker."""
    spans = []
    total = 1
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        spans.append((low, high - low + 1))
        total *= high - low + 1
    if total >= WIDE:
        return np.lexsort(columns[::-1])
    mixed = np.zeros(len(columns[0]), np.int64)
    for column, (low, size) in zip(columns, spans, strict=True):
        mixed *= size
        mixed += column - low
    return np.argsort(mixed, kind="quicksort")


# ---------------------------------------------------------------------------- rows


NOTHING: Final = -(2**63)
"""In place of a time that is not there: before everything."""
RECORD_TIME: Final = "_timestamp"
ID_HEADER: Final = "hf-id"
ID_COLUMN: Final = "hf-id"
"""The column of a spooling producer's numbers, beside those of the values."""
NO_ROWS: Final = pa.schema(
    [
        *((name, pa.int64()) for name in ("offset", "event", "seen")),
        *((name, pa.bool_()) for name in ("decoded", "tombstone")),
    ]
).empty_table()
FIXED: Final = tuple(NO_ROWS.column_names)
COLUMN: Final = "column "
"""Before the names of the values' columns, where records stand in one table."""


@dataclass(frozen=True)
class Clock:
    """The rules of a source's event time."""

    field: str
    delay_ms: int
    idle_ms: int | None
    ahead_ms: int

    @classmethod
    def of(cls, event: EventTime) -> Clock:
        idle_ms = None if event.idle is None else parse_duration_ms(event.idle)
        return cls(event.field, parse_duration_ms(event.delay), idle_ms, parse_duration_ms(event.ahead))

    def is_awake(self, active_ms: int | None, now_ms: int) -> bool:
        """Whether a partition that last had records then holds the watermark back."""
        return self.idle_ms is None or (active_ms is not None and now_ms - active_ms < max(1, self.idle_ms))


@dataclass
class Rows:
    """All records of the scope, by topic, partition and offset."""

    table: pa.Table
    """`FIXED`, and the columns of the values behind `COLUMN`. Of records that an earlier audit has handed on also what
    became of them (`stateful.carried`); null for others."""
    places: tuple[Place, ...]
    bounds: Numbers
    """Where each place begins, and the end."""
    greatest: tuple[int, ...]
    """By place, of all its events that count."""

    def __post_init__(self) -> None:
        offsets, events, seen, decoded, tombstones = (np.asarray(self.table.column(name)) for name in FIXED)
        self.offsets: Numbers = offsets
        self.events: Numbers = events
        """`NOTHING`: the record has none."""
        self.seen: Numbers = seen
        """The greatest event before it in its partition."""
        self.is_decoded: Flags = decoded
        self.is_tombstone: Flags = tombstones
        self.columns = self.named(COLUMN)

    @classmethod
    def of(
        cls,
        table: pa.Table,
        places: tuple[Place, ...],
        sizes: Numbers | Sequence[int],
        greatest: tuple[int, ...],
    ) -> Rows:
        """Of a table whose places follow each other."""
        return cls(table, places, np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))), greatest)

    def named(self, prefix: str) -> dict[str, pa.ChunkedArray]:
        """The columns whose names begin so, by the rest of their names."""
        names = (name for name in self.table.column_names if name.startswith(prefix))
        return {name.removeprefix(prefix): self.table.column(name) for name in names}

    def __len__(self) -> int:
        return len(self.offsets)

    def slice_of(self, number: int) -> slice:
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def place_numbers(self) -> npt.NDArray[np.int32]:
        return np.repeat(np.arange(len(self.places), dtype=np.int32), np.diff(self.bounds))

    @cached_property
    def hashes(self) -> Hashes:
        """Of the places, as lineage digests have them."""
        parts = [
            hashes_of_offsets(place.topic, place.partition, self.offsets[self.slice_of(number)])
            for number, place in enumerate(self.places)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def telling(self, columns: Mapping[str, npt.NDArray[Any]]) -> Rows:
        """The same, and this of them."""
        names = [name for name in self.table.column_names if name in FIXED or name.startswith(COLUMN)]
        table = self.table.select(names)
        for name, values in columns.items():
            table = table.append_column(name, pa.array(values))
        return Rows(table, self.places, self.bounds, self.greatest)

    def where(self, chosen: Flags) -> Rows:
        counts = np.bincount(self.place_numbers()[chosen], minlength=len(self.places))
        return Rows.of(self.table.filter(pa.array(chosen)), self.places, counts, self.greatest)

    def seen_by(self, number: int, ends: Numbers) -> Numbers:
        """The greatest event of a place before each of these offsets."""
        part = self.slice_of(number)
        at = np.searchsorted(self.offsets[part], ends)
        through = np.concatenate((self.seen[part], [self.greatest[number]]))
        return through[at]

    def match(self, topic: str, partition: int, offsets: Numbers) -> Numbers:
        """The row of each of these offsets; -1 for one that is no record of the scope."""
        found = np.full(len(offsets), -1, np.int64)
        for number, place in enumerate(self.places):
            part = self.slice_of(number)
            if (place.topic, place.partition) == (topic, partition) and part.stop > part.start:
                ours = self.offsets[part]
                at = np.minimum(np.searchsorted(ours, offsets), len(ours) - 1)
                found = np.where(ours[at] == offsets, at + part.start, -1)
        return found

    def offsets_by_place(self, chosen: Flags) -> dict[Place, Numbers]:
        """Offsets of the rows that are chosen."""
        return {
            place: self.offsets[self.slice_of(number)][chosen[self.slice_of(number)]]
            for number, place in enumerate(self.places)
        }


class Recorder:
    """Sees every record of the source, and keeps what stateful steps go by."""

    def __init__(
        self,
        clock: Clock | None,
        columns: Sequence[str],
        *,
        keeps_ids: bool,
        spans: Iterable[Place],
        before: Rows | None = None,
    ) -> None:
        """`before` are records that come before those of the spans, as an earlier audit has kept them."""
        self._clock = clock
        self._columns = tuple(columns)
        self.needs_headers = keeps_ids
        self._parts: dict[Place, list[pa.Table]] = {place: [] for place in spans}
        self._greatest = dict.fromkeys(self._parts, NOTHING)
        for number, place in enumerate(() if before is None else before.places):
            if before is not None and place in self._parts:
                part = before.slice_of(number)
                self._parts[place].append(before.table.slice(part.start, part.stop - part.start))
                self._greatest[place] = before.greatest[number]

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        if batch.num_rows == 0:
            return
        found = decoded()
        is_decoded = found.errors.is_null()
        events = seen = np.full(batch.num_rows, NOTHING, np.int64)
        if self._clock is not None:
            times = _milliseconds(batch.column("timestamp"))
            if self._clock.field == RECORD_TIME:
                events = np.where(_flags(is_decoded) & (times >= 0), times, NOTHING)
            else:
                events = _milliseconds(found.columns[self._clock.field])
            # A record without a time (-1) has nothing that its event could be ahead of.
            counting = np.where((times < 0) | (events <= times + self._clock.ahead_ms), events, NOTHING)
            running = np.maximum.accumulate(np.concatenate(([self._greatest[place]], counting)))
            seen, self._greatest[place] = running[:-1], int(running[-1])
        columns = {COLUMN + name: found.columns[name] for name in self._columns}
        if self.needs_headers:
            columns[COLUMN + ID_COLUMN] = first_header(batch.column("headers"), ID_HEADER)
        fixed = (batch.column("offset"), events, seen, is_decoded, batch.column("value").is_null())
        self._parts[place].append(pa.table(dict(zip(FIXED, fixed, strict=True)) | columns))

    def finish(self) -> Rows:
        places = tuple(sorted(self._parts))
        parts = [self._parts.pop(place) for place in places]
        sizes = [sum(each.num_rows for each in part) for part in parts]
        tables = [each for part in parts for each in part] or [NO_ROWS]
        whole = pa.concat_tables(tables, promote_options="default")
        return Rows.of(whole, places, sizes, tuple(self._greatest[place] for place in places))


def _milliseconds(times: pa.Array) -> Numbers:
    """Rounded down; `NOTHING` for null."""
    micros = times.cast(pa.timestamp("us", tz=times.type.tz)).cast(pa.int64())
    known = _flags(micros.is_valid())
    filled = _numbers(pc.fill_null(micros, 0))
    return np.where(known, filled // 1000, NOTHING)


def _numbers(column: pa.Array) -> Numbers:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.int64)


def _flags(column: pa.Array) -> Flags:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)
