"""A pipeline with everything that docs/FORMAT.md knows of pipelines, and what people find in its sinks.

`Worlds` builds it twice, with other records on other clusters, and keeps copies: after the first batch, and after the
second one, when records for two more batches wait in the source. A trial begins with the newer copy of the first world.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import psycopg
import pyarrow.dataset as ds
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from deltalake import DeltaTable
from tests.pipeline.absent.without_spark import without_spark

from holdfast.broker.server.embed import Broker
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.reader import read
from holdfast.testing.postgres import PostgresServer

BATCH: Final = 8
EARLIER, NOW, OTHER = "earlier", "now", "other"
COLUMNS: Final = ["id", "user", "city"]
BROKER: Final = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
DEFINITION: Final = """\
pipeline: orders
home: home
source:
  topics: [orders]
  bootstrap: ${BOOTSTRAP}
  batch_records: 8
  value:
    format: json
    fields: {id: long, user: string, amount: double, at: timestamp}
  event_time: {field: at, delay: 1s}
steps:
  - filter: {name: real, where: amount > 0}
  - lookup: {name: people, table: people.csv, on: {user: login}, columns: [city], refresh: 1ms}
  - dedupe: {name: once, key: id, within: 1d}
sinks:
  - parquet: {path: rows, name: files}
  - delta: {path: table, name: table}
  - postgres: {url: "${DATABASE}", table: orders, name: database}
  - kafka: {topic: known, name: topic}
