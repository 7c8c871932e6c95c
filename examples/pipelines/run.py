"""Sample data through one of the example pipelines, and whether the results are what they must be.

    python examples/pipelines/run.py activity
    python examples/pipelines/run.py logs changes payments --count 200000 --directory ./example-run

Each run generates seeded data, runs the pipeline of that name (its definition stands beside this file) and compares
what the sinks hold with what the generator knows. Without --bootstrap-server a broker is started for the time of the
run; `changes` writes to the PostgreSQL that DATABASE_URL names, or to one started for the run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.client import Producer
from holdfast.demo.generate import GenerateSettings, Generator, time_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
PARTITIONS = 3
DAY_MS = 24 * 3_600_000
SETTINGS: dict[str, dict[str, Any]] = {
    "activity": {"spacing_ms": 2_000, "keys": 20},
    "logs": {"spacing_ms": 200},
    "changes": {"keys": 500, "duplicates": 0.02},
    "payments": {"duplicates": 0.02},
}
LAST: dict[str, dict[str, Any]] = {
    "activity": {"user": "nobody", "action": "view", "page": "/end"},
    "logs": {"service": "nobody", "level": "INFO", "message": "end", "latency_ms": 0},
}
"""An event a day later: it closes every window before it."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=sorted(SETTINGS), metavar="NAME", help="|".join(SETTINGS))
    parser.add_argument("--count", type=int, default=20_000, help="messages for each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--directory", type=Path, help="where everything is kept; without it a temporary one is used"
    )
    parser.add_argument("--bootstrap-server", help="a Kafka to use instead of one started for the run")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = options.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        bootstrap = options.bootstrap_server or start_broker(stack, directory)
        if "changes" in options.names and "DATABASE_URL" not in os.environ:
            os.environ["DATABASE_URL"] = start_database(stack)
        spark = start_spark(stack, directory)
        results = [
            run(name, options.count, options.seed, directory, bootstrap, spark) for name in options.names
        ]
    return 0 if all(results) else 1


def run(name: str, count: int, seed: int, directory: Path, bootstrap: str, spark: SparkSession) -> bool:
    """Generate, run, compare."""
    from holdfast.pipeline.definition.loading import load_pipeline
    from holdfast.pipeline.engine.running import run_pipeline

    create(bootstrap, name, "log-alerts", "payment-alarms")
    expected = generate(name, count, seed, bootstrap)
    for file in (f"{name}.yaml", "steps.py"):
        shutil.copy(HERE / file, directory / file)
    print(f"{name}: {count} messages generated; running {directory / name}.yaml", flush=True)
    definition = load_pipeline(str(directory / f"{name}.yaml")).definition
    summary = run_pipeline(definition, bootstrap=bootstrap, spark=spark, once=True)
    found = FOUND[name](directory / "out", bootstrap)
    print(f"  {summary.batches} batches in {summary.duration_ms / 1000:.1f} s")
    is_right = True
    for what, value in found.items():
        agrees = value == expected[what]
        is_right = is_right and agrees
        print(f"  {what}: {value}" + ("" if agrees else f", but it should be {expected[what]}"))
    return is_right


# What must be there, and what is


def generate(name: str, count: int, seed: int, bootstrap: str) -> dict[str, Any]:
    """Fill the topic; what a correct pipeline finds in it."""
    generator = Generator(GenerateSettings(name, seed=seed, count=count, **SETTINGS[name]))
    settings = GenerateSettings(name)
    end_ms = settings.start_ms + 2 * count * SETTINGS[name].get("spacing_ms", settings.spacing_ms) + DAY_MS
    with Producer(bootstrap) as producer:
        for message in generator:
            producer.send(name, message.value, key=message.key)
        if name in LAST:
            last = json.dumps({**LAST[name], "at": time_text(end_ms)}).encode()
            for partition in range(PARTITIONS):
                producer.send(name, last, partition=partition)
    results = generator.summary()["results"]
    if name == "activity":
        return {"visits": results["sessions"], "events": results["events"]}
    if name == "logs":
        return {
            "lines": results["lines"],
            "errors": {each: n for each, n in results["errors_by_service"].items() if n},
        }
    if name == "changes":
        return {"rows": results["rows"], "balance": str(results["balance"])}
    return {"payments": results["payments"], "alarms": results["frauds"]}


def found_activity(out: Path, bootstrap: str) -> dict[str, Any]:
    visits = table(out / "visits")
    return {"visits": len(visits), "events": sum(row["events"] for row in visits)}


def found_logs(out: Path, bootstrap: str) -> dict[str, Any]:
    errors: dict[str, int] = {}
    lines = 0
    for row in table(out / "error-rates"):
        lines += row["lines"]
        if row["errors"]:
            errors[row["service"]] = errors.get(row["service"], 0) + row["errors"]
    return {"lines": lines, "errors": dict(sorted(errors.items()))}


def found_changes(out: Path, bootstrap: str) -> dict[str, Any]:
    import psycopg

    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        row = connection.execute("SELECT count(*), coalesce(sum(balance), 0) FROM customers").fetchone()
    assert row is not None
    return {"rows": row[0], "balance": str(row[1])}


def found_payments(out: Path, bootstrap: str) -> dict[str, Any]:
    return {"payments": len(table(out / "payments")), "alarms": records(bootstrap, "payment-alarms")}


FOUND: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "activity": found_activity,
    "logs": found_logs,
    "changes": found_changes,
    "payments": found_payments,
}


def table(path: Path) -> list[dict[str, Any]]:
    import pyarrow.dataset as ds

    rows: list[dict[str, Any]] = (
        ds.dataset(str(path), format="parquet", exclude_invalid_files=True).to_table().to_pylist()
    )
    return rows


def records(bootstrap: str, topic: str) -> int:
    """Committed records of a topic."""
    from holdfast.reader import read

    return sum(batch.num_rows for batch in read(bootstrap, topic))


# What a run needs


def start_broker(stack: ExitStack, directory: Path) -> str:
    from holdfast import Broker

    return stack.enter_context(Broker(str(directory / "broker"))).bootstrap_servers


def start_database(stack: ExitStack) -> str:
    from holdfast.testing.postgres import PostgresServer

    return stack.enter_context(PostgresServer()).url


def start_spark(stack: ExitStack, directory: Path) -> SparkSession:
    from holdfast.pipeline.session import spark_session

    spark = spark_session("examples", str(directory / "spark"))
    stack.callback(spark.stop)
    return spark


def create(bootstrap: str, *topics: str) -> None:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 4})
    made = admin.create_topics([NewTopic(topic, PARTITIONS, 1) for topic in topics])
    for future in made.values():
        try:
            future.result(30)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise


if __name__ == "__main__":
    sys.exit(main())
