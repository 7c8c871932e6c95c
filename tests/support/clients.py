"""Other people's Kafka clients behind one small face, so that a test can hold each against each.

    for writer in CLIENTS:
        writer.produce(bootstrap, "topic", messages, codec="zstd")
        for reader in CLIENTS:
            assert reader.consume(bootstrap, "topic", count=len(messages)) == messages

Every client produces with acks=all and idempotence, which are the defaults of those that have defaults, and
consumes one partition from its start by assignment, without a group. A client's own exception passes through.
What a client cannot say (a console producer knows no timestamps) its `can` leaves out.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.testing.apache import CONSOLE_CONSUMER, CONSOLE_PRODUCER, run_tool

WAIT_SECONDS: Final = 60.0
"""How long a client may take for what it is asked, on a crowded machine."""
NULL: Final = "<null>"
FIELD: Final = "\x1f"
"""Between the fields of a line; no test puts it into a message."""

TIMESTAMPS: Final = "timestamps"
NULL_HEADERS: Final = "null headers"
EMPTY_HEADER_NAMES: Final = "empty header names"


class Message(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    """None lets the client choose."""


Messages = Sequence[Message]
Settings = Mapping[str, Any]


class Delivered(NamedTuple):
    """A message as a consumer saw it."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int
    is_log_append_time: bool


class NotDelivered(HoldfastError):
    """A client did not deliver what it was given, or found less than it was asked for."""


class Client(ABC):
    name: str
    can: frozenset[str]

    def produce(
        self,
        bootstrap_servers: str,
        topic: str,
        messages: Messages,
        *,
        codec: str = "none",
        settings: Settings | None = None,
    ) -> None:
        """Send to partition 0 and return when all are acknowledged."""
        self._produce(bootstrap_servers, topic, messages, codec, settings or {})

    def consume(
        self, bootstrap_servers: str, topic: str, count: int, *, settings: Settings | None = None
    ) -> list[Delivered]:
        """The first `count` messages of partition 0."""
        found = self._consume(bootstrap_servers, topic, count, settings or {})
        if len(found) < count:
            raise NotDelivered(
                f"{self.name} found {len(found)} of {count} messages within {WAIT_SECONDS:.0f} s"
            )
        return found

    @abstractmethod
    def _produce(
        self, bootstrap: str, topic: str, messages: Messages, codec: str, settings: Settings
    ) -> None: ...

    @abstractmethod
    def _consume(self, bootstrap: str, topic: str, count: int, settings: Settings) -> list[Delivered]: ...


class ConfluentKafka(Client):
    """confluent-kafka, and with it librdkafka; settings by librdkafka's names."""

    name = "confluent-kafka"
    can = frozenset((TIMESTAMPS, NULL_HEADERS, EMPTY_HEADER_NAMES))

    def _produce(
        self, bootstrap: str, topic: str, messages: Messages, codec: str, settings: Settings
    ) -> None:
        from confluent_kafka import KafkaException, Producer

        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "compression.type": codec,
                "linger.ms": 20,
                **settings,
            }
        )
        failures: list[Any] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failures.append(error)

        for message in messages:
            producer.produce(
                topic,
                message.value,
                message.key,
                0,
                on_delivery=delivered,
                timestamp=message.timestamp_ms or 0,
                headers=list(message.headers),
            )
        left = producer.flush(WAIT_SECONDS)
        if failures:
            raise KafkaException(failures[0])
        if left:
            raise NotDelivered(f"{left} messages were not acknowledged within {WAIT_SECONDS:.0f} s")

    def _consume(self, bootstrap: str, topic: str, count: int, settings: Settings) -> list[Delivered]:
        from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaException, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "not-used",
                "enable.auto.commit": False,
                **settings,
            }
        )
        found: list[Delivered] = []
        deadline = time.monotonic() + WAIT_SECONDS
        try:
            consumer.assign([TopicPartition(topic, 0, 0)])
            while len(found) < count and time.monotonic() < deadline:
                message: Any
                for message in consumer.consume(count - len(found), timeout=1.0):
                    if message.error():
                        raise KafkaException(message.error())
                    kind, timestamp_ms = message.timestamp()
                    found.append(
                        Delivered(
                            message.offset(),
                            message.key(),
                            message.value(),
                            tuple(message.headers() or ()),
                            timestamp_ms,
                            kind == TIMESTAMP_LOG_APPEND_TIME,
                        )
                    )
        finally:
            consumer.close()
        return found


class KafkaPython(Client):
    """kafka-python; settings by the names of its arguments."""

    name = "kafka-python"
    can = frozenset((TIMESTAMPS,))

    def _produce(
        self, bootstrap: str, topic: str, messages: Messages, codec: str, settings: Settings
    ) -> None:
        from kafka import KafkaProducer

        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            acks="all",
            enable_idempotence=True,
            compression_type=None if codec == "none" else codec,
            linger_ms=20,
            **settings,
        )
        try:
            futures = [
                producer.send(
                    topic,
                    value=message.value,
                    key=message.key,
                    headers=list(message.headers),
                    partition=0,
                    timestamp_ms=message.timestamp_ms,
                )
                for message in messages
            ]
            for future in futures:
                future.get(WAIT_SECONDS)
        finally:
            producer.close(WAIT_SECONDS)

    def _consume(self, bootstrap: str, topic: str, count: int, settings: Settings) -> list[Delivered]:
        from kafka import KafkaConsumer, TopicPartition

        consumer = KafkaConsumer(bootstrap_servers=bootstrap, group_id=None, **settings)
        found: list[Delivered] = []
        deadline = time.monotonic() + WAIT_SECONDS
        try:
            partition = TopicPartition(topic, 0)
            consumer.assign([partition])
            consumer.seek(partition, 0)
            while len(found) < count and time.monotonic() < deadline:
                batch = consumer.poll(timeout_ms=1000).get(partition, ())
                found += [_from_attributes(message) for message in batch]
        finally:
            consumer.close()
        return found