"""


def order(number: int, seed: int) -> bytes:
    """Of eight, one cannot be read, one is filtered, and one is that of the batch before again."""
    match number % BATCH:
        case 3:
            return b"{broken"
        case 5:
            number -= BATCH + 1
    user = ("ann", "bob", "cat")[number % 3]
    amount = -1.0 if number % BATCH == 6 else 1.0
    at = f"2026-03-01T00:{number % 60:02d}:00Z"
    return json.dumps({"id": number + seed * 1000, "user": user, "amount": amount, "at": at}).encode()


class Worlds:
    """`files`, a broker and a database, which trials change, and copies of all three."""

    def __init__(self, directory: Path) -> None:
        self.files = directory / "files"
        self._directory = directory
        self._server = PostgresServer(
            settings=["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        )
        self.broker = Broker(directory / "broker", settings=BROKER)
        self.expected: Mapping[str, Any] = {}
        """What the sinks hold when all four batches of the first world are done."""

    def __enter__(self) -> Self:
        self._server.start()
        self._admin("CREATE ROLE pipeline LOGIN", "CREATE ROLE stranger")
        self._build(1)
        self._keep(OTHER)
        self._build(0)
        self.restore()
        self.run()
        self.expected = self.contents()
        return self

    def __exit__(self, *_: object) -> None:
        self.broker.stop()
        self._server.close()

    # -------------------------------------------------------------------- building

    def _build(self, seed: int) -> None:
        if self.broker.server is not None:
            self.broker.stop()
        for path in (self.files, self._directory / "broker"):
            shutil.rmtree(path, ignore_errors=True)
        self.broker.start()
        self.new_database("live")
        self.files.mkdir()
        text = DEFINITION.replace("${BOOTSTRAP}", self.broker.bootstrap_servers)
        (self.files / "orders.yaml").write_text(
            text.replace("${DATABASE}", self.database("live", "pipeline"))
        )
        (self.files / "people.csv").write_text(f"login,city\nann,Aachen-{seed}\nbob,Bonn-{seed}\n")
        self.create_topic("orders")
        self.produce(0, 1, seed)
        self.run()
        if seed == 0:
            self._keep(EARLIER)
        self.produce(1, 1, seed)
        self.run()
        self.produce(2, 2, seed)
        if seed == 0:
            self._keep(NOW)

    def create_topic(self, name: str) -> None:
        admin = self.admin()
        admin.create_topics([NewTopic(name, 1, 1)])[name].result(30)

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})

    def produce(self, first: int, batches: int, seed: int = 0) -> None:
        producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers})
        for number in range(first * BATCH, (first + batches) * BATCH):
            producer.produce("orders", order(number, seed), partition=0)
        assert producer.flush(30) == 0

    def _keep(self, name: str) -> None:
        self.broker.stop()
        self.copy("files", name)
        self.copy("broker", name)
        self.broker.start()
        self._admin(f"CREATE DATABASE {name} TEMPLATE live OWNER pipeline")

    def copy(self, what: str, name: str) -> None:
        shutil.copytree(self._directory / what, self.kept(name, what))

    def kept(self, name: str, what: str = "files") -> Path:
        return self._directory / "kept" / name / what

    # -------------------------------------------------------------------- trials

    def restore(self) -> None:
        """Everything as it was when records for two batches waited."""
        shutil.rmtree(self.files)
        shutil.copytree(self.kept(NOW), self.files)
        self.restore_broker(NOW)
        self.new_database("live", NOW)

    def restore_broker(self, name: str | None) -> None:
        """The cluster as this copy has it; nothing: a new one."""
        if self.broker.server is not None:
            self.broker.stop()
        shutil.rmtree(self._directory / "broker")
        if name is not None:
            shutil.copytree(self.kept(name, "broker"), self._directory / "broker")
        self.broker.start()

    def run(self, faults: Faults = no_faults) -> None:
        definition = load_pipeline(str(self.files / "orders.yaml")).definition
        with without_spark() as session:
            run_pipeline(definition, spark=session, signals=False, faults=faults)

    def contents(self) -> dict[str, Any]:
        """What readers of the sinks find; a text where they find an error."""
        readers = (self._files, self._table, self._database, self._topic, self._letters)
        return {how.__name__.removeprefix("_"): _read(how) for how in readers}

    def _files(self) -> Counter[str]:
        found = ds.dataset(self.files / "rows", format="parquet", partitioning="hive").to_table(
            columns=COLUMNS
        )
        return Counter(map(repr, found.to_pylist()))

    def _table(self) -> Counter[str]:
        found = DeltaTable(self.files / "table").to_pyarrow_table(columns=COLUMNS)
        return Counter(map(repr, found.to_pylist()))

    def _database(self) -> Counter[str]:
        with psycopg.connect(self.database("live")) as connection:
            found = connection.execute('SELECT id, "user", city FROM orders').fetchall()
        return Counter(map(repr, found))

    def _topic(self) -> Counter[str]:
        return self._records("known")

    def _letters(self) -> Counter[str]:
        return self._records("orders-dlt")

    def _records(self, topic: str) -> Counter[str]:
        batches = read(self.broker.bootstrap_servers, topic)
        return Counter(repr(row["value"]) for batch in batches for row in batch.to_pylist())

    # -------------------------------------------------------------------- the database

    def database(self, name: str, user: str = "holdfast") -> str:
        return f"postgresql://{user}@127.0.0.1:{self._server.port}/{name}"

    def sql(self, *statements: str) -> None:
        with psycopg.connect(self.database("live"), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def _admin(self, *statements: str) -> None:
        with psycopg.connect(self._server.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def drop_database(self) -> None:
        self._admin("DROP DATABASE IF EXISTS live WITH (FORCE)")

    def new_database(self, name: str, template: str = "template0") -> None:
        self._admin(
            f"DROP DATABASE IF EXISTS {name} WITH (FORCE)",
            f"CREATE DATABASE {name} TEMPLATE {template} OWNER pipeline",
        )

    def close_database(self) -> None:
        self._admin(
            "ALTER DATABASE live ALLOW_CONNECTIONS false",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'live'",
        )

    def replace_rows(self, name: str, table: str) -> None:
        """The table as a copy has it, restored in the place of the one that is there."""
        with psycopg.connect(self.database(name)) as kept, psycopg.connect(self.database("live")) as live:
            live.execute(f"CREATE TABLE restored (LIKE {table} INCLUDING ALL)")
            live.execute(f"DROP TABLE {table}")
            live.execute(f"ALTER TABLE restored RENAME TO {table}")
            live.execute(f"ALTER TABLE {table} OWNER TO pipeline")
            with (
                kept.cursor().copy(f"COPY {table} TO STDOUT") as source,
                live.cursor().copy(f"COPY {table} FROM STDIN") as target,
            ):
                for data in source:
                    target.write(data)


def _read(how: Any) -> Any:
    try:
        return how()
    except Exception as error:  # noqa: BLE001 - whatever a reader of that sink raises
        return f"{type(error).__name__}: {error}"
