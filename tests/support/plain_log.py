"""One partition's log on a simulated disk, beside a model of what it should hold: for tests of log and recovery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.broker.log.leader_epochs import EpochStart
from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery import Trust, open_log
from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig
from holdfast.seams import Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import BatchHeader, Record, build_batch, check_whole, read_header
from holdfast.wire.codecs import Codec

DIRECTORY: Final = "/data/t-0"
START_MS: Final = 1_700_000_000_000
NOW: Final = Now(START_MS, 0)


def topic_config(**overrides: str) -> TopicConfig:
    """Small segments and dense indexes, so that little data makes many of both. Dots are underscores here."""
    config, _ = BrokerConfig.load({"log.dirs": "/data"})
    return config.topic_config(
        {
            "internal.segment.bytes": "700",
            "index.interval.bytes": "150",
            **{name.replace("_", "."): value for name, value in overrides.items()},
        }
    )


class Batch(NamedTuple):
    """What to append: records and who sends them."""

    values: tuple[bytes, ...]
    producer_id: int = -1
    sequence: int = -1
    codec: Codec = Codec.NONE
    timestamp: int = START_MS
    epoch: int = 0


class Stored(NamedTuple):
    """One batch as the log should hold it, byte for byte."""

    header: BatchHeader
    data: bytes


class LogState(NamedTuple):
    """Everything about an open log that a reader or the next writer could notice."""

    start_offset: int
    end_offset: int
    batches: tuple[bytes, ...]
    segments: tuple[tuple[int, int], ...]
    """Base offset and size of each."""
    timestamps: tuple[tuple[int, int], ...]
    """The largest timestamp of each segment, and its offset."""
    epochs: tuple[EpochStart, ...]
    producers: tuple[tuple[int, int, tuple[tuple[int, ...], ...]], ...]
    """Id, epoch, and of the remembered batches the first and last sequence and offset."""


class Indexes(NamedTuple):
    offsets: tuple[tuple[int, int], ...]
    times: tuple[tuple[int, int], ...]


def encode(batch: Batch) -> bytes:
    return build_batch(
        [Record(index, 0, None, value) for index, value in enumerate(batch.values)],
        base_timestamp=batch.timestamp,
        codec=batch.codec,
        producer_id=batch.producer_id,
        producer_epoch=0 if batch.producer_id >= 0 else -1,
        base_sequence=batch.sequence if batch.producer_id >= 0 else -1,
    )


def append(log: Log, batch: Batch, now: Now = NOW) -> Stored:
    data = encode(batch)
    header = log.append(check_whole(data), data, batch.epoch, now)
    return Stored(
        header,
        header.base_offset.to_bytes(8, "big") + data[8:12] + batch.epoch.to_bytes(4, "big") + data[16:],
    )


def open_at(
    disk: SimulatedDisk,
    *,
    config: TopicConfig | None = None,
    clean: bool = False,
    recovery_point: int = 0,
    start_offset: int = 0,
    torn: bool = False,
    recovery_point_known: bool = True,
    start_offset_known: bool = True,
    accept_loss: bool = False,
    said: list[str] | None = None,
    now: Now = NOW,
) -> Log:
    trust = Trust(clean, recovery_point, start_offset, torn, recovery_point_known, start_offset_known)
    lines = [] if said is None else said
    config = config or topic_config()
    return open_log(disk, DIRECTORY, config, trust, now, lines.append, accept_loss=accept_loss)


def flush(disk: SimulatedDisk, log: Log) -> int:
    """Flush what the log names; returns the offset below which everything is durable now."""
    pending = log.begin_flush(apart=True)
    for target in pending.targets:
        if isinstance(target, str):
            disk.flush_directory(target)
        else:
            target.flush()
    log.advance_recovery_point(pending.end)
    return pending.end.offset


def read_batches(log: Log, *, max_bytes: int = 1 << 20) -> tuple[bytes, ...]:
    """Every batch from the log start, by way of `Log.read`, as fetches find them."""
    batches: list[bytes] = []
    offset = log.start_offset
    while (piece := log.read(offset, max_bytes, log.end_position, at_least_one=True)) is not None:
        data = piece.file.pread(piece.length, piece.position)
        while len(data) >= 61 and len(data) >= (header := read_header(data)).size:
            batches.append(data[: header.size])
            data = data[header.size :]
            if header.next_offset <= offset:
                raise AssertionError(f"asked for {offset}, got a batch that ends before it: {header}")
            offset = header.next_offset
    return tuple(batches)


def state_of(log: Log) -> LogState:
    return LogState(
        log.start_offset,
        log.end_offset,
        read_batches(log),
        tuple((segment.base_offset, segment.size) for segment in log.segments),
        tuple((segment.max_timestamp, segment.offset_of_max_timestamp) for segment in log.segments),
        tuple(log.epochs.entries),
        tuple(
            sorted(
                (
                    producer.producer_id,
                    producer.producer_epoch,
                    tuple(batch[:4] for batch in log.producers.batches_of(producer.producer_id)),
                )
                for producer in log.producers.describe()
            )
        ),
    )


def indexes_of(log: Log) -> list[Indexes]:
    return [
        Indexes(tuple(segment.index.entries), tuple(segment.time_index.entries)) for segment in log.segments
    ]


def fresh_copy(stored: Sequence[Stored], config: TopicConfig | None = None) -> Log:
    """A log on a new disk to which these batches were appended: what a recovered one must equal."""
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk, config=config)
    for header, data in stored:
        log.append(header, data, header.leader_epoch, NOW)
    return log
