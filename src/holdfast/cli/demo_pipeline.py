"""The demo's second half: orders, some of them broken, through a pipeline into Parquet and a topic.

A spooling producer sends orders while the broker is killed and started again; one order in a hundred is malformed in
one way or another. The pipeline checks them, writes the good ones to Parquet and as events to a topic, and each other
one to the dead-letter topic with the reason. Then the demo counts, without the pipeline's help: every order it sent has
to be in exactly one of the places.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console

from holdfast.testing.broker import BrokerProcess

if TYPE_CHECKING:
    from holdfast.pipeline.definition.model import PipelineDefinition
    from holdfast.pipeline.engine.progress import Summary

SOURCE, EVENTS, DEAD_LETTERS = "orders", "order-events", "orders-dlt"
PARTITIONS = 4
BATCHES = 4
BROKEN_EVERY = 100
TRIAL_EVERY = 20
COUNTRIES = ("de", "fr", "it", "nl", "pl", "se")


@dataclass(frozen=True)
class Outcome:
    """Where the orders are, counted in the sinks themselves."""

    sent: int
    in_parquet: int
    twice_in_parquet: int
    in_events: int
    in_dead_letters: Counter[str]
    filtered: int
    summary: Summary

    @property
    def is_whole(self) -> bool:
        """Whether each order is once in Parquet and in the events, or a dead letter, or was a trial."""
        trials = sum(number % TRIAL_EVERY == 1 for number in range(self.sent))
        broken = -(-self.sent // BROKEN_EVERY)
        return (
            self.in_parquet == self.in_events == self.sent - trials - broken
            and not self.twice_in_parquet
            and sum(self.in_dead_letters.values()) == broken
            and self.filtered == trials
        )

    def rows(self) -> list[tuple[str, str]]:
        seconds = self.summary.duration_ms / 1000
        return [
            ("orders sent, with the broker killed once", f"{self.sent:,}"),
            ("→ in Parquet", f"{self.in_parquet:,}"),
            ("→ in the topic of events", f"{self.in_events:,}"),
            *(
                (f"→ dead letter: {reason}", f"{count:,}")
                for reason, count in sorted(self.in_dead_letters.items())
            ),
            ("→ filtered: trial orders", f"{self.filtered:,}"),
            ("missing or twice", "none" if self.is_whole else "SOME"),
            ("pipeline", f"{self.summary.batches} batches in {seconds:,.1f} s"),
        ]


def try_pipeline(broker: BrokerProcess, console: Console, directory: str, orders: int) -> Outcome:
    """Send, run, count."""
    from holdfast.pipeline.engine.running import run_pipeline

    make_topics(broker)
    with console.status(f"sending {orders:,} orders through a spool; the broker is killed half-way"):
        send_orders(broker, f"{directory}/spool", orders)
    with console.status("starting Spark and running the pipeline"):
        summary = run_pipeline(
            orders_pipeline(directory, orders // BATCHES), bootstrap=broker.bootstrap_servers, once=True
        )
    with console.status("counting in Parquet and in the topics"):
        ids = ids_in_parquet(f"{directory}/out")
        return Outcome(
            sent=orders,
            in_parquet=len(ids),
            twice_in_parquet=len(ids) - len(set(ids)),
            in_events=len(read_values(broker, EVENTS)),
            in_dead_letters=count_reasons(broker),
            filtered=summary.routes.filtered.get("no-trials", 0),
            summary=summary,
        )


def make_topics(broker: BrokerProcess) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    wanted = [NewTopic(SOURCE, PARTITIONS), NewTopic(EVENTS, 1), NewTopic(DEAD_LETTERS, 1)]
    for future in admin.create_topics(wanted).values():
        future.result(30)


def orders_pipeline(directory: str, batch_records: int) -> PipelineDefinition:
    from holdfast.pipeline import Pipeline

    fields = {
        "id": "long",
        "customer": "string",
        "country": "string",
        "amount": "decimal(10,2)",
        "at": "timestamp",
        "note": "string?",
    }
    return (
        Pipeline("demo-orders", home=f"{directory}/home")
        .read(SOURCE, value={"format": "json", "fields": fields}, batch_records=batch_records)
        .expect("amount > 0", name="positive-amount")
        .filter("note IS NULL OR note <> 'trial'", name="no-trials")
        .sql("SELECT *, CAST(amount * 0.19 AS DECIMAL(10,2)) AS tax FROM input", name="tax")
        .write("parquet", path=f"{directory}/out", partition_by=["country"])
        .write("kafka", topic=EVENTS)
        .dead_letter(DEAD_LETTERS)
        .definition()
    )


def send_orders(broker: BrokerProcess, spool: str, orders: int) -> None:
    """Every order is on disk before `send` returns, so the broker's death is none of the sender's business."""
    from holdfast.client import Producer

    with Producer(broker.bootstrap_servers, spool=spool, config={"log_level": "0"}) as producer:
        for number in range(orders):
            producer.send(SOURCE, order(number), key=f"c-{number % 997}".encode())
            if number == orders // 2:
                broker.crash()
                broker.restart()
        producer.flush()


def order(number: int) -> bytes:
    """An order as JSON; one in `BROKEN_EVERY` is not what it should be."""
    chance = random.Random(number)
    content: dict[str, object] = {
        "id": number,
        "customer": f"c-{number % 997}",
        "country": chance.choice(COUNTRIES),
        "amount": round(chance.uniform(1, 500), 2),
        "at": f"2026-01-{1 + number % 28:02d}T12:{number % 60:02d}:00Z",
    }
    if number % TRIAL_EVERY == 1:
        content["note"] = "trial"
    text = json.dumps(content)
    if number % BROKEN_EVERY:
        return text.encode()
    broken = (
        text[:-9],
        text + text,
        "",
        json.dumps({**content, "amount": "a lot"}),
        json.dumps({key: value for key, value in content.items() if key != "customer"}),
        json.dumps({**content, "amount": -1}),
    )
    return broken[number // BROKEN_EVERY % len(broken)].encode()


def ids_in_parquet(path: str) -> list[int]:
    """The orders in the files a plain reader sees."""
    import pyarrow.dataset as ds

    table = ds.dataset(path, format="parquet", partitioning="hive").to_table(columns=["id"])
    ids: list[int] = table.column("id").to_pylist()
    return ids


def read_values(broker: BrokerProcess, topic: str) -> list[bytes | None]:
    from holdfast import reader

    values: list[bytes | None] = []
    for batch in reader.read(broker.bootstrap_servers, topic):
        values.extend(batch.column("value").to_pylist())
    return values


def count_reasons(broker: BrokerProcess) -> Counter[str]:
    """Dead letters by the reason in their headers."""
    from holdfast import reader

    reasons: Counter[str] = Counter()
    for batch in reader.read(broker.bootstrap_servers, DEAD_LETTERS):
        for headers in batch.column("headers").to_pylist():
            known = {header["key"]: header["value"] for header in headers or ()}
            reasons[(known.get("hf-dlt-reason") or b"unknown").decode()] += 1
    return reasons
