"""Messages as lines: reader properties of kafka-console-producer, formatter properties of kafka-console-consumer.

How one line of input becomes a message:

    headers <headers.delimiter> key <key.separator> value        headers: k:v,k:v

Bytes stay bytes: what is not UTF-8 goes through unchanged. Separators are plain text; Kafka takes
`headers.separator` for a regular expression.

How a message is printed, byte for byte as Kafka's tool does, or as JSON:

    CreateTime:1700000000000 Partition:0 Offset:5 Epoch:0 h1:v1,h2:v2 key value     joined by key.separator

Bytes stay bytes in text; in JSON a key, value or header is text if it is UTF-8, else base64, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from typing import NamedTuple, Self

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message

from holdfast.cli.output import content_as_json, json_line
from holdfast.client.messages import headers_of
from holdfast.errors import ConfigError, HoldfastError

Headers = list[tuple[str, str | bytes | None]]


class MalformedLine(HoldfastError):
    """A line that does not have the parts the reader properties promise."""


class ParsedLine(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: Headers


class Properties:
    """Settings of a format by Kafka's dotted names: each field is one, a flag or a text."""

    @classmethod
    def property_names(cls) -> list[str]:
        return [each.name.replace("_", ".") for each in fields(cls)]  # type: ignore[arg-type]

    @classmethod
    def from_properties(cls, properties: Mapping[str, str], option: str) -> Self:
        """`option` is the one that the user gives them by."""
        arguments: dict[str, bool | bytes] = {}
        for name, value in properties.items():
            if name not in (known := cls.property_names()):
                raise ConfigError(f"{option} {name} is not known; there are {', '.join(known)}")
            field = name.replace(".", "_")
            is_flag = isinstance(getattr(cls, field), bool)
            arguments[field] = value.strip().lower() == "true" if is_flag else value.encode()
        return cls(**arguments)


@dataclass(frozen=True)
class LineFormat(Properties):
    """How a line is read."""

    parse_key: bool = False
    parse_headers: bool = False
    ignore_error: bool = False
    key_separator: bytes = b"\t"
    headers_delimiter: bytes = b"\t"
    headers_separator: bytes = b","
    headers_key_separator: bytes = b":"
    null_marker: bytes | None = None

    def __post_init__(self) -> None:
        """Two marks that are equal would make a line ambiguous; key and headers may share theirs."""
        marks = {
            "headers.delimiter": self.headers_delimiter,
            "headers.separator": self.headers_separator,
            "headers.key.separator": self.headers_key_separator,
            "null.marker": self.null_marker,
        }
        pairs = [*combinations(marks, 2)]
        for first, second in pairs:
            if marks[first] == marks[second]:
                raise ConfigError(f"{first} and {second} must differ")
        if self.null_marker == self.key_separator:
            raise ConfigError("null.marker and key.separator must differ")
        if b"" in (self.key_separator, *(mark for mark in marks.values() if mark is not None)):
            raise ConfigError("a separator cannot be empty")

    def parse(self, line: bytes) -> ParsedLine:
        headers: Headers = []
        key = None
        rest = line
        if self.parse_headers:
            part, rest = self._split(rest, self.headers_delimiter, "headers.delimiter")
            if part is not None and part != self.null_marker:
                headers = self._parse_headers(part)
        if self.parse_key:
            key, rest = self._split(rest, self.key_separator, "key.separator")
        return ParsedLine(self._or_null(key), self._or_null(rest), headers)

    def _split(self, line: bytes, mark: bytes, name: str) -> tuple[bytes | None, bytes]:
        before, found, after = line.partition(mark)
        if found:
            return before, after
        if self.ignore_error:
            return None, line
        raise MalformedLine(f"there is no {name} {mark.decode()!r} in it")

    def _parse_headers(self, part: bytes) -> Headers:
        headers: Headers = []
        for pair in part.split(self.headers_separator):
            name, found, value = pair.partition(self.headers_key_separator)
            if not found and not self.ignore_error:
                mark = self.headers_key_separator.decode()
                raise MalformedLine(f"header {pair!r} has no headers.key.separator {mark!r}")
            if name == self.null_marker:
                raise MalformedLine("a header's name cannot be the null.marker")
            headers.append((_text(name), self._or_null(value) if found else None))
        return headers

    def _or_null(self, part: bytes | None) -> bytes | None:
        return None if part == self.null_marker else part


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise MalformedLine(f"header name {name!r} is not UTF-8") from None


TIMESTAMP_TYPES: Mapping[int, str] = {
    TIMESTAMP_CREATE_TIME: "CreateTime",
    TIMESTAMP_LOG_APPEND_TIME: "LogAppendTime",
}
NOT_PRESENT = b"NOT_PRESENT"


@dataclass(frozen=True)
class MessageFormat(Properties):
    """How a message is printed."""

    print_timestamp: bool = False
    print_partition: bool = False
    print_offset: bool = False
    print_epoch: bool = False
    print_headers: bool = False
    print_key: bool = False
    print_value: bool = True
    key_separator: bytes = b"\t"
    line_separator: bytes = b"\n"
    headers_separator: bytes = b","
    null_literal: bytes = b"null"

    def as_text(self, message: Message) -> bytes:
        parts: list[bytes] = []
        if self.print_timestamp:
            kind, timestamp_ms = message.timestamp()
            name = TIMESTAMP_TYPES.get(kind)
            parts.append(f"{name}:{timestamp_ms}".encode() if name else b"NO_TIMESTAMP")
        if self.print_partition:
            parts.append(b"Partition:%d" % (message.partition() or 0))
        if self.print_offset:
            parts.append(b"Offset:%d" % (message.offset() or 0))
        if self.print_epoch:
            epoch = message.leader_epoch()
            parts.append(b"Epoch:" + (NOT_PRESENT if epoch is None else b"%d" % epoch))
        if self.print_headers:
            parts.append(self._headers(message))
        if self.print_key:
            parts.append(self._or_null(message.key()))
        if self.print_value:
            parts.append(self._or_null(message.value()))
        return self.key_separator.join(parts) + self.line_separator if parts else b""

    def _headers(self, message: Message) -> bytes:
        headers = headers_of(message)
        if not headers:
            return b"NO_HEADERS"
        return self.headers_separator.join(
            name.encode() + b":" + self._or_null(value) for name, value in headers
        )

    def _or_null(self, data: bytes | None) -> bytes:
        return self.null_literal if data is None else data


def as_json_line(message: Message) -> bytes:
    """One message on one line; the keys are always all there."""
    kind, timestamp_ms = message.timestamp()
    document = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "leader_epoch": message.leader_epoch(),
        "timestamp_type": TIMESTAMP_TYPES.get(kind),
        "timestamp_ms": timestamp_ms if kind in TIMESTAMP_TYPES else None,
        **content_as_json(message.key(), message.value(), headers_of(message)),
    }
    return json_line(document).encode()
