"""What a run tells Prometheus and a catalogue: its numbers, its inputs and outputs, the balance of its batches."""

from __future__ import annotations

import http.server
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.errors import UsageError
from holdfast.pipeline.core.failures import Unbalanced
from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Source,
)
from holdfast.pipeline.engine.lineage_events import Lineage
from holdfast.pipeline.engine.metrics import FAMILIES, PipelineMetrics
from holdfast.pipeline.engine.progress import (
    BatchDone,
    Ended,
    Failed,
    Retrying,
    Started,
    StateNow,
    Waiting,
    Warned,
)
from holdfast.pipeline.ledger import Intake, Routes
from holdfast.pipeline.positions import BatchRange
from holdfast.reader import Unreachable

if TYPE_CHECKING:
    from .conftest import Bench


@pytest.fixture
def bench(arrow_bench: Bench) -> Bench:
    return arrow_bench


STARTED = Started("orders", "/home", ("main", "second"), 7)
DONE = BatchDone(
    BatchRange({}),
    0,
    Intake(records=10),
    Routes(main=6, dead_letter={"parse": 3}, late=1),
    {},
    {"main": 6},
    {"stage": 1500},
    1,
    2000,
    4,
    state=StateNow(1, None, {"dedupe": (6, 600)}),
    sink_times_ms={"main": 250},
)


def shown(metrics: PipelineMetrics) -> dict[str, float]:
    return {
        "|".join(
            (
                sample.name,
                *(f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "pipeline"),
            )
        ): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }


def test_every_family_is_shown_and_right() -> None:
    now_s = 1000.0
    metrics = PipelineMetrics(wall_s=lambda: now_s)
    metrics(STARTED)
    assert shown(metrics)["holdfast_pipeline_complete_until_timestamp_seconds"] == 0
    metrics(Retrying("away", 500, "second"))
    metrics(Warned("odd"))
    found = shown(metrics)
    assert (
        found["holdfast_pipeline_failing|sink=second"]
        == found["holdfast_pipeline_retries_total|sink=second"]
        == 1
    )
    assert found["holdfast_pipeline_failing|sink=main"] == 0
    metrics(DONE)
    metrics(DONE)
    found = shown(metrics)
    names = {name.partition("|")[0] for name in found}
    assert {name for name, family in FAMILIES.items() if family.kind != "histogram"} <= names
    assert "holdfast_pipeline_batch_seconds_bucket" in names
    assert found["holdfast_pipeline_records_total"] == 20
    assert (
        found["holdfast_pipeline_batch_records|at=intake"]
        == found["holdfast_pipeline_batch_records|at=routes"]
        == 10
    )
    assert found["holdfast_pipeline_routed_total|route=dead-letter"] == 6
    assert found["holdfast_pipeline_dead_letters_total|reason=parse"] == 6
    assert found["holdfast_pipeline_rows_total|sink=main"] == 12
    assert found["holdfast_pipeline_phase_seconds_total|phase=stage"] == 3
    assert found["holdfast_pipeline_sink_seconds_total|sink=main"] == 0.5
    assert found["holdfast_pipeline_state_bytes|step=dedupe"] == 600
    assert found["holdfast_pipeline_lag_offsets"] == 4
    assert found["holdfast_pipeline_complete_until_timestamp_seconds"] == 0
    metrics(Waiting(0))
    assert shown(metrics)["holdfast_pipeline_complete_until_timestamp_seconds"] == 1000
    metrics(Ended("done"))
    assert shown(metrics)["holdfast_pipeline_up"] == 0


def test_a_run_that_fails_shows_where() -> None:
    metrics = PipelineMetrics()
    metrics(STARTED)
    metrics(Failed("full", "main"))
    found = shown(metrics)
    assert (found["holdfast_pipeline_up"], found["holdfast_pipeline_failing|sink=main"]) == (0, 1)


DEFINITION = PipelineDefinition(
    name="orders",
    source=Source(topics=("orders",), bootstrap="kafka:9092", value=Decoding("json")),
    sinks=(
        ParquetSink(path="/data/orders"),
        DeltaSink(path="s3://bucket/orders"),
        PostgresSink(url="postgresql://me:secret@db:5433/shop", table="orders"),
        KafkaSink(topic="orders-out"),
    ),
    dead_letter=DeadLetter("orders-dlt"),
    home="/home",
    directory="/",
)


