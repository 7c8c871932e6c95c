"""What `holdfast.testing.topics` sends and receives: record batches by raw requests, so that nothing waits or hides.

A client library takes half a second to get a producer id and says of a full disk that a message timed out. Here one
batch goes to one partition at a time, and the broker's own words come back. A batch whose answer got lost is never
sent again, so no record is stored twice.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from holdfast.admin.errors import Unreachable
from holdfast.client.partitioner import POSITIVE, murmur2
from holdfast.errors import UsageError
from holdfast.reader.cluster import Cluster
from holdfast.reader.errors import TopicMissing
from holdfast.reader.fetch_messages import FETCH, LOWEST_VERSION, Asked, pack_fetch, walk_fetch
from holdfast.reader.model import TopicInfo, TopicPartition
from holdfast.testing.committed_reader import visible
from holdfast.testing.topics import NotConsumed, NotProduced, Record
from holdfast.wire import batch as wire
from holdfast.wire import error_table
from holdfast.wire.api_keys import CREATE_TOPICS, PRODUCE

CLUSTERS_DEFAULT: Final = -1
"""As many replicas as the cluster's settings say."""
ACKS_ALL: Final = -1
PRODUCE_BY_NAME_MAX: Final = 12
"""The last version of Produce that names topics."""
BATCH_BYTES_MAX: Final = 512 << 10
"""Half of what a broker takes by default; a larger record goes alone."""
RETRY_SECONDS: Final = 0.05
STORED_PERHAPS: Final = frozenset({7, 20})
"""REQUEST_TIMED_OUT and NOT_ENOUGH_REPLICAS_AFTER_APPEND: the leader has the batch."""
OFFSET_OUT_OF_RANGE: Final = 1
FETCH_WAIT_MS: Final = 500
"""How long a broker may hold a fetch; what is asked for is there, so it never does for long."""
FETCH_BYTES_MAX: Final = 8 << 20
EMPTY_ANSWERS_MAX: Final = 3
"""So many in a row mean that all before the end was compacted away."""


def create(bootstrap_servers: str, name: str, partitions: int, settings: Mapping[str, str]) -> None:
    topic = {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": CLUSTERS_DEFAULT,
        "assignments": [],
        "configs": [{"name": each, "value": value} for each, value in settings.items()],
    }
    with _cluster(bootstrap_servers) as cluster:
        fields = {"topics": [topic], "timeout": cluster.settings.request_timeout_ms, "validate_only": False}
        (told,) = cluster.ask_any(CREATE_TOPICS, fields, lowest=4).topics
        if told.error_code:
            why = told.error_message or error_table.describe(told.error_code)
            raise UsageError(f"topic {name!r} was not created: {why}")


def produced(
    bootstrap_servers: str,
    topic: str,
    values: Sequence[bytes | None],
    *,
    key: bytes | None,
    headers: tuple[tuple[str, bytes | None], ...],
    partition: int | None,
    timestamp_ms: int | None,
    timeout: float,
) -> list[Record]:
    deadline = time.monotonic() + timeout
    stored: dict[int, Record] = {}
    try:
        with _cluster(bootstrap_servers, timeout) as cluster:
            info = _topic(cluster, topic)
            places = [_place(info, partition, key, number) for number in range(len(values))]
            for place, numbers in groupby(
                sorted(range(len(values)), key=places.__getitem__), places.__getitem__
            ):
                for some in _batches(list(numbers), values):
                    stamp = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
                    records = [wire.Record(at, 0, key, values[each], headers) for at, each in enumerate(some)]
                    base, stamp = _append(cluster, place, records, stamp, deadline)
                    for at, each in enumerate(some):
                        stored[each] = Record(*place, base + at, key, values[each], headers, stamp)
    except (Unreachable, NotProduced) as error:
        raise NotProduced(f"topic {topic!r} has {len(stored)} of {len(values)} records: {error}") from error
    return [stored[number] for number in range(len(values))]


def _append(
    cluster: Cluster, place: TopicPartition, records: list[wire.Record], stamp: int, deadline: float
) -> tuple[int, int]:
    """Its base offset and time once a batch is acknowledged."""
    batch = wire.build_batch(records, base_timestamp=stamp)
    while True:
        seconds = max(0.0, deadline - time.monotonic())
        fields = {
            "transactional_id": None,
            "acks": ACKS_ALL,
            "timeout": max(1, round(seconds * 1000)),
            "topic_data": [
                {"name": place.topic, "partition_data": [{"index": place.partition, "records": batch}]}
            ],
        }
        leader = cluster.leader(place)
        if leader is not None and leader.leader >= 0:
            connection = cluster.connection(leader.leader)
            answer = connection.ask(PRODUCE, fields, lowest=3, highest=PRODUCE_BY_NAME_MAX)
            told: Any = answer.responses[0].partition_responses[0]
            code = int(told.error_code)
            if not code:
                return told.base_offset, _milliseconds(told.log_append_time) or stamp
            why = error_table.describe(code)
        else:
            code, why = 5, error_table.describe(5)
        if code in STORED_PERHAPS or not error_table.is_retriable(code) or time.monotonic() >= deadline:
            raise NotProduced(why)
        time.sleep(RETRY_SECONDS)
        cluster.refresh([place.topic])


