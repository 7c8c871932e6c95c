"""When a failed message is tried again, and when it is given up on.

Retries are bounded by number and by time, and the wait between two of them grows. Some errors are not worth a second
attempt: they are named by their classes, and a message that meets one is given up on at once. What giving up means is
the consumer's: the dead-letter topic, or stopping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from holdfast.client.dead_letter_dialects import Header, Headers
from holdfast.client.messages import (
    RETRY_PREFIX,
    DeadLetter,
    Message,
    Origin,
    Retry,
    UnusableHandler,
    described,
)
from holdfast.client.spool.format import PartitionKey
from holdfast.errors import UsageError

GiveUp: TypeAlias = Literal["dead-letter", "stop"]


class Again(NamedTuple):
    """Try again after so many seconds."""

    seconds: float


class Enough(NamedTuple):
    """No further attempt here: why."""

    reason: str
    is_final: bool = False
    """Whether no later attempt could succeed either, however long the wait."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """In-place retries: the message stays with its worker, and what is ordered behind it waits."""

    attempts: int = 5
    """How often a message is handed to the handler in all."""
    first_seconds: float = 0.1
    factor: float = 2.0
    longest_seconds: float = 30.0
    within_seconds: float | None = None
    """From the first attempt on; no attempt begins later than that."""
    retried: tuple[type[BaseException], ...] = (Exception,)
    final: tuple[type[BaseException], ...] = ()
    """Errors that no second attempt can mend; they win over `retried`."""
    give_up: GiveUp = "dead-letter"

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise UsageError(f"attempts={self.attempts}: a message is handed over at least once")
        if self.first_seconds < 0 or self.factor < 1 or self.longest_seconds < 0:
            raise UsageError("the wait between attempts cannot be negative or shrink")

    def judge(self, error: BaseException, attempt: int, elapsed_seconds: float) -> Again | Enough:
        """What follows on a failure: `attempt` counts from 1. A handler that cannot be used is nobody's to judge."""
        if isinstance(error, UnusableHandler):
            raise error
        if isinstance(error, DeadLetter):
            return Enough(error.reason, is_final=True)
        if self.is_final(error):
            return Enough(f"{described(error)}", is_final=True)
        if attempt >= self.attempts:
            return Enough(f"{attempt} attempts, the last: {described(error)}")
        wait = self.wait_after(attempt)
        if isinstance(error, Retry) and error.after_seconds is not None:
            wait = error.after_seconds
        if self.within_seconds is not None and elapsed_seconds + wait > self.within_seconds:
            return Enough(f"{self.within_seconds} s have passed, the last: {described(error)}")
        return Again(wait)

    def is_final(self, error: BaseException) -> bool:
        """Whether no attempt, now or later, is worth making."""
        return isinstance(error, (DeadLetter, *self.final)) or not isinstance(error, (Retry, *self.retried))

    def wait_after(self, attempt: int) -> float:
        """Doubling from the first wait up to the longest."""
        exponent = min(attempt - 1, 64)
        return min(self.first_seconds * self.factor**exponent, self.longest_seconds)


NO_RETRIES = RetryPolicy(attempts=1)


TEXT_BYTES_MAX: Final = 1024
"""Of the last error's words."""


