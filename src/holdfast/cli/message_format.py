"""How a message is printed: the formatter properties of kafka-console-consumer, byte for byte, or JSON.

    CreateTime:1700000000000 Partition:0 Offset:5 Epoch:0 h1:v1,h2:v2 key value     joined by key.separator

Bytes stay bytes in text; in JSON a key, value or header is text if it is UTF-8, else base64, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Message

from holdfast.cli.output import bytes_as_json, json_line
from holdfast.client.messages import headers_of
from holdfast.errors import ConfigError

TIMESTAMP_TYPES: Mapping[int, str] = {
    TIMESTAMP_CREATE_TIME: "CreateTime",
    TIMESTAMP_LOG_APPEND_TIME: "LogAppendTime",
}
NOT_PRESENT = b"NOT_PRESENT"


@dataclass(frozen=True)
class MessageFormat:
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

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> MessageFormat:
        arguments: dict[str, bool | bytes] = {}
        for name, value in properties.items():
            if name in FLAGS:
                arguments[name.replace(".", "_")] = value.strip().lower() == "true"
            elif name in TEXTS:
                arguments[name.replace(".", "_")] = value.encode()
            else:
                known = ", ".join((*FLAGS, *TEXTS))
                raise ConfigError(f"--formatter-property {name} is not known; there are {known}")
        return cls(**arguments)  # type: ignore[arg-type]

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
        headers = message_headers(message)
        if not headers:
            return b"NO_HEADERS"
        return self.headers_separator.join(
            name.encode() + b":" + self._or_null(value) for name, value in headers
        )

    def _or_null(self, data: bytes | None) -> bytes:
        return self.null_literal if data is None else data


FLAGS = (
    "print.timestamp",
    "print.partition",
    "print.offset",
    "print.epoch",
    "print.headers",
    "print.key",
    "print.value",
)
TEXTS = ("key.separator", "line.separator", "headers.separator", "null.literal")


def message_headers(message: Message) -> list[tuple[str, bytes | None]]:
    return list(headers_of(message))


def as_json_line(message: Message) -> bytes:
    """One message on one line; the keys are always all there."""
    key, key_encoding = bytes_as_json(message.key())
    value, value_encoding = bytes_as_json(message.value())
    kind, timestamp_ms = message.timestamp()
    headers = []
    for name, data in message_headers(message):
        text, encoding = bytes_as_json(data)
        headers.append({"key": name, "value": text, "value_encoding": encoding})
    document = {
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "leader_epoch": message.leader_epoch(),
        "timestamp_type": TIMESTAMP_TYPES.get(kind),
        "timestamp_ms": timestamp_ms if kind in TIMESTAMP_TYPES else None,
        "key": key,
        "key_encoding": key_encoding,
        "value": value,
        "value_encoding": value_encoding,
        "headers": headers,
    }
    return json_line(document).encode()
