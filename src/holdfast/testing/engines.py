"""The same scenario on two engines: Apache Kafka and holdfast, as other people's clients see them.

A scenario is a function that takes an `Engine`, does what a user would do, checks what must hold, and returns
what it saw as plain data. It runs on both engines at the same time, and what was seen must be equal:

    def scenario(engine: Engine) -> Any:
        engine.create_topic("orders", 3)
        ...
        return {"assigned": ..., "committed": ...}

What no two engines can share (member ids, producer ids, clocks) a scenario leaves out of what it returns.
Nothing here sleeps for an effect: `wait_until` asks again until it has come about.

Apache Kafka answers the end of a transaction when it is decided, and writes the markers afterwards: a reader of
committed messages that is quicker than the markers finds the topic as it was before. Whoever reads a topic to its end
to see what a transaction left there waits for them first (`await_decided`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from holdfast.errors import HoldfastError
from holdfast.testing.wire_client import CLOSED, SILENT, WireClient
from holdfast.wire.api_keys import LIST_OFFSETS, OFFSET_FETCH

WAIT_SECONDS: Final = 40.0
"""How long anything may take on a crowded machine."""
POLL_SECONDS: Final = 0.02
QUIET: Final[Mapping[str, Any]] = {"log_level": 0, "socket.keepalive.enable": True}
"""Settings of librdkafka that every client here has: what goes wrong is raised, not printed."""

Place = tuple[str, int]
"""A topic and one of its partitions."""


class NotComeAbout(HoldfastError):
    """What a scenario waited for did not happen."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_SECONDS) -> Any:
    """Ask again and again until the answer is true, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise NotComeAbout(f"within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_SECONDS)


def read_log(
    bootstrap_servers: str, topic: str, *, isolation: str = "read_committed", seconds: float = WAIT_SECONDS
) -> Iterator[Any]:
    """Every message of a topic that a reader of this isolation level sees, each partition up to its end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "reads-without-a-group",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            **QUIET,
        }
    )
    deadline = time.monotonic() + seconds
    try:
        left = set(consumer.list_topics(topic, WAIT_SECONDS).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index in left])
        while left:
            if time.monotonic() > deadline:
                raise NotComeAbout(f"the end of {topic} was not reached: {sorted(left)}")
            message: Any = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is None:
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard(message.partition())
            else:
                raise KafkaException(error)
    finally:
        consumer.close()


