"""What the headers of a dead letter say, in four dialects, as one model.

Ours, and those of Kafka Streams (KIP-1034), Kafka Connect (KIP-298) and Spring Kafka. All are read, whatever is broken
in them: a number that is none is missing, and nothing here raises on what another program wrote. One is written.

- Ours stands behind the message's own headers and begins with the topic. A dead letter that failed again has two sets:
  the last one counts, and taking ours away uncovers the one before.
- Streams and Connect write numbers as text; Spring Kafka writes them as big-endian integers.
- Every text that is written is bounded: an error may quote a whole document.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

Dialect: TypeAlias = Literal["holdfast", "streams", "connect", "spring"]
Header: TypeAlias = tuple[str, bytes | None]
Headers: TypeAlias = tuple[Header, ...]

DIALECTS: Final[tuple[Dialect, ...]] = get_args(Dialect)
PREFIXES: Final[Mapping[Dialect, str]] = {
    "holdfast": "hf-dlt-",
    "streams": "__streams.errors.",
    "connect": "__connect.errors.",
    "spring": "kafka_dlt-",
}
TEXT_BYTES_MAX: Final = 4096
"""Of an error's message and of the reason for giving up: enough to know it by, small beside a message."""
STACK_BYTES_MAX: Final = 16_384
"""The innermost calls are at the end, which is the part that is kept."""
SHORT_BYTES_MAX: Final = 200
"""Of each text when the dead letter would be too large otherwise."""

SPRING_ATTEMPTS: Final = "retry_topic-attempts"
"""Spring Kafka's retry topics count attempts here, as an integer of four bytes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a message came from and what went wrong with it; what a dialect does not tell is None."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    timestamp_ms: int | None = None
    group: str | None = None
    """The consumer group that gave up on it; a connector for Connect."""
    error: str | None = None
    """The error's class."""
    message: str | None = None
    """The error's own words."""
    reason: str | None = None
    """Why no further attempt was made."""
    stack: str | None = None
    attempts: int | None = None
    failed_ms: int | None = None
    """When it was given up on."""
    dialect: Dialect = "holdfast"

    @property
    def place(self) -> str:
        return f"{self.topic or '?'}-{_or_mark(self.partition)}@{_or_mark(self.offset)}"

    def without_stack(self) -> Failure:
        return replace(self, stack=None)

    def shortened(self) -> Failure:
        """As small as it can be and still say what it is about."""
        return replace(
            self,
            stack=None,
            error=_or_none(self.error, lambda text: _cut(text, SHORT_BYTES_MAX)),
            message=_or_none(self.message, lambda text: _cut(text, SHORT_BYTES_MAX)),
            reason=_or_none(self.reason, lambda text: _cut(text, SHORT_BYTES_MAX)),
        )


def class_name(error: BaseException) -> str:
    """An error's class as its users write it."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def stack_of(error: BaseException) -> str:
    """The end of the error's traceback."""
    return _cut_front("".join(traceback.format_exception(error)), STACK_BYTES_MAX)


# Reading


def read_failure(headers: Iterable[Header]) -> Failure | None:
    """What the headers of a dead letter say, or None when they say nothing in any dialect."""
    all_headers = tuple(headers)
    for dialect in DIALECTS:
        own = _last_set(all_headers) if dialect == "holdfast" else all_headers
        prefix = PREFIXES[dialect]
        fields = {name[len(prefix) :]: value for name, value in own if name.startswith(prefix)}
        if fields:
            return _READERS[dialect](fields, dict(all_headers))
    return None


def without_failure(headers: Iterable[Header], dialect: Dialect) -> Headers:
    """The headers a message had before it was a dead letter of that dialect."""
    kept = tuple(headers)
    prefix = PREFIXES[dialect]
    if dialect == "holdfast":
        begin = len(kept) - len(_last_set(kept))
        return kept[:begin] + tuple(each for each in kept[begin:] if not each[0].startswith(prefix))
    return tuple(
        each
        for each in kept
        if not each[0].startswith(prefix) and not (dialect == "spring" and each[0] in _SPRING_OTHERS)
    )


def _last_set(headers: Headers) -> Headers:
    """Everything from the last of our sets on."""
    begin = f"{PREFIXES['holdfast']}topic"
    for at in range(len(headers) - 1, -1, -1):
        if headers[at][0] == begin:
            return headers[at:]
    return headers


_Fields: TypeAlias = Mapping[str, bytes | None]


def _read_ours(fields: _Fields, headers: _Fields) -> Failure:
    return Failure(
        topic=_text(fields.get("topic")),
        partition=_number(fields.get("partition")),
        offset=_number(fields.get("offset")),
        timestamp_ms=_number(fields.get("timestamp")),
        group=_text(fields.get("group")),
        error=_text(fields.get("error")) or None,
        message=_text(fields.get("message")),
        reason=_text(fields.get("reason")),
        stack=_text(fields.get("stack")),
        attempts=_number(fields.get("attempts")),
        failed_ms=_number(fields.get("time")),
    )


def _read_streams(fields: _Fields, headers: _Fields) -> Failure:
    return Failure(
        topic=_text(fields.get("topic")),
        partition=_number(fields.get("partition")),
        offset=_number(fields.get("offset")),
        error=_text(fields.get("exception")),
        message=_text(fields.get("message")),
        stack=_text(fields.get("stacktrace")),
        dialect="streams",
    )


