"""Subscriptions and assignments of classic consumers, against kio's schemas and librdkafka's bytes."""

from __future__ import annotations

import importlib
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.serial import entity_reader, entity_writer
from tests.support.tiers import examples

from holdfast.wire.consumer_protocol import (
    ConsumerAssignment,
    ConsumerSubscription,
    OwnedPartitions,
    decode_assignment,
    decode_subscription,
)

SUBSCRIPTION = bytes.fromhex("000300000001000c726563723863333939332d740000000000000000ffffffff0000")
ASSIGNMENT = bytes.fromhex("000000000001000c726563723863333939332d7400000002000000000000000100000000")


def test_what_librdkafka_wrote_is_read_and_written_back() -> None:
    subscription = ConsumerSubscription(topics=("recr8c3993-t",), user_data=b"", rack_id="")
    assert decode_subscription(SUBSCRIPTION) == (3, subscription)
    assert subscription.encode() == SUBSCRIPTION
    assignment = ConsumerAssignment(
        assigned_partitions=(OwnedPartitions("recr8c3993-t", (0, 1)),), user_data=b""
    )
    assert decode_assignment(ASSIGNMENT) == (0, assignment)
    assert assignment.encode(0) == ASSIGNMENT


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize(
    ("kind", "decode"),
    [(ConsumerSubscription, decode_subscription), (ConsumerAssignment, decode_assignment)],
)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_they_are_those_of_the_schemas(made: Any, kind: Any, decode: Any, version: int, data: Any) -> None:
    name = "consumer_protocol_" + kind.__name__.removeprefix("Consumer").lower()
    module = importlib.import_module(f"kio.schema.{name}.v{version}.data")
    schema = getattr(module, "".join(word.capitalize() for word in name.split("_")))
    message = data.draw(made.record(kind, version))
    encoded = message.encode(version)
    assert decode(encoded) == (version, message)
    entity, size = entity_reader(schema)(encoded, 2)
    assert size == len(encoded) - 2
    buffer = io.BytesIO()
    entity_writer(schema)(buffer, entity)
    assert buffer.getvalue() == encoded[2:]


def test_newer_layouts_are_read_as_far_as_they_are_known() -> None:
    version, newer = decode_subscription(b"\x00\x09" + SUBSCRIPTION[2:] + b"of the future")
    assert version == 3
    assert newer == decode_subscription(SUBSCRIPTION)[1]


@pytest.mark.parametrize("decode", [decode_subscription, decode_assignment])
def test_other_bytes_are_refused(decode: Any) -> None:
    for data in (
        b"",
        b"\0",
        b"\0\0\x7f\xff\xff\xff",
        b"\xff\xff" + bytes(30),
        b"\0\0\0\0\0\1\0\2\xff\xff" + bytes(9),
    ):
        with pytest.raises(ValueError, match=r"."):
            decode(data)
    for size in range(len(SUBSCRIPTION)):
        with pytest.raises(ValueError, match=r"."):
            decode_subscription(SUBSCRIPTION[:size])


@given(st.binary(max_size=60))
def test_random_bytes_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_subscription, decode_assignment):
        try:
            decode(data)
        except ValueError:
            continue
