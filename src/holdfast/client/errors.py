"""What can go wrong for a client, as a tree under `HoldfastError`.

    ClientError
    ├── UnsafeSetting          a setting that lets messages be lost, and nobody said that this is wanted
    ├── DeliveryFailed         one message was refused or given up on; carries the broker's error
    ├── UndeliveredMessages    messages that were handed over and never confirmed; names them
    ├── SendTimeout            there was no room for one more message within the time allowed
    ├── NotStored              the spool did not take the message; the reason is its cause
    ├── DeliveryStopped        a spool is not delivered any more; what it holds is safe, and waits for a new producer
    ├── ForkedProducer         a producer was used in a child of the process that made it
    ├── ProducerClosed         the producer was closed before the call
    └── HandlerFailed          a message could not be handled, and its consumer was told to stop there

The spool's own errors (`SpoolFull`, `SpoolFailed`, `DamagedSpool`) are `StorageError`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError, UsageError

NAMED_MAX: Final = 10
"""How many undelivered messages an error names; the rest are counted."""


class ClientError(HoldfastError):
    """Whatever a client of ours raises on purpose."""


class UnsafeSetting(ClientError, UsageError):
    """A setting that lets messages be lost or duplicated, without the argument that says so."""


class ProducerClosed(ClientError, UsageError):
    """A message was handed to a producer that is closed."""


class ForkedProducer(ClientError, UsageError):
    """A producer was used in a child of the process that made it, where none of its threads run."""


class SendTimeout(ClientError):
    """Nothing was taken: the producer had no room within the time allowed."""


class NotStored(ClientError):
    """The spool did not take the message; the reason is its cause."""


class DeliveryStopped(ClientError):
    """Nothing more of a spool is delivered by this process; the reason is its cause. What was stored stays stored."""


class DeliveryFailed(ClientError):
    """A message did not reach the broker, or the broker refused it."""

    def __init__(self, reason: str, *, code: str, is_final: bool, topic: str, partition: int | None) -> None:
        super().__init__(f"{topic}{'' if partition is None else f'-{partition}'}: {reason}")
        self.reason = reason
        self.code = code
        """The broker's or client library's name of the error, such as MSG_SIZE_TOO_LARGE."""
        self.is_final = is_final
        """Whether no attempt can ever succeed: too large, not authorised, no such topic."""
        self.topic = topic
        self.partition = partition


class HandlerFailed(ClientError):
    """A message could not be handled, and the policy says to stop. No offset behind it was committed."""


class Undelivered(NamedTuple):
    """A message that was handed over and not confirmed."""

    topic: str
    partition: int | None
    key: bytes | None
    reason: str

    def __str__(self) -> str:
        where = self.topic if self.partition is None else f"{self.topic}-{self.partition}"
        return f"{where} key {self.key!r}: {self.reason}"


class LeftBehind(NamedTuple):
    """What a sender that ended had not delivered."""

    named: list[Undelivered]
    """Lost, or refused without anybody having been told: the first of them, when they are many."""
    total: int
    line: str | None = None
    """What is to be said about messages that are safe and still to be sent."""


class UndeliveredMessages(ClientError):
    """Messages that were handed over and are not known to have arrived."""

    def __init__(self, messages: Sequence[Undelivered], count: int | None = None) -> None:
        self.count = len(messages) if count is None else count
        self.messages = list(messages)
        """The first of them; all of them when there are few."""
        named = "; ".join(map(str, self.messages[:NAMED_MAX]))
        more = self.count - min(len(self.messages), NAMED_MAX)
        super().__init__(
            f"{self.count} {'message was' if self.count == 1 else 'messages were'} not delivered: {named}"
            + (f"; and {more} more" if more > 0 else "")
        )
