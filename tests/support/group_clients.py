"""Members of consumer groups, of whichever client, behind one small face, and work for them.

    first = make_member("aiokafka", engine.bootstrap_servers, "group", ["topic"], assignor="sticky")
    pump([first], lambda: len(first.seen) == 60, "everything was read")

A member notes what it read (`seen`), what it holds (`assignment`) and every change of that (`events`), as its
client told it. Members never commit by themselves. All of them want to be polled: `pump` does that in turns until
a condition holds, so that a rebalance, which needs all members, can go on. `JavaMember` is Kafka's VerifiableConsumer,
a process that tells its events as JSON: it commits after every batch, before it tells of it, and leaves the group when
it is asked to end (SIGTERM).

`Work` is for a group of real clients: topics that get messages in phases, and members that read each once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException

from holdfast.testing.apache import VERIFIABLE_CONSUMER, tool_command
from holdfast.testing.engines import QUIET, WAIT_SECONDS, Engine, NotComeAbout, Place, wait_until
from holdfast.testing.processes import die_with_parent, end

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


class Member(ABC):
    """One member of a group, whatever its client."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.events: list[Event] = []
        self.errors: list[str] = []
        """Names of errors its client reported for good, such as being fenced."""
        self.commits_when_revoked = False
        """Whether it commits what it read before another member reads on, where its client lets it."""
        self.consumer: Any = None

    @property
    def assignment(self) -> frozenset[Place]:
        return places_of(self.consumer.assignment())

    def note(self, kind: str, partitions: Any) -> None:
        self.events.append(Event(kind, places_of(partitions)))

    def take(self, found: Mapping[Any, Sequence[Any]]) -> None:
        """What kafka-python and aiokafka hand out looks alike."""
        self.seen += [
            Seen(message.topic, message.partition, message.offset, (message.value or b"").decode())
            for batch in found.values()
            for message in batch
        ]

    @abstractmethod
    def poll(self, timeout_s: float) -> None:
        """Let the client work, and take what it has read."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the positions of everything held, and wait for the answer."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group, as the client does it."""


def places_of(partitions: Iterable[Any]) -> frozenset[Place]:
    return frozenset((each.topic, each.partition) for each in partitions)


def own_settings(
    settings: Mapping[str, Any] | None, assignor: Any, instance_id: str | None
) -> dict[str, Any]:
    """As kafka-python and aiokafka name them."""
    extra: dict[str, Any] = dict(settings or {})
    if assignor is not None:
        extra["partition_assignment_strategy"] = [assignor]
    if instance_id is not None:
        extra["group_instance_id"] = instance_id
    return {
        "enable_auto_commit": False,
        "auto_offset_reset": "earliest",
        "heartbeat_interval_ms": HEARTBEAT_MS,
        "session_timeout_ms": SESSION_MS,
        "fetch_max_wait_ms": 50,
        "retry_backoff_ms": 20,
        **extra,
    }


class ConfluentMember(Member):
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
        super().__init__()
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
            on_assign=lambda _, partitions: self.note("assigned", partitions),
            on_revoke=lambda _, partitions: self._revoke(partitions),
            on_lost=lambda _, partitions: self.note("lost", partitions),
        )

    def _revoke(self, partitions: Any) -> None:
        self.note("revoked", partitions)
        if self.commits_when_revoked:
            self.commit()

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
        self.commits_when_revoked = False  # its connections are going
        self.consumer.close()


