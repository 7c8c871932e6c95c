"""From values to bytes: what cannot be sent is refused before anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from holdfast.client.serializers import as_bytes, as_json, as_text, with_schema


def test_bytes_and_text_are_taken_as_they_are() -> None:
    assert [as_bytes(value, "t") for value in (b"a", bytearray(b"b"), memoryview(b"c"), "d€")] == [
        b"a",
        b"b",
        b"c",
        "d€".encode(),
    ]
    assert as_text("€", "t") == "€".encode()


def test_other_values_need_a_serializer_and_the_message_says_so() -> None:
    with pytest.raises(TypeError, match=r"dict for orders .* value=as_json"):
        as_bytes({"id": 1}, "orders")


def test_json_is_compact_and_any_reader_takes_it() -> None:
    assert as_json({"name": "Ünï", "n": [1, None]}, "t") == '{"name":"Ünï","n":[1,null]}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json(float("nan"), "t")


class FakeRegistrySerializer:
    """What confluent-kafka's Avro, Protobuf and JSON Schema serializers are called with."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []

    def __call__(self, value: Any, context: Any) -> bytes | None:
        self.contexts.append(context)
        return None if value is None else b"\x00\x00\x00\x00\x07" + json.dumps(value).encode()


def test_a_serializer_of_the_registry_client_learns_topic_and_field() -> None:
    registry = FakeRegistrySerializer()
    value, key = with_schema(registry), with_schema(registry, is_key=True)
    assert value({"id": 1}, "orders") == b'\x00\x00\x00\x00\x07{"id": 1}'
    assert key("k", "orders") == b'\x00\x00\x00\x00\x07"k"'
    assert [(context.topic, context.field) for context in registry.contexts] == [
        ("orders", "value"),
        ("orders", "key"),
    ]


def test_nothing_of_the_registry_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, holdfast.client.serializers as s\n"
        "s.with_schema(lambda value, context: b'x')({}, 't')\n"
        "assert not [m for m in sys.modules if m.startswith(('httpx', 'confluent_kafka.schema_registry'))]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
