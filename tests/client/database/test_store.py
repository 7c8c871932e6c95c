"""Positions in a database: advanced by whoever expects the right one, together with the work, or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast.client.database.sqlite import SqliteDatabase
from holdfast.client.database.store import (
    Advance,
    Database,
    DatabaseUnreachable,
    SchemaMissing,
    Start,
    Superseded,
    TransactionEnded,
    Trouble,
    open_database,
    without_password,
)
from holdfast.errors import UsageError


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url)
    opened.connect()
    opened.migrate()
    opened.run("create table results (value text primary key)", {})
    yield opened
    opened.close()


def another(database: Database) -> Database:
    opened = open_database(database.url)
    opened.connect()
    return opened


def results(database: Database) -> list[str]:
    return [row[0] for row in database.run("select value from results order by value", {}).fetchall()]


def position(database: Database) -> int:
    return database.positions("g", [("t", 0)])["t", 0].position


def insert(database: Database, value: str) -> Any:
    return lambda connection: database.run("insert into results values (:value)", {"value": value})


def test_migrations_can_be_run_again(database_url: str) -> None:
    database = open_database(database_url)
    database.connect()
    assert (database.version(), database.migrate(), database.migrate(), database.version()) == (0, [1], [], 1)
    database.check_schema()
    database.close()


def test_missing_tables_are_explained(database_url: str) -> None:
    database = open_database(database_url)
    database.connect()
    with pytest.raises(SchemaMissing, match="holdfast sink migrate --database"):
        database.check_schema()
    database.close()


def test_tables_of_a_newer_version_are_left_alone(database: Database) -> None:
    database.run("insert into holdfast_schema values (99, 'later')", {})
    with pytest.raises(SchemaMissing, match="newer"):
        database.check_schema()
    with pytest.raises(SchemaMissing, match="newer"):
        database.migrate()


def test_a_claim_keeps_the_position_and_changes_the_owner(database: Database) -> None:
    first = database.claim("g", "one", [("t", 0)], [Start("t", 0, "id", 7)])
    again = database.claim("g", "two", [("t", 0)], [Start("t", 0, "id", 99)])
    assert first["t", 0] == ("id", 7, "one")
    assert again["t", 0] == ("id", 7, "two")


def test_work_and_position_are_stored_together(database: Database) -> None:
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 0)])
    database.store("g", "me", [Advance("t", 0, "id", 0, 5)], insert(database, "a"))
    assert (results(database), position(database)) == (["a"], 5)


def test_failed_work_leaves_nothing(database: Database) -> None:
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 0)])

    def work(connection: Any) -> None:
        insert(database, "a")(connection)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        database.store("g", "me", [Advance("t", 0, "id", 0, 5)], work)
    assert (results(database), position(database)) == ([], 0)


@pytest.mark.parametrize(
    ("owner", "advance"),
    [
        ("somebody else", Advance("t", 0, "id", 3, 5)),
        ("me", Advance("t", 0, "id", 2, 5)),
        ("me", Advance("t", 0, "id", 4, 5)),
        ("me", Advance("t", 0, "another topic", 3, 5)),
        ("me", Advance("t", 1, "id", 3, 5)),
    ],
)
def test_whoever_expects_something_else_does_no_work(
    database: Database, owner: str, advance: Advance
) -> None:
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 3)])
    with pytest.raises(Superseded) as refused:
        database.store("g", owner, [advance], insert(database, "a"))
    assert refused.value.keys == [(advance.topic, advance.partition)]
    assert (results(database), position(database)) == ([], 3)


def test_one_stale_partition_takes_back_the_whole_transaction(database: Database) -> None:
    keys = [("t", 0), ("t", 1)]
    database.claim("g", "me", keys, [Start("t", 0, "id", 0), Start("t", 1, "id", 0)])
    database.claim("g", "other", [("t", 1)], [])
    with pytest.raises(Superseded) as refused:
        database.store(
            "g", "me", [Advance("t", 0, "id", 0, 5), Advance("t", 1, "id", 0, 5)], insert(database, "a")
        )
    assert refused.value.keys == [("t", 1)]
    assert (results(database), position(database)) == ([], 0)


def test_an_owner_that_was_replaced_while_it_worked_is_waited_for_or_rolled_back(postgres_url: str) -> None:
    """The row is locked while the work is done: a claim does not come in between, and says that it waits."""
    database = open_database(postgres_url)
    database.connect()
    database.migrate()
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 0)])
    rival = another(database)
    rival.connection.execute("set lock_timeout = 50")
    refusals: list[Trouble] = []

    def work(connection: Any) -> None:
        try:
            rival.claim("g", "rival", [("t", 0)], [])
        except rival.errors as error:
            refusals.append(rival.judge(error))

    database.store("g", "me", [Advance("t", 0, "id", 0, 5)], work)
    assert refusals == [Trouble.AGAIN]
    assert rival.claim("g", "rival", [("t", 0)], [])["t", 0] == ("id", 5, "rival")
    database.close()
    rival.close()


@pytest.mark.parametrize("end", ["commit", "rollback", "commit; begin"])
def test_a_handler_cannot_end_its_transaction_unnoticed(database: Database, end: str) -> None:
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 0)])

    def work(connection: Any) -> None:
        insert(database, "a")(connection)
        for statement in end.split(";"):
            connection.execute(statement)

    with pytest.raises((TransactionEnded, *database.errors)):
        database.store("g", "me", [Advance("t", 0, "id", 0, 5)], work)
    assert position(database) == 0


def test_a_handler_cannot_commit_by_method(database: Database) -> None:
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 0)])

    def work(connection: Any) -> None:
        insert(database, "a")(connection)
        connection.commit()

    with pytest.raises(database.errors):
        database.store("g", "me", [Advance("t", 0, "id", 0, 5)], work)
    assert (results(database), position(database)) == ([], 0)


def test_a_signal_that_meets_sqlite_blames_no_statement(tmp_path: Path) -> None:
    """What its handler raises in the middle of a statement of SQLite's reaches nobody, and the statement is refused."""
    database = SqliteDatabase(str(tmp_path / "sink.sqlite"))
    database.connect()
    database.migrate()
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 0)])

    def work(connection: Any) -> None:
        def interrupted(*_: object) -> int:
            raise InterruptedError

        connection.set_authorizer(interrupted)
        connection.execute("create table results (value text)")

    with pytest.raises(database.errors) as refused:
        database.store("g", "me", [Advance("t", 0, "id", 0, 5)], work)
    assert database.judge(refused.value) is Trouble.LATER
    assert position(database) == 0
    assert not database.connection.in_transaction
    database.close()


