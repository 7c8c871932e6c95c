"""One offset of a log: what is there, in which batch, of which transaction, or why nothing is.

What an offset is (a record, a marker, aborted, compacted away) is said by the same reader that the audit walks the log
with. The rest (leader epoch, producer, sequence, the marker that ended its transaction) stands in the headers of
batches, which are fetched here once more, raw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.model import AuditError, Kind, place_json
from holdfast.client.spool.marks import ID_HEADER, parse_mark
from holdfast.errors import UsageError
from holdfast.pipeline.positions import Place
from holdfast.reader import Isolation, OffsetSpec, ranges_of
from holdfast.reader.cluster import Cluster
from holdfast.reader.errors import OffsetGone, TopicMissing
from holdfast.reader.fetch_messages import FETCH, LOWEST_VERSION, Asked, pack_fetch, walk_fetch
from holdfast.reader.model import PartitionRange, RangeReport, TopicPartition
from holdfast.wire.batch import HEADER_SIZE, NO_PRODUCER_ID, BatchHeader, iterate_records, read_header
from holdfast.wire.codecs import Codec

WAIT_MS: Final = 100
FETCH_BYTES: Final = 1 << 20
"""Of a fetch that looks for a marker; a larger batch comes whole all the same."""
FETCHES_MAX: Final = 64
"""How far behind a record the marker of its transaction is looked for."""

Transaction = Literal["none", "committed", "aborted", "open"]
Outcome = Literal["record", "control", "aborted", "compacted", "expired", "not_yet", "open"]
"""`not_yet`: behind the end of the log; `open`: of a transaction that has not ended."""


@dataclass(frozen=True)
class Stored:
    """One offset."""

    place: Place
    offset: int
    outcome: Outcome
    log_start: int
    log_end: int
    """The high watermark."""
    timestamp_ms: int | None = None
    is_append_time: bool = False
    """The time is the broker's, when it was stored; otherwise the sender's."""
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    batch: BatchHeader | None = None
    """Of the batch that holds it."""
    transaction: Transaction = "none"
    marker_offset: int | None = None
    """Where the marker that ended the transaction stands."""
    marker_ms: int | None = None
    row: pa.RecordBatch | None = field(default=None, compare=False, repr=False)
    """The record as the reader gives it, for decoding."""

    @property
    def name(self) -> str:
        return f"{self.place.topic}:{self.place.partition}@{self.offset}"

    def header(self, name: str) -> bytes | None:
        return next((value for key, value in reversed(self.headers) if key == name), None)

    @property
    def spool(self) -> tuple[str, int, int] | None:
        """The spool, partition and sequence that its sender gave it, if it was spooled."""
        found = parse_mark(self.header(ID_HEADER))
        return None if found is None else (found.spool, found.partition, found.sequence)

    def as_json(self) -> dict[str, Any]:
        spool = self.spool
        return {
            "place": place_json(self.place),
            "offset": self.offset,
            "outcome": self.outcome,
            "log_start": self.log_start,
            "log_end": self.log_end,
            "timestamp_ms": self.timestamp_ms,
            "timestamp_of": ("broker" if self.is_append_time else "sender")
            if self.timestamp_ms is not None
            else None,
            "key": shown_bytes(self.key),
            "value_bytes": None if self.value is None else len(self.value),
            "headers": {name: shown_bytes(value) for name, value in self.headers},
            "spool": None if spool is None else {"id": spool[0], "partition": spool[1], "sequence": spool[2]},
            "batch": None if self.batch is None else _batch_json(self.batch),
            "transaction": self.transaction,
            "marker_offset": self.marker_offset,
            "marker_ms": self.marker_ms,
        }


def shown_bytes(data: bytes | None) -> str | None:
    """As text where it is text, else in hexadecimal digits."""
    if data is None:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return f"0x{data.hex()}"


def place_of(cluster: Cluster, topic: str, partition: int) -> Place:
    info = cluster.topics([topic])[topic]
    if partition not in info.partitions:
        raise UsageError(
            f"topic '{topic}' has no partition {partition}; it has 0 to {len(info.partitions) - 1}"
        )
    return Place(topic, info.topic_id, partition)


def look_up(cluster: Cluster, place: Place, offset: int) -> Stored:
    """What is at this offset today."""
    at = TopicPartition(place.topic, place.partition)
    specs: tuple[OffsetSpec, ...] = ("earliest", "latest", "last-stable")
    log_start, log_end, stable = (cluster.offsets([at], spec)[at].offset for spec in specs)
    gone = Stored(place, offset, "expired", log_start, log_end)
    if offset < log_start:
        return gone
    if offset >= log_end:
        return replace(gone, outcome="not_yet")
    try:
        kind, row = _kind(cluster, place, offset, is_decided=offset < stable)
        found = _batch_at(cluster, place, offset)
    except OffsetGone:  # retention was faster
        return gone
    header, raw = found or (None, b"")
    if kind is Kind.COMPACTED or header is None:
        return replace(gone, outcome="compacted", batch=header)
    stored = _stored(replace(gone, outcome="record", batch=header, row=row), kind, header, raw)
    if kind is Kind.CONTROL or not header.is_transactional:
        return stored
    if offset >= stable:
        return replace(stored, outcome="open", transaction="open")
    if kind is Kind.ABORTED:
        stored = replace(stored, outcome="aborted")
    marker_offset, marker_ms = _marker(cluster, place, header) or (None, None)
    ended: Transaction = "aborted" if kind is Kind.ABORTED else "committed"
    return replace(stored, transaction=ended, marker_offset=marker_offset, marker_ms=marker_ms)


def _kind(
    cluster: Cluster, place: Place, offset: int, *, is_decided: bool
) -> tuple[Kind, pa.RecordBatch | None]:
    reports: list[RangeReport] = []
    wanted = PartitionRange(place.topic, place.topic_id, place.partition, offset, offset + 1)
    isolation: Isolation = "read_committed" if is_decided else "read_uncommitted"
    rows = list(cluster.read([wanted], isolation=isolation, reports=reports))
    (report,) = reports
    if report.records:
        return Kind.RECORD, rows[0]
    return (Kind.CONTROL if report.control else Kind.ABORTED if report.aborted else Kind.COMPACTED), None


def _stored(stored: Stored, kind: Kind, header: BatchHeader, raw: bytes) -> Stored:
    """With what stands in the batch."""
    at = stored.offset - header.base_offset
    record = next((each for each in iterate_records(raw) if each.offset_delta == at), None)
    if record is not None:
        sent_ms = header.base_timestamp + record.timestamp_delta
        stored = replace(
            stored,
            timestamp_ms=header.max_timestamp if header.is_log_append_time else sent_ms,
            key=None if kind is Kind.CONTROL else record.key,
            value=record.value,
            headers=tuple((str(name), value) for name, value in record.headers),
        )
    if kind is Kind.CONTROL:
        is_commit = record is not None and _is_commit(record.key)
        stored = replace(stored, outcome="control", transaction="committed" if is_commit else "aborted")
    return replace(stored, is_append_time=header.is_log_append_time)


def _is_commit(key: bytes | None) -> bool:
    return key is not None and len(key) >= 4 and int.from_bytes(key[2:4], "big") == 1


def codec_name(batch: BatchHeader) -> str:
    return Codec(batch.codec).name.lower()


def _batch_json(batch: BatchHeader) -> dict[str, Any]:
    names = ("base_offset", "last_offset", "leader_epoch", "producer_id", "producer_epoch", "base_sequence")
    return {
        **{name: getattr(batch, name) for name in names},
        "records": batch.records_count,
        "bytes": batch.size,
        "codec": codec_name(batch),
    }


# ------------------------------------------------------------------------ raw batches


def _batch_at(cluster: Cluster, place: Place, offset: int) -> tuple[BatchHeader, bytes] | None:
    """The batch whose offsets hold this one; nothing when the log has none such."""
    behind = (each for each in _fetched(cluster, place, offset) if each[0].last_offset >= offset)
    header, raw = next(behind, (None, b""))
    return (header, raw) if header is not None and header.base_offset <= offset else None


def _marker(cluster: Cluster, place: Place, header: BatchHeader) -> tuple[int, int] | None:
    """The marker that ended the transaction of a batch: its offset and time; none when it is too far behind."""
    if header.producer_id == NO_PRODUCER_ID:
        return None
    position = header.next_offset
    for _ in range(FETCHES_MAX):
        before = position
        for each, _raw in _fetched(cluster, place, position):
            if each.is_control and each.producer_id == header.producer_id:
                return each.base_offset, each.max_timestamp
            position = max(position, each.next_offset)
        if position == before:
            return None
    return None


def _fetched(cluster: Cluster, place: Place, offset: int) -> Iterator[tuple[BatchHeader, bytes]]:
    """The whole batches of one fetch."""
    at = TopicPartition(place.topic, place.partition)
    leader = cluster.leader(at)
    if leader is None:
        raise TopicMissing(f"nobody is known to lead {place.topic}-{place.partition}")
    connection = cluster.connection(leader.leader)
    version = connection.version(FETCH, LOWEST_VERSION)
    asked = Asked(place.partition, leader.leader_epoch, offset, FETCH_BYTES)
    body = pack_fetch(
        version, {place.topic_id: [asked]}, isolation_level=0, wait_ms=WAIT_MS, bytes_max=FETCH_BYTES
    )
    answer = walk_fetch(connection.receive(connection.send(FETCH, version, body)))
    for fetched in answer.partitions:
        if fetched.error_code:
            raise AuditError(
                f"{place.topic}-{place.partition}: the batch at offset {offset} could not be fetched (error "
                f"{fetched.error_code}); the same question later may be answered"
            )
        data = bytes(fetched.records)
        position = 0
        while len(data) - position >= HEADER_SIZE:
            header = read_header(data, position)
            if position + header.size > len(data):
                break
            yield header, data[position : position + header.size]
            position += header.size


# ------------------------------------------------------------------------ by key


def offsets_of_key(
    cluster: Cluster, topic: str, key: bytes, *, most: int
) -> tuple[list[tuple[Place, int]], int]:
    """The newest records with this key, oldest first, and how many there are in all; every partition is read, since
    nobody knows how the sender chose one."""
    ranges = ranges_of(cluster, topic)
    places = {each.partition: Place(topic, each.topic_id, each.partition) for each in ranges}
    found: list[tuple[int, Place, int]] = []
    count = 0
    wanted = pa.scalar(key, pa.binary())
    for batch in cluster.read(ranges, headers=False):
        chosen = batch.filter(pc.fill_null(pc.equal(batch.column("key"), wanted), False))
        count += chosen.num_rows
        moments = pc.fill_null(chosen.column("timestamp").cast(pa.int64()), 0).to_pylist()
        at = zip(chosen.column("partition").to_pylist(), chosen.column("offset").to_pylist(), strict=True)
        found += [
            (moment, places[number], offset) for moment, (number, offset) in zip(moments, at, strict=True)
        ]
        if len(found) > 4 * most:
            found = sorted(found)[-most:]
    return [(place, offset) for _, place, offset in sorted(found)[-most:]], count
