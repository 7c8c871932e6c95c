"""The guide's steps and sinks on a real broker and database, and what it says of sinks that are lost or gone back."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.model import Fate, Report, Verdict
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.audit.spark.auditing import audit_with_spark
from holdfast.client.dead_letter_dialects import Failure, read_failure
from holdfast.pipeline.core.failures import SinkLost
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.definition.naming import DIGEST_KEY_NAME, home_of
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.operations.refilling import perform_refill, plan_refill
from holdfast.pipeline.sealing import DigestKeyLost
from holdfast.reader import read
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.postgres import NoPostgres, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.pipeline.definition.model import PipelineDefinition

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "pipeline.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.M | re.S)
[STEPS] = [text for text in BLOCKS if "positive-amount" in text]
[SINKS] = [text for text in BLOCKS if "orders-clean" in text]
[DEAD_LETTER] = [text for text in BLOCKS if text.startswith("dead_letter: ")]
ADDRESS = "postgresql://pipeline:${PGPASSWORD}@db/shop"

Row = dict[str, Any]


@dataclass
class World:
    """The guide's pipeline, and what a plain program makes of the records that were sent."""

    broker: BrokerProcess
    database: PostgresServer
    directory: Path
    spark: SparkSession
    definition: PipelineDefinition = field(init=False)
    sent: list[Row | None] = field(default_factory=list)
    given_up: int = 0
    """How many rows the Parquet sink lacks because that loss was accepted."""

    def __post_init__(self) -> None:
        assert ADDRESS in SINKS
        source = {
            "topics": "orders",
            "bootstrap": self.broker.bootstrap_servers,
            "value": {
                "format": "json",
                "fields": {"id": "long", "amount": "double", "customer": "string", "at": "timestamp"},
            },
        }
        text = f"pipeline: orders\nsource: {json.dumps(source)}\n{STEPS}{SINKS}{DEAD_LETTER}"
        text = text.replace(ADDRESS, self.database.url)
        self.definition = parse_yaml(text, directory=str(self.directory)).definition
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        names = ("orders", "orders-clean", "orders-rejected")
        for future in admin.create_topics([NewTopic(name, 2, 1) for name in names]).values():
            future.result(30)

    def send(self, count: int) -> None:
        """Every order comes twice with another amount; some are of no use, in each way that the guide knows."""
        producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers})
        for number in range(len(self.sent), len(self.sent) + count):
            row = {
                "id": number // 2,
                "amount": number + 0.5,
                "customer": "ann",
                "at": f"2026-03-0{1 + number % 3}T10:00:00Z",
            }
            match number % 8:
                case 2:
                    row["amount"] = -1.0
                case 4:
                    row["customer"] = "test"
                case 5:
                    row["customer"] = "a\0b"
            is_row = number % 8 != 7
            producer.produce("orders", json.dumps(row) if is_row else "{", str(number // 2))
            self.sent.append(row if is_row else None)
        assert producer.flush(30) == 0

    @property
    def rows(self) -> list[Row]:
        """Those that every sink gets."""
        return [
            each
            for each in self.sent
            if each is not None and each["amount"] > 0 and each["customer"] == "ann"
        ]

    def run(self, **more: Any) -> int:
        return run_pipeline(self.definition, spark=self.spark, signals=False, **more).batches

    def refill(self, sink: str) -> None:
        perform_refill(plan_refill(self.definition, sink), spark=self.spark, signals=False)

    def audit(self) -> Report:
        return audit_pipeline(self.definition)

    # -------------------------------------------------------------------- what sinks have

    def parquet(self) -> list[tuple[int, float, str]]:
        files = sorted((self.directory / "out" / "orders").glob("batch=*/**/*.parquet"))
        return sorted(
            (row["id"], row["amount"], path.parent.name)
            for path in files
            for row in pq.ParquetFile(path).read().to_pylist()
        )

    def delta(self) -> list[tuple[int, float, str]]:
        from deltalake import DeltaTable

        rows = DeltaTable(self.directory / "lake" / "orders").to_pyarrow_table().to_pylist()
        return sorted((row["id"], row["amount"], f"day={row['day']}") for row in rows)

    def table(self) -> dict[int, float]:
        with psycopg.connect(self.database.url) as connection:
            return dict(connection.execute("SELECT id, amount FROM orders").fetchall())

    def topic(self, name: str = "orders-clean") -> list[Row]:
        return [row for batch in read(self.broker.bootstrap_servers, name) for row in batch.to_pylist()]

    def clean(self) -> list[tuple[int, float]]:
        values = [json.loads(row["value"]) for row in self.topic()]
        return sorted((value["id"], value["amount"]) for value in values)

    def files(self) -> dict[Path, int]:
        """Of the file sinks, and when each was written."""
        directories = (self.directory / "out", self.directory / "lake")
        return {
            path: path.stat().st_mtime_ns
            for each in directories
            for path in each.rglob("*")
            if path.is_file()
        }

    def holds_everything(self) -> None:
        """What the guide says of each sink, against the plain program."""
        assert self.parquet() == days(self.rows[self.given_up :])
        assert self.delta() == days(self.rows)
        assert self.table() == {each["id"]: each["amount"] for each in self.rows}
        assert self.clean() == sorted((each["id"], each["amount"]) for each in self.rows)


def days(rows: list[Row]) -> list[tuple[int, float, str]]:
    return sorted((each["id"], each["amount"], f"day={each['at'][:10]}") for each in rows)


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """After two batches; `orders.sql`, `out-1` and `home-1` are copies made between them."""
    directory = tmp_path_factory.mktemp("guide")
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        unavailable(str(missing))
    with BrokerProcess(str(directory / "broker")) as broker, server:
        made = World(broker, server, directory, spark)
        made.send(24)
        assert made.run() == 1
        dump = subprocess.run(
            ["pg_dump", "--clean", "--if-exists", server.url], check=True, capture_output=True
        )
        (directory / "orders.sql").write_bytes(dump.stdout)
        shutil.copytree(directory / "out", directory / "out-1")
        shutil.copytree(home_of(made.definition), directory / "home-1")
        made.send(16)
        assert made.run() == 1
        yield made


def test_rows_are_where_the_guide_says_and_what_a_sink_does_not_take_is_a_dead_letter(world: World) -> None:
    world.holds_everything()
    headers = [{each["key"]: each["value"] for each in row["headers"]} for row in world.topic()]
    assert all(each["source"] == b"orders" and "hf-source" in each for each in headers)
    letters = [failure_of(row) for row in world.topic("orders-rejected")]
    reasons = sorted(str(each.reason) for each in letters)
    assert reasons == sorted(5 * ["parse", "positive-amount", "sink:postgres"])
    assert all("customer" in str(each.message) for each in letters if each.reason == "sink:postgres")


def failure_of(row: Row) -> Failure:
    failure = read_failure((each["key"], each["value"]) for each in row["headers"])
    assert failure is not None
    return failure


@pytest.mark.parametrize("way", ["plain", "spark"])
def test_an_audit_accounts_for_what_a_sink_did_not_take_and_takes_its_word_for_it(
    world: World, way: str
) -> None:
    report = world.audit() if way == "plain" else audit_with_spark(world.definition, spark=world.spark)
    assert report.exit_code() == 0, report.reasons
    (said,) = [each for each in report.coverage if each.name == "steps.sink:postgres"]
    assert (said.recomputed, said.unaltered) == (0, 5)
    fates = Counter[str]()
    for account in report.partitions:
        fates.update(account.fates)
    assert (fates["dead_letter"], fates["lost"]) == (15, 0)


def refused(world: World, sink: str, why: str) -> None:
    """With the ways on that the guide has."""
    ways = re.findall(r"^- `(?:holdfast pipeline |run )([^`]*SINK)`", GUIDE, re.M)
    assert ways == ["refill FILE SINK", "--accept-loss=SINK"]
    with pytest.raises(SinkLost, match=why) as caught:
        world.run()
    for text in ("Restore", *(way.replace("SINK", sink) for way in ways)):
        assert text in str(caught.value)


def test_a_database_restored_from_an_earlier_dump_is_refilled_beside_the_others(world: World) -> None:
    subprocess.run(
        [
            "psql",
            "--quiet",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            world.database.url,
            "-f",
            world.directory / "orders.sql",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert len(world.table()) < len({each["id"] for each in world.rows})
    refused(world, "postgres", "sink 'postgres': its ledger has 2 entries, and it had 3")
    report = world.audit()
    assert report.verdict is Verdict.FAILED
    assert {each.sink for each in report.findings} == {"postgres"}
    assert report.findings[0].fate is Fate.LOST
    assert "older copy" in report.findings[0].detail
    others = world.files(), world.topic()
    world.refill("postgres")
    assert (world.files(), world.topic()) == others
    world.holds_everything()
    assert world.audit().exit_code() == 0
    assert world.run() == 0


@pytest.mark.long
def test_a_directory_is_put_back(world: World) -> None:
    out, newest = world.directory / "out", world.directory / "newest"
    out.rename(newest)
    shutil.copytree(world.directory / "out-1", out)
    refused(world, "parquet", "sink 'parquet': its ledger has 2 entries")
    shutil.rmtree(out)
    refused(world, "parquet", "sink 'parquet': nothing of this pipeline is there")
    newest.rename(out)
    world.send(8)
    assert world.run() == 1
    world.holds_everything()


@pytest.mark.long
@pytest.mark.parametrize("sink", ["parquet", "delta", "kafka"])
def test_a_sink_that_is_gone_is_written_again(world: World, sink: str) -> None:
    if sink == "kafka":
        admin = AdminClient({"bootstrap.servers": world.broker.bootstrap_servers})
        admin.delete_topics(["orders-clean"])["orders-clean"].result(30)
        admin.create_topics([NewTopic("orders-clean", 2, 1)])["orders-clean"].result(30)
    else:
        shutil.rmtree(world.directory / {"parquet": "out", "delta": "lake"}[sink])
    refused(world, sink, f"sink '{sink}': ")
    world.refill(sink)
    world.holds_everything()
    assert world.audit().exit_code() == 0
    world.send(8)
    assert world.run() == 1
    world.holds_everything()


@pytest.mark.long
def test_an_accepted_loss_goes_on_where_the_others_stand_and_is_no_proof(world: World) -> None:
    shutil.rmtree(world.directory / "out")
    world.given_up = len(world.rows)
    world.send(16)
    assert world.run(accept_loss=["parquet"]) == 1
    world.holds_everything()
    report = world.audit()
    assert report.verdict is Verdict.INCONCLUSIVE, report.reasons
    assert any("what sink 'parquet' had before" in reason for reason in report.reasons), report.reasons


@pytest.mark.long
@pytest.mark.parametrize("copy", ["home-1", None])  # in this order: then the key is another one
def test_a_home_that_is_lost_or_older_loses_no_row(world: World, copy: str | None) -> None:
    home = home_of(world.definition)
    shutil.rmtree(home)
    if copy is not None:
        shutil.copytree(world.directory / copy, home)
    world.send(8)
    accepted = []
    if copy is None:
        with pytest.raises(DigestKeyLost, match=f"accept-loss={DIGEST_KEY_NAME}"):
            world.run()
        accepted = [DIGEST_KEY_NAME]
    assert world.run(accept_loss=accepted) == 1
    world.holds_everything()
    assert world.audit().verdict is Verdict.INCONCLUSIVE  # which rows had left is not known any more