def test_an_error_that_a_handler_hides_is_not_taken_for_success(postgres_url: str) -> None:
    database = open_database(postgres_url)
    database.connect()
    database.migrate()
    database.claim("g", "me", [("t", 0)], [Start("t", 0, "id", 0)])

    def work(connection: Any) -> None:
        with pytest.raises(database.errors):
            connection.execute("select * from nowhere")

    with pytest.raises(database.errors, match="current transaction is aborted"):
        database.store("g", "me", [Advance("t", 0, "id", 0, 5)], work)
    assert position(database) == 0
    database.close()


@pytest.mark.parametrize("state", ["08006", "53100", "53300", "57014", "57P03", "58030", "25006"])
def test_a_fault_of_postgresql_that_is_no_statements_passes(postgres_url: str, state: str) -> None:
    database = open_database(postgres_url)
    database.connect()
    assert database.judge(psycopg.errors.lookup(state)()) is Trouble.LATER
    assert database.judge(psycopg.errors.lookup("23505")()) is Trouble.FAILED
    database.close()


def test_a_full_disk_under_sqlite_passes(tmp_path: Path) -> None:
    database = open_database(str(tmp_path / "sink.sqlite"))
    database.connect()
    database.run("create table results (value text)", {})
    (pages,) = database.run("pragma page_count", {}).fetchone()
    database.run(f"pragma max_page_count = {pages}", {})
    with pytest.raises(sqlite3.OperationalError, match="full") as refused:
        database.run("insert into results values (:value)", {"value": "x" * 100_000})
    assert database.judge(refused.value) is Trouble.LATER
    database.close()


def test_an_address_that_never_works_is_told_from_a_server_that_is_away(postgres_url: str) -> None:
    with pytest.raises(DatabaseUnreachable) as never:
        open_database(f"{postgres_url}_missing").connect()
    assert not never.value.may_pass
    with pytest.raises(DatabaseUnreachable) as away:
        open_database("postgresql://nobody@127.0.0.1:1/none").connect()
    assert away.value.may_pass


def test_passwords_are_not_repeated() -> None:
    assert without_password("postgresql://a:secret@host/db") == "postgresql://a:***@host/db"
    with pytest.raises(UsageError, match="postgresql"):
        open_database("mysql://a:secret@host/db")
