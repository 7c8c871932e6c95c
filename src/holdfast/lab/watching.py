"""Clients that are watched: what a plain client does, and what it is told, as events of a history.

A message is known by the first word of its value; what follows is ballast. Errors that leave open whether the broker
has the message are `unknown`, the others `fail`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from holdfast.lab.history import Event, Recorder
from holdfast.testing.engines import QUIET, WAIT_SECONDS, Engine, NotComeAbout, read_log, wait_until

UNDECIDED: Final = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.NETWORK_EXCEPTION,
    }
)
"""After these the message may be in the log or not."""
NOBODY_COORDINATES: Final = frozenset(
    {
        KafkaError._WAIT_COORD,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    }
)
"""Errors of a broker that has just started: the lab retries."""
ASK_SECONDS: Final = 10.0


def id_of(value: bytes | str | None) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value or ""
    return text.partition(" ")[0]


def field_of(message: Any, name: str) -> Any:
    """A part of a message: a plain one, whose parts are methods, or one of ours."""
    part = getattr(message, name)
    return part() if callable(part) else part


class Watching:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def note(self, event: str, actor: str, /, **fields: Any) -> Event:
        return self.recorder.add(event, actor, **fields)

    # Sending

    def sends(self, actor: str, topic: str, ids: Iterable[str], **more: Any) -> list[str]:
        """Messages that a program of this name hands to its client."""
        taken = [id_of(each) for each in ids]
        for each in taken:
            self.note("send", actor, id=each, topic=topic, **more)
        return taken

    def report(self, actor: str, **more: Any) -> Callable[[KafkaError | None, Any], None]:
        """A delivery callback that writes down what it is told."""

        def told(error: KafkaError | None, message: Any) -> None:
            self.outcome(actor, id_of(message.value()), error, message, **more)

        return told

    def produce(
        self, producer: Producer, topic: str, value: str, key: str | None = None, actor: str = "program"
    ) -> None:
        """A plain producer sends; what it is told of the message is written down."""
        self.sends(actor, topic, [value])
        producer.produce(topic, value, key=key, on_delivery=self.report(actor))

    def outcome(
        self, actor: str, message_id: str, error: KafkaError | None, message: Any = None, **more: Any
    ) -> None:
        if error is not None and error.code() in UNDECIDED:
            self.note("unknown", actor, id=message_id, error=error.name(), **more)
        elif error is not None:
            self.note("fail", actor, id=message_id, error=error.name(), **more)
        else:
            offset = field_of(message, "offset")
            place = {} if offset is None or offset < 0 else {"offset": offset}
            topic, partition = field_of(message, "topic"), field_of(message, "partition")
            self.note("ack", actor, id=message_id, topic=topic, partition=partition, **place, **more)

    def delivered(self, actor: str, message_id: str, topic: str, delivery: Any, **more: Any) -> None:
        """A delivery of our producer, waited for."""
        done = delivery.wait(WAIT_SECONDS)
        self.note(
            "ack", actor, id=message_id, topic=topic, partition=done.partition, offset=done.offset, **more
        )

    def all_delivered(self, actor: str, topic: str, ids: Iterable[str], deliveries: Iterable[Any]) -> None:
        """Deliveries of our producer, each waited for."""
        for message_id, delivery in zip(ids, deliveries, strict=True):
            self.delivered(actor, message_id, topic, delivery)

    def drops(self, actor: str, ids: Iterable[str], why: str) -> None:
        """The program lets go of messages: it will never send them again."""
        for each in ids:
            self.note("drop", actor, id=each, why=why)

    def write(
        self, engine: Engine, topic: str, values: Sequence[str], partition: int = 0, actor: str = "writer"
    ) -> None:
        """Acknowledged messages, so that there is something to read."""
        producer = Producer({"bootstrap.servers": engine.bootstrap_servers, "linger.ms": 5, **QUIET})
        for value in values:
            self.sends(actor, topic, [value])
            producer.produce(topic, value.encode(), partition=partition, on_delivery=self.report(actor))
        if producer.flush(WAIT_SECONDS):
            raise NotComeAbout(f"not everything was sent to {topic}")

    # Reading

    def given(self, group: str, actor: str, message: Any) -> str:
        """A message handed to a reader."""
        return self._read("deliver", group, actor, message)

    def handles(self, group: str, actor: str, message: Any) -> str:
        """Its handling is done."""
        return self._read("handle", group, actor, message)

    def reads(self, group: str, actor: str, message: Any) -> None:
        """A reader is given a message, and is done with it at once."""
        self.given(group, actor, message)
        self.handles(group, actor, message)

    def _read(self, event: str, group: str, actor: str, message: Any) -> str:
        message_id = id_of(field_of(message, "value"))
        self.note(
            event,
            actor,
            id=message_id,
            group=group,
            topic=field_of(message, "topic"),
            partition=field_of(message, "partition"),
            offset=field_of(message, "offset"),
        )
        return message_id

    def committed_offset(self, engine: Engine, group: str, topic: str, partition: int = 0) -> int:
        """Where the broker says that a group stands; −1: nowhere."""
        found = committed(engine.bootstrap_servers, group, topic, partition)
        self.note("position", "lab", group=group, topic=topic, partition=partition, offset=found)
        return found

    # The log

    def scan(
        self,
        engine: Engine,
        topic: str,
        partitions: int = 1,
        *,
        called: str | None = None,
        identify: Callable[[bytes | None], str] = id_of,
        start: int | Callable[[], int] | None = None,
        compacted: bool = False,
    ) -> list[str]:
        """Everything that a reader of committed messages finds, to the end: what is not there is nowhere.

        `called`: by which name the history knows the topic; `start`: below which offset the log was removed,
        or how to find out. That is asked after reading: retention may pass more of it meanwhile.
        """
        found = list(read_log(engine.bootstrap_servers, topic))
        for message in found:
            self.note(
                "stored",
                "log",
                id=identify(message.value()),
                topic=called or topic,
                partition=message.partition(),
                offset=message.offset(),
            )
        begins = start() if callable(start) else start
        self.note("log-end", "log", topic=called or topic, start=begins, compacted=compacted or None)
        return [identify(message.value()) for message in found]


def committed(bootstrap_servers: str, group: str, topic: str, partition: int) -> int:
    """A group's committed offset, asked for as a member does; −1 where it has none.

    Not by librdkafka's admin client: it dies (2.16) when Apache Kafka has just started and does not know yet who
    coordinates the group.
    """
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": group, **QUIET})

    def ask() -> Any:
        try:
            (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=ASK_SECONDS)
        except KafkaException as error:
            if error.args[0].code() in (*UNDECIDED, *NOBODY_COORDINATES):
                return None
            raise
        return found

    try:
        found = wait_until(ask, f"the committed offset of {group} is known")
        return max(int(found.offset), -1)
    finally:
        consumer.close()
