"""Pipelines that earlier versions ran go on from their homes: every row once, and what was remembered is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.golden.make_pipelines import send
from tests.golden.pipeline_inputs import joined_rows, plain_rows, table_rows
from tests.golden.pipelines import ARCHIVES, Pipelines, name_of, opened, restore

from holdfast.pipeline.engine.running import run_pipeline
from holdfast.testing.postgres import NoPostgres, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GoOn = Callable[..., None]


@pytest.fixture(params=ARCHIVES, ids=name_of)
def pipelines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pipelines]:
    with opened(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def go_on(pipelines: Pipelines, spark: SparkSession) -> GoOn:
    """The pipeline runs until it has all there is; with the next part of its input, unless that is still to come."""

    def run(name: str, *, with_more: bool = True) -> None:
        if with_more:
            send(pipelines.bootstrap_servers, name, pipelines.expected["parts"] + 1)
        run_pipeline(
            pipelines.load(name).definition,
            bootstrap=pipelines.bootstrap_servers,
            spark=spark,
            once=True,
            signals=False,
        )

    return run


def proven(pipelines: Pipelines, name: str) -> None:
    report = pipelines.audit(name)
    assert report.findings == ()
    assert not any(each.is_gap for each in report.unproven), report.reasons


def test_a_batch_that_a_kill_interrupted_is_finished(pipelines: Pipelines, go_on: GoOn) -> None:
    """One sink had it. The other gets it now, by the same plan, and duplicates are told by what was remembered."""
    before = pipelines.rows("out/stops")
    go_on("stopped", with_more=False)
    assert pipelines.rows("out/stops") == before
    first, interrupted = (f"batch={number:020d}" for number in (1, 2))
    known = {row["id"] for row in pipelines.rows(f"out/stops/{first}")}
    copies = {row["id"] for row in pipelines.rows(f"out/stop-copies/{interrupted}")}
    assert known & copies, "none is a copy of a row of the batch before"
    proven(pipelines, "stopped")


@pytest.mark.long
def test_duplicates_are_recognised_and_windows_go_on(pipelines: Pipelines, go_on: GoOn) -> None:
    before = {row["id"] for row in pipelines.rows("out/sales")}
    known = len(pipelines.rows("out/copies"))
    go_on("counting")
    proven(pipelines, "counting")
    copies = pipelines.rows("out/copies")[known:]
    assert before & {row["id"] for row in copies}, "none is a copy of a row from before"
    starts = [(row["customer"], row["window_start"]) for row in pipelines.rows("out/totals")]
    assert len(starts) == len(set(starts))


@pytest.mark.long
def test_joins_and_states_by_key_find_what_came_before(pipelines: Pipelines, go_on: GoOn) -> None:
    go_on("joining")
    paid, alarms = joined_rows(pipelines.expected["parts"] + 1)
    rows = pipelines.rows("out/paid")
    assert sorted((row["id"], row["customer"], row["city"], row["paid"]) for row in rows) == sorted(paid)
    assert sorted(row["card"] for row in pipelines.rows("out/alarms")) == sorted(alarms)
    proven(pipelines, "joining")


@pytest.mark.long
def test_files_tables_and_topics_grow_by_what_is_new(pipelines: Pipelines, go_on: GoOn) -> None:
    go_on("plain")
    kept = plain_rows(pipelines.expected["parts"] + 1)["kept"]
    assert sorted(row["id"] for row in pipelines.rows("out/plain")) == kept
    assert sorted(row["id"] for row in pipelines.delta_rows("out/plain-delta")) == kept
    proven(pipelines, "plain")


@pytest.fixture
def database(pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A PostgreSQL with the golden tables."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(PostgresServer())
        except NoPostgres as missing:
            if os.environ.get("CI"):
                pytest.fail(str(missing))
            pytest.skip(str(missing))
        restore(server.url, pipelines.directory)
        monkeypatch.setenv("DATABASE_URL", server.url)
        yield server.url


@pytest.mark.long
def test_a_database_goes_on_from_its_ledger(pipelines: Pipelines, database: str, go_on: GoOn) -> None:
    import psycopg

    def table() -> dict[int, tuple[str | None, float | None]]:
        with psycopg.connect(database) as connection:
            found = connection.execute("SELECT id, name, balance FROM customers").fetchall()
        return {
            number: (name, None if balance is None else float(balance)) for number, name, balance in found
        }

    parts = pipelines.expected["parts"]
    assert table() == table_rows(parts)
    proven(pipelines, "tables")
    go_on("tables")
    assert table() == table_rows(parts + 1)
    proven(pipelines, "tables")
