"""The other examples of the guide on memory, run on a real broker and database against what the text says of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.reader import read
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.long

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "stateful-pipelines.md").read_text()
BLOCKS = re.findall(r"^```(yaml|python)\n(.*?)^```$", GUIDE, re.M | re.S)
ADDRESS = "postgresql://app:${PGPASSWORD}@db/shop"
Row = dict[str, Any]


def example(words: str, language: str = "yaml") -> str:
    found: list[str] = [text for kind, text in BLOCKS if kind == language and words in text]
    assert len(found) == 1, words
    return found[0]


@dataclass
class Place:
    """A broker and a database that the examples share; each has its own topics, tables and directory."""

    broker: BrokerProcess
    database: PostgresServer
    spark: SparkSession

    def topics(self, *names: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
            future.result(30)

    def send(self, topic: str, rows: Sequence[Row]) -> None:
        producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers})
        for row in rows:
            producer.produce(topic, json.dumps(row), str(row.get("customer", row.get("card"))))
        assert producer.flush(30) == 0

    def run(self, text: str, directory: Path, name: str, more: Mapping[str, Any] | None = None) -> None:
        """The example with what it leaves out; the same again goes on where it stands."""
        given = yaml.load(text, Loader=yaml.BaseLoader)
        missing = {key: each for key, each in {"pipeline": name, **(more or {})}.items() if key not in given}
        secret = directory / "database"
        secret.write_text(self.database.url)
        text = text.replace(ADDRESS, self.database.url).replace("/run/secrets/database", str(secret))
        text += yaml.safe_dump(missing) if missing else ""
        definition = parse_yaml(text, directory=str(directory)).definition
        bootstrap = self.broker.bootstrap_servers
        run_pipeline(definition, bootstrap=bootstrap, spark=self.spark, signals=False)

    def table(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database.url) as connection:
            return connection.execute(query).fetchall()

    def topic(self, name: str) -> list[Row]:
        rows = [row for batch in read(self.broker.bootstrap_servers, name) for row in batch.to_pylist()]
        return [json.loads(row["value"]) for row in rows]


def files(directory: Path) -> list[Row]:
    return [
        row
        for path in sorted(directory.glob("batch=*/*.parquet"))
        for row in pq.ParquetFile(path).read().to_pylist()
    ]


def at(clock: str) -> str:
    return f"2024-03-01T{clock}:00Z"


@pytest.fixture(scope="module")
def place(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with BrokerProcess(str(tmp_path_factory.mktemp("broker"))) as broker, server:
        yield Place(broker, server, spark)


def source(topic: str, delay: str = "0s", **fields: str) -> Row:
    return {
        "source": {
            "topics": topic,
            "value": {"format": "json", "fields": {**fields, "at": "timestamp"}},
            "event_time": {"field": "at", "delay": delay},
        }
    }


def test_a_window_is_written_again_for_late_rows_until_they_are_too_late(
    place: Place, tmp_path: Path
) -> None:
    place.topics("orders", "too-late", "corrected-dlt")
    text = example("correct_within: 2d")

    def order(number: int, amount: float, moment: str) -> Row:
        return {"id": number, "customer": "ann", "amount": amount, "at": moment}

    def totals() -> list[tuple[Any, ...]]:
        return place.table(
            "SELECT to_char(window_start AT TIME ZONE 'UTC', 'DD HH24'), total FROM totals ORDER BY 1"
        )

    place.send("orders", [order(1, 10, at("10:05")), order(2, 5, at("10:50")), order(3, 1, at("11:30"))])
    place.run(text, tmp_path, "corrected")
    assert totals() == [("01 10", 15)]  # the last one stays open until newer events come
    place.send("orders", [order(4, 7, at("10:59"))])
    place.run(text, tmp_path, "corrected")
    assert totals() == [("01 10", 22)]
    place.send("orders", [order(5, 1, "2024-03-04T00:00:00Z"), order(6, 100, at("10:30"))])
    place.run(text, tmp_path, "corrected")
    assert totals() == [("01 10", 22), ("01 11", 1)]
    assert [each["id"] for each in place.topic("too-late")] == [6]


def test_of_two_sessions_that_become_one_the_other_is_taken_back(place: Place, tmp_path: Path) -> None:
    place.topics("visits", "changing-dlt")
    text = example("two sessions can become one").replace("topics: orders", "topics: visits")
    query = "SELECT customer, to_char(window_start AT TIME ZONE 'UTC', 'HH24:MI'), orders FROM visits ORDER BY 1, 2"
    place.send("visits", [{"customer": "ann", "at": at(clock)} for clock in ("10:00", "10:40")])
    place.run(text, tmp_path, "changing")
    assert place.table(query) == [("ann", "10:00", 1), ("ann", "10:40", 1)]
    place.send("visits", [{"customer": "ann", "at": at("10:20")}, {"customer": "bob", "at": at("10:50")}])
    place.run(text, tmp_path, "changing")
    assert place.table(query) == [("ann", "10:00", 3), ("bob", "10:50", 1)]


def test_an_order_meets_its_payment_or_comes_alone(place: Place, tmp_path: Path) -> None:
    text = example("pipeline: payments").replace("[orders, payments]", "[bought, payments]")
    text = text.replace("    orders: {", "    bought: {").replace("left: orders", "left: bought")
    place.topics("bought", "payments", "unmatched", "payments-dlt")
    orders = [(1, "10:00"), (2, "10:10"), (3, "10:20"), (4, "20:00")]
    payments = [(2, 15.0, "10:05"), (1, 5.0, "11:00"), (3, 15.0, "13:30"), (9, 1.0, "20:00")]
    place.send(
        "bought", [{"id": n, "customer": "ann", "amount": 15.0, "at": at(clock)} for n, clock in orders]
    )
    place.send("payments", [{"order_id": n, "paid": paid, "at": at(clock)} for n, paid, clock in payments])
    place.run(text, tmp_path, "payments")
    found = sorted((row["id"], row["paid"], row["open"]) for row in files(tmp_path / "out" / "paid"))
    assert found == [(1, 5.0, 10.0), (2, 15.0, 0.0), (3, None, 15.0)]  # 3 was paid too late, 4 still waits
    pairs = [row for row in files(tmp_path / "out" / "paid") if row["paid"] is not None]
    assert all(
        row["left_hf"]["topic"] == "bought" and row["right_hf"]["topic"] == "payments" for row in pairs
    )


def test_a_function_with_a_state_finds_what_it_says(place: Place, tmp_path: Path) -> None:
    place.topics("cards", "alarmed-dlt")
    (tmp_path / "steps.py").write_text(example("def alarms", "python"))
    spent = [
        ("a", 0.5, "10:00:00"),
        ("a", 900.0, "10:00:30"),
        ("b", 0.5, "10:00:30"),
        ("b", 900.0, "10:02:00"),
    ]
    spent += [("c", 900.0, "10:02:00"), ("a", 900.0, "10:03:00")]
    place.send("cards", [{"card": c, "amount": n, "at": f"2024-03-01T{clock}Z"} for c, n, clock in spent])
    more = source("cards", card="string", amount="double")
    sinks = {"sinks": [{"parquet": {"path": "alarms", "rows": "alarms"}}]}
    place.run(example("function: alarms"), tmp_path, "alarmed", {**more, **sinks})
    found = [
        (row["card"], row["amount"], row["at"].strftime("%H:%M:%S")) for row in files(tmp_path / "alarms")
    ]
    assert found == [("a", 900.0, "10:00:30")]


def test_windows_of_each_kind_and_duplicates(place: Place, tmp_path: Path) -> None:
    """Both examples as one pipeline, with a sink for everything that the table of `rows` lists."""
    place.topics("clicks", "windows-dlt")
    steps = example("name: once, key: [id]") + example("name: sliding").removeprefix("steps:\n")
    rows = ["", "once.duplicates", "once.late", "tumbling", "tumbling.late", "sliding", "sessions"]
    sinks = [
        {"parquet": {"path": each or "all", "name": each.replace(".", "-") or "all", "rows": each}}
        for each in rows
    ]
    del sinks[0]["parquet"]["rows"]
    clicked = [
        (1, "ann", 1.0, "10:00"),
        (2, "ann", 2.0, "10:20"),
        (1, "ann", 1.0, "10:00"),
        (3, "bob", 4.0, "10:01"),
    ]
    clicked += [(4, "bob", 8.0, "12:30"), (5, "ann", 16.0, "09:00")]
    place.send(
        "clicks", [{"id": i, "customer": c, "amount": n, "at": at(clock)} for i, c, n, clock in clicked]
    )
    more = {**source("clicks", "30m", id="long", customer="string", amount="double"), "sinks": sinks}
    place.run(steps, tmp_path, "windows", more)
    assert sorted(row["id"] for row in files(tmp_path / "all")) == [1, 2, 3, 4, 5]
    assert [row["id"] for row in files(tmp_path / "once.duplicates")] == [1]
    assert [row["id"] for row in files(tmp_path / "tumbling.late")] == [5]

    def windows(name: str, *columns: str) -> set[tuple[Any, ...]]:
        return {
            (f"{row['window_start']:%H:%M}", f"{row['window_end']:%H:%M}", *(row[each] for each in columns))
            for row in files(tmp_path / name)
        }

    assert windows("tumbling", "customer", "orders") == {
        ("10:00", "10:01", "ann", 1),
        ("10:20", "10:21", "ann", 1),
        ("10:01", "10:02", "bob", 1),
    }
    sliding = windows("sliding", "total", "most")
    assert {
        ("09:05", "10:05", 5.0, 4.0),
        ("10:00", "11:00", 7.0, 4.0),
        ("10:05", "11:05", 2.0, 2.0),
    } <= sliding
    assert len(sliding) == 16
    assert windows("sessions", "customer", "orders", "last") == {
        ("10:00", "10:50", "ann", 2, 2.0),
        ("10:01", "10:31", "bob", 1, 4.0),
    }


def test_rows_get_the_columns_of_both_tables(place: Place, tmp_path: Path) -> None:
    place.topics("sales", "looked-up-dlt")
    with psycopg.connect(place.database.url) as connection:
        connection.execute("CREATE TABLE prices (sku text, price double precision, valid boolean)")
        connection.execute("INSERT INTO prices VALUES ('a', 1.5, true), ('a', 9, false), ('b', 2, true)")
    customers = [{"id": "ann", "city": "Bonn", "segment": "x"}, {"id": "bob", "city": "Kyiv", "segment": "y"}]
    pq.write_table(pa.Table.from_pylist(customers), tmp_path / "customers.parquet")
    sold = [("ann", "a"), ("bob", "b"), ("eve", "a")]
    place.send("sales", [{"customer": c, "sku": sku, "at": at("10:00")} for c, sku in sold])
    text = example("customers.parquet")
    more = {**source("sales", customer="string", sku="string"), "sinks": [{"parquet": "out"}]}
    place.run(text, tmp_path, "looked-up", more)
    found = sorted(
        (row["customer"], row["city"], row["segment"], row["price"]) for row in files(tmp_path / "out")
    )
    assert found == [("ann", "Bonn", "x", 1.5), ("bob", "Kyiv", "y", 2.0), ("eve", None, None, 1.5)]
