"""Transactions of real clients: the same scenario, the same outcome, on Apache Kafka and here. X."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from tests.support.group_clients import MEMBERS, ConfluentMember, Member, pump
from tests.support.transaction_clients import PRODUCERS, Refused, TransactionalProducer

from holdfast.testing.engines import Engine, NotComeAbout, Place, Scenario, wait_until

pytestmark = pytest.mark.check

OnBoth = Callable[[Scenario], Any]
CLIENTS = ("confluent-kafka", "aiokafka", "kafka-python")


def open_producer(engine: Engine, client: str, name: str, **options: Any) -> TransactionalProducer:
    return PRODUCERS[client](engine.bootstrap_servers, name, **options)


def refusal(work: Callable[[], None]) -> str | None:
    try:
        work()
    except Refused as error:
        return str(error)
    return None


def commits_and_aborts(client: str, engine: Engine) -> Any:
    """Transactions over two partitions, some aborted, some empty; a plain producer writes in between."""
    topic = engine.create_topic(f"txn-{client}", 2)
    with closing(open_producer(engine, client, f"txn-{client}")) as producer:
        for number in range(6):
            producer.begin()
            if number != 4:
                for partition in (0, 1):
                    producer.send(topic, partition, f"{number} in {partition}")
            if number == 3:
                producer.flush()
                engine.write(topic, {0: ["from outside"]})
            if number % 3 == 2:
                producer.flush()  # what waits in a client when it aborts is never sent
                producer.abort()
            else:
                producer.commit()
    return {
        "committed": engine.read(topic, 2),
        "everything": engine.read(topic, 2, isolation="read_uncommitted"),
    }


@pytest.mark.parametrize("client", CLIENTS)
def test_committed_transactions_are_seen_and_aborted_ones_are_not(client: str, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: commits_and_aborts(client, engine))
    assert seen["committed"][0] == ["0 in 0", "1 in 0", "3 in 0", "from outside"]
    assert seen["committed"][1] == ["0 in 1", "1 in 1", "3 in 1"]
    assert seen["everything"][1] == ["0 in 1", "1 in 1", "2 in 1", "3 in 1", "5 in 1"]


def open_transaction(client: str, engine: Engine) -> Any:
    """What comes behind an open transaction waits for its end; interleaved ones end in any order."""
    topic = engine.create_topic(f"open-{client}", 1)
    with (
        closing(open_producer(engine, client, f"open-first-{client}")) as first,
        closing(open_producer(engine, client, f"open-second-{client}")) as second,
    ):
        first.begin()
        first.send(topic, 0, "first")
        first.flush()
        second.begin()
        second.send(topic, 0, "second")
        second.flush()
        engine.write(topic, {0: ["plain"]})
        seen = {"both open": engine.read(topic)}
        second.commit()
        seen["second committed"] = engine.read(topic)
        first.abort()
        engine.await_decided(topic)
        seen["first aborted"] = engine.read(topic)
        return seen


@pytest.mark.parametrize("client", CLIENTS)
def test_readers_wait_for_the_earliest_open_transaction(client: str, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: open_transaction(client, engine))
    assert [each[0] for each in seen.values()] == [[], [], ["second", "plain"]]


def zombie(client: str, engine: Engine) -> Any:
    """A second producer of the same id ends the first one's transaction and shuts it out."""
    topic = engine.create_topic(f"zombie-{client}", 1)
    name = f"zombie-{client}"
    with closing(open_producer(engine, client, name)) as old:
        old.begin()
        old.send(topic, 0, "of the old one, committed")
        old.commit()
        old.begin()
        old.send(topic, 0, "of the old one, left open")
        old.flush()
        with closing(open_producer(engine, client, name)) as new:
            new.begin()
            new.send(topic, 0, "of the new one")
            new.commit()

            def goes_on() -> None:
                old.send(topic, 0, "of the zombie")
                old.flush()
                old.commit()

            refused = refusal(goes_on)
    engine.await_decided(topic)
    return {"refused": refused, "committed": engine.read(topic)[0]}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_zombie_is_shut_out_and_its_transaction_aborted(client: str, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: zombie(client, engine))
    assert seen["committed"] == ["of the old one, committed", "of the new one"]
    assert seen["refused"]


def late(client: str, engine: Engine) -> Any:
    """A transaction that takes longer than its time-out is aborted by the broker; its producer learns of it."""
    topic = engine.create_topic(f"late-{client}", 1)
    with closing(open_producer(engine, client, f"late-{client}", timeout_ms=1000)) as producer:
        producer.begin()
        producer.send(topic, 0, "too late")
        producer.flush()
        engine.write(topic, {0: ["behind it"]})
        wait_until(lambda: engine.read(topic)[0], "the time-out has aborted it")
        refused = refusal(producer.commit)
    with closing(open_producer(engine, client, f"late-{client}")) as producer:
        producer.begin()
        producer.send(topic, 0, "in time")
        producer.commit()
    engine.await_decided(topic)
    return {"refused": refused, "committed": engine.read(topic)[0]}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_transaction_that_takes_too_long_is_aborted(client: str, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: late(client, engine))
    assert seen["committed"] == ["behind it", "in time"]
    assert seen["refused"]


