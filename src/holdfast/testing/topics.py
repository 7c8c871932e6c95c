"""Topics of any Kafka in a test's words: create one, produce to it, read all that it holds.

    broker.create_topic("orders", partitions=3)
    broker.produce("orders", "paid", "shipped", key="7", headers={"source": "web"})
    assert [record.text for record in broker.consume_all("orders")] == ["paid", "shipped"]

`produce` returns when everything is acknowledged with acks=all. `consume_all` reads what is there when it is called,
joins no group and commits nothing. `Topics("kafka:9092")` does the same on any cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.reader.cluster import Cluster
    from holdfast.reader.model import TopicInfo, TopicPartition

PRODUCE_SECONDS_MAX: Final = 30.0
POLL_SECONDS_MAX: Final = 0.1
"""How long a report of delivery waits at most to be heard."""
FETCH_WAIT_MS: Final = 500
"""How long a broker may hold a fetch; what is asked for is there, so it never does for long."""
FETCH_BYTES_MAX: Final = 8 << 20
EMPTY_ANSWERS_MAX: Final = 3
"""So many in a row mean that all before the end was compacted away."""

Content: TypeAlias = str | bytes | None
"""A key, a value or a header's value; text is sent as UTF-8, None is a tombstone where it is a value."""
Isolation: TypeAlias = Literal["read_uncommitted", "read_committed"]


class NotProduced(HoldfastError):
    """A record was not acknowledged; it may be stored all the same."""


class NotConsumed(HoldfastError):
    """A topic could not be read up to its end."""


class Record(NamedTuple):
    """One record as it is stored."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int

    @property
    def text(self) -> str:
        """The value as text; empty for a tombstone."""
        return (self.value or b"").decode()


class Topics:
    """The topics of one Kafka, holdfast's or Apache's."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._address = bootstrap_servers

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect, as HOST:PORT."""
        return self._address

    def create_topic(self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Create a topic, with settings by Kafka's names. Raises `UsageError` when it exists."""
        from holdfast.broker.server.embed import create_topic

        create_topic(self.bootstrap_servers, name, partitions, settings)

    def produce(
        self,
        topic: str,
        *values: Content,
        key: Content = None,
        headers: Mapping[str, Content] | Sequence[tuple[str, Content]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        timeout: float = PRODUCE_SECONDS_MAX,
    ) -> list[Record]:
        """Send records and wait until each is acknowledged; returns them as they are stored.

        Without `partition` the key decides, and without a key chance. After `timeout` seconds `NotProduced` says how
        many were not acknowledged, and why.
        """
        from confluent_kafka import Producer

        encoded_key, encoded_headers = _encoded(key), _encoded_headers(headers)
        settings = {
            "bootstrap.servers": self.bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 0,
            "message.timeout.ms": max(1, round(timeout * 1000)),
            "log_level": 0,
        }
        given: dict[str, Any] = {} if partition is None else {"partition": partition}
        if timestamp_ms is not None:
            given["timestamp"] = timestamp_ms
        stored: dict[int, Record] = {}
        failed: list[Exception] = []
        reasons: list[str] = []
        producer = Producer({**settings, "error_cb": lambda error: reasons.append(error.str())})
        for number, value in enumerate(values):
            encoded = _encoded(value)

            def delivered(
                error: Any, message: Any, number: int = number, value: bytes | None = encoded
            ) -> None:
                if error is not None:
                    failed.append(error)
                    return
                place, stamp = (message.partition(), message.offset()), message.timestamp()[1]
                stored[number] = Record(topic, *place, encoded_key, value, encoded_headers, stamp)

            producer.produce(
                topic, encoded, encoded_key, on_delivery=delivered, headers=list(encoded_headers), **given
            )
            producer.poll(0)
        while len(stored) + len(failed) < len(values):
            producer.poll(POLL_SECONDS_MAX)
        if failed:
            why = "; ".join(dict.fromkeys([*(str(error) for error in failed), *reasons]))
            raise NotProduced(f"{len(failed)} of {len(values)} records for topic {topic!r}: {why}")
        return [stored[number] for number in range(len(values))]

    def consume_all(
        self,
        topic: str,
        *,
        partition: int | None = None,
        isolation: Isolation = "read_uncommitted",
    ) -> list[Record]:
        """Every record up to the topic's end at this moment, by partition and offset.

        read_committed leaves out what was aborted and ends where the first undecided transaction begins.
        """
        from holdfast.reader.cluster import Cluster
        from holdfast.reader.errors import TopicMissing
        from holdfast.reader.model import TopicPartition

        if isolation not in ("read_uncommitted", "read_committed"):
            raise UsageError(f"isolation {isolation!r} is neither read_committed nor read_uncommitted")
        is_committed = isolation == "read_committed"
        with Cluster({"bootstrap.servers": self.bootstrap_servers}) as cluster:
            try:
                info = cluster.topics([topic])[topic]
            except TopicMissing as missing:
                raise UsageError(f"{missing}; {_nearest(topic, cluster.topics())}") from None
            numbers = sorted(info.partitions)
            if partition is not None and partition not in numbers:
                raise UsageError(f"topic {topic!r} has no partition {partition}; it has 0 to {numbers[-1]}")
            places = [
                TopicPartition(topic, each) for each in numbers if partition is None or each == partition
            ]
            starts = cluster.offsets(places, "earliest")
            ends = cluster.offsets(places, "last-stable" if is_committed else "latest")
            return [
                record
                for place in places
                for record in _read(
                    cluster, info, place, starts[place].offset, ends[place].offset, is_committed
                )
            ]


def _read(
    cluster: Cluster, info: TopicInfo, place: TopicPartition, start: int, end: int, is_committed: bool
) -> Iterator[Record]:
    from holdfast.reader.fetch_messages import FETCH, LOWEST_VERSION, Asked, pack_fetch, walk_fetch
    from holdfast.testing.committed_reader import visible
    from holdfast.wire import error_table

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
        if fetched.error_code:
            why = error_table.describe(fetched.error_code)
            raise NotConsumed(f"{place.topic}-{place.partition} at offset {offset}: {why}")
        seen = visible(bytes(fetched.records), offset, fetched.aborted if is_committed else None)
        for at, header, record in seen.records:
            if at < end:
                moment = header.max_timestamp if header.is_log_append_time else header.base_timestamp
                stamp = moment if header.is_log_append_time else moment + record.timestamp_delta
                yield Record(
                    place.topic, place.partition, at, record.key, record.value, record.headers, stamp
                )
        empty_answers = empty_answers + 1 if seen.next_offset <= offset else 0
        offset = seen.next_offset


def _encoded(content: Content) -> bytes | None:
    return content.encode() if isinstance(content, str) else content


def _encoded_headers(
    headers: Mapping[str, Content] | Sequence[tuple[str, Content]],
) -> tuple[tuple[str, bytes | None], ...]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return tuple((name, _encoded(value)) for name, value in pairs)


def _nearest(topic: str, there: Mapping[str, object]) -> str:
    import difflib

    near = difflib.get_close_matches(topic, there, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(there)) or 'none'}"
