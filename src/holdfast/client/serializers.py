"""From values to bytes: plain ones here, those with a schema through confluent-kafka's registry client.

A serializer is a function of the value and the topic. Whatever it raises comes out of `send`, before anything was
handed over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

Serializer: TypeAlias = Callable[[Any, str], bytes | None]
"""The bytes of a value for a topic."""


def as_bytes(value: Any, topic: str) -> bytes:
    """Bytes as they are; text in UTF-8."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(
        f"a {type(value).__name__} for {topic} is neither bytes nor text: give the producer a serializer for it, "
        "such as value=as_json"
    )


def as_text(value: str, topic: str) -> bytes:
    return value.encode()


def as_json(value: Any, topic: str) -> bytes:
    """Compact JSON in UTF-8. NaN and infinities are refused: no other reader takes them."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class SchemaSerializer(Protocol):
    """What confluent-kafka's Avro, Protobuf and JSON Schema serializers are."""

    def __call__(self, value: Any, context: Any, /) -> bytes | None: ...


def with_schema(serializer: SchemaSerializer, *, is_key: bool = False) -> Serializer:
    """A serializer of confluent-kafka's registry client, as ours."""
    from confluent_kafka.serialization import MessageField, SerializationContext

    field = MessageField.KEY if is_key else MessageField.VALUE

    def serialize(value: Any, topic: str) -> bytes | None:
        return serializer(value, SerializationContext(topic, field))

    return serialize
