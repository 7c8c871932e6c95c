"""What a handler gets, and what it may answer.

A handler that returns has handled its message. To say anything else it returns, or raises, one of the two other
outcomes: `Retry`, to have the message again later, or `DeadLetter`, to have it sent to the dead-letter topic with a
reason. An exception of any other kind is judged by the consumer's `RetryPolicy`.

What a handler may be, and what it may give back.

A message counts as handled when the call of its handler returned: nothing that the call leaves for later is waited for.
So a handler whose call only begins the work (a coroutine where none is awaited, a generator, a future) is refused:
before the first message where its kind can be seen, and otherwise at its first outcome. Then the client stops. Neither
retries nor the dead-letter topic are for it: the next message would fare the same.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.client.errors import ClientError
from holdfast.client.process import say
from holdfast.errors import UsageError

RETRY_PREFIX: Final = "hf-retry-"
"""Headers of a message in a retry topic; see `retries.History`."""
ID_HEADER: Final = "hf-id"
"""A spool's number of a message; see `dedupe`."""
ORIGIN_ID_HEADER: Final = "hf-origin-id"
UNREADABLE_HEADER: Final = "hf-unreadable-headers"

Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]


def last_header(headers: Headers, name: str) -> bytes | None:
    """The value of the last header of that name."""
    for each, value in reversed(headers):
        if each == name:
            return value
    return None


def away_from_home(headers: Headers) -> Headers:
    """Headers for a message that goes anywhere but on its first way.

    `hf-id` counts messages of one topic in order. Elsewhere they come out of order or a second time on purpose, and a
    reader that deduplicates would drop them: the id stays readable under another name.
    """
    return tuple((ORIGIN_ID_HEADER if name == ID_HEADER else name, value) for name, value in headers)


def forwarded(headers: Headers) -> Headers:
    """A user's headers for a new message; they may be those of a message that was read, with what is ours in them.

    That one's number and its retries are not those of the new one, and would be taken for them.
    """
    for name, _ in headers:
        if name.startswith("hf-"):
            break
    else:
        return headers
    return away_from_home(tuple(each for each in headers if not each[0].startswith(RETRY_PREFIX)))


class Origin(NamedTuple):
    """Where a message was first."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class Message(NamedTuple):
    """One message of a topic."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    def header(self, name: str) -> bytes | None:
        """The last header of that name, which is the one that counts."""
        return last_header(self.headers, name)

    @property
    def place(self) -> str:
        return f"{self.topic}-{self.partition}@{self.offset}"

    @property
    def here(self) -> Origin:
        """Where it is."""
        return Origin(self.topic, self.partition, self.offset, self.timestamp_ms)

    @property
    def origin(self) -> Origin:
        """Where it was first: here, unless it comes from a retry topic."""
        topic = self.header(f"{RETRY_PREFIX}topic")
        numbers = [
            self.header(f"{RETRY_PREFIX}{name}") or b"" for name in ("partition", "offset", "timestamp")
        ]
        if topic is None or not all(each.removeprefix(b"-").isdigit() for each in numbers):
            return self.here
        partition, offset, timestamp_ms = map(int, numbers)
        return Origin(topic.decode("utf-8", "replace"), partition, offset, timestamp_ms)


@dataclass
class Retry(Exception):
    """The message could not be handled now: ask again."""

    reason: str = ""
    after_seconds: float | None = None
    """When to ask again; by default the policy says."""

    def __str__(self) -> str:
        return self.reason or "asked to be retried"


@dataclass
class DeadLetter(Exception):
    """The message will never be handled: set it aside."""

    reason: str

    def __str__(self) -> str:
        return self.reason


Fields: TypeAlias = tuple[str, int, int, int, bytes | None, bytes | None, Headers]
"""A message that waits for its handler: what a `Message` has, in that order. Python makes plain tuples out of old ones
and does not count those as new objects: however many wait, they do not make it look for garbage."""
PARTITION: Final = itemgetter(1)
OFFSET: Final = itemgetter(2)
KEY: Final = itemgetter(4)
HEADERS: Final = itemgetter(6)

as_message: Final[Callable[[Fields], Message]] = partial(tuple.__new__, Message)
"""Past the named tuple's own constructor, which costs more than finding the fields."""


def from_raw(raw: Any) -> Message:
    """A message of confluent-kafka as ours."""
    return as_message(all_fields([raw])[0])


