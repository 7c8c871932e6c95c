"""One broker of ours for all tests of the reader, and ways to fill its topics."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.testing.broker import BrokerProcess

MakeTopic = Callable[..., str]


@pytest.fixture(scope="session")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = {
        "log.cleaner.backoff.ms": "100",
        "transaction.state.log.num.partitions": "1",
        "log.retention.ms": "-1",
    }
    with BrokerProcess(str(tmp_path_factory.mktemp("reader") / "holdfast"), settings=settings) as broker:
        yield broker.bootstrap_servers


def topic_maker(bootstrap_servers: str) -> MakeTopic:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})

    def make(prefix: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        made = admin.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))])
        made[name].result(30)
        return name

    return make


@pytest.fixture(scope="session")
def make_topic(bootstrap: str) -> MakeTopic:
    return topic_maker(bootstrap)
