"""Fetch: limits, waiting, epochs, topic ids and incremental sessions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tests.support.differential import Script, Side

from holdfast.wire.api_keys import FETCH
from holdfast.wire.batch import make_batch
from holdfast.wire.codecs import Codec

NOW = int(time.time() * 1000)
Compare = Callable[[Script], None]


def fill(
    side: Side, topic: str, batches: int, *, partition: int = 0, size: int = 100, **options: int
) -> None:
    for number in range(batches):
        values = [b"%d" % number * size, b"second"]
        data = make_batch(values, timestamp=NOW + number, **options)
        side.client.ask(
            0,
            9,
            {
                "acks": -1,
                "timeout": 9000,
                "topic_data": [
                    {"name": topic, "partition_data": [{"index": partition, "records": data}]},
                ],
            },
        )


def request(topics: Mapping[Any, Sequence[Mapping[str, int]]], **fields: Any) -> dict[str, Any]:
    """A fetch of everything in the partitions named, unless told otherwise."""

    def topic_key(topic: str | uuid.UUID) -> str:
        return "topic_id" if isinstance(topic, uuid.UUID) else "topic"

    return {
        "replica_id": -1,
        "replica_state": {"replica_id": -1, "replica_epoch": -1},
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": 50 << 20,
        "session_id": 0,
        "session_epoch": -1,
        "topics": [
            {
                topic_key(topic): topic,
                "partitions": [
                    {"partition_max_bytes": 1 << 20, "current_leader_epoch": -1, **p} for p in parts
                ],
            }
            for topic, parts in topics.items()
        ],
        **fields,
    }


def at(offset: int, partition: int = 0, **fields: int) -> dict[str, int]:
    return {"partition": partition, "fetch_offset": offset, **fields}


def versions_of_fetch(side: Side) -> None:
    topic_id = side.create_topic("fetched")
    fill(side, "fetched", 3)
    for version in (4, 5, 7, 9, 10, 11, 12):
        side.ask(f"version {version}", FETCH, version, request({"fetched": [at(0)]}))
    for version in (13, 15, 16, 17, 18):
        side.ask(f"version {version}", FETCH, version, request({topic_id: [at(0)]}))
    side.ask("from inside a batch", FETCH, 12, request({"fetched": [at(3)]}))
    side.ask("at the end", FETCH, 12, request({"fetched": [at(6)]}))
    side.ask("read committed", FETCH, 12, request({"fetched": [at(2)]}, isolation_level=1))
    side.ask("isolation level 7", FETCH, 12, request({"fetched": [at(2)]}, isolation_level=7))


def places_without_data(side: Side) -> None:
    topic_id = side.create_topic("sparse")
    fill(side, "sparse", 1)
    side.ask("beyond the end", FETCH, 12, request({"sparse": [at(3)]}))
    side.ask("negative offset", FETCH, 12, request({"sparse": [at(-1)]}))
    side.ask("no such partition", FETCH, 12, request({"sparse": [at(0, 5)]}))
    side.ask("negative partition", FETCH, 12, request({"sparse": [at(0, -1)]}))
    side.ask("no such topic", FETCH, 12, request({"nowhere": [at(0)]}))
    side.ask("no such topic id", FETCH, 13, request({uuid.UUID(int=77): [at(0)]}))
    side.ask("zero topic id", FETCH, 13, request({uuid.UUID(int=0): [at(0)]}))
    side.ask("id, no such partition", FETCH, 13, request({topic_id: [at(0, 5)]}))
    side.ask("good and bad", FETCH, 12, request({"sparse": [at(0), at(0, 5)], "nowhere": [at(0)]}))
    side.ask("nothing asked", FETCH, 12, request({}))
    side.ask("same partition twice", FETCH, 12, request({"sparse": [at(0), at(1)]}))


def epochs_of_clients(side: Side) -> None:
    topic_id = side.create_topic("epochs")
    fill(side, "epochs", 2)
    for epoch in (-1, 0, 1, 5):
        side.ask(
            f"current epoch {epoch}", FETCH, 12, request({"epochs": [at(0, current_leader_epoch=epoch)]})
        )
    side.ask("future epoch by id", FETCH, 17, request({topic_id: [at(0, current_leader_epoch=9)]}))
    for epoch, offset in ((0, 2), (0, 4), (0, 9), (3, 2), (-1, 2)):
        wanted = at(offset, last_fetched_epoch=epoch)
        side.ask(f"last fetched epoch {epoch} at {offset}", FETCH, 12, request({"epochs": [wanted]}))


def limits_of_bytes(side: Side) -> None:
    side.create_topic("limited", 3)
    for partition in range(3):
        fill(side, "limited", 4, partition=partition, size=1000)
    every = [at(0, 0), at(0, 1), at(0, 2)]
    small = {"partition_max_bytes": 10}
    side.ask("partition limit below a batch", FETCH, 12, request({"limited": [at(0, 0, **small)]}))
    side.ask("the same for three", FETCH, 12, request({"limited": [at(0, p, **small) for p in range(3)]}))
    side.ask("zero partition limit", FETCH, 12, request({"limited": [at(0, 0, partition_max_bytes=0)]}))
    side.ask("negative partition limit", FETCH, 12, request({"limited": [at(0, 0, partition_max_bytes=-1)]}))
    side.ask("two and a half batches", FETCH, 12, request({"limited": [at(0, 0, partition_max_bytes=2700)]}))
    side.ask("total below a batch", FETCH, 12, request({"limited": every}, max_bytes=1))
    side.ask("total zero", FETCH, 12, request({"limited": every}, max_bytes=0))
    side.ask("total negative", FETCH, 12, request({"limited": every}, max_bytes=-1))
    side.ask("total of five batches and a half", FETCH, 12, request({"limited": every}, max_bytes=6000))


def old_clients_and_zstd(side: Side) -> None:
    side.create_topic("zstd-data")
    fill(side, "zstd-data", 1, codec=int(Codec.ZSTD))
    side.create_topic("zstd-topic", 1, {"compression.type": "zstd"})
    fill(side, "zstd-topic", 1)
    for version in (4, 9, 10):
        side.ask(f"batch, version {version}", FETCH, version, request({"zstd-data": [at(0)]}))
        side.ask(f"topic, version {version}", FETCH, version, request({"zstd-topic": [at(0)]}))


def waiting(side: Side) -> None:
    side.create_topic("awaited", 2)
    fill(side, "awaited", 1)

    def took(label: str, fields: dict[str, Any], at_least_ms: int) -> None:
        """An answer that must not wait comes long before its `max_wait`, or the asking itself fails."""
        before = time.monotonic()
        side.ask(label, FETCH, 12, fields)
        if at_least_ms:
            side.note(f"{label}: waited", (time.monotonic() - before) * 1000 >= at_least_ms - 5)

    took("end of data waits", request({"awaited": [at(2)]}, max_wait=150), 150)
    took("too little data waits", request({"awaited": [at(0)]}, max_wait=150, min_bytes=1 << 20), 150)
    took("no minimum never waits", request({"awaited": [at(2)]}, max_wait=30_000, min_bytes=0), 0)
    took("enough data never waits", request({"awaited": [at(0)]}, max_wait=30_000, min_bytes=50), 0)
    took("an error beside the end of data", request({"awaited": [at(2), at(0, 9)]}, max_wait=2000), 2000)
    took("out of range never waits", request({"awaited": [at(99)]}, max_wait=30_000), 0)
    took(
        "a fenced epoch never waits",
        request({"awaited": [at(2, current_leader_epoch=4)]}, max_wait=30_000),
        0,
    )
    took("nothing asked", request({}, max_wait=30_000), 0)


def data_arrives_while_waiting(side: Side) -> None:
    side.create_topic("arriving")
    fields = request({"arriving": [at(0)]}, max_wait=20_000)
    correlation_id = side.client.tell(FETCH, 12, fields)
    other = Side(side.bootstrap_servers)
    try:
        fill(other, "arriving", 1)
    finally:
        other.close()
    answer = side.client.receive()
    assert isinstance(answer, bytes)
    side.note("woken", side.client.decode(answer, FETCH, 12, correlation_id))


class Sessions:
    """Asks within one fetch session, keeping its id and epoch."""

    def __init__(self, side: Side, version: int) -> None:
        self.side = side
        self.version = version
        self.id = 0
        self.epoch = 0

    def ask(self, label: str, topics: Mapping[Any, Sequence[Mapping[str, int]]], **fields: Any) -> Any:
        session = {"session_id": self.id, "session_epoch": self.epoch}
        answer = self.side.ask(label, FETCH, self.version, request(topics, **{**session, **fields}))
        if answer.session_id:
            self.id = answer.session_id
            self.epoch += 1
        return answer


def sessions_by_name(side: Side) -> None:
    side.create_topic("session", 3)
    fill(side, "session", 1)
    session = Sessions(side, 12)
    session.ask("full", {"session": [at(0, 0), at(0, 1), at(0, 2)]})
    session.ask("nothing changed but unread data", {})
    session.ask("read on", {"session": [at(2, 0)]})
    session.ask("nothing new", {})
    fill(side, "session", 1, partition=1)
    session.ask("news of another partition", {})
    session.ask("again, it was not read", {})
    forgotten = [{"topic": "session", "partitions": [1]}]
    session.ask("forgotten", {}, forgotten_topics_data=forgotten)
    session.ask("forgotten again", {}, forgotten_topics_data=forgotten)
    session.ask("error in session", {"session": [at(99, 2)]})
    session.ask("error repeated", {})
    session.ask("error mended", {"session": [at(0, 2)]})
    session.ask("added unknown topic", {"nowhere": [at(0)]})
    side.ask("epoch of the past", FETCH, 12, request({}, session_id=session.id, session_epoch=1))
    side.ask("epoch of the future", FETCH, 12, request({}, session_id=session.id, session_epoch=99))
    session.ask("still there", {})
    side.ask("unknown session", FETCH, 12, request({}, session_id=123456, session_epoch=1))
    side.ask("session 0 with an epoch", FETCH, 12, request({}, session_id=0, session_epoch=3))
    side.ask("negative epoch", FETCH, 12, request({}, session_id=session.id, session_epoch=-5))
    closing = request({"session": [at(0)]}, session_id=session.id, session_epoch=-1)
    side.ask("closed", FETCH, 12, closing)
    side.ask("after closing", FETCH, 12, request({}, session_id=session.id, session_epoch=session.epoch))


def sessions_by_id(side: Side) -> None:
    topic_id = side.create_topic("session-id", 2)
    fill(side, "session-id", 1)
    session = Sessions(side, 17)
    session.ask("full", {topic_id: [at(0, 0), at(0, 1)]})
    session.ask("read on", {topic_id: [at(2, 0)]})
    session.ask("unknown id added", {uuid.UUID(int=99): [at(0)]})
    session.ask("unknown id goes on", {})
    session.ask(
        "unknown id forgotten", {}, forgotten_topics_data=[{"topic_id": uuid.UUID(int=99), "partitions": [0]}]
    )
    session.ask("quiet", {})
    by_name = request({"session-id": [at(0)]}, session_id=session.id, session_epoch=session.epoch)
    side.ask("by name in the middle", FETCH, 12, by_name)


def sessions_replaced(side: Side) -> None:
    side.create_topic("replaced")
    fill(side, "replaced", 1)
    session = Sessions(side, 12)
    session.ask("first", {"replaced": [at(0)]})
    side.ask("another", FETCH, 12, request({"replaced": [at(0)]}, session_id=session.id, session_epoch=0))
    side.ask("the first is gone", FETCH, 12, request({}, session_id=session.id, session_epoch=1))
    side.ask("none without partitions", FETCH, 12, request({}, session_id=0, session_epoch=0))


SCRIPTS = (
    versions_of_fetch,
    places_without_data,
    epochs_of_clients,
    limits_of_bytes,
    old_clients_and_zstd,
    waiting,
    data_arrives_while_waiting,
    sessions_by_name,
    sessions_by_id,
    sessions_replaced,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_fetch_is_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
