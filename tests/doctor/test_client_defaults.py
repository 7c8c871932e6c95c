"""The defaults the doctor knows are those of the packages that are installed."""

from __future__ import annotations

import inspect
from typing import Any

import aiokafka
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from kafka import KafkaConsumer, KafkaProducer

from holdfast.doctor.client_defaults import DEFAULTS, INFINITE, Client, Role, known_names, own_name


def packaged(client: Client, role: Role) -> dict[str, Any]:
    if client is Client.KAFKA_PYTHON:
        return dict((KafkaProducer if role == "producer" else KafkaConsumer).DEFAULT_CONFIG)
    made = aiokafka.AIOKafkaProducer if role == "producer" else aiokafka.AIOKafkaConsumer
    parameters = inspect.signature(made.__init__).parameters
    return {name: each.default for name, each in parameters.items() if name not in ("self", "topics")}


@pytest.mark.parametrize("role", ["producer", "consumer"])
@pytest.mark.parametrize("client", [Client.KAFKA_PYTHON, Client.AIOKAFKA])
def test_defaults_of_python_clients_are_the_packages_own(client: Client, role: Role) -> None:
    package = packaged(client, role)
    for name, value in DEFAULTS[client, role].items():
        own = own_name(client, name)
        if own == "acks" and client is Client.AIOKAFKA:
            continue  # decided when it is made: 1, or all with idempotence; the corpus has both
        if own not in package or own == "partitioner":
            continue
        real = package[own]
        wanted = {"all": -1}.get(str(value), value)
        assert real == wanted or (real == float("inf") and value == INFINITE), own


@pytest.mark.parametrize("role", ["producer", "consumer"])
@pytest.mark.parametrize("client", [Client.KAFKA_PYTHON, Client.AIOKAFKA])
def test_every_name_a_package_takes_is_known(client: Client, role: Role) -> None:
    assert packaged(client, role).keys() - known_names(client, role) == set()


# confluent-kafka adds these, takes them from the program, or would look for a broker.
OF_THE_PROGRAM = {
    "bootstrap.servers",
    "metadata.broker.list",
    "default.topic.config",
    "logger",
    "oauth_cb",
    "on_commit",
    "on_delivery",
    "key.serializer",
    "value.serializer",
    "key.deserializer",
    "value.deserializer",
}


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_every_librdkafka_name_is_taken_by_it(role: Role) -> None:
    made = Producer if role == "producer" else Consumer
    for name in sorted(known_names(Client.LIBRDKAFKA, role) - OF_THE_PROGRAM):
        said = ""
        try:
            made({"group.id": "g", name: "¬"} if role == "consumer" else {name: "¬"})
        except (KafkaException, TypeError, ValueError) as error:
            said = str(error)  # a value it does not take, or a callback: known all the same
        assert "No such configuration property" not in said, name


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"enable.idempotence": True}, False),
        ({"enable.idempotence": True, "acks": "1"}, True),
        ({"enable.idempotence": True, "retries": 0}, True),
        ({"enable.idempotence": True, "max.in.flight": 6}, True),
        ({"linger.ms": 60_000, "message.timeout.ms": 60_000}, True),
        ({"buffer.memory": 1}, True),
        ({"transactional.id": "t", "message.timeout.ms": 120_000}, True),
        ({"transactional.id": "t", "message.timeout.ms": 60_000}, False),
        ({"transactional.id": "t", "acks": "1"}, True),
        ({"transactional.id": "t", "enable.idempotence": False}, True),
    ],
)
def test_librdkafka_refuses_what_the_rules_say_it_refuses(settings: dict[str, Any], refused: bool) -> None:
    try:
        Producer({"log_level": 0, **settings})
    except KafkaException:
        assert refused
    else:
        assert not refused


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"max.poll.interval.ms": 40_000}, True),
        ({"receive.message.max.bytes": 1_000_000}, True),
        ({"heartbeat.interval.ms": 3_000}, False),
    ],
)
def test_librdkafka_refuses_consumers_the_rules_say_it_refuses(
    settings: dict[str, Any], refused: bool
) -> None:
    try:
        Consumer({"group.id": "g", "log_level": 0, **settings}).close()
    except KafkaException:
        assert refused
    else:
        assert not refused