class AioKafka(Client):
    """aiokafka; settings by the names of its arguments."""

    name = "aiokafka"
    can = frozenset((TIMESTAMPS, NULL_HEADERS, EMPTY_HEADER_NAMES))

    def _produce(
        self, bootstrap: str, topic: str, messages: Messages, codec: str, settings: Settings
    ) -> None:
        from aiokafka import AIOKafkaProducer

        async def run() -> None:
            producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap,
                acks="all",
                enable_idempotence=True,
                compression_type=None if codec == "none" else codec,
                linger_ms=20,
                **settings,
            )
            await producer.start()
            try:
                futures = [
                    await producer.send(
                        topic,
                        value=message.value,
                        key=message.key,
                        headers=list(message.headers),
                        partition=0,
                        timestamp_ms=message.timestamp_ms,
                    )
                    for message in messages
                ]
                for future in futures:
                    await asyncio.wait_for(future, WAIT_SECONDS)
            finally:
                await producer.stop()

        asyncio.run(run())

    def _consume(self, bootstrap: str, topic: str, count: int, settings: Settings) -> list[Delivered]:
        from aiokafka import AIOKafkaConsumer, TopicPartition

        async def run() -> list[Delivered]:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=bootstrap,
                group_id=None,
                enable_auto_commit=False,
                **settings,
            )
            await consumer.start()
            found: list[Delivered] = []
            deadline = time.monotonic() + WAIT_SECONDS
            try:
                partition = TopicPartition(topic, 0)
                consumer.assign([partition])
                consumer.seek(partition, 0)
                while len(found) < count and time.monotonic() < deadline:
                    batch = await consumer.getmany(timeout_ms=1000, max_records=count - len(found))
                    found += [_from_attributes(message) for message in batch.get(partition, ())]
            finally:
                await consumer.stop()
            return found

        return asyncio.run(run())


class JavaConsole(Client):
    """Kafka's console producer and consumer, and with them its Java client; settings by their dotted names."""

    name = "java"
    can: frozenset[str] = frozenset()

    def _produce(
        self, bootstrap: str, topic: str, messages: Messages, codec: str, settings: Settings
    ) -> None:
        arguments = ["--bootstrap-server", bootstrap, "--topic", topic, "--compression-codec", codec]
        for name, value in {
            "parse.key": "true",
            "parse.headers": "true",
            "key.separator": FIELD,
            "headers.delimiter": FIELD,
            "null.marker": NULL,
        }.items():
            arguments += ["--reader-property", f"{name}={value}"]
        for name, value in settings.items():
            arguments += ["--command-property", f"{name}={value}"]
        lines = "".join(_line(message) + "\n" for message in messages)
        done = run_tool(CONSOLE_PRODUCER, *arguments, input=lines)
        said = done.stderr.decode(errors="replace")
        # The console producer only logs what it could not send, and exits with 0.
        if "ERROR" in said or "Exception" in said:
            raise NotDelivered(f"the console producer said:\n{said}")

    def _consume(self, bootstrap: str, topic: str, count: int, settings: Settings) -> list[Delivered]:
        arguments = ["--bootstrap-server", bootstrap, "--topic", topic, "--partition", "0"]
        arguments += ["--offset", "earliest", "--max-messages", str(count)]
        arguments += ["--timeout-ms", str(int(WAIT_SECONDS * 1000))]
        for name, value in {
            "print.timestamp": "true",
            "print.offset": "true",
            "print.headers": "true",
            "print.key": "true",
            "print.value": "true",
            "key.separator": FIELD,
            "line.separator": "\x1e",
            "headers.separator": "\x1d",
            "null.literal": NULL,
        }.items():
            arguments += ["--formatter-property", f"{name}={value}"]
        for name, value in settings.items():
            arguments += ["--command-property", f"{name}={value}"]
        done = run_tool(CONSOLE_CONSUMER, *arguments)
        lines = done.stdout.decode().split("\x1e")[:-1]
        return [_parsed(line) for line in lines]


def _from_attributes(message: Any) -> Delivered:
    """What kafka-python and aiokafka hand out looks alike."""
    return Delivered(
        message.offset,
        message.key,
        message.value,
        tuple((name, value) for name, value in message.headers),
        message.timestamp,
        message.timestamp_type == 1,
    )


def _line(message: Message) -> str:
    def text(data: bytes | None) -> str:
        return NULL if data is None else data.decode()

    headers = ",".join(f"{name}:{text(value)}" for name, value in message.headers) or NULL
    return FIELD.join((headers, text(message.key), text(message.value)))


def _parsed(line: str) -> Delivered:
    def data(text: str) -> bytes | None:
        return None if text == NULL else text.encode()

    timestamp, offset, headers, key, value = line.split(FIELD)
    kind, _, moment = timestamp.partition(":")
    pairs = () if headers == "NO_HEADERS" else tuple(each.partition(":") for each in headers.split("\x1d"))
    return Delivered(
        int(offset.removeprefix("Offset:")),
        data(key),
        data(value),
        tuple((name, data(content)) for name, _, content in pairs),
        int(moment),
        kind == "LogAppendTime",
    )


CLIENTS: Final[tuple[Client, ...]] = (ConfluentKafka(), KafkaPython(), AioKafka(), JavaConsole())
