"""Fetched bytes made up for the reader's decoder, and one way to look at what either decoder makes of them.

Below them are topics for the reader's tests: filled with anything a client may send, and read back by another client.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from confluent_kafka import KafkaException, Producer

from holdfast.reader import Cluster, Isolation, PartitionRange, RangeReport, ranges_of, reference
from holdfast.reader.errors import CorruptBatch
from holdfast.reader.fetch_messages import Aborted
from holdfast.reader.reference import Row
from holdfast.testing.engines import QUIET, await_decided, read_log
from holdfast.wire.batch import Record, build_batch
from holdfast.wire.codecs import Codec

if TYPE_CHECKING:
    import pyarrow as pa


TOPIC: Final = "orders"
PARTITION: Final = 7
TOPIC_ID: Final = UUID(int=1)
CORRUPT: Final = "corrupt"


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[reference.Row]:
    """Arrow's rows in the reference's words."""
    import pyarrow as pa

    rows: list[reference.Row] = []
    for batch in batches:
        batch.validate(full=True)
        columns: list[Any] = [
            batch.column("offset").to_pylist(),
            batch.column("timestamp").cast(pa.int64()).to_pylist(),
            batch.column("timestampType").to_pylist(),
            batch.column("key").to_pylist(),
            batch.column("value").to_pylist(),
            [
                tuple((header["key"], header["value"]) for header in headers)
                for headers in batch.column("headers").to_pylist()
            ],
        ]
        rows += map(reference.Row, *columns)
    return rows


def by_arrow(
    data: memoryview,
    start: int,
    end: int,
    aborted: Sequence[Aborted] = (),
    *,
    check_crc: bool = True,
    chunk_bytes: int = 1 << 20,
) -> reference.Decoded | str:
    """What the machine code makes of the bytes, in the reference's words; `CORRUPT` when it refuses them."""
    from holdfast.reader.arrow import Reading, decode, survey

    wanted = PartitionRange(TOPIC, TOPIC_ID, PARTITION, start, end)
    report = RangeReport(wanted)
    try:
        surveyed = survey(data, check_crc=check_crc)
        reading = Reading(wanted, start, report, aborted, True, chunk_bytes, check_crc)
        batches = list(decode(surveyed, reading))
    except CorruptBatch:
        return CORRUPT
    for batch in batches:
        assert set(batch.column("topic").to_pylist()) == {TOPIC}
        assert set(batch.column("partition").to_pylist()) == {PARTITION}
    rows = rows_of(batches)
    assert report.records == len(rows)
    assert report.records + report.control + report.aborted + report.missing == report.position - start
    return reference.Decoded(rows, report.control, report.aborted, report.missing, report.position)


def by_reference(
    data: memoryview, start: int, end: int, aborted: Sequence[Aborted] = (), *, check_crc: bool = True
) -> reference.Decoded | str:
    try:
        return reference.decode(data, start, end, aborted, check_crc=check_crc)
    except CorruptBatch:
        return CORRUPT


def random_batch(chance: random.Random, base_offset: int) -> bytes:
    """A valid batch of any shape a log may hold."""
    is_control = chance.random() < 0.1
    is_transactional = is_control or chance.random() < 0.3
    if is_control:
        marker = bytes((0, 0, 0, chance.randrange(2)))
        records = [Record(0, 0, marker, bytes(6))]
    else:
        deltas = range(chance.choice((0, 1, 2, 5, 40)))
        if chance.random() < 0.3:  # compaction leaves gaps
            deltas = sorted(chance.sample(range(200), len(deltas)))  # type: ignore[assignment]
        records = [_random_record(chance, delta) for delta in deltas]
    last = records[-1].offset_delta if records else 0
    return build_batch(
        records,
        base_offset=base_offset,
        leader_epoch=chance.randrange(5),
        base_timestamp=chance.choice((0, 1_700_000_000_000, -1, 2**62, -(2**63))),
        codec=Codec.NONE if chance.random() < 0.6 else chance.choice(list(Codec)),
        producer_id=chance.randrange(3) if is_transactional else -1,
        is_transactional=is_transactional,
        is_control=is_control,
        log_append_time=chance.random() < 0.2,
        last_offset_delta=last + (chance.randrange(5) if chance.random() < 0.2 else 0),
        max_timestamp=chance.randrange(2**41),
    )


