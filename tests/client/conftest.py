"""What the tests of clients share: a broker, a PostgreSQL, topics with messages in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.support.fake_producer import FakeCluster

from holdfast.client.spool import transactional
from holdfast.client.spool.transactional import PROGRESS_TOPIC, Told, decode_told
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL that all tests of the session share: use a database of your own."""
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """The address of a new, empty database."""
    return new_database(postgres)


@pytest.fixture(params=["postgres", "sqlite"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'sink.sqlite'}"
    return new_database(request.getfixturevalue("postgres"))


def new_database(server: PostgresServer) -> str:
    import psycopg

    name = f"sink_{uuid4().hex}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f'create database "{name}"')
    return server.url.rpartition("/")[0] + f"/{name}"


@pytest.fixture
def progress_topic(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exactly-once spools have told of themselves is read from the fake cluster."""

    class FakeTopic:
        def __init__(self, settings: Any) -> None:
            pass

        def make(self) -> None:
            pass

        def read(self, spool_id: str, is_over: Callable[[], bool]) -> Told:
            found = Told()
            for record in cluster.log(PROGRESS_TOPIC):
                if record.key == spool_id.encode():
                    found = decode_told(record.value or b"")
            return found

    monkeypatch.setattr(transactional, "ProgressTopic", FakeTopic)