class Engine:
    """One broker, ours or Apache Kafka's, with what scenarios need again and again."""

    def __init__(self, name: str, bootstrap_servers: str) -> None:
        self.name = name
        self.bootstrap_servers = bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})

    def __repr__(self) -> str:
        return f"{self.name} at {self.bootstrap_servers}"

    # Topics

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        made = self.admin.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))])
        made[name].result(WAIT_SECONDS)
        # Apache Kafka answers a creation before it is carried out. A client of the requests themselves asks:
        # librdkafka's would remember that it was told of no such topic.
        wanted = [{"partition_index": index, "timestamp": -1} for index in range(partitions)]
        with WireClient(self.bootstrap_servers) as client:

            def is_served() -> bool:
                answer = client.ask(LIST_OFFSETS, 3, {"topics": [{"name": name, "partitions": wanted}]})
                return all(each.error_code == 0 for each in answer.topics[0].partitions)

            wait_until(is_served, f"{name} is served")
        return name

    def write(self, topic: str, values: Mapping[int, Iterable[str]]) -> None:
        """Values into partitions of a topic, acknowledged when this returns."""
        failures: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: Any) -> None:
            if error is not None:
                failures.append(error)

        producer = Producer(
            {"bootstrap.servers": self.bootstrap_servers, "linger.ms": 5, "enable.idempotence": True, **QUIET}
        )
        for partition, some in values.items():
            for value in some:
                producer.produce(topic, value.encode(), partition=partition, on_delivery=delivered)
        left = producer.flush(WAIT_SECONDS)
        if failures or left:
            raise NotComeAbout(f"{left} of the values for {topic} were not acknowledged: {failures[:1]}")

    def read(
        self, topic: str, partitions: int = 1, *, isolation: str = "read_committed"
    ) -> dict[int, list[str]]:
        """Every value of a topic that a reader of this isolation level sees, by partition, in order."""
        found: dict[int, list[str]] = {index: [] for index in range(partitions)}
        for message in read_log(self.bootstrap_servers, topic, isolation=isolation):
            found[message.partition()].append((message.value() or b"").decode())
        return found

    def await_decided(self, topic: str) -> None:
        """Return when all of a topic is committed or aborted, before `read` is to see how its transactions ended."""
        if not await_decided(self.bootstrap_servers, topic, WAIT_SECONDS):
            raise NotComeAbout(f"a transaction in {topic} stays open")

    # Groups

    def committed(self, group: str) -> dict[str, int]:
        """The committed offsets of a group, by `topic-partition`, once no transaction is about to change them.

        A client of the requests themselves asks: librdkafka's could end the process when it was asked right after a
        restart of the broker.
        """
        wanted = {"groups": [{"group_id": group, "topics": None}], "require_stable": True}

        def ask() -> list[Any] | None:
            try:
                with WireClient(self.bootstrap_servers) as client:
                    answer = client.ask(OFFSET_FETCH, 8, wanted)
            except OSError:
                return None
            if answer in (CLOSED, SILENT) or answer.groups[0].error_code != 0:
                return None
            found = [(topic.name, each) for topic in answer.groups[0].topics for each in topic.partitions]
            return None if any(each.error_code != 0 for _, each in found) else [found]

        (found,) = wait_until(ask, f"the committed offsets of {group} are stable")
        places = sorted((topic, each.partition_index, each.committed_offset) for topic, each in found)
        return {f"{topic}-{index}": offset for topic, index, offset in places}

    def await_committed(self, group: str, positions: Mapping[Place, int]) -> dict[str, int]:
        """The same once they are these: Apache Kafka answers the end of a transaction before it shows."""
        wanted = {f"{topic}-{partition}": offset for (topic, partition), offset in positions.items()}
        wait_until(lambda: self.committed(group) == wanted, f"{group} stands at {wanted}")
        return wanted

    def state_of(self, group: str) -> str:
        """The state of a group as an admin client names it."""
        described = self.admin.describe_consumer_groups([group])[group].result(WAIT_SECONDS)
        return str(described.state.name)

    def await_state(self, group: str, *states: str) -> None:
        wait_until(lambda: self.state_of(group) in states, f"{group} is {' or '.join(states)}")


Scenario = Callable[[Engine], Any]


def run_on_all(scenario: Scenario, engines: Sequence[Engine]) -> list[Any]:
    """What each engine showed; the first exception of any passes through, with the engine's name."""

    def run(engine: Engine) -> Any:
        try:
            return scenario(engine)
        except BaseException as error:
            error.add_note(f"on {engine}")
            raise

    with ThreadPoolExecutor(len(engines)) as pool:
        running = [pool.submit(run, engine) for engine in engines]
    failures = [error for each in running if (error := each.exception()) is not None]
    if failures:
        for other in failures[1:]:
            failures[0].add_note(f"and {type(other).__name__}: {other}")
        raise failures[0]
    return [each.result() for each in running]


ANSWER_SECONDS: Final = 30.0


def await_decided(bootstrap_servers: str, topic: str, seconds: float = 30.0) -> bool:
    """Wait until all that the topic holds now is committed or aborted; false when something stays open."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, **QUIET})
    found = admin.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic].partitions
    places = [TopicPartition(topic, number) for number in found]
    written = _ends(admin, places, IsolationLevel.READ_UNCOMMITTED)

    def is_decided() -> bool:
        stable = _ends(admin, places, IsolationLevel.READ_COMMITTED)
        return all(end >= written[number] for number, end in stable.items())

    try:
        wait_until(is_decided, f"everything in {topic} is decided", seconds)
    except NotComeAbout:
        return False
    return True


def _ends(admin: Any, places: list[TopicPartition], isolation: IsolationLevel) -> dict[int, int]:
    specs: Any = OffsetSpec
    asked = {place: specs.latest() for place in places}
    answers = admin.list_offsets(asked, isolation_level=isolation, request_timeout=ANSWER_SECONDS)
    return {place.partition: future.result().offset for place, future in answers.items()}
