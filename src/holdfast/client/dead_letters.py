"""Dead letters: messages set aside in a topic of their own, with where they came from and what went wrong.

The message goes as it was, key, value and headers; ours are added behind them. It counts as set aside when the broker
has acknowledged it, so a message is in its topic until its dead letter is safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.client.messages import Message
from holdfast.client.producer import Producer

PREFIX: Final = "hf-dlt-"
CONNECTION_SETTINGS: Final = (
    "bootstrap.servers",
    "security.protocol",
    "sasl.",
    "ssl.",
    "client.id",
    "enable.ssl.certificate.verification",
    "broker.address.family",
    "socket.",
)
"""Settings of a consumer that its producer of dead letters shares."""
REASON_BYTES_MAX: Final = 8192


class DeadLetters:
    def __init__(self, bootstrap: str, group: str, consumer_settings: Mapping[str, Any]) -> None:
        shared = {
            name: value
            for name, value in consumer_settings.items()
            if name.startswith(CONNECTION_SETTINGS) and name != "bootstrap.servers"
        }
        self._group = group
        self._producer = Producer(bootstrap, config=shared)

    def add(
        self, topic: str, message: Message, reason: str, error: BaseException | None, attempts: int
    ) -> None:
        """Set a message aside; returns when the broker has it, raises when it cannot."""
        headers = [*message.headers, *dead_letter_headers(message, self._group, reason, error, attempts)]
        self._producer.send(topic, message.value, key=message.key, headers=headers).wait()

    def close(self) -> None:
        self._producer.close()


def dead_letter_headers(
    message: Message, group: str, reason: str, error: BaseException | None, attempts: int
) -> list[tuple[str, bytes]]:
    cause = error.__cause__ or error if error is not None else None
    return [
        (f"{PREFIX}topic", message.topic.encode()),
        (f"{PREFIX}partition", b"%d" % message.partition),
        (f"{PREFIX}offset", b"%d" % message.offset),
        (f"{PREFIX}timestamp", b"%d" % message.timestamp_ms),
        (f"{PREFIX}group", group.encode()),
        (f"{PREFIX}reason", reason.encode()[:REASON_BYTES_MAX]),
        (f"{PREFIX}error", type(cause).__name__.encode() if cause is not None else b""),
        (f"{PREFIX}attempts", b"%d" % attempts),
    ]
