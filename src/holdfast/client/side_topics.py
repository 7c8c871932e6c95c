"""The topics beside the one that is read: where what failed goes, and how it gets there.

Nothing is sent to a topic that is not known to exist: a broker that creates topics by itself would make one with its
own defaults, which forget messages after a week. A missing one is created like its source when that is allowed, and
never forgets; otherwise the error names the command that creates it.

A message counts as sent when the broker has acknowledged it. It goes to the partition with the number it came from
where there is one, so that what was in order stays in order, and by its key otherwise. It gets a timestamp of its own:
with its old one it could be old enough to be deleted on arrival.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from holdfast.client.dead_letter_dialects import Headers
from holdfast.client.errors import ClientError, DeliveryFailed, UndeliveredMessages
from holdfast.client.messages import Message
from holdfast.client.process import say
from holdfast.client.producer import NO_TIMESTAMP, SEND_TIMEOUT_SECONDS, Producer
from holdfast.client.settings import INFINITE, admin_settings, shared_settings
from holdfast.errors import UsageError

PRODUCER_SETTINGS: Final = {
    # The topic's limit decides, and for each message by itself: a batch is refused as a whole.
    "message.max.bytes": 1_000_000_000,
    "batch.num.messages": 1,
    # A broker that is away is waited for, as long as the consumer runs.
    "message.timeout.ms": INFINITE,
}
ANSWER_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 30.0
"""How often it is said that a message still waits for the broker."""
LOOK_SECONDS: Final = 1.0
"""How often a wait for the broker looks whether it is still wanted."""
CLOSE_SECONDS: Final = 5.0
HEADERS_BYTES: Final = 65_536
"""How much larger than its source a message may be in a topic that we create."""
DEFAULT_MESSAGE_BYTES: Final = 1_048_588
AWAY: Final = frozenset((KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN))
TOO_LARGE: Final = frozenset(("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"))


class Sends(Protocol):
    """How a message leaves for another topic."""

    def send(self, topic: str, message: Message, headers: Headers, *, source: str) -> None:
        """Returns when the broker has it."""
        ...


class TooLargeToSetAside(ClientError):
    """A message does not fit the topic it has to go to, even with the shortest headers. It is still where it was."""


class SideTopicMissing(ClientError, UsageError):
    """A message has to go to a topic that does not exist. It is still where it was."""


def send_smaller(
    topics: Sends, topic: str, message: Message, tries: Iterable[Headers], *, source: str
) -> None:
    """Send a message with the first of these headers that fits."""
    refused: DeliveryFailed | None = None
    for headers in tries:
        try:
            topics.send(topic, message, headers, source=source)
        except DeliveryFailed as failed:
            if failed.code not in TOO_LARGE:
                raise
            refused = failed
        else:
            return
    size = len(message.key or b"") + len(message.value or b"")
    raise TooLargeToSetAside(
        f"{message.place}: key and value have {size} bytes, and '{topic}' does not take them "
        f"({refused.reason if refused else 'no headers were tried'}). Its committed offset was not moved. Let larger "
        f"messages in: holdfast configs alter --topic {topic} --add-config max.message.bytes={size + HEADERS_BYTES}"
    ) from refused


class SideTopics:
    """Sends messages to topics that are known to exist; for several threads."""

    def __init__(
        self,
        bootstrap: str,
        consumer_settings: Mapping[str, Any],
        *,
        create: bool,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """A broker that does not answer is waited for as long as it is wanted."""
        self._shared = shared_settings(consumer_settings)
        self._bootstrap = bootstrap
        self._producer: Producer | None = None
        """Made for the first message that is sent: a processor has its own and asks only about topics."""
        self._create = create
        self._is_wanted = is_wanted
        self._is_closed = False
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def send(self, topic: str, message: Message, headers: Headers, *, source: str) -> None:
        """Send a message on; returns when the broker has it, raises when it cannot."""
        count = self.partitions(topic, source)
        if not count:
            raise TimeoutError(f"{message.place} was to go to '{topic}', and no broker has told of it")
        # Past `send`, which takes a history for one that a user has copied.
        delivery = self._sender()._hand_over(
            topic,
            message.partition if message.partition < count else None,
            message.key,
            message.value,
            headers,
            NO_TIMESTAMP,
            SEND_TIMEOUT_SECONDS,
        )
        say_at = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                delivery.wait(LOOK_SECONDS)
                return
            except TimeoutError:
                if self._is_closed or not self._is_wanted():
                    raise
                if time.monotonic() >= say_at:
                    say_at = time.monotonic() + PATIENCE_SECONDS
                    say(
                        f"{message.place} waits for '{topic}': no broker has taken it for {PATIENCE_SECONDS:.0f} s"
                    )

    def _sender(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = Producer(self._bootstrap, config={**PRODUCER_SETTINGS, **self._shared})
            return self._producer

    def close(self) -> None:
        """What is under way and not confirmed soon is not lost: no offset behind it was committed. The next run begins
        with a new producer."""
        self._is_closed = True
        producer, self._producer = self._producer, None
        try:
            if producer is not None:
                producer.close(CLOSE_SECONDS)
        except UndeliveredMessages as left:
            say(f"{left.count} messages could not be set aside; they are still in their topics")
        self._is_closed = False

    def partitions(self, topic: str, source: str, is_wanted: Callable[[], bool] = lambda: True) -> int:
        """How many partitions a topic has; it is created like `source` if it must and may be.

        Retries while no broker answers and the answer is wanted; 0 when it is not wanted any more.
        """
        known = self._counts.get(topic)
        if known is not None:
            return known
        with self._lock:
            while topic not in self._counts:
                keeper = _Keeper(AdminClient(admin_settings(self._shared)))
                try:
                    self._counts[topic] = keeper.find(topic) or keeper.make(
                        topic, source, is_allowed=self._create
                    )
                except KafkaException as error:
                    if error.args[0].code() not in AWAY and not error.args[0].retriable():
                        raise
                    if self._is_closed or not self._is_wanted() or not is_wanted():
                        return 0
                    say(f"'{topic}' is needed and no broker tells of it: {error.args[0].str()}")
            return self._counts[topic]


class _Keeper:
    """Finds topics and makes them, for as long as the question takes."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def find(self, topic: str) -> int | None:
        described = self._describe(topic)
        return None if described is None else len(described.partitions)

    def _describe(self, topic: str) -> Any:
        """Asking by description never makes a broker create the topic."""
        asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=ANSWER_SECONDS)
        try:
            return asked[topic].result()
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise

    def make(self, topic: str, source: str, *, is_allowed: bool) -> int:
        like = self._describe(source)
        count = len(like.partitions) if like is not None else 1
        if not is_allowed:
            raise SideTopicMissing(
                f"topic '{topic}' does not exist, and a message of '{source}' has to go there. Create it: "
                f"holdfast topics create --topic {topic} --partitions {count} --config retention.ms=-1"
            )
        replicas = len(like.partitions[0].replicas) if like is not None else -1
        new = NewTopic(
            topic, num_partitions=count, replication_factor=replicas, config=self._config_like(source)
        )
        try:
            self._admin.create_topics([new], request_timeout=ANSWER_SECONDS)[topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
            return self.find(topic) or count
        return count

    def _config_like(self, source: str) -> dict[str, str]:
        """As safe as the source, room for our headers, and nothing is ever forgotten."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, source)
        (asked,) = self._admin.describe_configs([resource], request_timeout=ANSWER_SECONDS).values()
        config = {"retention.ms": "-1", "cleanup.policy": "delete"}
        try:
            found = asked.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            found = {}
        largest = found.get("max.message.bytes")
        config["max.message.bytes"] = str(
            (int(largest.value) if largest is not None else DEFAULT_MESSAGE_BYTES) + HEADERS_BYTES
        )
        if "min.insync.replicas" in found:
            config["min.insync.replicas"] = found["min.insync.replicas"].value
        return config
