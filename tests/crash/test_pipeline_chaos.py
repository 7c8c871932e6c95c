"""A pipeline killed at moments of chance, driver, JVM and workers: every record is in its sink once. S6.

Each kill costs the start of a Spark, so `make test` leaves these out; `--pipeline-kills` says how many each sink gets.
A failure names its seed and the directory with everything the runs left.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.pipeline_chaos import (
    Orders,
    PipelineProcess,
    PipelineStorm,
    Row,
    check_once,
    dead_letter_rows,
    delta_rows,
    kafka_rows,
    parquet_rows,
    postgres_rows,
)

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600), pytest.mark.long]

TOPIC, TARGET, LETTERS = "orders", "orders-clean", "orders-dlt"
PARTITIONS: Final = 4
LONG_KILLS, LONG_ROWS, SHORT_ROWS_EACH = 10, 500_000, 12_000
"""From so many kills on it is the long form; a short one has fewer rows for each."""
BATCHES_EACH: Final = 4
"""Batches between two kills, if nobody killed."""

DEFINITION: Final = """\
pipeline: orders
source:
  topics: orders
  batch_records: {batch_records}
  value:
    format: json
    fields: {{part: integer, number: long, amount: double, note: string}}
steps:
  - sql: SELECT _hf, part, number, amount * 2 AS twice FROM input
sinks:
  - {sink}
trigger: 100ms
home: home
"""
SINKS: Final = {
    "parquet": "parquet: {path: out}",
    "delta": "delta: {path: out}",
    "postgres": "postgres: {url: '${CHAOS_DATABASE}', table: orders}",
    "kafka": "kafka: {topic: orders-clean}",
    "kafka with two writers": "kafka: {topic: orders-clean, writers: 2}",
}


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    wanted = int(request.config.getoption("--pipeline-kills"))
    if not wanted:
        pytest.skip("each kill costs the start of a Spark: --pipeline-kills says how many (make chaos: 10)")
    return wanted


@pytest.fixture
def bootstrap_servers(tmp_path: Path) -> Iterator[str]:
    with BrokerProcess(str(tmp_path / "broker")) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        for topic in (TOPIC, TARGET):
            admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
        yield broker.bootstrap_servers


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with server:
        monkeypatch.setenv("CHAOS_DATABASE", server.url)
        yield server.url


@pytest.fixture
def read_back(
    request: pytest.FixtureRequest, kills: int, bootstrap_servers: str, tmp_path: Path
) -> Callable[[str], Iterator[Row]]:
    """What is in a sink; the sink's server is there from now on."""

    def read(sink: str) -> Iterator[Row]:
        if sink == "parquet":
            return parquet_rows(tmp_path / "out")
        if sink == "delta":
            return delta_rows(tmp_path / "out")
        if sink == "postgres":
            return postgres_rows(request.getfixturevalue("database"), "orders")
        return kafka_rows(bootstrap_servers, TARGET)

    return read


@pytest.mark.parametrize("sink", SINKS)
def test_every_record_is_in_the_sink_once(
    sink: str,
    kills: int,
    bootstrap_servers: str,
    read_back: Callable[[str], Iterator[Row]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    chance: random.Random,
) -> None:
    if sink == "postgres":
        request.getfixturevalue("database")
    share = (LONG_ROWS // (kills + 1) if kills >= LONG_KILLS else SHORT_ROWS_EACH) + 1
    file = tmp_path / "orders.yaml"
    file.write_text(DEFINITION.format(sink=SINKS[sink], batch_records=share // BATCHES_EACH))
    orders = Orders(bootstrap_servers, TOPIC, PARTITIONS)
    process = PipelineProcess(file, bootstrap_servers, tmp_path / "home")
    storm = PipelineStorm(chance, process)
    with ExitStack() as stack:
        stack.callback(process.end)
        for _ in range(kills):
            orders.send(share)
            storm.kill_once()
        orders.send(share)
        storm.finish()
    print("\n".join(storm.log))
    check_once(orders.good(), read_back(sink), sink)
    check_once(orders.broken(), dead_letter_rows(bootstrap_servers, LETTERS), "dead letters")
    rows = sum(orders.sent.values())
    print(
        f"{kills} kills over {rows} records into {sink}; first batch after a restart at "
        f"{statistics.median(storm.recoveries_s):.1f} s (median), {max(storm.recoveries_s):.1f} s (longest)"
    )
