"""Fixtures of the server's tests: real processes, real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import CREATE_TOPICS

StartBroker = Callable[..., BrokerProcess]


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Start a broker with settings, given with underscores for dots; it ends with the test."""
    with ExitStack() as stack:

        def start(name: str = "data", prefix: tuple[str, ...] = (), **settings: str) -> BrokerProcess:
            named = {setting.replace("_", "."): value for setting, value in settings.items()}
            return stack.enter_context(BrokerProcess(str(tmp_path / name), settings=named, prefix=prefix))

        yield start


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerProcess:
    return start_broker()


@pytest.fixture
def create_topic() -> Callable[..., None]:
    """Create a topic; settings are given with underscores for dots."""

    def create(broker: BrokerProcess, name: str, partitions: int = 1, **configs: str) -> None:
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 1,
            "assignments": [],
            "configs": [
                {"name": setting.replace("_", "."), "value": value} for setting, value in configs.items()
            ],
        }
        with WireClient(broker.bootstrap_servers) as client:
            (made,) = client.ask(CREATE_TOPICS, 5, {"topics": [topic], "timeout": 30_000}).topics
        assert made.error_code == 0, made

    return create