class CopyJob:
    """Consume, transform, produce: ten messages a transaction, positions committed within it."""

    def __init__(
        self, engine: Engine, client: str, name: str, positions: dict[Place, int], **options: Any
    ) -> None:
        self.source, self.target = f"{name}-source", f"{name}-target"
        self.group = f"{name}-group"
        settings: dict[str, Any] = (
            {"isolation.level": "read_committed"}
            if client == "confluent-kafka"
            else {"isolation_level": "read_committed"}
        )
        self.member: Member = MEMBERS[client](
            engine.bootstrap_servers, self.group, [self.source], settings=settings, **options
        )
        self.producer = open_producer(engine, client, f"{name}-id")
        self._done = 0
        self.positions = positions
        """Where the group stands by the transactions that were committed."""

    def step(self, *, end: str = "commit") -> None:
        """One transaction over the next ten messages."""
        pump([self.member], lambda: len(self.member.seen) >= self._done + 10, "ten more messages")
        batch = self.member.seen[self._done : self._done + 10]
        self._done += 10
        self.producer.begin()
        for each in batch:
            self.producer.send(self.target, each.partition, f"copy of {each.value}")
        positions = {(each.topic, each.partition): each.offset + 1 for each in batch}
        self.producer.send_offsets(positions, self.member)
        if end == "crash":
            self.producer.flush()
        elif end == "abort":
            self.producer.abort()
        else:
            self.producer.commit()
            self.positions |= positions

    def close(self) -> None:
        self.producer.close()
        self.member.close()


def copies_at_last(client: str, options: dict[str, Any], engine: Engine) -> Any:
    """kafka-python 3.0 now and then misses a wake-up and stands still, on Apache Kafka as here: it may try once more,
    and the run's last lines say that it had to."""
    try:
        return copies(client, options, engine)
    except NotComeAbout as stall:
        if client != "kafka-python":
            raise
        warnings.warn(f"{client} stood still on {engine.name} and tried again: {stall}", stacklevel=2)
        return copies(client, options, engine, attempt=2)


def copies(client: str, options: dict[str, Any], engine: Engine, attempt: int = 1) -> Any:
    name = f"copy-{attempt}-{client}" + "".join(f"-{value}" for value in options.values())
    source = engine.create_topic(f"{name}-source", 2)
    target = engine.create_topic(f"{name}-target", 2)
    # What was aborted on the way in must not be copied.
    with closing(open_producer(engine, client, f"{name}-writer")) as writer:
        for kind in ("kept", "dropped", "kept too"):
            writer.begin()
            for number in range(10):
                writer.send(source, number % 2, f"{kind} {number}")
            writer.abort() if kind == "dropped" else writer.commit()
    positions: dict[Place, int] = {}
    with closing(CopyJob(engine, client, name, positions, **options)) as job:
        job.step(end="abort")
    with closing(CopyJob(engine, client, name, positions, **options)) as job:
        job.step()
        engine.await_committed(job.group, job.positions)
        job.step(end="crash")
    # The new instance ends the transaction of the one that crashed before it asks where to go on.
    with closing(open_producer(engine, client, f"{name}-id")):
        pass
    with closing(CopyJob(engine, client, name, positions, **options)) as job:
        job.step()
        engine.await_committed(job.group, job.positions)
    engine.await_decided(target)
    copied = engine.read(target, 2)
    assert copied == {
        index: [f"copy of {value}" for value in some] for index, some in engine.read(source, 2).items()
    }
    return {"copied": copied}


COPIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("confluent-kafka", {}),
    ("confluent-kafka", {"protocol": "consumer"}),
    ("aiokafka", {}),
    ("kafka-python", {}),
)


@pytest.mark.parametrize(("client", "options"), COPIES, ids=str)
def test_consume_transform_produce_copies_every_message_once(
    client: str, options: dict[str, Any], on_both: OnBoth
) -> None:
    seen = on_both(lambda engine: copies_at_last(client, options, engine))
    assert sum(map(len, seen["copied"].values())) == 20


def several_groups(engine: Engine) -> Any:
    """Positions of three groups and messages for two topics in one transaction: all or nothing."""
    topics = [engine.create_topic(f"several-{index}", 1) for index in range(2)]
    engine.write(topics[0], {0: [str(number) for number in range(10)]})
    members = [ConfluentMember(engine.bootstrap_servers, f"several-group-{n}", topics[:1]) for n in range(3)]
    seen: dict[str, Any] = {}
    with closing(open_producer(engine, "confluent-kafka", "several")) as producer:
        pump(members, lambda: all(len(each.seen) == 10 for each in members), "all have read")
        for end in ("abort", "commit"):
            producer.begin()
            producer.send(topics[1], 0, end)
            for number, member in enumerate(members):
                producer.send_offsets({(topics[0], 0): number + 3}, member)
            if end == "commit":
                producer.commit()
                for number in range(3):
                    engine.await_committed(f"several-group-{number}", {(topics[0], 0): number + 3})
            else:
                producer.abort()
                seen[end] = [engine.committed(f"several-group-{number}") for number in range(3)]
    for member in members:
        member.close()
    engine.await_decided(topics[1])
    return {**seen, "read": engine.read(topics[1])}


def test_committed_offsets_of_several_groups_commit_together(on_both: OnBoth) -> None:
    seen = on_both(several_groups)
    assert seen == {"abort": [{}, {}, {}], "read": {0: ["commit"]}}
