"""A run merges the small batches of its Parquet sinks as it goes, and goes on where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from tests.pipeline.absent.without_spark import PlainRouter, without_spark

from holdfast.audit import pipeline_audit
from holdfast.audit.model import Report
from holdfast.audit.pipeline_audit import PipelineAudit, audit_pipeline
from holdfast.broker.server.embed import Broker
from holdfast.client import Producer
from holdfast.pipeline.definition.loading import from_document
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.sinks import compacting
from holdfast.pipeline.sinks.compacting import compact
from holdfast.pipeline.sinks.files import Disk

RECORDS = 12


@pytest.fixture
def definition(tmp_path: Path) -> Any:
    with Broker(str(tmp_path / "broker")) as broker:
        for topic in ("orders", "orders-dlt"):
            broker.create_topic(topic)
        with Producer(broker.bootstrap_servers) as producer:
            producer.send_many("orders", [json.dumps({"id": number}).encode() for number in range(RECORDS)])
        document = {
            "pipeline": "orders",
            "source": {
                "topics": ["orders"],
                "bootstrap": broker.bootstrap_servers,
                "batch_records": 1,
                "value": {"format": "json", "fields": {"id": "long"}},
            },
            "sinks": [{"parquet": {"path": "out", "compact": 4}}],
            "home": "home",
        }
        yield from_document(document, directory=str(tmp_path)).definition


def run(definition: PipelineDefinition) -> None:
    with without_spark(PlainRouter) as session:
        run_pipeline(definition, spark=session, signals=False)


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = (directory / "home" / "log.jsonl").read_text().splitlines()
    return [document for document in map(json.loads, lines) if document["event"] == kind]


def test_directories_stay_few_and_the_audit_follows(
    definition: PipelineDefinition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacting, "SHARE", 0)
    run(definition)
    assert len(events(tmp_path, "batch")) == RECORDS
    assert len(events(tmp_path, "compacted")) == RECORDS // 3
    assert len(list((tmp_path / "out").glob("batch=*"))) <= 4
    rows = ds.dataset(tmp_path / "out", format="parquet", partitioning="hive").to_table()
    assert sorted(rows["id"].to_pylist()) == list(range(RECORDS))
    assert audit_pipeline(definition).verdict.exit_code == 0


def test_an_audit_under_whose_feet_batches_are_merged_begins_again(
    definition: PipelineDefinition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compacting, "SHARE", 1 << 30)
    run(definition)
    opened = []

    class Disturbed(PipelineAudit):
        def run(self) -> Report:
            opened.append(self)
            if len(opened) == 1:
                compact(definition)  # after the sinks were opened, before their files are read
            return super().run()

    monkeypatch.setattr(pipeline_audit, "PipelineAudit", Disturbed)
    assert audit_pipeline(definition).verdict.exit_code == 0
    assert len(opened) == 2


def test_a_place_that_cannot_exchange_directories_is_warned_of_once_and_written_on(
    definition: PipelineDefinition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(self: Disk, one: str, other: str) -> None:
        raise OSError(22, "two directories cannot be exchanged here: Invalid argument", other)

    monkeypatch.setattr(Disk, "exchange", exchange)
    run(definition)
    assert len(events(tmp_path, "batch")) == RECORDS
    (warned,) = events(tmp_path, "warning")
    assert "small batches are not merged in this run" in warned["message"]
    assert len(list((tmp_path / "out").glob("batch=*"))) == RECORDS + 1  # the first opens the partition
    assert list(tmp_path.glob(".out.compact-*")) == []
