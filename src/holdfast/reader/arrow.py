"""Fetched batches to Arrow: every offset of a range is a row, or is counted as what it is.

The machine code (`kernel`) does what is done per record, numpy what is done per batch, Python what is done per fetch.
A run of fetched batches is taken in two steps. `survey` tables the whole batches in it, which tells where the next
fetch begins, so that it can be under way while this one is decoded. `decode` then proves the checksums, unpacks
compressed batches, sorts out control batches and aborted transactions, and makes record batches of the rest.

Nothing of the fetched bytes is kept in the result: the buffer they are in may be used again.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from holdfast.errors import InvalidRecords
from holdfast.reader import kernel, layout
from holdfast.reader.errors import CorruptBatch
from holdfast.reader.fetch_messages import Aborted
from holdfast.reader.model import PartitionRange, RangeReport
from holdfast.wire.batch import (
    CODEC_MASK,
    CONTROL,
    CRC_START,
    LOG_APPEND_TIME,
    RECORDS_BYTES_MAX,
    TRANSACTIONAL,
)
from holdfast.wire.codecs import decompress

SMALL_BYTES: Final = 2048
"""Batches up to this size have their checksum computed by the machine code: a call from Python costs more."""
CHUNK_BYTES_MAX: Final = 1 << 30
"""Arrow's offsets have 31 bits; one batch more than this still fits."""
ROWS_MAX: Final = 1 << 20
"""Of one record batch: a million times the longest topic name still fits those 31 bits."""
EXPECTED_MORE: Final = 1.15
"""What is expected of the next compressed batch, in sizes of the last: too little costs unpacking twice."""
CACHED_ROWS_MAX: Final = 1 << 16
"""Columns of one value are kept up to this length: a few hundred kilobytes each."""
_ABORT: Final = 0

Table = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


@cache
def SCHEMA() -> pa.Schema:  # noqa: N802  it stands for a constant that would cost an import
    """The columns, named and typed as Spark's own connector has them."""
    return pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("timestampType", pa.int32()),
            ("headers", _headers_type()),
        ]
    )


@cache
def _headers_type() -> pa.DataType:
    return pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def warm() -> None:
    """Load everything reading needs; worth it before a process forks its workers."""
    importlib.import_module("holdfast.reader.topic_reader")
    importlib.import_module("holdfast.reader.fetching")
    kernel.load()
    _crc_tables()
    SCHEMA()


class Survey(NamedTuple):
    """The whole batches found in fetched bytes."""

    data: memoryview
    table: Table
    """One row per batch, see `layout`."""
    wanted_bytes: int
    """How large the batch is that was cut off at the end; 0 when its header was cut off too, or there is none."""
    problem: str
    """Why the bytes behind the last batch are no batch; empty when they are a cut-off one, or there are none."""

    @property
    def next_offset(self) -> int:
        """The offset behind the last batch, -1 when there is none."""
        return int(self.table[-1, layout.LAST_OFFSET]) + 1 if len(self.table) else -1

    @property
    def batch_bytes_max(self) -> int:
        """The size of the largest batch, the one cut off included."""
        return max(self.wanted_bytes, int(self.table[:, layout.SIZE].max()) if len(self.table) else 0)

    @property
    def leader_epoch(self) -> int:
        return int(self.table[-1, layout.LEADER_EPOCH]) if len(self.table) else -1


class Reading(NamedTuple):
    """What is to be read of some fetched batches, and how."""

    range: PartitionRange
    start: int
    """Rows before it were read already."""
    report: RangeReport
    aborted: Sequence[Aborted]
    """Aborted transactions among the batches; none for read_uncommitted."""
    headers: bool
    chunk_bytes: int
    check_crc: bool = True


