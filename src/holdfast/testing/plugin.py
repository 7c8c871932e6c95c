"""The pytest plugin: `holdfast_broker` gives a test a broker of its own.

    from holdfast.testing import BrokerProcess

    def test_orders(holdfast_broker: BrokerProcess) -> None:
        holdfast_broker.create_topic("orders", partitions=3)
        holdfast_broker.produce("orders", "one", "two", key="7")
        holdfast_broker.crash()      # SIGKILL
        holdfast_broker.restart()    # same data, same port
        assert [record.text for record in holdfast_broker.consume_all("orders")] == ["one", "two"]

Topics are created, by `create_topic` or any client: a producer that sends to one that is missing waits for it. With
the setting `auto.create.topics.enable=true` the first to ask for one creates it.

The broker is a process by default, forked in milliseconds from one that has done the imports. The mark `holdfast` says
otherwise: `mode="thread"` runs it in the test's own process, `settings` are Kafka's, and `prepared` is a function that
fills a broker once in the session; the test's broker starts on a copy of what it left.

    @pytest.mark.holdfast(mode="thread", settings={"num.partitions": "3"}, prepared=shop)

`holdfast_session_broker` is one broker for all tests of the session, or of the worker where pytest-xdist runs several,
and `holdfast_topic` the name of a topic of the test's own there. A fixture `holdfast_settings` of yours, with scope
"session", replaces the settings that all of them start from.

`holdfast_schema_registry` is a schema registry of the test's own, in this process, for any client of Confluent's:

    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

    def test_schemas(holdfast_schema_registry):
        registry = SchemaRegistryClient({"url": holdfast_schema_registry.url})
        assert registry.register_schema("orders-value", Schema('"string"', "AVRO")) == 1

That client comes with `holdfast[registry]`.

`apache_kafka` is one real Apache Kafka 4.3 for the whole session; without Java the test is skipped, or fails in CI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from holdfast.testing.apache import ApacheKafka
    from holdfast.testing.broker import BrokerProcess
    from holdfast.testing.broker_thread import BrokerThread
    from holdfast.testing.prepared import Prepared
    from holdfast.testing.schema_registry import SchemaRegistry

SETTINGS: Final[Mapping[str, str]] = {
    # A test has its members at once, and few groups and transactions.
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
}
TOPIC_CHARACTERS_MAX: Final = 100
"""Of a test's name in its topic's: Kafka allows 249 in all."""
PREPARED: Final = pytest.StashKey[dict[object, "Prepared"]]()


class Marked(NamedTuple):
    """What `@pytest.mark.holdfast` asks for."""

    mode: str = "process"
    settings: Mapping[str, str] = {}
    prepared: Callable[[BrokerProcess], object] | None = None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PREPARED] = {}
    config.addinivalue_line(
        "markers",
        "holdfast(mode, settings, prepared): how the holdfast_broker fixture runs: mode 'process' or 'thread', "
        "settings by Kafka's property names, a function that fills a broker once in the session",
    )


@pytest.fixture(scope="session")
def holdfast_settings() -> Mapping[str, str]:
    """What brokers of tests start from, by Kafka's property names; yours, of the same name, replaces it."""
    return SETTINGS


@pytest.fixture
def holdfast_broker(
    request: pytest.FixtureRequest,
    holdfast_settings: Mapping[str, str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[BrokerProcess | BrokerThread]:
    """A broker on an ephemeral port with its data in the test's temporary directory."""
    marked = asked_for(request.node.get_closest_marker("holdfast"))
    settings = {**holdfast_settings, **marked.settings}
    directory = tmp_path / "holdfast"
    if marked.prepared is not None:
        _prepared(request.config, marked.prepared, settings, tmp_path_factory).copy_to(directory)
    if marked.mode == "thread":
        from holdfast.testing.broker_thread import BrokerThread

        with BrokerThread(directory, settings=settings) as embedded:
            yield embedded
    else:
        with _process(directory, settings) as process:
            yield process


def asked_for(mark: pytest.Mark | None) -> Marked:
    options: dict[str, Any] = dict(mark.kwargs) if mark is not None else {}
    if (mark is not None and mark.args) or options.keys() - set(Marked._fields):
        raise pytest.UsageError(
            f"@pytest.mark.holdfast takes mode='process'|'thread', settings and prepared, not {mark}"
        )
    marked = Marked(**options)
    if marked.mode not in ("process", "thread"):
        raise pytest.UsageError(f"@pytest.mark.holdfast: mode is 'process' or 'thread', not {marked.mode!r}")
    return marked


def _process(directory: Path, settings: Mapping[str, str]) -> BrokerProcess:
    from holdfast.testing.broker import BrokerProcess

    return BrokerProcess(directory, settings=settings, faults=True, warm=True)


def _prepared(
    config: pytest.Config,
    fill: Callable[[BrokerProcess], object],
    settings: Mapping[str, str],
    directories: pytest.TempPathFactory,
) -> Prepared:
    """What a function fills a broker with, once for each of the settings it is wanted with."""
    from holdfast.testing.prepared import prepared

    known, key = config.stash[PREPARED], (fill, tuple(sorted(settings.items())))
    if key not in known:
        known[key] = prepared(fill, directories.mktemp("holdfast-prepared") / "data", settings=settings)
    return known[key]


@pytest.fixture(scope="session")
def holdfast_session_broker(
    holdfast_settings: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """One broker that all tests of the session share: use topics and groups of your own."""
    with _process(tmp_path_factory.mktemp("holdfast") / "data", holdfast_settings) as broker:
        yield broker


@pytest.fixture
def holdfast_topic(request: pytest.FixtureRequest, holdfast_session_broker: BrokerProcess) -> str:
    """A new topic of the session's broker, named after the test."""
    test = re.sub(r"[^A-Za-z0-9._-]", "-", request.node.name)[:TOPIC_CHARACTERS_MAX]
    name = f"{test}-{uuid4().hex[:8]}"
    holdfast_session_broker.create_topic(name)
    return name


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
