"""The demo's own count: which order is where, by a checker that knows neither the pipeline nor its audit.

It takes what was sent from the seed (`demo.orders`), what the topic holds from a plain consumer, and what was written
from plain Parquet files, and puts the three beside each other, order by order. It counts ours and the plain job of
`--unsafe` in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.demo.orders import NUMBER_HEADER, Kind, Orders
from holdfast.errors import HoldfastError
from holdfast.testing.engines import await_decided, read_log

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
    # Themselves or as a copy.
    arrived = {orders.id_of(number) for number in in_topic if number < orders.count}
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


def numbers_in_topic(bootstrap: str, topic: str) -> Iterator[int]:
    """The number of every message of a topic that a plain consumer of committed ones sees.

    Up to the end of all that is written: a transaction that was committed a moment ago, and whose markers are still on
    their way, is waited for.
    """
    if not await_decided(bootstrap, topic, READ_SECONDS_MAX):
        raise HoldfastError(f"a transaction in {topic} stays open")
    for message in read_log(bootstrap, topic, seconds=READ_SECONDS_MAX):
        yield int(dict(message.headers() or ())[NUMBER_HEADER] or -1)


def ids_in_parquet(*directories: Path) -> Iterator[int]:
    """The orders in the files a plain reader sees."""
    import pyarrow.parquet as pq

    for directory in directories:
        for file in sorted(directory.rglob("*.parquet")):
            below = file.relative_to(directory).parts
            if not any(part.startswith(("_", ".")) for part in below):
                yield from pq.ParquetFile(file).read(columns=["id"]).column("id").to_pylist()
