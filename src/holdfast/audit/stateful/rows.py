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

Codes = npt.NDArray[np.int64]
WIDE: Final = 2**62


class KeysDiffer(ValueError):
    """A sink's column cannot be read as the source's."""


class KeySpace:
    """The keys of all records: equal numbers, equal keys. Nulls are equal to each other."""

    def __init__(self, columns: Sequence[pa.ChunkedArray], rows: int) -> None:
        self._values: list[pa.Array] = []
        self._types = [column.type for column in columns]
        self._narrowed: dict[int, Codes] = {}
        """Before which column the numbers were made small again, and those that there were."""
        self.codes: Codes = np.zeros(rows, np.int64)
        for number, column in enumerate(columns):
            encoded = _combined(_comparable(column)).dictionary_encode()
            self._values.append(encoded.dictionary)
            size = len(encoded.dictionary) + 1
            if len(self.codes) and int(self.codes.max()) > WIDE // size:
                self._narrowed[number], self.codes = np.unique(self.codes, return_inverse=True)
            self.codes = self.codes * size + _numbers(pc.fill_null(encoded.indices, -1)) + 1

    def codes_of(self, columns: Sequence[pa.ChunkedArray]) -> Codes:
        """Of rows of a sink; keys that no record has are below 0, each by a number of its own."""
        held = [_as_type(column, kind) for column, kind in zip(columns, self._types, strict=True)]
        rows = len(held[0]) if held else 0
        codes = np.zeros(rows, np.int64)
        known = np.ones(rows, np.bool_)
        for number, (column, values) in enumerate(zip(held, self._values, strict=True)):
            if number in self._narrowed:
                codes, is_there = _found(self._narrowed[number], codes)
                known &= is_there
            plain = _combined(_comparable(column))
            at = _numbers(pc.fill_null(pc.index_in(plain, value_set=values, skip_nulls=True), -1)) + 1
            known &= (at > 0) | _flags(plain.is_null())
            codes = codes * (len(values) + 1) + at
        if not known.all():
            strangers = [column.filter(pa.array(~known)) for column in held]
            codes[~known] = -1 - KeySpace(strangers, int((~known).sum())).codes
        return codes


def _found(values: Codes, codes: Codes) -> tuple[Codes, npt.NDArray[np.bool_]]:
    if len(values) == 0:
        return np.zeros(len(codes), np.int64), np.zeros(len(codes), np.bool_)
    at = np.minimum(np.searchsorted(values, codes), len(values) - 1)
    return at.astype(np.int64), values[at] == codes


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


def sorting(*columns: Codes) -> Codes:
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


Times = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

NOTHING: Final = -(2**63)
"""In place of a time that is not there: before everything."""
RECORD_TIME: Final = "_timestamp"
ID_HEADER: Final = "hf-id"
ID_COLUMN: Final = "hf-id"
"""The column of a spooling producer's numbers, beside those of the values."""
FIXED: Final = ("offset", "event", "seen", "decoded", "tombstone")
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


@dataclass
class Rows:
    """All records of the scope, by topic, partition and offset."""

    places: tuple[Place, ...]
    bounds: Numbers
    """Where each place begins, and the end."""
    offsets: Numbers
    events: Times
    """`NOTHING`: the record has none."""
    seen: Times
    """The greatest event before it in its partition."""
    greatest: tuple[int, ...]
    """By place, of all its events that count."""
    is_decoded: Flags
    is_tombstone: Flags
    columns: Mapping[str, pa.ChunkedArray]

    @classmethod
    def of(
        cls, table: pa.Table, places: tuple[Place, ...], sizes: Sequence[int], greatest: tuple[int, ...]
    ) -> Rows:
        """Of a table as `as_table` makes it, whose places follow each other."""
        offsets, events, seen, decoded, tombstones = (np.asarray(table.column(name)) for name in FIXED)
        return cls(
            places,
            np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
            offsets,
            events,
            seen,
            greatest,
            decoded.astype(np.bool_, copy=False),
            tombstones.astype(np.bool_, copy=False),
            {
                name.removeprefix(COLUMN): table.column(name)
                for name in table.column_names
                if name.startswith(COLUMN)
            },
        )

    def as_table(self) -> pa.Table:
        fixed = (self.offsets, self.events, self.seen, self.is_decoded, self.is_tombstone)
        columns = {COLUMN + name: column for name, column in self.columns.items()}
        return pa.table(dict(zip(FIXED, fixed, strict=True)) | columns)

    def __len__(self) -> int:
        return len(self.offsets)

    def slice_of(self, number: int) -> slice:
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))

    def place_numbers(self) -> npt.NDArray[np.int32]:
        return np.repeat(np.arange(len(self.places), dtype=np.int32), np.diff(self.bounds))

    def hashes(self) -> Hashes:
        """Of the places, as lineage digests have them."""
        parts = [
            hashes_of_offsets(place.topic, place.partition, self.offsets[self.slice_of(number)])
            for number, place in enumerate(self.places)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def where(self, chosen: Flags) -> Rows:
        counts = np.bincount(self.place_numbers()[chosen], minlength=len(self.places))
        return Rows(
            self.places,
            np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
            self.offsets[chosen],
            self.events[chosen],
            self.seen[chosen],
            self.greatest,
            self.is_decoded[chosen],
            self.is_tombstone[chosen],
            {name: column.filter(pa.array(chosen)) for name, column in self.columns.items()},
        )

    def seen_by(self, number: int, ends: Numbers) -> Times:
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

    needs_headers: bool

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
                if part.start < part.stop:
                    self._parts[place].append(before.as_table().slice(part.start, part.stop - part.start))
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
        tables = [each for part in parts for each in part]
        nothing = pa.table(dict.fromkeys(FIXED, pa.array([], pa.int64())))
        whole = pa.concat_tables(tables) if tables else nothing
        return Rows.of(whole, places, sizes, tuple(self._greatest[place] for place in places))


def _milliseconds(times: pa.Array) -> Times:
    """Rounded down; `NOTHING` for null."""
    micros = times.cast(pa.timestamp("us", tz=times.type.tz)).cast(pa.int64())
    known = _flags(micros.is_valid())
    filled = _numbers(pc.fill_null(micros, 0))
    return np.where(known, filled // 1000, NOTHING)


def _numbers(column: pa.Array) -> Numbers:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.int64)


def _flags(column: pa.Array) -> Flags:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)