def _random_record(chance: random.Random, delta: int) -> Record:
    def field() -> bytes | None:
        size = chance.choice((-1, 0, 1, 3, 7, 8, 15, 16, 17, 31, 64, 300))
        return None if size < 0 else chance.randbytes(size)

    names = ("", "h", "trace-id", "größe", "\udc80x")
    count = chance.choice((0, 0, 0, 1, 2, 5))
    headers = tuple((chance.choice(names), field()) for _ in range(count))
    timestamp_delta = chance.choice((0, 1, -1, 100_000, 2**40, 2**62))
    return Record(delta, timestamp_delta, field(), field(), headers)


def random_run(chance: random.Random) -> tuple[bytes, int]:
    """A few batches as a fetch might bring them, perhaps cut off, and the offset behind them."""
    offset = chance.randrange(1000)
    parts = []
    for _ in range(chance.randrange(1, 6)):
        batch = random_batch(chance, offset)
        parts.append(batch)
        last_delta = int.from_bytes(batch[23:27], "big")
        offset += last_delta + 1 + (chance.randrange(1, 50) if chance.random() < 0.2 else 0)
    data = b"".join(parts)
    if chance.random() < 0.2:
        data = data[: chance.randrange(len(data) + 1)]
    return data, offset


def damaged(chance: random.Random, data: bytes) -> bytes:
    """The same bytes after an accident."""
    broken = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        if not broken:
            break
        kind = chance.randrange(5)
        at = chance.randrange(len(broken))
        if kind == 0:
            broken[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            broken[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del broken[at : at + chance.randrange(1, 20)]
        elif kind == 3:
            broken[at:at] = chance.randbytes(chance.randrange(1, 20))
        else:
            size = chance.randrange(1, 12)
            broken[at : at + size] = b"\xff" * min(size, len(broken) - at)
    return bytes(broken)


def shortened(chance: random.Random, data: bytes) -> bytes:
    """A run whose last batch lost the end of its records and says so in its length, or claims a longer field.

    What accidents rarely bring about: lengths that agree with each other and not with the bytes there are.
    """
    records = [_random_record(chance, delta) for delta in range(chance.randrange(1, 4))]
    batch = bytearray(build_batch(records, base_offset=5000))
    cut = chance.randrange(61, len(batch))
    del batch[cut:]
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    return data + bytes(batch)


class GuardedMemory:
    """Memory that ends where the process may not look: a read past the end of what is put here is fatal."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self._usable = (size + page - 1) // page * page
        self._map = mmap.mmap(-1, self._usable + page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        library = ctypes.CDLL(None, use_errno=True)
        if library.mprotect(ctypes.c_void_p(address + self._usable), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def put(self, data: bytes) -> memoryview:
        """The data, right before the guard."""
        if len(data) > self._usable:
            raise ValueError(f"{len(data)} bytes do not fit {self._usable}")
        view = memoryview(self._map)[self._usable - len(data) : self._usable]
        view[:] = data
        return view


def fuzz(seed: int, rounds: int) -> None:
    """Decode damaged runs in guarded memory, mostly with the checksum left out, and compare with the reference.

    The machine code may refuse one thing more, numbers of more than 64 bits, which the reference takes for null.
    """
    guarded = GuardedMemory(1 << 20)
    for number in range(seed, seed + rounds):
        chance = random.Random(number)
        data, behind = random_run(chance)
        if number % 3:
            data = damaged(chance, data)
        else:
            data, behind = shortened(chance, b""), 5003
        start, end = 0, behind + 5
        if chance.random() < 0.5:
            start = chance.randrange(behind + 10)
            end = chance.randrange(start, behind + 20) + 1
        aborted = [
            Aborted(chance.randrange(3), chance.randrange(behind + 1)) for _ in range(chance.randrange(3))
        ]
        check_crc = chance.random() < 0.1
        chunk_bytes = chance.choice((1, 500, 1 << 20))
        placed = guarded.put(data)
        found = by_arrow(placed, start, end, aborted, check_crc=check_crc, chunk_bytes=chunk_bytes)
        expected = by_reference(placed, start, end, aborted, check_crc=check_crc)
        if found not in (expected, CORRUPT):
            raise AssertionError(f"seed {number}: {found} where {expected} is right")
    print(f"{rounds} rounds")


CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
HUGE_BYTES: Final = 900_000
WAIT_S: Final = 30.0

Rows = dict[int, list[Row]]
"""By partition."""


def random_message(chance: random.Random, *, is_huge: bool = False) -> dict[str, Any]:
    def field() -> bytes | None:
        size = chance.choice((-1, 0, 1, 10, 100, 2000))
        return None if size < 0 else chance.randbytes(size // 2) + bytes(size - size // 2)

    names = ("", "h", "trace-id", "größe")
    message: dict[str, Any] = {"key": field(), "value": field()}
    if is_huge:
        message["value"] = chance.randbytes(1000) * (HUGE_BYTES // 1000)
    count = chance.choice((0, 0, 0, 1, 3))
    if count:
        message["headers"] = [(chance.choice(names), field()) for _ in range(count)]
    if chance.random() < 0.3:
        message["timestamp"] = 1_700_000_000_000 + chance.randrange(10**9)
    return message


def make_producer(bootstrap_servers: str, codec: str = "none", **settings: Any) -> Producer:
    return Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "compression.type": codec,
            "linger.ms": 5,
            **QUIET,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )


def flush(producer: Producer) -> None:
    left = producer.flush(WAIT_S)
    if left:
        raise KafkaException(f"{left} messages were not acknowledged in time")


def fill(bootstrap_servers: str, topic: str, partitions: int, seed: int, *, count: int = 60) -> None:
    """Messages of every kind with every codec, in batches of one and of many."""
    chance = random.Random(seed)
    for codec in chance.sample(CODECS, len(CODECS)):
        producer = make_producer(bootstrap_servers, codec)
        for number in range(count):
            message = random_message(chance, is_huge=number == count // 2)
            producer.produce(topic, partition=chance.randrange(partitions), **message)
            if chance.random() < 0.05:
                flush(producer)
        flush(producer)


def fill_transactions(
    bootstrap_servers: str, topic: str, partitions: int, seed: int, *, leave_open: bool = False
) -> list[Producer]:
    """Transactions that commit, abort, interleave with each other and with plain messages.

    With `leave_open` one stays open at the end; its producer is returned, and so must be kept.
    """
    chance = random.Random(seed)
    producers = [
        make_producer(
            bootstrap_servers, chance.choice(CODECS), transactional_id=f"{topic}-{number}-{seed}", linger_ms=0
        )
        for number in range(3)
    ]
    plain = make_producer(bootstrap_servers, "lz4")
    for producer in producers:
        producer.init_transactions(WAIT_S)
    begun: list[Producer] = []
    for _ in range(40):
        producer = chance.choice(producers)
        if producer not in begun:
            producer.begin_transaction()
            begun.append(producer)
        for _ in range(chance.randrange(1, 6)):
            message = random_message(chance)
            producer.produce(topic, partition=chance.randrange(partitions), **message)
        flush(producer)
        if chance.random() < 0.5:
            plain.produce(topic, partition=chance.randrange(partitions), **random_message(chance))
            flush(plain)
        if chance.random() < 0.4:
            begun.remove(producer)
            _end(producer, is_commit=chance.random() < 0.5)
    for producer in begun[1:] if leave_open else begun:
        _end(producer, is_commit=chance.random() < 0.5)
    if not leave_open and not await_decided(bootstrap_servers, topic, WAIT_S):
        raise KafkaException(f"a transaction in {topic} stays open")
    return begun[:1] if leave_open else []


def _end(producer: Producer, *, is_commit: bool) -> None:
    if is_commit:
        producer.commit_transaction(WAIT_S)
    else:
        producer.abort_transaction(WAIT_S)


def consumed(bootstrap_servers: str, topic: str, partitions: Iterable[int], isolation: Isolation) -> Rows:
    """Everything in a topic, as confluent-kafka reads it."""
    rows: Rows = {number: [] for number in partitions}
    for message in read_log(bootstrap_servers, topic, isolation=isolation):
        rows[message.partition()].append(_row(message))
    return rows


def _row(message: Any) -> Row:
    kind, timestamp_ms = message.timestamp()
    headers = tuple((name, value) for name, value in message.headers() or ())
    return Row(message.offset(), timestamp_ms * 1000, kind - 1, message.key(), message.value(), headers)


def read_rows(
    cluster: Cluster,
    ranges: list[PartitionRange],
    *,
    isolation: Isolation = "read_committed",
    batch_bytes: int = 4 << 20,
) -> tuple[Rows, list[RangeReport]]:
    """Ranges as our reader reads them, with every offset accounted for."""
    reports: list[RangeReport] = []
    rows: Rows = defaultdict(list)
    for each in ranges:
        rows[each.partition] = []
    for batch in cluster.read(ranges, isolation=isolation, batch_bytes=batch_bytes, reports=reports):
        (partition,) = set(batch.column("partition").to_pylist())
        rows[partition] += rows_of([batch])
    for report in reports:
        told = report.records + report.control + report.aborted + report.missing
        assert told == report.range.end - report.range.start, report
        assert report.is_complete
    return dict(rows), reports


def whole(cluster: Cluster, topic: str, isolation: Isolation = "read_committed") -> list[PartitionRange]:
    return ranges_of(cluster, topic, isolation=isolation)


MakeTopic = Callable[..., str]
