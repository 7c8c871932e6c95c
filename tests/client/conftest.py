"""What the tests of clients share: a broker, a PostgreSQL, topics with messages in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from holdfast.testing.postgres import NoPostgres, PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL that all tests of the session share: use a database of your own."""
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))
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
