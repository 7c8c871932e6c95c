"""Every field of every request that is offered, one at a time at its limits: each gets an answer or closes its
connection with the reason, and none runs into a defect.

The requests are made from the schemas: one item in every array, zeros and short names everywhere else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast.broker.node.dispatch import is_offered
from holdfast.testing.bare_node import LENGTH_BYTES, BareClient, BareNode
from holdfast.testing.wire_client import frame
from holdfast.wire import apis
from holdfast.wire.api_keys import PRODUCE
from holdfast.wire.message_schema import FieldShape, request_type, shapes
from holdfast.wire.varint import encode_uvarint

INTEGERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "timedelta_i32": "i", "timedelta_i64": "q"}
OTHERS = {"bool": 1, "uint16": 2, "float64": 8, "uuid": 16}
TEXTS = ("string", "bytes", "records")
ITEM = "[]"
Path = tuple[str, ...]


class Place(NamedTuple):
    """One field of a request, where it stands and whether its request has tagged fields."""

    path: Path
    shape: FieldShape
    flexible: bool

    def text(self, data: bytes | None, *, is_array: bool = False) -> bytes:
        """Bytes with their length before them; none for null. An empty array is written the same way."""
        if self.flexible:
            return b"\0" if data is None else encode_uvarint(len(data) + 1) + data
        size = struct.Struct(">h" if self.shape.kafka_type == "string" and not is_array else ">i")
        return size.pack(-1) if data is None else size.pack(len(data)) + data

    def null(self) -> bytes | None:
        """The field as null, if there is a way to write that."""
        shape = self.shape
        if shape.is_array or shape.kafka_type in TEXTS:
            return self.text(None, is_array=shape.is_array)
        return b"\xff" if shape.struct_type is not None and shape.nullable else None

    def limits(self) -> Iterator[bytes]:
        """Values at the limits of what the field can hold."""
        kind = self.shape.kafka_type or ""
        if self.shape.is_array:
            yield self.text(b"", is_array=True)
        elif kind in INTEGERS:
            high = (1 << 8 * struct.calcsize(INTEGERS[kind]) - 1) - 1
            yield from (struct.pack(f">{INTEGERS[kind]}", value) for value in (-high - 1, -1, 1, high))
        elif kind in TEXTS:
            yield from (self.text(data) for data in (b"", b"a" * 300, "é\0\n".encode()))
        elif kind in OTHERS:
            yield b"\x01" if kind == "bool" else b"\xff" * OTHERS[kind]
        null = self.null()
        if self.shape.nullable and null is not None:
            yield null


def written(entity_type: Any, path: Path, instead: bytes) -> bytes:
    """A request with something else in the place of one field."""
    flexible = bool(entity_type.__flexible__)

    def of_struct(struct_type: Any, at: Path) -> bytes:
        plain, tagged = b"", b""
        for shape in shapes(struct_type):
            here = (*at, shape.name)
            if shape.tag is None:
                plain += instead if here == path else field(shape, here)
            elif here == path:
                tagged = encode_uvarint(shape.tag) + encode_uvarint(len(instead)) + instead
        return plain + (b"\x01" + tagged if tagged else b"\0") if flexible else plain

    def field(shape: FieldShape, at: Path) -> bytes:
        if not shape.is_array:
            return b"\x01" * (shape.nullable and shape.struct_type is not None) + value(shape, at)
        one = b"\x02" if flexible else b"\0\0\0\x01"
        return one + (instead if (*at, ITEM) == path else value(shape, at))

    def value(shape: FieldShape, at: Path) -> bytes:
        if shape.struct_type is not None:
            return of_struct(shape.struct_type, at)
        if shape.kafka_type in INTEGERS:
            return bytes(struct.calcsize(INTEGERS[shape.kafka_type]))
        if shape.kafka_type in OTHERS:
            return bytes(OTHERS[shape.kafka_type])
        return Place(at, shape, flexible).text(b"a")

    return of_struct(entity_type, ())


def places(entity_type: Any) -> list[Place]:
    flexible = bool(entity_type.__flexible__)

    def within(struct_type: Any, at: Path) -> Iterator[Place]:
        for shape in shapes(struct_type):
            here = (*at, shape.name)
            yield Place(here, shape, flexible)
            if shape.is_array and shape.kafka_type in TEXTS:
                yield Place((*here, ITEM), shape._replace(is_array=False, nullable=False), flexible)
            if shape.struct_type is not None and shape.tag is None:
                yield from within(shape.struct_type, here)

    return list(within(entity_type, ()))


def offered() -> Iterator[tuple[int, int]]:
    for api in apis.APIS:
        for version in range(api.served_from, api.max + 1):
            if is_offered(api.key, version):
                yield api.key, version


class Asker:
    """Sends each request over a connection of its own."""

    def __init__(self) -> None:
        self.node = BareNode()
        self.node.connect().create_topic("a")

    def ask(self, key: int, version: int, body: bytes) -> BareClient:
        """The connection, when it was answered or closed, or nothing more comes to pass."""
        client = self.node.connect()
        client.send(frame(key, version, body)[LENGTH_BYTES:])
        for _ in range(2):  # a parked request, and what its end leads to
            if not client.frames and not client.closed:
                self.node.settle()
                self.node.advance(60_000)
        assert not [line for line in self.node.said if line.startswith("defect")], (key, version)
        return client


def test_a_null_where_none_may_be_closes_its_connection_before_a_handler_sees_it() -> None:
    asker = Asker()
    refused = 0
    for key, version in offered():
        entity_type = request_type(key, version)
        for place in places(entity_type):
            null = place.null()
            if null is None or place.shape.nullable:
                continue
            client = asker.ask(key, version, written(entity_type, place.path, null))
            assert client.closed, (key, version, place)
            assert f"{place.shape.name} is null" in client.closed[0]
            assert not client.frames
            refused += 1
    assert refused > 500


def test_a_field_at_its_limits_gets_an_answer() -> None:
    asker = Asker()
    for api in apis.APIS:
        for version in sorted({api.served_from, api.max}):
            if not is_offered(api.key, version):
                continue
            entity_type = request_type(api.key, version)
            for place in places(entity_type):
                if place.shape.tag is not None and place.shape.nullable:
                    continue  # null is the default of a tagged field, so nobody writes it
                for value in place.limits():
                    client = asker.ask(api.key, version, written(entity_type, place.path, value))
                    # Zero acks ask for no answer, and closing is the only way to tell of a failure.
                    is_silent = api.key == PRODUCE and place.path != ("acks",)
                    assert is_silent or (client.frames and not client.closed), (
                        api.name,
                        version,
                        place,
                        value,
                    )