def told_of_a_run(lineage: Lineage) -> None:
    lineage.describe(DEFINITION, "kafka:9092,other:9092")
    for event in (STARTED, Waiting(0), DONE, Failed("disk full")):
        lineage(event)


def check_events(events: list[dict[str, Any]]) -> None:
    start, running, failed = events
    assert [each["eventType"] for each in events] == ["START", "RUNNING", "FAIL"]
    assert len({each["run"]["runId"] for each in events}) == 1
    assert start["job"] == {"namespace": "holdfast", "name": "orders", "facets": {}}
    assert start["inputs"] == [{"namespace": "kafka://kafka:9092", "name": "orders"}]
    assert start["outputs"] == [
        {"namespace": "file", "name": "/data/orders"},
        {"namespace": "s3://bucket", "name": "orders"},
        {"namespace": "postgres://db:5433", "name": "shop.public.orders"},
        {"namespace": "kafka://kafka:9092", "name": "orders-out"},
        {"namespace": "kafka://kafka:9092", "name": "orders-dlt"},
    ]
    batch = running["run"]["facets"]["holdfast_batch"]
    assert (batch["intake"]["records"], batch["routes"]["main"], batch["rows"]) == (10, 6, {"main": 6})
    assert failed["run"]["facets"]["errorMessage"]["message"] == "disk full"
    assert "secret" not in json.dumps(events)


def test_lineage_goes_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lineage.jsonl"
    told_of_a_run(Lineage(str(path)))
    check_events([json.loads(line) for line in path.read_text().splitlines()])
    with pytest.raises(UsageError, match="cannot be written"):
        Lineage(str(tmp_path / "nowhere" / "lineage.jsonl"))


@pytest.fixture
def catalogue() -> Iterator[tuple[str, list[Any]]]:
    taken: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name for it
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/api/v1/lineage", taken
        server.shutdown()
        thread.join()


def test_lineage_goes_to_an_address_and_nothing_depends_on_it(
    catalogue: tuple[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    address, taken = catalogue
    told_of_a_run(Lineage(address))
    check_events(taken)
    with caplog.at_level(logging.WARNING):
        told_of_a_run(Lineage("http://127.0.0.1:1/api"))
    assert "lineage of orders was not told (START)" in caplog.text


def test_a_failing_sink_shows_while_it_fails(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.produce_orders(10)
    metrics, path = PipelineMetrics(), tmp_path / "lineage.jsonl"
    second = bench.sinks["second"]
    prepare = second.prepare
    seen: list[bool] = []

    def fail_once(*arguments: Any) -> Any:
        if not seen:
            seen.append(True)
            raise Unreachable("the second is away")
        return prepare(*arguments)

    monkeypatch.setattr(second, "prepare", fail_once)
    shown_meanwhile: list[dict[str, float]] = []

    def look(event: object) -> None:
        if isinstance(event, Retrying):
            shown_meanwhile.append({"reason": float(event.sink == "second")})

    bench.run(progress=look, metrics=metrics, lineage=Lineage(str(path)))
    assert shown_meanwhile == [{"reason": 1.0}]
    found = shown(metrics)
    assert found["holdfast_pipeline_retries_total|sink=second"] == 1
    assert found["holdfast_pipeline_failing|sink=second"] == 0
    assert found["holdfast_pipeline_records_total"] == 10
    assert found["holdfast_pipeline_complete_until_timestamp_seconds"] > 0
    assert [json.loads(line)["eventType"] for line in path.read_text().splitlines()] == [
        "START",
        "RUNNING",
        "COMPLETE",
    ]
    assert any(line["event"] == "retry" and "the second is away" in line["reason"] for line in bench.log)


def test_a_run_that_fails_tells_a_catalogue(bench: Bench, tmp_path: Path) -> None:
    bench.produce_orders(3)
    path = tmp_path / "lineage.jsonl"
    metrics = PipelineMetrics()

    def fail(point: str) -> None:
        if point == "routed":
            raise Unbalanced("made up")

    with pytest.raises(Unbalanced):
        bench.run(fail, metrics=metrics, lineage=Lineage(str(path)))
    assert [json.loads(line)["eventType"] for line in path.read_text().splitlines()] == ["START", "FAIL"]
    assert shown(metrics)["holdfast_pipeline_up"] == 0