class KafkaPythonMember(Member):
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

        super().__init__()
        self.consumer = KafkaConsumer(
            bootstrap_servers=bootstrap_servers,
            group_id=group,
            metadata_max_age_ms=1000,
            **own_settings(settings, assignor and _kafka_python_assignor(assignor), instance_id),
        )
        # One that joins before it knows its topics has nothing to share out, and does not look again soon.
        for topic in topics:
            wait_until(partial(self.consumer.partitions_for_topic, topic), f"{topic} is known")
        note = self.note

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
            def on_partitions_revoked(self, revoked: Any) -> None:
                note("revoked", revoked)

            def on_partitions_assigned(self, assigned: Any) -> None:
                note("assigned", assigned)

        self.consumer.subscribe(list(topics), listener=Listener())

    def poll(self, timeout_s: float) -> None:
        from kafka.errors import KafkaError as ClientError

        try:
            # Given less time than this it may never get round to its heartbeats and fetches.
            found = self.consumer.poll(timeout_ms=max(int(timeout_s * 1000), 200))
        except ClientError as error:
            self.errors.append(type(error).__name__)
            return
        self.take(found)

    def commit(self) -> None:
        self.consumer.commit()

    def close(self) -> None:
        self.consumer.close(autocommit=False)


class AioKafkaMember(Member):
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

        super().__init__()
        self.group = group
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        note = self.note

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
            async def on_partitions_revoked(self, revoked: Any) -> None:
                note("revoked", revoked)

            async def on_partitions_assigned(self, assigned: Any) -> None:
                note("assigned", assigned)

        async def start() -> Any:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap_servers,
                group_id=group,
                **own_settings(settings, assignor and _aiokafka_assignor(assignor), instance_id),
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
        return places_of(self._consumer.assignment())

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
        self.take(found)

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


ASSIGNORS: Final = {
    "range": "org.apache.kafka.clients.consumer.RangeAssignor",
    "roundrobin": "org.apache.kafka.clients.consumer.RoundRobinAssignor",
    "sticky": "org.apache.kafka.clients.consumer.StickyAssignor",
    "cooperative-sticky": "org.apache.kafka.clients.consumer.CooperativeStickyAssignor",
}