def all_fields(batch: list[Any]) -> list[Fields]:
    """The fields of messages of confluent-kafka, without a call of ours for each."""
    return [
        (
            raw.topic(),
            raw.partition(),
            raw.offset(),
            raw.timestamp()[1],
            raw.key(),
            raw.value(),
            tuple(headers) if headers else (),
        )
        for raw, headers in zip(batch, _all_headers(batch), strict=False)
    ]


def headers_of(raw: Any) -> Headers:
    """The headers of a message of confluent-kafka. To be asked for once per message; see `_all_headers`."""
    return tuple(_all_headers([raw])[0] or ())


def _all_headers(batch: list[Any]) -> list[Any]:
    """The headers of each message.

    confluent-kafka cannot read a name that is not UTF-8, which brokers and other clients take. It raises and keeps a
    broken list, which ends the process when it is looked at: nobody may ask such a message a second time, nor from
    Python's own call instruction, which does not look for an exception beside a result. The message is handed out all
    the same, with a header that says so.
    """
    found: list[Any] = []
    while len(found) < len(batch):
        try:
            found.extend(map(type(batch[0]).headers, batch[len(found) :] if found else batch))
        except (UnicodeDecodeError, SystemError):
            raw = batch[len(found)]  # what came before it stays in the list
            say(
                f"{raw.topic()}-{raw.partition()}@{raw.offset()}: the name of a header is not UTF-8, so that the "
                f"client cannot read its headers; the message comes with the header {UNREADABLE_HEADER} instead"
            )
            found.append(((UNREADABLE_HEADER, b"the name of a header is not UTF-8"),))
    return found


UNTOLD: Final = "(its text cannot be made"


class UnusableHandler(ClientError, UsageError):
    """A handler that can never finish a message; no message it was given counts as handled."""


def is_coroutine(handler: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await: `async def`, or an object whose call is."""
    return _is(inspect.iscoroutinefunction, handler)


def check_handler(handler: Callable[..., Any], *, awaits: bool = False, iterates: bool = False) -> None:
    """Refuse a handler of a kind that its caller cannot carry out.

    `awaits` and `iterates` say what the caller does with the outcome of a call.
    """
    if not callable(handler):
        raise UnusableHandler(f"{handler!r} is no function: a handler is called with each message")
    if _is(inspect.isasyncgenfunction, handler) or (
        _is(inspect.isgeneratorfunction, handler) and not iterates
    ):
        raise UnusableHandler(
            f"{_name(handler)} yields: calling it runs none of it, so no message would be handled; return instead"
        )
    if is_coroutine(handler) and not awaits:
        raise UnusableHandler(
            f"{_name(handler)} is `async def`, and nobody awaits it here: no message would be handled; "
            "make it a plain function, or use Consumer, which awaits its handlers"
        )


def check_outcome(outcome: Any, *, iterates: bool = False) -> None:
    """An outcome that was returned counts like one that was raised; one that is yet to come counts as none."""
    if outcome is None:
        return
    if isinstance(outcome, Retry | DeadLetter):
        raise outcome
    if isinstance(outcome, Awaitable | AsyncIterable | Future) or (
        isinstance(outcome, Generator) and not iterates
    ):
        if inspect.iscoroutine(outcome):
            outcome.close()  # or Python warns that nobody awaited it
        raise UnusableHandler(
            f"the handler returned a {type(outcome).__name__}: the work has at most begun, and nobody waits for it. "
            "The message does not count as handled; make the handler finish its work before it returns"
        )


def described(error: BaseException) -> str:
    """An error's class and text, even where making the text fails."""
    text = text_of(error)
    return f"{type(error).__name__} {text}" if text.startswith(UNTOLD) else f"{type(error).__name__}: {text}"


def text_of(error: BaseException) -> str:
    """An error's text, even where making it fails."""
    try:
        return str(error)
    except Exception as failed:  # noqa: BLE001 - the error is told all the same
        return f"{UNTOLD}: {type(failed).__name__})"


def _is(kind: Callable[[Any], bool], handler: Callable[..., Any]) -> bool:
    return kind(handler) or kind(getattr(handler, "__call__", None))  # noqa: B004 - the method itself is asked for


def _name(handler: Callable[..., Any]) -> str:
    return str(getattr(handler, "__qualname__", handler))
