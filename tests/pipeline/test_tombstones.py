"""The guide's example of tombstones, run: what is deleted in the topic is deleted in the table, and proven."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.postgres import NoPostgres, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "pipeline.md").read_text()
[EXAMPLE] = [text for text in re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.M | re.S) if "_tombstone" in text]


def test_a_tombstone_deletes_its_row(
    spark: SparkSession, holdfast_broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap = holdfast_broker.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("customers", 2, 1)])["customers"].result(30)
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(4):
        producer.produce("customers", f'{{"id": {number}, "name": "n{number}"}}', f'{{"id": {number}}}')
    producer.produce("customers", None, '{"id": 1}')
    producer.produce("customers", None, '{"id": 2}')
    producer.produce("customers", '{"id": 2, "name": "back"}', '{"id": 2}')
    assert producer.flush(30) == 0
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))
    with server:
        monkeypatch.setenv("DATABASE_URL", server.url)
        text = f"pipeline: guide\n{EXAMPLE}".replace("source:", f"source:\n  bootstrap: {bootstrap}", 1)
        definition = parse_yaml(text, directory=str(tmp_path)).definition
        run_pipeline(definition, spark=spark, signals=False)
        with psycopg.connect(server.url) as connection:
            found = connection.execute("SELECT id, name FROM customers ORDER BY id").fetchall()
        assert found == [(0, "n0"), (2, "back"), (3, "n3")]
        assert audit_pipeline(definition).exit_code() == 0
