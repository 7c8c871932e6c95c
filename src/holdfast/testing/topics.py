"""Topics of any Kafka in a test's words: create one, produce to it, read all that it holds.

    broker.create_topic("orders", partitions=3)
    broker.produce("orders", "paid", "shipped", key="7", headers={"source": "web"})
    assert [record.text for record in broker.consume_all("orders")] == ["paid", "shipped"]

`produce` returns when everything is acknowledged with acks=all. `consume_all` reads what is there when it is called,
joins no group and commits nothing. `Topics("kafka:9092")` does the same on any cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from holdfast.errors import HoldfastError, UsageError

PRODUCE_SECONDS_MAX: Final = 30.0

Content: TypeAlias = str | bytes | None
"""A key, a value or a header's value; text is sent as UTF-8, a value of None is a tombstone."""
Headers: TypeAlias = Mapping[str, Content] | Sequence[tuple[str, Content]]
Isolation: TypeAlias = Literal["read_uncommitted", "read_committed"]


class NotProduced(HoldfastError):
    """A record was not acknowledged; the message says why, and whether it may be stored all the same."""


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
        from holdfast.testing.topic_records import create

        create(self.bootstrap_servers, name, partitions, settings or {})

    def produce(
        self,
        topic: str,
        *values: Content,
        key: Content = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        timeout: float = PRODUCE_SECONDS_MAX,
    ) -> list[Record]:
        """Send records and wait until each is acknowledged; returns them as they are stored.

        Without `partition` the key decides, as in Kafka's Java client, and values without a key take turns. What a
        broker refuses for the time being is sent again for `timeout` seconds; then `NotProduced` says why. Nothing is
        sent again that may be stored already.
        """
        from holdfast.testing.topic_records import produced

        pairs = headers.items() if isinstance(headers, Mapping) else headers
        return produced(
            self.bootstrap_servers,
            topic,
            [_encoded(value) for value in values],
            key=_encoded(key),
            headers=tuple((name, _encoded(value)) for name, value in pairs),
            partition=partition,
            timestamp_ms=timestamp_ms,
            timeout=timeout,
        )

    def consume_all(
        self, topic: str, *, partition: int | None = None, isolation: Isolation = "read_uncommitted"
    ) -> list[Record]:
        """Every record up to the topic's end at this moment, by partition and offset.

        read_committed leaves out what was aborted and ends where the first undecided transaction begins.
        """
        from holdfast.testing.topic_records import consumed

        if isolation not in ("read_uncommitted", "read_committed"):
            raise UsageError(f"isolation {isolation!r} is neither read_committed nor read_uncommitted")
        is_committed = isolation == "read_committed"
        return consumed(self.bootstrap_servers, topic, partition, is_committed=is_committed)


def _encoded(content: Content) -> bytes | None:
    return content.encode() if isinstance(content, str) else content
