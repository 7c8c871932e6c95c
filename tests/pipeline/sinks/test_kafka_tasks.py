"""Spark's tasks send to Kafka, and a worker and the driver are killed between the commits of two writers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.model import Verdict
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.sinks.kafka_ledger import LedgerTopic, standing_of

from .test_kafka import committed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = 200
PIPELINE = """\
pipeline: copies
home: {home}
source:
  topics: [orders]
  bootstrap: {bootstrap}
  batch_records: 100
  value: {{format: json, fields: {{id: long}}}}
sinks:
  - kafka: {{topic: out, name: out, key: cast(id AS string), writers: 2}}
"""


@pytest.mark.timeout(900)
@pytest.mark.holdfast(mode="process")
def test_a_worker_and_the_driver_killed_between_two_commits_cost_and_repeat_nothing(
    holdfast_broker: Any, spark: SparkSession, tmp_path: Path
) -> None:
    bootstrap = holdfast_broker.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("orders", 2, 1)])["orders"].result(30)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(RECORDS):
        producer.produce("orders", json.dumps({"id": number}), key=str(number), partition=number % 2)
    assert producer.flush(30) == 0
    path = tmp_path / "copies.yaml"
    path.write_text(PIPELINE.format(home=tmp_path / "home", bootstrap=bootstrap))
    notes = tmp_path / "notes"
    notes.mkdir()
    script = Path(__file__).with_name("kafka_killed.py")
    with open(tmp_path / "killed.log", "w", encoding="utf-8") as log:
        died = subprocess.run(
            [sys.executable, str(script), str(path), str(notes)],
            stdout=log,
            stderr=log,
            timeout=600,
            check=False,
        )
    assert died.returncode == -signal.SIGKILL, (tmp_path / "killed.log").read_text()
    assert sorted(os.listdir(notes)) == [
        f"{batch}-{what}" for batch in (1, 2) for what in ("committed", "first", "killed")
    ]
    # The task of the worker that was killed was run again by Spark, and the batch was not.
    assert '"event":"retry"' not in (tmp_path / "home" / "log.jsonl").read_text()
    ledger = LedgerTopic("hf-ledger-copies--out", "out", "copies", {"bootstrap.servers": bootstrap})
    left = standing_of([last.record for last in ledger.read()])
    assert left.last is not None
    assert (left.last.number, left.unfinished is not None, len(left.done)) == (1, True, 1)
    definition = load_pipeline(str(path)).definition

    run_pipeline(definition, spark=spark)

    found = committed(bootstrap, "out")
    assert sorted(json.loads(message.value())["id"] for message in found) == list(range(RECORDS))
    assert len({message.headers()[0][1] for message in found}) == RECORDS
    assert audit_pipeline(definition).verdict is not Verdict.FAILED
