"""Rows per second of `DatabaseSink`: PostgreSQL and SQLite, a statement per message and one per transaction."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.measures.clients_producer import ENGINES
from bench.measures.groups import SIDES
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker
from holdfast.testing.postgres import NoPostgres, PostgresServer

COUNT: Final = 50_000
PARTITIONS: Final = 4
SIZE_BYTES: Final = 100
ROWS_PER_S: Final = 5_000.0
MANNERS: Final = {
    "postgres_each": "PostgreSQL, a statement per message",
    "postgres_pipeline": "PostgreSQL, a statement per message, `pipeline=True`",
    "postgres_batch": "PostgreSQL, one COPY per transaction",
    "sqlite_each": "SQLite, a statement per message",
    "sqlite_batch": "SQLite, one `executemany` per transaction",
}


class ClientDatabase(Measure):
    """One member, transactions of up to a thousand messages, PostgreSQL with its default durability."""

    name = "clients-database"
    title = "Clients: rows into a database, exactly once"
    rows = tuple(
        Row(f"`DatabaseSink`, {manner}, from {engine}", "rows/s", f"{side}_{key}.per_s", above=ROWS_PER_S)
        for side, engine in ENGINES.items()
        for key, manner in MANNERS.items()
    )
    shares_brokers = True

    def run(self, bench: Bench) -> MeasureResult:
        """A table of its own for each run."""
        missing = ""
        with ExitStack() as stack:
            databases = {"sqlite": f"sqlite:///{bench.fresh_directory('clients-sqlite') / 'rows.sqlite'}"}
            try:
                databases["postgres"] = stack.enter_context(PostgresServer()).url
            except NoPostgres as error:
                missing = str(error)
            series = []
            absent: list[str] = []
            for side, durability in SIDES:
                broker = bench.pair.ours if side == "ours" else bench.pair.kafka
                topic = stack.enter_context(bench.topic(broker, "clients", durability, PARTITIONS))
                count = _fill(broker, topic, bench.count(COUNT))
                for key in MANNERS:
                    kind, manner = key.split("_")
                    if kind in databases:
                        spec = kafka_load(
                            "clients_database", broker.bootstrap_servers, topic, size=SIZE_BYTES
                        )
                        spec |= {"database": databases[kind], "manner": manner, "count": count}
                        series.append(_series(f"{side}_{key}", spec))
                    else:
                        absent.append(f"{side}_{key}")
            result = bench.alternate(self.name, series)
        result.missing.update(dict.fromkeys(absent, missing))
        return result


def _fill(broker: Broker, topic: str, count: int) -> int:
    servers = broker.bootstrap_servers
    made = run_load(
        kafka_load("bulk_produce", servers, topic, partitions=PARTITIONS, size=SIZE_BYTES, count=count)
    )
    return int(made["count"]) + PARTITIONS


def _series(key: str, spec: dict[str, object]) -> Series:
    def once() -> Metrics:
        found = run_load(spec)
        return {"per_s": found["count"] / found["seconds"]}

    return Series(key, once, rate="per_s")