@dataclass(frozen=True, slots=True)
class History:
    """What a message in a retry topic carries with it: where it was first, how often it failed, and when it is due.

    The history replaces the one before it, so that a message's headers do not grow from topic to topic. It is taken
    away when the message leaves the retry topics. A message without one, or with one that is broken, counts as new: it
    is handled at once, since nothing says that it has to wait.

    The attempts on one message so far.
    """

    origin: Origin
    group: str | None = None
    """Whose attempts these are; other groups read the same retry topics and pass over it."""
    attempts: int = 0
    step: int | None = None
    """Which delay it waits for, from 0; None where it has failed nowhere yet."""
    first_ms: int | None = None
    """When it failed first."""
    due_ms: int = 0
    error: str = ""
    """What the last attempt failed with."""

    @classmethod
    def read(cls, message: Message) -> History:
        """The history in a message's headers, an empty one where there is none."""
        origin = message.origin
        found = {
            name[len(RETRY_PREFIX) :]: value
            for name, value in message.headers
            if name.startswith(RETRY_PREFIX) and value is not None
        }
        numbers = {name: _number(found.get(name)) for name in ("attempts", "step", "first", "due")}
        if not found or any(number is None for number in numbers.values()):
            return cls(origin)
        return cls(
            origin,
            _text(found.get("group")),
            numbers["attempts"] or 0,
            numbers["step"],
            numbers["first"],
            numbers["due"] or 0,
            _text(found.get("error")),
        )

    def headers(self) -> Headers:
        origin = self.origin
        values: list[tuple[str, bytes]] = [
            ("topic", origin.topic.encode("utf-8", "replace")),
            ("partition", b"%d" % origin.partition),
            ("offset", b"%d" % origin.offset),
            ("timestamp", b"%d" % origin.timestamp_ms),
            ("group", (self.group or "").encode("utf-8", "replace")),
            ("attempts", b"%d" % self.attempts),
            ("step", b"%d" % (self.step or 0)),
            ("first", b"%d" % (self.first_ms or 0)),
            ("due", b"%d" % self.due_ms),
            ("error", self.error.encode("utf-8", "replace")[:TEXT_BYTES_MAX]),
        ]
        return tuple((f"{RETRY_PREFIX}{name}", value) for name, value in values)


def without_history(headers: Iterable[Header]) -> Headers:
    return tuple(each for each in headers if not each[0].startswith(RETRY_PREFIX))


def _number(value: bytes | None) -> int | None:
    return int(value) if value is not None and len(value) <= 20 and value.isdigit() else None


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


class Later(NamedTuple):
    """Try again after so long, by way of this topic."""

    topic: str
    step: int
    seconds: float
    reason: str


class RetryStep(NamedTuple):
    """What a retry topic is for."""

    source: str
    step: int


def retry_topic(topic: str, step: int) -> str:
    return f"{topic}-retry-{step}"


@dataclass(frozen=True)
class RetryTopics:
    """Retries that do not hold up the partition: what failed waits in topics of its own.

        Consumer("localhost:9092", group="mailer", topics=["orders"], retry=RetryTopics(delays=[5, 60, 600]))

    A message that fails goes to `orders-retry-0`, is tried again 5 seconds later, goes to `orders-retry-1`, and so on;
    behind the last one is the dead-letter topic. The consumer reads the retry topics itself, in the same group, and
    gives what is due to the same handler; `message.origin` tells where it was first.

    Rules:
    - The committed offset behind a failed message moves when the broker has acknowledged its copy in the retry topic. A
      crash in between repeats an attempt and loses none.
    - Waiting costs no thread and no membership. All messages of a retry topic wait equally long, so the first of a
      partition is due first: while it is not, the partition is paused. When it is due is written in its headers, so
      that a restart changes nothing.
    - For the same reason the topic's delay holds for a handler's `Retry` too, whatever it asks for.
    - A clock that was set back makes nothing wait longer than the topic's delay.
    - Groups that read the same topic share its retry topics. Each passes over what another one failed on.
    - Order is given up: what comes behind a failed message, with its key too, is handled before it.

    Retries through topics: one delay each, in seconds.
    """

    delays: Sequence[float]
    in_place: RetryPolicy = NO_RETRIES
    """What is tried before a message goes to the next topic, there and in the topic it came from; its `retried` and
    `final` say which errors are worth a retry at all, its `give_up` what follows on the last topic."""
    within_seconds: float | None = None
    """From the first failure on; no attempt is planned later than that."""
    name: Callable[[str, int], str] = retry_topic
    create: bool = False
    """Whether missing retry topics and dead-letter topics may be created."""

    def __post_init__(self) -> None:
        if not self.delays:
            raise UsageError("retry topics need a delay each: delays=[5, 60, 600]")
        if any(delay < 0 for delay in self.delays):
            raise UsageError(f"delays={list(self.delays)}: a delay cannot be negative")

    def places(self, topics: Iterable[str]) -> dict[str, RetryStep]:
        """The retry topics of `topics`, and what each is for."""
        places: dict[str, RetryStep] = {}
        for topic in topics:
            if topic.startswith("^"):
                raise UsageError(f"{topic!r} is a pattern: retry topics need topics by their names")
            for step in range(len(self.delays)):
                places[self.name(topic, step)] = RetryStep(topic, step)
        return places

    def follow(self, history: History, error: BaseException, attempts: int, now_ms: int) -> Later | Enough:
        """Where a message goes that was given up on in the topic it is in; `attempts` were made there."""
        told = described(error)
        if self.in_place.is_final(error):
            return Enough(error.reason if isinstance(error, DeadLetter) else told, is_final=True)
        step = 0 if history.step is None else history.step + 1
        if step >= len(self.delays):
            return Enough(f"{history.attempts + attempts} attempts, the last: {told}")
        seconds = self.delays[step]
        first_ms = history.first_ms or now_ms
        if (
            self.within_seconds is not None
            and now_ms - first_ms + seconds * 1000 > self.within_seconds * 1000
        ):
            return Enough(f"{self.within_seconds} s have passed, the last: {told}")
        return Later(self.name(history.origin.topic, step), step, seconds, told)