def _read_connect(fields: _Fields, headers: _Fields) -> Failure:
    return Failure(
        topic=_text(fields.get("topic")),
        partition=_number(fields.get("partition")),
        offset=_number(fields.get("offset")),
        group=_text(fields.get("connector.name")),
        error=_text(fields.get("exception.class.name")),
        message=_text(fields.get("exception.message")),
        reason=_text(fields.get("stage")),
        stack=_text(fields.get("exception.stacktrace")),
        dialect="connect",
    )


def _read_spring(fields: _Fields, headers: _Fields) -> Failure:
    # The outer class is Spring's own wrapper; what went wrong is its cause.
    return Failure(
        topic=_text(fields.get("original-topic")),
        partition=_integer(fields.get("original-partition")),
        offset=_integer(fields.get("original-offset")),
        timestamp_ms=_integer(fields.get("original-timestamp")),
        group=_text(fields.get("original-consumer-group")),
        error=_text(fields.get("exception-cause-fqcn")) or _text(fields.get("exception-fqcn")),
        message=_text(fields.get("exception-message")),
        stack=_text(fields.get("exception-stacktrace")),
        attempts=_integer(headers.get(SPRING_ATTEMPTS)),
        dialect="spring",
    )


_READERS: Final[Mapping[Dialect, Callable[[_Fields, _Fields], Failure]]] = {
    "holdfast": _read_ours,
    "streams": _read_streams,
    "connect": _read_connect,
    "spring": _read_spring,
}
_SPRING_OTHERS: Final = frozenset(
    (SPRING_ATTEMPTS, "retry_topic-original-timestamp", "retry_topic-backoff-timestamp")
)


# Writing


def failure_headers(failure: Failure, dialect: Dialect = "holdfast") -> Headers:
    """The headers that tell of a failure; what is not known is left out, what the dialect has no word for, too."""
    written = _WRITERS[dialect](failure)
    prefix = PREFIXES[dialect]
    return tuple(
        (name if name in _SPRING_OTHERS else prefix + name, value)
        for name, value in written
        if value is not None
    )


def _write_ours(failure: Failure) -> list[Header]:
    return [
        ("topic", _bytes(failure.topic or "")),
        ("partition", _decimal(failure.partition)),
        ("offset", _decimal(failure.offset)),
        ("timestamp", _decimal(failure.timestamp_ms)),
        ("group", _bytes(failure.group)),
        ("error", _bytes(failure.error)),
        ("message", _bytes(failure.message)),
        ("reason", _bytes(failure.reason)),
        ("stack", _stack(failure.stack)),
        ("attempts", _decimal(failure.attempts)),
        ("time", _decimal(failure.failed_ms)),
    ]


def _write_streams(failure: Failure) -> list[Header]:
    return [
        ("exception", _bytes(failure.error)),
        ("message", _bytes(failure.message)),
        ("stacktrace", _stack(failure.stack)),
        ("topic", _bytes(failure.topic)),
        ("partition", _decimal(failure.partition)),
        ("offset", _decimal(failure.offset)),
    ]


def _write_connect(failure: Failure) -> list[Header]:
    return [
        ("topic", _bytes(failure.topic)),
        ("partition", _decimal(failure.partition)),
        ("offset", _decimal(failure.offset)),
        ("connector.name", _bytes(failure.group)),
        ("stage", _bytes(failure.reason)),
        ("exception.class.name", _bytes(failure.error)),
        ("exception.message", _bytes(failure.message)),
        ("exception.stacktrace", _stack(failure.stack)),
    ]


def _write_spring(failure: Failure) -> list[Header]:
    return [
        ("original-topic", _bytes(failure.topic)),
        ("original-partition", _big_endian(failure.partition, 4)),
        ("original-offset", _big_endian(failure.offset, 8)),
        ("original-timestamp", _big_endian(failure.timestamp_ms, 8)),
        ("original-consumer-group", _bytes(failure.group)),
        ("exception-fqcn", _bytes(failure.error)),
        ("exception-message", _bytes(failure.message)),
        ("exception-stacktrace", _stack(failure.stack)),
        (SPRING_ATTEMPTS, _big_endian(failure.attempts, 4)),
    ]


_WRITERS: Final[Mapping[Dialect, Callable[[Failure], list[Header]]]] = {
    "holdfast": _write_ours,
    "streams": _write_streams,
    "connect": _write_connect,
    "spring": _write_spring,
}


# Values


def _text(value: bytes | None) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")


def _number(value: bytes | None) -> int | None:
    """Decimal digits; Python's `int` takes more than numbers."""
    if value is None or len(value) > 20 or not value.removeprefix(b"-").isdigit():
        return None
    return int(value)


def _integer(value: bytes | None) -> int | None:
    return int.from_bytes(value, "big", signed=True) if value is not None and len(value) in (4, 8) else None


def _bytes(text: str | None, limit: int = TEXT_BYTES_MAX) -> bytes | None:
    return None if text is None else _cut(text, limit).encode("utf-8", "replace")


def _stack(text: str | None) -> bytes | None:
    return None if text is None else _cut_front(text, STACK_BYTES_MAX).encode("utf-8", "replace")


def _decimal(number: int | None) -> bytes | None:
    return None if number is None else b"%d" % number


def _big_endian(number: int | None, size: int) -> bytes | None:
    if number is None or not -(1 << (8 * size - 1)) <= number < 1 << (8 * size - 1):
        return None
    return number.to_bytes(size, "big", signed=True)


def _cut(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[:limit].decode("utf-8", "ignore")


def _cut_front(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[-limit:].decode("utf-8", "ignore")


def _or_none(text: str | None, change: Callable[[str], str]) -> str | None:
    return None if text is None else change(text)


def _or_mark(number: int | None) -> str:
    return "?" if number is None else str(number)
