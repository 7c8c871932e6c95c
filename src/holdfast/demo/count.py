"""The demo's own count: which order is where, by a checker that knows neither the pipeline nor its audit.

It takes what was sent from the seed (`demo_orders`), what the topic holds from a plain consumer, and what was written
from plain Parquet files, and puts the three beside each other, order by order. It counts ours and the plain job of
`--unsafe` in the same way.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from holdfast.demo.orders import NUMBER_HEADER, Kind, Orders
from holdfast.errors import HoldfastError

READ_SECONDS_MAX: Final = 120.0


@dataclass(frozen=True)
class Tally:
    """What became of the orders of one run."""

    orders: int
    """Different ones whose customers were told that they were taken, malformed ones apart."""
    malformed: int
    stored: int
    """Messages in the topic, copies and malformed ones included."""
    lost_before_broker: frozenset[int]
    """Orders that are not even in the topic."""
    lost_behind_broker: frozenset[int]
    """In the topic, and in no output."""
    twice: frozenset[int]
    surplus_rows: int
    """Rows too many: those of an order beyond the first; of a late one, beyond those in the topic."""
    untraced: frozenset[int]
    """Malformed messages of which nothing tells."""
    taken_for_good: frozenset[int]
    """Malformed messages that were written as if they were orders."""

    @property
    def lost(self) -> int:
        return len(self.lost_before_broker) + len(self.lost_behind_broker)

    @property
    def is_whole(self) -> bool:
        return not (self.lost or self.surplus_rows or self.untraced or self.taken_for_good)


def count(orders: Orders, stored: Iterable[int], written: Iterable[int], rejected: Iterable[int]) -> Tally:
    """`stored` and `rejected` are numbers of messages, `written` ids of orders, each as often as it is there."""
    in_topic = Counter(stored)
    rows = Counter(written)
    wanted = orders.ids(Kind.ORDER) | orders.ids(Kind.LATE)
    malformed = orders.ids(Kind.MALFORMED)
    arrived = _arrived(orders, in_topic)
    surplus = _surplus(orders, in_topic, rows)
    missing = wanted - rows.keys()
    traced = set(rejected) | rows.keys()
    return Tally(
        orders=len(wanted),
        malformed=len(malformed),
        stored=sum(in_topic.values()),
        lost_before_broker=frozenset(missing - arrived),
        lost_behind_broker=frozenset(missing & arrived),
        twice=frozenset(surplus),
        surplus_rows=surplus.total(),
        untraced=frozenset(malformed - traced),
        taken_for_good=frozenset(rows.keys() - wanted),
    )


def _surplus(orders: Orders, in_topic: Counter[int], rows: Counter[int]) -> Counter[int]:
    """Rows too many, by order. A late one may be there as often as the topic has it: it came too late to be judged."""
    return Counter(
        {
            number: times - allowed
            for number, times in rows.items()
            if times > (allowed := max(1, in_topic[number]) if orders.kind(number) is Kind.LATE else 1)
        }
    )


def _arrived(orders: Orders, in_topic: Iterable[int]) -> set[int]:
    """The orders that the topic holds, themselves or as a copy."""
    found = set()
    for number in in_topic:
        if number < orders.count:
            found.add(orders.id_of(number))
    return found


def numbers_in_topic(bootstrap: str, topic: str) -> Iterator[int]:
    """The number of every message of a topic that a plain consumer of committed ones sees.

    Up to the end of all that is written: a transaction that was committed a moment ago, and whose markers are still on
    their way, is waited for.
    """
    ends = _ends(bootstrap, topic)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "demo-count",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "log_level": 0,
        }
    )
    deadline = time.monotonic() + READ_SECONDS_MAX
    try:
        left = set(ends)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in left])
        while left:
            if time.monotonic() > deadline:
                raise HoldfastError(
                    f"the end of {topic} was not reached within {READ_SECONDS_MAX:.0f} s: {left}"
                )
            for message in consumer.consume(10_000, 0.2):
                error = message.error()
                if error is None:
                    yield int(dict(message.headers() or ())[NUMBER_HEADER] or -1)
                elif error.code() == KafkaError._PARTITION_EOF:
                    if (message.offset() or 0) >= ends[message.partition() or 0]:
                        left.discard(message.partition())
                else:
                    raise HoldfastError(f"{topic} cannot be read: {error}")
    finally:
        consumer.close()


def _ends(bootstrap: str, topic: str) -> dict[int, int]:
    """The offset behind the last of every partition, of whatever transaction it is."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    specs: Any = OffsetSpec
    partitions = admin.list_topics(topic, 30).topics[topic].partitions
    asked = admin.list_offsets({TopicPartition(topic, each): specs.latest() for each in partitions})
    return {place.partition: future.result().offset for place, future in asked.items()}


def ids_in_parquet(*directories: Path) -> Iterator[int]:
    """The orders in the files a plain reader sees."""
    import pyarrow.parquet as pq

    for directory in directories:
        for file in sorted(directory.rglob("*.parquet")):
            below = file.relative_to(directory).parts
            if not any(part.startswith(("_", ".")) for part in below):
                yield from pq.ParquetFile(file).read(columns=["id"]).column("id").to_pylist()
