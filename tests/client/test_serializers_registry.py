"""Values with a schema: sent by `Producer`, read by `Consumer`, with confluent-kafka's serializers and a registry."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import (
    MessageField,
    SerializationContext,
    SerializationError,
    StringSerializer,
)
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tests.support.apicurio import ApicurioRegistry, NoApicurio

from holdfast.client import Consumer, Message, Producer, with_schema
from holdfast.client.serializers import SchemaSerializer
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.schema_registry import SchemaRegistry

pytestmark = [
    pytest.mark.holdfast(
        settings={"auto.create.topics.enable": "true", "group.initial.rebalance.delay.ms": "0"}
    ),
    pytest.mark.xdist_group("registry"),
]
AVRO = """{"type":"record","name":"Order","fields":[
    {"name":"id","type":"long"},{"name":"item","type":"string"}]}"""
JSON = """{"$schema":"http://json-schema.org/draft-07/schema#","title":"Order","type":"object",
    "properties":{"id":{"type":"integer"},"item":{"type":"string"}},"required":["id","item"]}"""


def _protobuf_classes() -> tuple[Any, Any]:
    """What protoc makes of two files: message Order { int64 id = 1; string item = 2; }, and in another file, which
    imports the first, message Parcel { repeated Order orders = 1; }"""
    order = descriptor_pb2.FileDescriptorProto(name="shop/order.proto", package="shop", syntax="proto3")
    message = order.message_type.add(name="Order")
    for number, (name, kind) in enumerate([("id", "TYPE_INT64"), ("item", "TYPE_STRING")], start=1):
        message.field.add(name=name, number=number, type=kind, label="LABEL_OPTIONAL", json_name=name)
    parcel = descriptor_pb2.FileDescriptorProto(name="shop/parcel.proto", package="shop", syntax="proto3")
    parcel.dependency.append(order.name)
    parcel.message_type.add(name="Parcel").field.add(
        name="orders",
        number=1,
        type="TYPE_MESSAGE",
        type_name=".shop.Order",
        label="LABEL_REPEATED",
        json_name="orders",
    )
    pool = descriptor_pool.DescriptorPool()
    for file in (order, parcel):
        pool.Add(file)
    found = (pool.FindMessageTypeByName(f"shop.{name}") for name in ("Order", "Parcel"))
    return tuple(map(message_factory.GetMessageClass, found))


def stricter() -> str:
    """A schema that cannot read what `AVRO` wrote."""
    return AVRO.replace("]}", ',{"name":"amount","type":"double"}]}')


class Format(NamedTuple):
    name: str
    serializer: Callable[[SchemaRegistryClient], SchemaSerializer]
    deserializer: Callable[[SchemaRegistryClient], SchemaSerializer]
    value: Callable[[int], Any]


Order, Parcel = _protobuf_classes()
FORMATS = [
    Format(
        "AVRO",
        lambda registry: AvroSerializer(registry, AVRO),
        lambda registry: AvroDeserializer(registry),
        lambda number: {"id": number, "item": f"Ünï {number}"},
    ),
    Format(
        "PROTOBUF",
        lambda registry: ProtobufSerializer(Order, registry),
        lambda registry: ProtobufDeserializer(Order, schema_registry_client=registry),
        lambda number: Order(id=number, item=f"Ünï {number}"),
    ),
    Format(
        "PROTOBUF with an import",
        lambda registry: ProtobufSerializer(Parcel, registry),
        lambda registry: ProtobufDeserializer(Parcel, schema_registry_client=registry),
        lambda number: Parcel(orders=[Order(id=number, item=f"Ünï {number}"), Order(id=7)]),
    ),
    Format(
        "JSON",
        lambda registry: JSONSerializer(JSON, registry),
        lambda registry: JSONDeserializer(None, schema_registry_client=registry),
        lambda number: {"id": number, "item": f"Ünï {number}"},
    ),
]


@pytest.fixture
def registry(holdfast_schema_registry: SchemaRegistry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": holdfast_schema_registry.url, "max.retries": 0}) as client:
        yield client


def read_all(broker: BrokerProcess, topic: str, count: int) -> list[Message]:
    seen: list[Message] = []
    consumer = Consumer(broker.bootstrap_servers, group="readers", topics=[topic])

    def handle(message: Message) -> None:
        seen.append(message)
        if len(seen) == count:
            consumer.stop()

    consumer.run(handle)
    return seen


@pytest.mark.parametrize("spooled", [False, True], ids=["direct", "spooled"])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda each: each.name)
@pytest.mark.check
def test_values_and_keys_come_back_as_they_were(
    holdfast_broker: BrokerProcess,
    registry: SchemaRegistryClient,
    tmp_path: Path,
    kind: Format,
    spooled: bool,
) -> None:
    round_trip(holdfast_broker, registry, kind, tmp_path / "spool" if spooled else None)


def round_trip(
    broker: BrokerProcess,
    registry: SchemaRegistryClient,
    kind: Format,
    spool: Path | None,
    topic: str = "orders",
) -> None:
    with Producer(
        broker.bootstrap_servers,
        spool=spool,
        key=with_schema(StringSerializer(), is_key=True),
        value=with_schema(kind.serializer(registry)),
    ) as producer:
        producer.send_many(topic, [kind.value(number) for number in range(10)], key=lambda value: "k")
    messages = read_all(broker, topic, 10)
    deserialize = kind.deserializer(registry)
    context = SerializationContext(topic, MessageField.VALUE)
    assert [deserialize(each.value, context) for each in messages] == [kind.value(each) for each in range(10)]
    assert {each.key for each in messages} == {b"k"}
    # The five bytes that Spark and everybody else reads: zero, and the schema's id.
    registered = registry.get_latest_version(f"{topic}-value")
    assert registered.schema.schema_type in (kind.name.split()[0], None)
    assert {each.value[:5] for each in messages if each.value} == {
        struct.pack(">bI", 0, registered.schema_id)
    }


def test_a_value_that_does_not_fit_its_schema_is_refused_before_anything_is_sent(
    holdfast_broker: BrokerProcess, registry: SchemaRegistryClient
) -> None:
    with Producer(
        holdfast_broker.bootstrap_servers, value=with_schema(AvroSerializer(registry, AVRO))
    ) as producer:
        with pytest.raises((SerializationError, ValueError, TypeError)):
            producer.send("orders", {"id": "seven"})
        assert producer.under_way == 0


def test_a_registry_that_is_away_refuses_the_first_message_and_no_later_one(
    holdfast_broker: BrokerProcess, holdfast_schema_registry: SchemaRegistry, registry: SchemaRegistryClient
) -> None:
    """Schemas are asked for once: a registry that goes away later is not noticed."""
    holdfast_schema_registry.stop()
    with Producer(
        holdfast_broker.bootstrap_servers, value=with_schema(AvroSerializer(registry, AVRO))
    ) as producer:
        with pytest.raises(Exception, match=r"(?i)connect"):
            producer.send("orders", {"id": 1, "item": "a"})
        assert producer.under_way == 0
        holdfast_schema_registry.start()
        producer.send("orders", {"id": 1, "item": "a"}).wait()
        holdfast_schema_registry.stop()
        producer.send("orders", {"id": 2, "item": "b"}).wait()


def test_a_schema_that_readers_of_old_data_could_not_take_is_refused(
    holdfast_broker: BrokerProcess, registry: SchemaRegistryClient
) -> None:
    with Producer(
        holdfast_broker.bootstrap_servers, value=with_schema(AvroSerializer(registry, AVRO))
    ) as producer:
        producer.send("orders", {"id": 1, "item": "a"}).wait()
    with (
        Producer(
            holdfast_broker.bootstrap_servers, value=with_schema(AvroSerializer(registry, stricter()))
        ) as producer,
        pytest.raises(SchemaRegistryError, match="cannot read what version 1 wrote"),
    ):
        producer.send("orders", {"id": 2, "item": "b", "amount": 1.5})


@pytest.fixture(scope="module")
def real_registry() -> Iterator[str]:
    try:
        registry = ApicurioRegistry()
    except NoApicurio as missing:
        unavailable(str(missing))
    with registry:
        yield registry.url


@pytest.mark.java
@pytest.mark.long
@pytest.mark.interop
@pytest.mark.parametrize("kind", FORMATS, ids=lambda each: each.name)
def test_a_real_registry_makes_no_difference(
    holdfast_broker: BrokerProcess, real_registry: str, kind: Format
) -> None:
    topic = f"orders-{kind.name.replace(' ', '-')}"
    with SchemaRegistryClient({"url": real_registry}) as registry:
        round_trip(holdfast_broker, registry, kind, None, topic)


@pytest.mark.java
@pytest.mark.long
@pytest.mark.interop
def test_the_registry_for_tests_answers_as_a_real_one(
    real_registry: str, holdfast_schema_registry: SchemaRegistry
) -> None:
    with (
        SchemaRegistryClient({"url": real_registry}) as real,
        SchemaRegistryClient({"url": holdfast_schema_registry.url}) as ours,
    ):
        assert what_happens(ours) == what_happens(real)


def what_happens(registry: SchemaRegistryClient) -> list[object]:
    """What a client sees of a subject's life; ids are left out, another registry counts them on."""

    def outcome(act: Callable[[], Any]) -> object:
        try:
            return act()
        except SchemaRegistryError as error:
            return error.http_status_code, error.error_code

    optional = AVRO.replace("]}", ',{"name":"note","type":"string","default":""}]}')
    return [
        outcome(lambda: registry.get_latest_version("life")),
        outcome(lambda: registry.get_schema(1_000_000)),
        outcome(lambda: bool(registry.set_compatibility("life", "BACKWARD"))),
        outcome(lambda: registry.get_compatibility("life")),
        outcome(lambda: isinstance(registry.register_schema("life", Schema(AVRO, "AVRO")), int)),
        outcome(lambda: registry.test_compatibility("life", Schema(optional, "AVRO"))),
        outcome(lambda: registry.test_compatibility("life", Schema(stricter(), "AVRO"))),
        outcome(lambda: isinstance(registry.register_schema("life", Schema(optional, "AVRO")), int)),
        outcome(lambda: registry.register_schema("life", Schema(stricter(), "AVRO"))),
        outcome(lambda: registry.register_schema("life", Schema("{", "AVRO"))),
        outcome(lambda: registry.get_versions("life")),
        outcome(lambda: registry.get_latest_version("life").version),
        outcome(lambda: registry.lookup_schema("life", Schema(AVRO, "AVRO")).version),
        outcome(lambda: registry.lookup_schema("life", Schema(stricter(), "AVRO"))),
        outcome(lambda: registry.get_version("life", 7)),
        outcome(lambda: registry.delete_version("life", 2)),
        outcome(lambda: registry.get_versions("life")),
        outcome(lambda: registry.delete_subject("life")),
        outcome(lambda: registry.get_versions("life")),
    ]