class JavaMember(Member):
    """One VerifiableConsumer; it can read one topic."""

    def __init__(
        self,
        bootstrap_servers: str,
        group: str,
        topics: Sequence[str],
        *,
        assignor: str,
        protocol: str = "classic",
        instance_id: str | None = None,
    ) -> None:
        (topic,) = topics
        super().__init__()
        self._held: set[Place] = set()
        self._read = self._committed = 0
        arguments = [
            "--bootstrap-server",
            bootstrap_servers,
            "--topic",
            topic,
            "--group-id",
            group,
            "--verbose",
        ]
        arguments += ["--group-protocol", protocol]
        settings = "fetch.max.wait.ms=50\nmetadata.max.age.ms=500\n"
        if protocol == "classic":
            arguments += ["--assignment-strategy", ASSIGNORS[assignor], "--session-timeout", str(SESSION_MS)]
            settings += f"heartbeat.interval.ms={HEARTBEAT_MS}\n"
        else:
            arguments += ["--group-remote-assignor", assignor]
        if instance_id is not None:
            arguments += ["--group-instance-id", instance_id]
        # Read by the process when it starts, removed when it has ended.
        descriptor, self._settings_file = tempfile.mkstemp(suffix=".properties", text=True)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(settings)
        arguments += ["--command-config", self._settings_file]
        self._process = subprocess.Popen(
            tool_command(VERIFIABLE_CONSUMER, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        match event["name"]:
            case "partitions_assigned" | "partitions_revoked" as name:
                places = frozenset((each["topic"], each["partition"]) for each in event["partitions"])
                if name == "partitions_assigned":
                    self._held |= places
                else:
                    self._held -= places
                self.events.append(Event(name.removeprefix("partitions_"), places))
            case "record_data":
                self.seen.append(Seen(event["topic"], event["partition"], event["offset"], event["value"]))
            case "records_consumed":
                self._read += 1
            case "offsets_committed":
                self._committed += 1
                if not event["success"]:
                    self.errors.append(event["error"])

    @property
    def assignment(self) -> frozenset[Place]:
        return frozenset(self._held)

    def poll(self, timeout_s: float) -> None:
        """It polls by itself."""
        time.sleep(timeout_s)

    def commit(self) -> None:
        """It commits by itself, each batch it tells of."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._committed < self._read and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        in_time = end(self._process, signal.SIGTERM, WAIT_SECONDS)
        self._listener.join(WAIT_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.unlink(self._settings_file)
        assert in_time, "a VerifiableConsumer did not end"


MESSAGES: Final = 10
"""In each partition, in each phase."""
PARTITIONS: Final = 3


class Kind(NamedTuple):
    """A client and how it takes part."""

    client: str
    assignor: str
    protocol: str = "classic"

    def __str__(self) -> str:
        return f"{self.client}-{self.protocol}-{self.assignor}"

    def join(self, engine: Engine, group: str, topics: Sequence[str], **options: Any) -> Member:
        if self.protocol != "classic":
            options["protocol"] = self.protocol
        make = JavaMember if self.client == "java" else MEMBERS[self.client]
        return make(engine.bootstrap_servers, group, topics, assignor=self.assignor, **options)


class Work:
    """Topics that get ten messages a partition and phase, and the group that reads them."""

    def __init__(self, engine: Engine, name: str, topics: int = 2) -> None:
        self.engine = engine
        self.group = f"group-{name}"
        self.topics = [engine.create_topic(f"{name}-{which}", PARTITIONS) for which in "abcd"[:topics]]
        self.places: list[Place] = [(topic, index) for topic in self.topics for index in range(PARTITIONS)]
        self.written: list[str] = []
        self.members: list[Member] = []
        """Everybody who ever was a member."""
        self.present: list[Member] = []

    def join(self, kind: Kind, **options: Any) -> Member:
        member = kind.join(self.engine, self.group, self.topics, **options)
        member.commits_when_revoked = True  # a rebalance may come between reading and `commit`
        self.members.append(member)
        self.present.append(member)
        return member

    def leave(self, member: Member) -> None:
        self.present.remove(member)
        member.close()

    def close(self) -> None:
        while self.present:
            self.leave(self.present[-1])

    def share(self, what: str, sizes: Sequence[int] | None = None) -> None:
        """Poll until the present members hold everything between them, and (if told) in shares of these sizes."""

        def is_settled() -> bool:
            if sizes is not None:
                held = [place for member in self.present for place in member.assignment]
                return self.sizes() == sorted(sizes) and sorted(held) == sorted(self.places)
            return is_shared(self.present, self.places)

        pump(self.present, is_settled, what)

    def write(self, phase: str) -> None:
        for topic in self.topics:
            values = {
                index: [f"{phase} {topic} {index} {number}" for number in range(MESSAGES)]
                for index in range(PARTITIONS)
            }
            self.engine.write(topic, values)
            self.written += [value for some in values.values() for value in some]

    def read(self, what: str) -> None:
        """Poll until as many messages were read as written so far, and see that each was read once."""

        def everything() -> bool:
            return sum(len(member.seen) for member in self.members) >= len(self.written)

        pump(self.present, everything, what)
        counts = Counter(seen.value for member in self.members for seen in member.seen)
        wrong = {value: counts[value] for value in {*counts, *self.written} if counts[value] != 1}
        told = [member.events for member in self.members] if wrong else []
        assert not wrong, f"{what}: read not once but {wrong}; the members were told {told}"

    def write_and_read(self, phase: str) -> None:
        """A phase: written, read once by those present, committed."""
        self.write(phase)
        self.read(phase)
        self.commit()

    def commit(self) -> None:
        """Everybody commits, while the others are polled: a client may first have to take part in a rebalance."""
        with ThreadPoolExecutor(1) as pool:
            for member in self.present:
                others = [each for each in self.present if each is not member]
                committing = pool.submit(member.commit)
                pump(others, committing.done, "a member has committed")
                committing.result()

    def shape(self) -> list[list[list[int]]]:
        """Which partitions of each topic a member holds, for every member, without saying which is which."""
        return sorted(
            [sorted(index for topic, index in member.assignment if topic == each) for each in self.topics]
            for member in self.present
        )

    def sizes(self) -> list[int]:
        return sorted(len(member.assignment) for member in self.present)


def happened(events: Sequence[Event]) -> list[tuple[str, int]]:
    """What a member was told, with how many partitions."""
    return [(event.kind, len(event.places)) for event in events if event.places]
