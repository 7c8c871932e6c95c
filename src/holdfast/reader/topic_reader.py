"""A topic as Arrow batches, by offsets or by time: the reader's front door.

Ends are fixed when the reading begins, so it ends even while others write. "latest" means the end of what is decided
(the last stable offset) under read_committed, and the high watermark under read_uncommitted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from holdfast.errors import UsageError, from_extra
from holdfast.reader.cluster import Cluster
from holdfast.reader.errors import OffsetGone, TopicMissing
from holdfast.reader.model import Isolation, OffsetSpec, PartitionRange, TopicInfo, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

Place: TypeAlias = str | int | datetime | Mapping[int, int]
""" "earliest", "latest", milliseconds since the epoch, a time, or an offset for each partition."""


def read(
    bootstrap: str,
    topic: str,
    *,
    start: Place = "earliest",
    end: Place = "latest",
    isolation: Isolation = "read_committed",
    settings: Mapping[str, str] | None = None,
    partitions: Collection[int] | None = None,
    batch_bytes: int = 4 << 20,
    headers: bool = True,
) -> pa.RecordBatchReader:
    """The records of a topic between two places, as a stream that pandas, Polars and DuckDB read as well.

    A time is that of the first record written at or after it. The brokers are asked for the ends at once, so a topic
    that is missing raises here; records are fetched as batches are taken. The reader can be read once.
    """
    with from_extra("reader", "reading topics"):
        import pyarrow as pa

        from holdfast.reader.arrow import SCHEMA

    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster({**(settings or {}), "bootstrap.servers": bootstrap}))
        ranges = ranges_of(cluster, topic, start=start, end=end, isolation=isolation, partitions=partitions)
        batches = cluster.read(ranges, isolation=isolation, batch_bytes=batch_bytes, headers=headers)
        return pa.RecordBatchReader.from_batches(SCHEMA(), _closing(batches, stack.pop_all()))


def _closing(batches: Iterator[pa.RecordBatch], stack: ExitStack) -> Iterator[pa.RecordBatch]:
    with stack:
        yield from batches


def ranges_of(
    cluster: Cluster,
    topic: str,
    *,
    start: Place = "earliest",
    end: Place = "latest",
    isolation: Isolation = "read_committed",
    partitions: Collection[int] | None = None,
) -> list[PartitionRange]:
    """What lies between two places of a topic; offsets that the log does not hold raise `OffsetGone`."""
    info = cluster.topics([topic])[topic]
    places = [TopicPartition(topic, number) for number in _chosen(info, start, end, partitions)]
    latest: OffsetSpec = "last-stable" if isolation == "read_committed" else "latest"
    log_starts = {place: answer.offset for place, answer in cluster.offsets(places, "earliest").items()}
    log_ends = {place: answer.offset for place, answer in cluster.offsets(places, latest).items()}
    starts = _offsets(cluster, start, log_starts, log_ends)
    ends = _offsets(cluster, end, log_starts, log_ends)
    again = cluster.topics([topic])[topic]
    if again.topic_id != info.topic_id:  # the offsets may be those of either
        return ranges_of(cluster, topic, start=start, end=end, isolation=isolation, partitions=partitions)
    ranges = []
    for place in places:
        first, behind = starts[place], ends[place]
        if first < log_starts[place] or max(first, behind) > log_ends[place]:
            raise OffsetGone(
                f"{topic}-{place.partition}: offsets {first} to {behind} were asked for, but the log holds "
                f"{log_starts[place]} to {log_ends[place]}",
                offset=first,
                log_start=log_starts[place],
                log_end=log_ends[place],
            )
        ranges.append(PartitionRange(topic, info.topic_id, place.partition, first, max(first, behind)))
    return ranges


def _chosen(info: TopicInfo, start: Place, end: Place, partitions: Collection[int] | None) -> list[int]:
    """The partitions to read: those named, else those that offsets are given for, else all."""
    if partitions is None:
        given = [set(place) for place in (start, end) if isinstance(place, Mapping)]
        partitions = set.intersection(*given) if given else info.partitions
    for number in partitions:
        if number not in info.partitions:
            raise TopicMissing(
                f"topic '{info.name}' has no partition {number}; it has 0 to {len(info.partitions) - 1}"
            )
    return sorted(partitions)


def _offsets(
    cluster: Cluster,
    place: Place,
    log_starts: Mapping[TopicPartition, int],
    log_ends: Mapping[TopicPartition, int],
) -> Mapping[TopicPartition, int]:
    if place == "earliest":
        return log_starts
    if place == "latest":
        return log_ends
    if isinstance(place, Mapping):
        missing = [each.partition for each in log_ends if each.partition not in place]
        if missing:
            raise UsageError(f"no offset is given for partition {missing[0]}")
        return {each: place[each.partition] for each in log_ends}
    if isinstance(place, datetime):
        place = int((place if place.tzinfo else place.replace(tzinfo=UTC)).timestamp() * 1000)
    if isinstance(place, str) or place < 0:
        raise UsageError(
            f"{place!r} is no place in a topic: earliest, latest, a time, milliseconds or offsets"
        )
    found = cluster.offsets(log_ends, place)
    return {
        each: end if (answer := found[each]).offset < 0 else min(answer.offset, end)
        for each, end in log_ends.items()
    }