def consumed(
    bootstrap_servers: str, topic: str, partition: int | None, *, is_committed: bool
) -> list[Record]:
    with _cluster(bootstrap_servers) as cluster:
        info = _topic(cluster, topic)
        numbers = sorted(info.partitions) if partition is None else [partition]
        places = [_place(info, number, None, 0) for number in numbers]
        starts = cluster.offsets(places, "earliest")
        ends = cluster.offsets(places, "last-stable" if is_committed else "latest")
        return [
            record
            for place in places
            for record in _read(cluster, info, place, starts[place].offset, ends[place].offset, is_committed)
        ]


def _read(
    cluster: Cluster, info: TopicInfo, place: TopicPartition, start: int, end: int, is_committed: bool
) -> Iterator[Record]:
    offset, empty_answers = start, 0
    leader = info.partitions[place.partition]
    connection = cluster.connection(leader.leader)
    version = connection.version(FETCH, LOWEST_VERSION)
    while offset < end and empty_answers < EMPTY_ANSWERS_MAX:
        asked = Asked(place.partition, leader.leader_epoch, offset, FETCH_BYTES_MAX)
        body = pack_fetch(
            version,
            {info.topic_id: [asked]},
            isolation_level=int(is_committed),
            wait_ms=FETCH_WAIT_MS,
            bytes_max=FETCH_BYTES_MAX,
        )
        fetched = walk_fetch(connection.receive(connection.send(FETCH, version, body))).partitions[0]
        if fetched.error_code == OFFSET_OUT_OF_RANGE:
            start = cluster.offsets([place], "earliest")[place].offset
            if start > offset:  # the broker has deleted what lay before it since we asked
                offset = start
                continue
        if fetched.error_code:
            why = error_table.describe(fetched.error_code)
            raise NotConsumed(f"{place.topic}-{place.partition} at offset {offset}: {why}")
        seen = visible(bytes(fetched.records), offset, fetched.aborted if is_committed else None)
        for at, header, record in seen.records:
            if at < end:
                stamp = header.base_timestamp + record.timestamp_delta
                if header.is_log_append_time:
                    stamp = header.max_timestamp
                yield Record(*place, at, record.key, record.value, record.headers, stamp)
        empty_answers = empty_answers + 1 if seen.next_offset <= offset else 0
        offset = seen.next_offset


def _cluster(bootstrap_servers: str, timeout: float | None = None) -> Cluster:
    settings = {"bootstrap.servers": bootstrap_servers}
    if timeout is not None:
        milliseconds = str(max(1, round(timeout * 1000)))
        names = ("request.timeout.ms", "default.api.timeout.ms", "socket.connection.setup.timeout.ms")
        settings |= dict.fromkeys(names, milliseconds)
    return Cluster(settings)


def _topic(cluster: Cluster, topic: str) -> TopicInfo:
    found = cluster.refresh([topic]).get(topic)
    if found is None:
        try:
            return cluster.topics([topic])[topic]  # not every broker knows at once of a new one
        except TopicMissing as missing:
            raise UsageError(f"{missing}; {_nearest(topic, cluster.topics())}") from None
    return found


def _place(info: TopicInfo, partition: int | None, key: bytes | None, number: int) -> TopicPartition:
    count = len(info.partitions)
    if partition is None:
        partition = (number if key is None else murmur2(key) & POSITIVE) % count
    elif partition not in info.partitions:
        raise UsageError(f"topic {info.name!r} has no partition {partition}; it has 0 to {count - 1}")
    return TopicPartition(info.name, partition)


def _batches(numbers: list[int], values: Sequence[bytes | None]) -> Iterator[list[int]]:
    some: list[int] = []
    size = 0
    for number in numbers:
        length = len(values[number] or b"")
        if some and size + length > BATCH_BYTES_MAX:
            yield some
            some, size = [], 0
        some.append(number)
        size += length
    if some:
        yield some


def _milliseconds(moment: Any) -> int | None:
    """When a broker says that it stamped a batch; None where it did not."""
    return None if moment is None else round(moment.timestamp() * 1000)


def _nearest(topic: str, there: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(topic, there, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(there)) or 'none'}"
