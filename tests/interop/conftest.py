"""One broker of ours for all interop tests; clients and Kafka's tools are other people's."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import Engine, Scenario, run_on_all
from holdfast.testing.kafka_fixtures import COORDINATORS

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)


@pytest.fixture(scope="session")
def interop_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    # Some messages carry old timestamps on purpose: retention must not take them while they are compared.
    settings = {"log.retention.ms": "-1", **COORDINATORS}
    with BrokerProcess(str(tmp_path_factory.mktemp("interop") / "holdfast"), settings=settings) as broker:
        yield broker


@pytest.fixture(scope="session")
def bootstrap(interop_broker: BrokerProcess) -> str:
    return interop_broker.bootstrap_servers


OnBoth = Callable[[Scenario], Any]


@pytest.fixture
def on_both(request: pytest.FixtureRequest) -> OnBoth:
    """Run a scenario on Apache Kafka and on our broker at once; both must show the same, which is returned."""
    wanted = request.config.getoption("--engine")
    engines = []
    if wanted != "apache":
        engines.append(Engine("holdfast", request.getfixturevalue("bootstrap")))
    if wanted != "holdfast":
        engines.append(Engine("Apache Kafka", request.getfixturevalue("apache_kafka").bootstrap_servers))

    def run(scenario: Scenario) -> Any:
        seen = run_on_all(scenario, engines)
        assert all(each == seen[-1] for each in seen), f"holdfast: {seen[0]}\nApache Kafka: {seen[-1]}"
        return seen[-1]

    return run


MakeTopic = Callable[..., str]


@pytest.fixture(scope="session")
def make_topic(bootstrap: str) -> MakeTopic:
    """Creates a topic of its own name and returns it."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})

    def make(prefix: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        created = admin.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))])
        created[name].result(30)
        return name

    return make
