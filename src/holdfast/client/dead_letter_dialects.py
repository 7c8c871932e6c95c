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
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

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

    def shortened(self) -> Failure:
        """As small as it can be and still say what it is about."""
        return replace(
            self,
            stack=None,
            error=self.error and _cut(self.error, SHORT_BYTES_MAX),
            message=self.message and _cut(self.message, SHORT_BYTES_MAX),
            reason=self.reason and _cut(self.reason, SHORT_BYTES_MAX),
        )


def class_name(error: BaseException) -> str:
    """An error's class as its users write it."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def stack_of(error: BaseException) -> str:
    """The end of the error's traceback."""
    return _cut_front("".join(traceback.format_exception(error)), STACK_BYTES_MAX)


# The fields of each dialect, in the order in which they are written


class _Kind(NamedTuple):
    """How a value is read and written."""

    read: Callable[[bytes | None], Any]
    write: Callable[[Any], bytes | None]


_Field: TypeAlias = tuple[str, str, _Kind]
"""The name of a header behind the dialect's prefix, the attribute of a `Failure`, and the kind of its value."""


def _text(value: bytes | None) -> str | None:
    return None if value is None else bytes(value).decode("utf-8", "replace")


def _number(value: bytes | None) -> int | None:
    """Decimal digits; Python's `int` takes more than numbers."""
    if value is None or len(value) > 20 or not value.removeprefix(b"-").isdigit():
        return None
    return int(value)


def _integer(value: bytes | None) -> int | None:
    return int.from_bytes(value, "big", signed=True) if value is not None and len(value) in (4, 8) else None


def _big_endian(size: int, number: int) -> bytes | None:
    if not -(1 << (8 * size - 1)) <= number < 1 << (8 * size - 1):
        return None
    return number.to_bytes(size, "big", signed=True)


def _cut(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[:limit].decode("utf-8", "ignore")


def _cut_front(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[-limit:].decode("utf-8", "ignore")


_TEXT: Final = _Kind(_text, lambda text: _cut(text, TEXT_BYTES_MAX).encode("utf-8", "replace"))
_STACK: Final = _Kind(_text, lambda text: _cut_front(text, STACK_BYTES_MAX).encode("utf-8", "replace"))
_DECIMAL: Final = _Kind(_number, lambda number: b"%d" % number)
_INT32: Final = _Kind(_integer, partial(_big_endian, 4))
_INT64: Final = _Kind(_integer, partial(_big_endian, 8))

_FIELDS: Final[Mapping[Dialect, tuple[_Field, ...]]] = {
    "holdfast": (
        ("topic", "topic", _TEXT),
        ("partition", "partition", _DECIMAL),
        ("offset", "offset", _DECIMAL),
        ("timestamp", "timestamp_ms", _DECIMAL),
        ("group", "group", _TEXT),
        ("error", "error", _TEXT),
        ("message", "message", _TEXT),
        ("reason", "reason", _TEXT),
        ("stack", "stack", _STACK),
        ("attempts", "attempts", _DECIMAL),
        ("time", "failed_ms", _DECIMAL),
    ),
    "streams": (
        ("exception", "error", _TEXT),
        ("message", "message", _TEXT),
        ("stacktrace", "stack", _STACK),
        ("topic", "topic", _TEXT),
        ("partition", "partition", _DECIMAL),
        ("offset", "offset", _DECIMAL),
    ),
    "connect": (
        ("topic", "topic", _TEXT),
        ("partition", "partition", _DECIMAL),
        ("offset", "offset", _DECIMAL),
        ("connector.name", "group", _TEXT),
        ("stage", "reason", _TEXT),
        ("exception.class.name", "error", _TEXT),
        ("exception.message", "message", _TEXT),
        ("exception.stacktrace", "stack", _STACK),
    ),
    "spring": (
        ("original-topic", "topic", _TEXT),
        ("original-partition", "partition", _INT32),
        ("original-offset", "offset", _INT64),
        ("original-timestamp", "timestamp_ms", _INT64),
        ("original-consumer-group", "group", _TEXT),
        ("exception-fqcn", "error", _TEXT),
        ("exception-message", "message", _TEXT),
        ("exception-stacktrace", "stack", _STACK),
        (SPRING_ATTEMPTS, "attempts", _INT32),
    ),
}
_SPRING_OTHERS: Final = frozenset(
    (SPRING_ATTEMPTS, "retry_topic-original-timestamp", "retry_topic-backoff-timestamp")
)
"""Headers of Spring Kafka that stand outside of its prefix."""


# Reading


def read_failure(headers: Iterable[Header]) -> Failure | None:
    """What the headers of a dead letter say, or None when they say nothing in any dialect."""
    all_headers = tuple(headers)
    for dialect in DIALECTS:
        own = dict(_last_set(all_headers) if dialect == "holdfast" else all_headers)
        prefix = PREFIXES[dialect]
        if not any(name.startswith(prefix) for name in own):
            continue
        found = {field: kind.read(own.get(_header(dialect, name))) for name, field, kind in _FIELDS[dialect]}
        if dialect == "spring":
            # The outer class is Spring's own wrapper; what went wrong is its cause.
            found["error"] = _text(own.get(f"{prefix}exception-cause-fqcn")) or found["error"]
        if dialect == "holdfast":
            found["error"] = found["error"] or None
        return Failure(**found, dialect=dialect)
    return None


def _header(dialect: Dialect, name: str) -> str:
    return name if name in _SPRING_OTHERS else PREFIXES[dialect] + name


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


# Writing


def failure_headers(failure: Failure, dialect: Dialect = "holdfast") -> Headers:
    """The headers that tell of a failure; what is not known is left out, what the dialect has no word for, too."""
    if dialect == "holdfast" and failure.topic is None:
        failure = replace(failure, topic="")
    written = (
        (_header(dialect, name), kind.write(value))
        for name, field, kind in _FIELDS[dialect]
        if (value := getattr(failure, field)) is not None
    )
    return tuple(each for each in written if each[1] is not None)


def _or_mark(number: int | None) -> str:
    return "?" if number is None else str(number)