def next_history(history: History, group: str, later: Later, attempts: int, now_ms: int) -> History:
    """A message's history on its way to the next retry topic."""
    return replace(
        history,
        group=group,
        attempts=history.attempts + attempts,
        step=later.step,
        first_ms=history.first_ms or now_ms,
        due_ms=now_ms + round(later.seconds * 1000),
        error=later.reason,
    )


def headers_for(message: Message, history: History) -> tuple[tuple[str, bytes | None], ...]:
    return (*without_history(message.headers), *history.headers())


class HeldBack:
    """Messages that are not due yet, by partition, in their order. Time is an argument, in milliseconds.

    A held message is not begun: it is not under way, and its committed offset does not pass it.
    """

    def __init__(self, delays_ms: dict[str, int], group: str) -> None:
        self._delays_ms = delays_ms
        """By retry topic; a topic that is not here holds nothing back."""
        self._group = group
        self._held: dict[PartitionKey, deque[tuple[int, Message]]] = {}

    def __contains__(self, key: PartitionKey) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, message: Message, now_ms: int) -> bool:
        """Keep a message until it is due; false when it is, and nothing before it waits."""
        delay_ms = self._delays_ms.get(message.topic)
        if delay_ms is None:
            return False
        key = (message.topic, message.partition)
        history = History.read(message)
        due_ms = now_ms if self._is_foreign(history) else min(history.due_ms, now_ms + delay_ms)
        if due_ms <= now_ms and key not in self._held:
            return False
        self._held.setdefault(key, deque()).append((due_ms, message))
        return True

    def is_foreign(self, message: Message) -> bool:
        """Whether another group failed on it: then it is that group's to try again, and nothing to us."""
        return message.topic in self._delays_ms and self._is_foreign(History.read(message))

    def _is_foreign(self, history: History) -> bool:
        return history.step is not None and history.group != self._group

    def take_due(self, now_ms: int) -> list[Message]:
        """Those whose time has come, each partition's in order."""
        due: list[Message] = []
        for key, waiting in list(self._held.items()):
            while waiting and waiting[0][0] <= now_ms:
                due.append(waiting.popleft()[1])
            if not waiting:
                del self._held[key]
        return due

    def forget(self, key: PartitionKey) -> None:
        """The partition is gone, and what was held of it with it: its next owner reads it again."""
        self._held.pop(key, None)
