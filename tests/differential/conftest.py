"""Runs scripts against our broker and Apache Kafka at the same time and compares what was answered."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.differential import (
    Allowed,
    Script,
    await_coordinators,
    differences,
    judge,
    run_script,
)

from holdfast.testing.apache import ApacheKafka
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import COORDINATORS

HERE = Path(__file__).parent
ALLOWED_FILE = HERE / "differences.toml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.interop)


@pytest.fixture(scope="session")
def allowed_differences() -> list[Allowed]:
    table = tomllib.loads(ALLOWED_FILE.read_text(encoding="utf-8"))
    return [
        Allowed(name, tuple(entry["where"]), entry.get("ours", "*"), entry.get("theirs", "*"))
        for name, entry in table.items()
    ]


@pytest.fixture(scope="session")
def our_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker of ours for the whole session, with the settings the Apache Kafka beside it has."""
    directory = tmp_path_factory.mktemp("differential") / "holdfast"
    settings = {"log.segment.delete.delay.ms": "1000", **COORDINATORS}
    with BrokerProcess(str(directory), settings=settings) as broker:
        yield broker


Compare = Callable[[Script], None]


@pytest.fixture(scope="session")
def both_brokers(apache_kafka: ApacheKafka, our_broker: BrokerProcess) -> tuple[str, str]:
    """The addresses of ours and of Apache Kafka, both with everything there that is made on demand."""
    addresses = (our_broker.bootstrap_servers, apache_kafka.bootstrap_servers)
    for address in addresses:
        await_coordinators(address)
    return addresses


@pytest.fixture
def compare(both_brokers: tuple[str, str], allowed_differences: list[Allowed]) -> Compare:
    """Run a script on both brokers; every difference must be on the allow-list."""
    our_address, their_address = both_brokers

    def run(script: Script) -> None:
        with ThreadPoolExecutor(2) as pool:
            ours = pool.submit(run_script, script, our_address)
            theirs = pool.submit(run_script, script, their_address)
        found = differences(script.__name__, ours.result(), theirs.result())
        problems = judge(script.__name__, found, allowed_differences)
        assert not problems, "\n" + "\n".join(problems)

    return run
