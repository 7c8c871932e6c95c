"""Making the golden pipelines: definitions, homes, sinks, ledgers, a database and certificates, and their broker.

The pipelines of `definitions/` read one broker. Two parts of the input go through each, in several batches. Some are
audited after either part, which makes chains of certificates and states of what is proven; `plain` is compacted in
between, and `stopped` is killed in the middle of its last batch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.golden.opening import HERE, broker_at
from tests.golden.pipeline_inputs import INPUTS, PARTITIONS, START_MS, TOPICS

from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.real import RealClock
from holdfast.testing.postgres import PostgresServer, binaries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BOOT_ID: Final = "11111111-2222-4333-8444-555555555555"
LISTEN: Final = "127.0.0.1:39092"
SETTINGS: Final = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "log.retention.ms": "-1",
}
PARTS: Final = (1, 2)
RUN: Final = ("plain", "mirror", "counting", "joining", "tables")
AUDITED: Final = ("plain", "mirror", "counting")
DUMP: Final = "postgres.sql"


def send(bootstrap: str, pipeline: str, part: int) -> None:
    """One part of a pipeline's input; each message is a batch of its own, in its order."""
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    for each in INPUTS[pipeline](part):
        producer.produce(
            each.topic, each.value, each.key, partition=each.partition, timestamp=each.timestamp_ms
        )
        assert producer.flush(30) == 0


def run_one(name: str, directory: Path, bootstrap: str, spark: SparkSession) -> None:
    loaded = load_pipeline(str(directory / f"{name}.yaml"))
    run_pipeline(loaded.definition, bootstrap=bootstrap, spark=spark, once=True, signals=False)


def command(directory: Path, *arguments: str) -> None:
    """As its user runs it, where the definitions are."""
    subprocess.run([sys.executable, "-m", "holdfast.cli", *arguments], cwd=directory, check=True)


def audit(directory: Path, bootstrap: str, name: str) -> None:
    command(
        directory,
        *("audit", "pipeline", f"{name}.yaml", "--bootstrap-server", bootstrap),
        *("--certificate", "certificates", "--state", f"{name}.proven"),
    )


def run(name: str, directory: Path, notes: Path) -> None:
    """In a process of its own."""
    if name == "stopped":
        be_killed(directory)
    from holdfast.pipeline.session import spark_session

    shutil.copytree(HERE / "definitions", directory)
    broker = broker_at(
        RealClock(), str(directory / "data"), boot_id=BOOT_ID, seed=1, settings=SETTINGS, listen=LISTEN
    )
    with broker as running, PostgresServer() as database:
        os.environ["DATABASE_URL"] = database.url
        bootstrap = running.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for future in admin.create_topics([NewTopic(each, PARTITIONS, 1) for each in TOPICS]).values():
            future.result(30)
        spark = spark_session("golden", str(directory.parent / "spark"), master="local[2]")
        for part in PARTS:
            for each in INPUTS:
                send(bootstrap, each, part)
            for each in RUN if part > 1 else (*RUN, "stopped"):
                run_one(each, directory, bootstrap, spark)
            if part == 1:
                command(directory, "pipeline", "compact", "plain.yaml")
            for each in AUDITED:
                audit(directory, bootstrap, each)
        spark.stop()
        ask = [
            sys.executable,
            "-m",
            "tests.golden.make",
            "--run",
            "pipelines",
            "stopped",
            str(directory),
            "-",
        ]
        code = subprocess.run(ask, check=False).returncode
        assert code == -signal.SIGKILL, code
        (directory / DUMP).write_text(dump(database.url), "utf-8")
    expected = {
        "boot_id": BOOT_ID,
        "clock_ms": START_MS,
        "settings": SETTINGS,
        "log_dirs": ["data"],
        "parts": len(PARTS),
    }
    notes.write_text(json.dumps(expected) + "\n", "utf-8")


def be_killed(directory: Path) -> None:
    """The second part of `stopped`, up to where one of its sinks has the batch."""
    from holdfast.pipeline.session import spark_session

    spark = spark_session("golden", str(directory.parent / "spark"), master="local[2]")
    definition = load_pipeline(str(directory / "stopped.yaml")).definition

    def faults(point: str) -> None:
        if point == "committed:stops":
            os.kill(os.getpid(), signal.SIGKILL)

    run_pipeline(definition, bootstrap=LISTEN, spark=spark, once=True, faults=faults)


def dump(url: str) -> str:
    """All tables as SQL that any client can send: without psql's own commands and without comments."""
    ask: Sequence[Any] = (f"{binaries()}/pg_dump", "--inserts", "--no-owner", "--no-privileges", url)
    text = subprocess.run(ask, check=True, capture_output=True).stdout.decode()
    kept = [line for line in text.splitlines() if not line.startswith(("--", "\\"))]
    return re.sub(r"\n{2,}", "\n", "\n".join(kept)) + "\n"
