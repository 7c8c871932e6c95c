"""The pytest plugin: `holdfast_broker` gives a test a broker of its own.

    from holdfast.client import Producer

    def test_orders(holdfast_broker):
        holdfast_broker.create_topic("orders", partitions=3)
        with Producer(holdfast_broker.bootstrap_servers) as producer:
            producer.send("orders", b"an order").wait()
        holdfast_broker.crash()      # SIGKILL
        holdfast_broker.restart()    # same data, same port

Topics are created, by `create_topic` or any client: a producer that sends to one that is missing waits for it. With
the setting `auto.create.topics.enable=true` the first to ask for one creates it.

The broker is a process by default. `@pytest.mark.holdfast(mode="thread", settings={"num.partitions": "3"})` runs it
on a thread instead (faster, cannot crash) or gives it settings.

`holdfast_schema_registry` is a schema registry of the test's own, in this process, for any client of Confluent's:

    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

    def test_schemas(holdfast_schema_registry):
        registry = SchemaRegistryClient({"url": holdfast_schema_registry.url})
        assert registry.register_schema("orders-value", Schema('"string"', "AVRO")) == 1

That client comes with `holdfast[registry]`.

`apache_kafka` is one real Apache Kafka 4.3 for the whole session; without Java the test is skipped, or fails in CI.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.broker.server.embed import Broker
    from holdfast.testing.apache import ApacheKafka
    from holdfast.testing.broker import BrokerProcess
    from holdfast.testing.schema_registry import SchemaRegistry


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "holdfast(mode, settings): how the holdfast_broker fixture runs: mode 'process' or 'thread', "
        "settings by Kafka's property names",
    )


@pytest.fixture
def holdfast_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker | BrokerProcess]:
    """A broker on an ephemeral port with its data in the test's temporary directory."""
    marker = request.node.get_closest_marker("holdfast")
    options = dict(marker.kwargs) if marker is not None else {}
    mode = options.pop("mode", "process")
    settings = options.pop("settings", {})
    if options or mode not in ("process", "thread"):
        raise pytest.UsageError(
            f"@pytest.mark.holdfast takes mode='process'|'thread' and settings, not {marker}"
        )
    if mode == "thread":
        from holdfast.broker.server.embed import Broker

        with Broker(str(tmp_path / "holdfast"), settings=settings) as embedded:
            yield embedded
    else:
        from holdfast.testing.broker import BrokerProcess

        with BrokerProcess(str(tmp_path / "holdfast"), settings=settings) as process:
            yield process


@pytest.fixture
def holdfast_schema_registry() -> Iterator[SchemaRegistry]:
    """An empty schema registry on an ephemeral port."""
    from holdfast.testing.schema_registry import SchemaRegistry

    with SchemaRegistry() as registry:
        yield registry


@pytest.fixture(scope="session")
def apache_kafka() -> Iterator[ApacheKafka]:
    """A real Apache Kafka that all tests of the session share: use topics of your own."""
    from holdfast.testing.kafka_fixtures import running_apache_kafka

    with running_apache_kafka() as broker:
        yield broker