def survey(data: memoryview, *, check_crc: bool = True) -> Survey:
    """Table the whole batches in `data`; damage is told, not raised: what is before it may be all that is wanted."""
    size = len(data)
    if size == 0:
        return Survey(data, np.empty((0, layout.TABLE_COLUMNS), np.int64), 0, "")
    table = np.empty((size // layout.HEADER_BYTES + 1, layout.TABLE_COLUMNS), np.int64)
    results = np.zeros(3, np.int64)
    status = kernel.load().survey(
        np.frombuffer(data, np.uint8).ctypes.data,
        size,
        table.ctypes.data,
        _crc_tables().ctypes.data,
        SMALL_BYTES if check_crc else 0,
        results.ctypes.data,
    )
    found, position, wanted = results.tolist()
    problem = f"{layout.MEANINGS[status]} (at byte {position} of {size} fetched)" if status else ""
    return Survey(data, table[:found], wanted, problem)


def decode(surveyed: Survey, reading: Reading) -> Iterator[pa.RecordBatch]:
    """The rows of the range among surveyed batches; the report gets everything else."""
    table, report, end = surveyed.table, reading.report, reading.range.end
    if surveyed.problem and surveyed.next_offset < end:
        raise _corrupt(reading.range, max(surveyed.next_offset, reading.start), surveyed.problem)
    # Up to the first that reaches the end: if it begins behind it, it is the proof that nothing lies before.
    table = table[: int(np.searchsorted(table[:, layout.LAST_OFFSET], end - 1)) + 1]
    if reading.check_crc:
        _check_checksums(surveyed.data, table, reading.range)
    first = int(np.searchsorted(table[:, layout.LAST_OFFSET], reading.start))
    table = table[first : int(np.searchsorted(table[:, layout.BASE_OFFSET], end))]
    report.bytes += int(table[:, layout.SIZE].sum())
    next_offset = min(end, max(surveyed.next_offset, reading.start))
    unread = next_offset - reading.start
    skipped, control, aborted = _set_aside(surveyed.data, table, reading)
    if skipped is not None:
        table = table[~skipped]
    report.control += control
    report.aborted += aborted
    rows = 0
    for chunk in _chunks(surveyed.data, table, reading):
        for batch in _record_batches(chunk.table, reading):
            rows += batch.num_rows
            report.records += batch.num_rows
            if batch.num_rows:
                yield batch
    report.missing += unread - rows - control - aborted
    report.position = next_offset


# ------------------------------------------------------------------------ batches


def _check_checksums(data: memoryview, table: Table, range_: PartitionRange) -> None:
    unchecked = table[table[:, layout.IS_CHECKED] == 0]
    columns = (layout.POSITION, layout.SIZE, layout.CRC, layout.BASE_OFFSET)
    for position, size, expected, base_offset in unchecked[:, columns].tolist():
        if crc32c(data[position + CRC_START : position + size]) != expected:
            raise _corrupt(range_, base_offset, layout.MEANINGS[layout.BAD_CRC])


def _set_aside(data: memoryview, table: Table, reading: Reading) -> tuple[Array | None, int, int]:
    """Which batches hold no rows, and how many control and aborted records those have within the range."""
    attributes = table[:, layout.ATTRIBUTES]
    controls = (attributes & CONTROL) != 0
    has_controls = bool(controls.any())
    if not has_controls and not reading.aborted:
        return None, 0, 0
    abortions = np.zeros(len(table), np.bool_)
    if reading.aborted:
        _mark_aborted(data, table, reading, abortions)
    control = _count_within(data, table[controls], reading) if has_controls else 0
    aborted = _count_within(data, table[abortions], reading) if abortions.any() else 0
    if reading.report.set_aside is not None:
        for kind, chosen in (("control", controls), ("aborted", abortions)):
            bounds = table[chosen][:, (layout.BASE_OFFSET, layout.LAST_OFFSET)].tolist()
            reading.report.set_aside.extend((kind, first, last) for first, last in bounds)
    return controls | abortions, control, aborted


def _mark_aborted(data: memoryview, table: Table, reading: Reading, abortions: Array) -> None:
    """A transaction is aborted from its first offset to the marker that ends it.

    The list of an answer covers the batches of that answer, so nothing is carried from one to the next.
    """
    pending = sorted(reading.aborted, key=lambda each: each.first_offset, reverse=True)
    open_ids: set[int] = set()
    columns = (layout.LAST_OFFSET, layout.ATTRIBUTES, layout.PRODUCER_ID)
    for index, (last_offset, attributes, producer_id) in enumerate(table[:, columns].tolist()):
        if not attributes & (CONTROL | TRANSACTIONAL):
            continue
        while pending and pending[-1].first_offset <= last_offset:
            open_ids.add(pending.pop().producer_id)
        if attributes & CONTROL:
            if producer_id in open_ids and _is_abort_marker(data, table[index], reading):
                open_ids.discard(producer_id)
        elif producer_id in open_ids:
            abortions[index] = True


def _is_abort_marker(data: memoryview, row: Array, reading: Reading) -> bool:
    from holdfast.wire.batch import parse_records

    if not row[layout.COUNT]:  # compaction keeps the last batch of a producer, empty
        return False
    body = _unpacked(data, row, reading.range)
    try:
        key = next(parse_records(body)).key or b""
    except (InvalidRecords, StopIteration):
        raise _corrupt(
            reading.range, int(row[layout.BASE_OFFSET]), "its control record cannot be read"
        ) from None
    return len(key) >= 4 and int.from_bytes(key[2:4], "big") == _ABORT


def _count_within(data: memoryview, table: Table, reading: Reading) -> int:
    """How many records of these batches lie within the range; only batches at its edges are looked into."""
    start, end = reading.start, reading.range.end
    base, last, count = (
        table[:, column] for column in (layout.BASE_OFFSET, layout.LAST_OFFSET, layout.COUNT)
    )
    inside = (base >= start) & (last < end)
    total = int(count[inside].sum())
    for row in table[~inside]:
        first, behind = int(row[layout.BASE_OFFSET]), int(row[layout.LAST_OFFSET]) + 1
        if int(row[layout.COUNT]) == behind - first:
            total += min(behind, end) - max(first, start)
        else:
            chunk = _Chunk(row.reshape(1, -1).copy(), [])
            chunk.unpack(data, reading.range)
            total += _parse(chunk.table, reading, start, end).rows
    return total


class _Chunk(NamedTuple):
    """Batches for one record batch, with whatever memory their unpacked records need."""

    table: Table
    unpacked: list[Any]

    def unpack(self, data: memoryview, range_: PartitionRange, record_bytes: float = 0) -> None:
        """Unpack what is compressed; `record_bytes` is a guess of what a record takes."""
        for row in self.table:
            if row[layout.ATTRIBUTES] & CODEC_MASK:
                expected = int(row[layout.COUNT] * record_bytes)
                content = _unpacked(data, row, range_, expected) if row[layout.COUNT] else b""
                body = np.frombuffer(content, np.uint8)
                self.unpacked.append(body)
                row[layout.RECORDS_ADDRESS] = body.ctypes.data
                row[layout.RECORDS_SIZE] = len(body)


def _unpacked(data: memoryview, row: Array, range_: PartitionRange, expected_bytes: int = 0) -> Any:
    position, size = int(row[layout.POSITION]), int(row[layout.SIZE])
    body = data[position + layout.HEADER_BYTES : position + size]
    codec = int(row[layout.ATTRIBUTES]) & CODEC_MASK
    if not codec:
        return body
    try:
        return decompress(codec, body, RECORDS_BYTES_MAX, expected_bytes)
    except InvalidRecords as error:
        raise _corrupt(range_, int(row[layout.BASE_OFFSET]), error.message) from None


def _chunks(data: memoryview, table: Table, reading: Reading) -> Iterator[_Chunk]:
    """Batches in groups of about the size asked for; compressed ones are unpacked group by group."""
    if not len(table):
        return
    target = min(max(reading.chunk_bytes, 1), CHUNK_BYTES_MAX)
    if not (table[:, layout.ATTRIBUTES] & CODEC_MASK).any():
        sizes, counts = (np.cumsum(table[:, column]) for column in (layout.RECORDS_SIZE, layout.COUNT))
        first, size, rows = 0, 0, 0
        while first < len(table):
            behind = min(
                int(np.searchsorted(sizes, size + target, "right")),
                int(np.searchsorted(counts, rows + ROWS_MAX, "right")),
            )
            behind = max(first + 1, behind)
            yield _Chunk(table[first:behind], [])
            first, size, rows = behind, int(sizes[behind - 1]), int(counts[behind - 1])
        return
    first, size, rows = 0, 0, 0
    chunk = _Chunk(table.copy(), [])
    record_bytes = 0.0
    for index in range(len(table)):
        one = _Chunk(chunk.table[index : index + 1], chunk.unpacked)
        one.unpack(data, reading.range, record_bytes)
        unpacked_bytes, count = int(one.table[0, layout.RECORDS_SIZE]), int(one.table[0, layout.COUNT])
        if count:  # records of one topic are alike: the next batch unpacks to about as much per record
            record_bytes = EXPECTED_MORE * unpacked_bytes / count
        size += unpacked_bytes
        rows += count
        following = int(table[index + 1, layout.COUNT]) if index + 1 < len(table) else ROWS_MAX
        if size >= target or rows + following > ROWS_MAX:
            yield _Chunk(chunk.table[first : index + 1], chunk.unpacked)
            chunk.unpacked.clear()
            first, size, rows = index + 1, 0, 0


# ------------------------------------------------------------------------ records


class _Parsed(NamedTuple):
    rows: int
    offsets: Array
    timestamps: Array
    key: _Field
    value: _Field
    header_ends: Array
    header_places: Array
    header_count: int
    name_bytes: int
    header_value_bytes: int


class _Field(NamedTuple):
    ends: Array
    places: Array
    bits: Array
    total: int
    nulls: int

    def to_arrow(self, rows: int) -> pa.Array:
        target = np.empty(self.total, np.uint8)
        if self.total:
            kernel.load().gather(rows, self.ends.ctypes.data, self.places.ctypes.data, target.ctypes.data)
        validity = pa.py_buffer(self.bits) if self.nulls else None
        buffers = [validity, pa.py_buffer(self.ends), pa.py_buffer(target)]
        return pa.Array.from_buffers(pa.binary(), rows, buffers, self.nulls)


def _parse(table: Table, reading: Reading, start: int, end: int) -> _Parsed:
    """Where everything is in the records whose offsets lie between `start` and `end`."""
    counts = table[:, layout.COUNT]
    too_many = counts * layout.RECORD_BYTES_MIN > table[:, layout.RECORDS_SIZE]
    if too_many.any():
        first = int(table[int(np.argmax(too_many)), layout.BASE_OFFSET])
        raise _corrupt(reading.range, first, layout.MEANINGS[layout.BAD_COUNT])
    capacity = min(int(counts.sum()), end - start)
    table = np.ascontiguousarray(table)
    offsets, timestamps, key_places, value_places, header_places = (
        np.empty(capacity, np.int64) for _ in range(5)
    )
    key_ends, value_ends, header_ends = (np.empty(capacity + 1, np.int32) for _ in range(3))
    key_bits, value_bits = (np.zeros((capacity + 7) // 8, np.uint8) for _ in range(2))
    results = np.zeros(10, np.int64)
    arrays = (offsets, timestamps, key_ends, key_places, key_bits, value_ends, value_places, value_bits)
    status = kernel.load().parse(
        table.ctypes.data,
        len(table),
        start,
        end,
        capacity,
        *(each.ctypes.data for each in (*arrays, header_ends, header_places, results)),
    )
    rows, key_total, key_nulls, value_total, value_nulls, headers, names, values, at, _ = results.tolist()
    if status:
        raise _corrupt(reading.range, int(table[at, layout.BASE_OFFSET]), layout.MEANINGS[status])
    return _Parsed(
        rows,
        offsets,
        timestamps,
        _Field(key_ends, key_places, key_bits, key_total, key_nulls),
        _Field(value_ends, value_places, value_bits, value_total, value_nulls),
        header_ends,
        header_places,
        headers,
        names,
        values,
    )


def _record_batches(table: Table, reading: Reading) -> Iterator[pa.RecordBatch]:
    """The rows of a chunk, in one piece unless it is a single batch of more rows than one piece may have."""
    start, end = reading.start, reading.range.end
    if int(table[:, layout.COUNT].sum()) <= ROWS_MAX:
        yield _record_batch(table, reading, start, end)
        return
    first = max(start, int(table[0, layout.BASE_OFFSET]))
    behind = min(end, int(table[-1, layout.LAST_OFFSET]) + 1)
    for window in range(first, behind, ROWS_MAX):
        yield _record_batch(table, reading, window, min(behind, window + ROWS_MAX))


def _record_batch(table: Table, reading: Reading, start: int, end: int) -> pa.RecordBatch:
    parsed = _parse(table, reading, start, end)
    rows = parsed.rows
    plain = [None, pa.py_buffer(parsed.offsets)]
    timestamps = [None, pa.py_buffer(parsed.timestamps)]
    return pa.RecordBatch.from_arrays(
        [
            parsed.key.to_arrow(rows),
            parsed.value.to_arrow(rows),
            _repeated_text(reading.range.topic, rows),
            _repeated_number(reading.range.partition, rows),
            pa.Array.from_buffers(pa.int64(), rows, plain, 0),
            pa.Array.from_buffers(SCHEMA().field("timestamp").type, rows, timestamps, 0),
            _timestamp_types(table, parsed.offsets, rows),
            _headers(parsed, rows, reading.headers),
        ],
        schema=SCHEMA(),
    )


def _timestamp_types(table: Table, offsets: Array, rows: int) -> pa.Array:
    types = (table[:, layout.ATTRIBUTES] & LOG_APPEND_TIME) != 0
    if types.all() or not types.any():
        return _repeated_number(int(types[0]), rows)
    batches = np.searchsorted(table[:, layout.LAST_OFFSET], offsets[:rows])
    return _numbers(types[batches].astype(np.int32))


def _headers(parsed: _Parsed, rows: int, wanted: bool) -> pa.Array:
    count = parsed.header_count
    if not wanted:
        return pa.nulls(rows, _headers_type())
    if not count:
        return _no_headers(rows)
    name_ends, value_ends = (np.empty(count + 1, np.int32) for _ in range(2))
    names, values = np.empty(parsed.name_bytes, np.uint8), np.empty(parsed.header_value_bytes, np.uint8)
    bits, results = np.zeros((count + 7) // 8, np.uint8), np.zeros(2, np.int64)
    kernel.load().fill_headers(
        rows,
        *(
            each.ctypes.data
            for each in (
                parsed.header_ends,
                parsed.header_places,
                name_ends,
                names,
                value_ends,
                values,
                bits,
                results,
            )
        ),
    )
    seen, nulls = results.tolist()
    keys = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(name_ends), pa.py_buffer(names)], 0)
    if seen >= 0x80:
        keys = _as_text(keys)
    buffers = [pa.py_buffer(bits) if nulls else None, pa.py_buffer(value_ends), pa.py_buffer(values)]
    items = pa.StructArray.from_arrays(
        [keys, pa.Array.from_buffers(pa.binary(), count, buffers, nulls)],
        fields=list(_headers_type().value_type),
    )
    ends = pa.py_buffer(parsed.header_ends)
    return pa.Array.from_buffers(_headers_type(), rows, [None, ends], 0, children=[items])


def _as_text(names: pa.Array) -> pa.Array:
    """Names that are no UTF-8 have what cannot be read in them replaced, as Java's clients do."""
    try:
        names.validate(full=True)
    except pa.ArrowInvalid:
        raw = names.cast(pa.binary()).to_pylist()
        return pa.array([name.decode("utf-8", "replace") for name in raw], pa.string())
    return names


# ------------------------------------------------------------------------ columns of one value


def _text_of_length(text: str, rows: int) -> pa.Array:
    encoded = text.encode()
    ends = np.arange(0, (rows + 1) * len(encoded), len(encoded), dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(encoded * rows)], 0
    )


def _number_of_length(number: int, rows: int) -> pa.Array:
    return _numbers(np.full(rows, number, np.int32))


def _numbers(numbers: npt.NDArray[np.int32]) -> pa.Array:
    """Not by `pa.array`, which imports pandas to find out that this is none of it."""
    return pa.Array.from_buffers(pa.int32(), len(numbers), [None, pa.py_buffer(numbers)], 0)


def _no_headers_of_length(rows: int) -> pa.Array:
    items = pa.nulls(0, _headers_type().value_type)
    ends = pa.py_buffer(np.zeros(rows + 1, np.int32))
    return pa.Array.from_buffers(_headers_type(), rows, [None, ends], 0, children=[items])


_kept_texts = lru_cache(maxsize=64)(_text_of_length)
_kept_numbers = lru_cache(maxsize=256)(_number_of_length)
_kept_no_headers = lru_cache(maxsize=16)(_no_headers_of_length)


def _room(rows: int) -> int:
    """The next power of two, so that few columns serve batches of all sizes."""
    return 1 << max(6, (rows - 1).bit_length())


def _repeated_text(text: str, rows: int) -> pa.Array:
    if rows > CACHED_ROWS_MAX:
        return _text_of_length(text, rows)
    return _kept_texts(text, _room(rows)).slice(0, rows)


def _repeated_number(number: int, rows: int) -> pa.Array:
    if rows > CACHED_ROWS_MAX:
        return _number_of_length(number, rows)
    return _kept_numbers(number, _room(rows)).slice(0, rows)


def _no_headers(rows: int) -> pa.Array:
    if rows > CACHED_ROWS_MAX:
        return _no_headers_of_length(rows)
    return _kept_no_headers(_room(rows)).slice(0, rows)


@cache
def _crc_tables() -> npt.NDArray[np.uint32]:
    """Eight tables of CRC-32C: what each byte contributes, with up to seven zero bytes behind it."""
    tables = np.zeros((8, 256), np.uint32)
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(0x82F63B78), crc >> 1).astype(np.uint32)
    tables[0] = crc
    for index in range(1, 8):
        tables[index] = tables[0][tables[index - 1] & 0xFF] ^ (tables[index - 1] >> 8)
    return tables


def _corrupt(range_: PartitionRange, offset: int, reason: str) -> CorruptBatch:
    return CorruptBatch(
        f"{range_.topic}-{range_.partition}: the batch at offset {offset} is damaged: {reason}"
    )
