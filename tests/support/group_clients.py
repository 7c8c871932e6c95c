"""Members of consumer groups, of whichever client, behind one small face.

    first = make_member("aiokafka", engine.bootstrap_servers, "group", ["topic"], assignor="sticky")
    pump([first], lambda: len(first.seen) == 60, "everything was read")

A member notes what it read (`seen`), what it holds (`assignment`) and every change of that (`events`), as its
client told it. Members never commit by themselves. All of them want to be polled: `pump` does that in turns until
a condition holds, so that a rebalance, which needs all members, can go on.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException

from holdfast.testing.engines import QUIET, WAIT_SECONDS, NotComeAbout, Place, wait_until

HEARTBEAT_MS: Final = 150
"""A member learns of a rebalance by its heartbeat; the default of three seconds would be most of a test."""
SESSION_MS: Final = 10_000
POLL_SECONDS: Final = 0.02

T = TypeVar("T")


class Seen(NamedTuple):
    topic: str
    partition: int
    offset: int
    value: str


class Event(NamedTuple):
    kind: str
    """assigned, revoked or lost."""
    places: frozenset[Place]


class Member(Protocol):
    seen: list[Seen]
    events: list[Event]
    errors: list[str]
    """Names of errors its client reported for good, such as being fenced."""

    @property
    def assignment(self) -> frozenset[Place]: ...

    def poll(self, timeout_s: float) -> None:
        """Let the client work, and take what it has read."""

    def commit(self) -> None:
        """Commit the positions of everything held, and wait for the answer."""

    def close(self) -> None:
        """Leave the group, as the client does it."""


class ConfluentMember:
    """librdkafka's consumer; `protocol` is `classic` or `consumer`."""

    def __init__(
        self,
        bootstrap_servers: str,
        group: str,
        topics: Sequence[str],
        *,
        assignor: str | None = None,
        protocol: str = "classic",
        instance_id: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.seen: list[Seen] = []
        self.events: list[Event] = []
        self.errors: list[str] = []
        config: dict[str, Any] = {
            "bootstrap.servers": bootstrap_servers,
            "group.id": group,
            "group.protocol": protocol,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 50,
            "topic.metadata.refresh.interval.ms": 500,
            **QUIET,
        }
        if protocol == "classic":
            config |= {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": HEARTBEAT_MS}
        if assignor is not None:
            name = "partition.assignment.strategy" if protocol == "classic" else "group.remote.assignor"
            config[name] = assignor
        if instance_id is not None:
            config["group.instance.id"] = instance_id
        self.consumer = Consumer({**config, **(settings or {})})
        self.consumer.subscribe(
            list(topics),
            on_assign=self._note("assigned"),
            on_revoke=self._note("revoked"),
            on_lost=self._note("lost"),
        )

    def _note(self, kind: str) -> Callable[[Any, Any], None]:
        def note(_: Any, partitions: Any) -> None:
            self.events.append(Event(kind, frozenset((each.topic, each.partition) for each in partitions)))

        return note

    @property
    def assignment(self) -> frozenset[Place]:
        return frozenset((each.topic, each.partition) for each in self.consumer.assignment())

    def poll(self, timeout_s: float) -> None:
        message: Any
        for message in self.consumer.consume(500, timeout=timeout_s):
            error = message.error()
            if error is None:
                value = (message.value() or b"").decode()
                self.seen.append(Seen(message.topic(), message.partition(), message.offset(), value))
            elif error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._PARTITION_EOF):
                continue
            else:
                self.errors.append(error.name())

    def commit(self) -> None:
        try:
            try:
                self.consumer.commit(asynchronous=False)
            except KafkaException as error:
                if error.args[0].code() != KafkaError._TIMED_OUT:
                    raise
                warnings.warn(f"a commit timed out and is tried again: {error}", stacklevel=2)
                self.consumer.commit(asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() != KafkaError._NO_OFFSET:
                raise

    def close(self) -> None:
        self.consumer.close()


class KafkaPythonMember:
    """kafka-python's consumer; it works only while it is polled."""

    def __init__(
        self,
        bootstrap_servers: str,
        group: str,
        topics: Sequence[str],
        *,
        assignor: str | None = None,
        instance_id: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        from kafka import ConsumerRebalanceListener, KafkaConsumer

        self.seen: list[Seen] = []
        self.events: list[Event] = []
        self.errors: list[str] = []
        extra: dict[str, Any] = dict(settings or {})
        if assignor is not None:
            extra["partition_assignment_strategy"] = [_kafka_python_assignor(assignor)]
        if instance_id is not None:
            extra["group_instance_id"] = instance_id
        self.consumer = KafkaConsumer(
            bootstrap_servers=bootstrap_servers,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            heartbeat_interval_ms=HEARTBEAT_MS,
            session_timeout_ms=SESSION_MS,
            fetch_max_wait_ms=50,
            retry_backoff_ms=20,
            metadata_max_age_ms=1000,
            **extra,
        )
        # One that joins before it knows its topics has nothing to share out, and does not look again soon.
        for topic in topics:
            wait_until(partial(self.consumer.partitions_for_topic, topic), f"{topic} is known")
        events = self.events

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
            def on_partitions_revoked(self, revoked: Any) -> None:
                events.append(Event("revoked", frozenset((each.topic, each.partition) for each in revoked)))

            def on_partitions_assigned(self, assigned: Any) -> None:
                events.append(Event("assigned", frozenset((each.topic, each.partition) for each in assigned)))

        self.consumer.subscribe(list(topics), listener=Listener())

    @property
    def assignment(self) -> frozenset[Place]:
        return frozenset((each.topic, each.partition) for each in self.consumer.assignment())

    def poll(self, timeout_s: float) -> None:
        from kafka.errors import KafkaError as ClientError

        try:
            # Given less time than this it may never get round to its heartbeats and fetches.
            found = self.consumer.poll(timeout_ms=max(int(timeout_s * 1000), 200))
        except ClientError as error:
            self.errors.append(type(error).__name__)
            return
        self.seen += [_from_attributes(message) for batch in found.values() for message in batch]

    def commit(self) -> None:
        self.consumer.commit()

    def close(self) -> None:
        self.consumer.close(autocommit=False)


class AioKafkaMember:
    """aiokafka's consumer, on an event loop and thread of its own."""

    def __init__(
        self,
        bootstrap_servers: str,
        group: str,
        topics: Sequence[str],
        *,
        assignor: str | None = None,
        instance_id: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

        self.seen: list[Seen] = []
        self.events: list[Event] = []
        self.errors: list[str] = []
        self.group = group
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        extra: dict[str, Any] = dict(settings or {})
        if assignor is not None:
            extra["partition_assignment_strategy"] = [_aiokafka_assignor(assignor)]
        if instance_id is not None:
            extra["group_instance_id"] = instance_id
        events = self.events

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
            async def on_partitions_revoked(self, revoked: Any) -> None:
                events.append(Event("revoked", frozenset((each.topic, each.partition) for each in revoked)))

            async def on_partitions_assigned(self, assigned: Any) -> None:
                events.append(Event("assigned", frozenset((each.topic, each.partition) for each in assigned)))

        async def start() -> Any:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap_servers,
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                heartbeat_interval_ms=HEARTBEAT_MS,
                session_timeout_ms=SESSION_MS,
                fetch_max_wait_ms=50,
                retry_backoff_ms=20,
                **extra,
            )
            consumer.subscribe(list(topics), listener=Listener())
            await consumer.start()
            return consumer

        # Starting waits for the assignment, which other members may have to make room for by being polled.
        self._starting = asyncio.run_coroutine_threadsafe(start(), self._loop)
        self._polling: Future[Any] | None = None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    @property
    def _consumer(self) -> Any:
        return self._starting.result(WAIT_SECONDS)

    @property
    def assignment(self) -> frozenset[Place]:
        if not self._starting.done():
            return frozenset()
        return frozenset((each.topic, each.partition) for each in self._consumer.assignment())

    def poll(self, timeout_s: float) -> None:
        from aiokafka.errors import KafkaError as ClientError

        if not self._starting.done():
            time.sleep(timeout_s)
            return
        if self._polling is None:
            work = self._consumer.getmany(timeout_ms=int(timeout_s * 1000))
            self._polling = asyncio.run_coroutine_threadsafe(work, self._loop)
        # A rebalance holds the call up for longer than it was asked to take, and may need the other members.
        try:
            found = self._polling.result(timeout_s)
        except TimeoutError:
            return
        except ClientError as error:
            self.errors.append(type(error).__name__)
            found = {}
        self._polling = None
        self.seen += [_from_attributes(message) for batch in found.values() for message in batch]

    def commit(self) -> None:
        self._call(self._consumer.commit())

    def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        try:
            self._call(self._consumer.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_SECONDS)
            self._loop.close()


def _kafka_python_assignor(name: str) -> Any:
    from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
    from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

    return {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "sticky": StickyPartitionAssignor,
        "cooperative-sticky": CooperativeStickyAssignor,
    }[name]


def _aiokafka_assignor(name: str) -> Any:
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor
    from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
    from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

    return {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "sticky": StickyPartitionAssignor,
    }[name]


def _from_attributes(message: Any) -> Seen:
    """What kafka-python and aiokafka hand out looks alike."""
    return Seen(message.topic, message.partition, message.offset, (message.value or b"").decode())


MEMBERS: Final[Mapping[str, Callable[..., Member]]] = {
    "confluent-kafka": ConfluentMember,
    "kafka-python": KafkaPythonMember,
    "aiokafka": AioKafkaMember,
}


def pump(members: Sequence[Member], condition: Callable[[], Any], what: str) -> Any:
    """Poll every member in turn until the condition holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        for member in members:
            member.poll(POLL_SECONDS)
        if not members:
            time.sleep(POLL_SECONDS)
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            held = [sorted(member.assignment) for member in members]
            read = [len(member.seen) for member in members]
            errors = [member.errors for member in members]
            raise NotComeAbout(f"{what}: members hold {held}, have read {read}, errors {errors}")


def is_shared(members: Sequence[Member], places: Iterable[Place]) -> bool:
    """Whether the members hold all of these, each of them by one member, and every member some."""
    held = [place for member in members for place in member.assignment]
    return sorted(held) == sorted(places) and all(member.assignment for member in members)
