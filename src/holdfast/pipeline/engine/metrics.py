"""Numbers of a running pipeline for Prometheus: what its events tell, kept until somebody looks.

    with PipelineMetrics(listen="9406") as metrics:
        pipeline.run(metrics=metrics)

`holdfast_pipeline_complete_until_timestamp_seconds` is the lag in time: whatever was in the log at that moment is in
every sink. It moves when a batch, or a look that found nothing, leaves nothing of what the look before it saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.exposition import Families, Family, ServedNumbers, table
from holdfast.pipeline.engine.progress import (
    BatchDone,
    Ended,
    Event,
    Failed,
    Retrying,
    Started,
    Waiting,
    Warned,
)

_PIPELINE: Final = ("pipeline",)
_SINK: Final = ("pipeline", "sink")
_STEP: Final = ("pipeline", "step")
_PREFIX: Final = "holdfast_pipeline_"


def _counter(name: str, meaning: str, labels: tuple[str, ...] = _PIPELINE) -> Family:
    return Family(_PREFIX + name, "counter", meaning, labels)


def _gauge(name: str, meaning: str, labels: tuple[str, ...] = _PIPELINE) -> Family:
    return Family(_PREFIX + name, "gauge", meaning, labels)


FAMILIES: Final[Families] = table(
    _gauge("up", "1 while the pipeline runs, 0 when it has ended."),
    _counter("batches_total", "Batches that every sink of theirs has."),
    _counter("records_total", "Records taken in."),
    _counter("routed_total", "Records by where they went.", ("pipeline", "route")),
    _counter("dead_letters_total", "Records that became dead letters, by reason.", ("pipeline", "reason")),
    _gauge("batch_records", "Records of the newest batch; at: its intake, its routes.", ("pipeline", "at")),
    _counter("rows_total", "Rows that sinks have written.", _SINK),
    _gauge("lag_offsets", "Offsets between the sink furthest behind and the end of the log."),
    _gauge(
        "complete_until_timestamp_seconds", "Whatever was in the log then is in every sink; 0: not known."
    ),
    _gauge("last_batch_timestamp_seconds", "When the newest batch was done; 0: none."),
    Family(_PREFIX + "batch_seconds", "histogram", "How long batches took.", _PIPELINE),
    _counter("phase_seconds_total", "Where their time went.", ("pipeline", "phase")),
    _counter("sink_seconds_total", "How long sinks prepared and committed.", _SINK),
    _gauge("state_rows", "Rows of a step's state.", _STEP),
    _gauge("state_bytes", "Bytes of a step's state.", _STEP),
    _counter("retries_total", "Attempts that failed; sink: where, empty if in none.", _SINK),
    _gauge("failing", "1 while the newest attempt failed there; empty: in no sink.", _SINK),
    _counter("warnings_total", "Warnings."),
)


class PipelineMetrics(ServedNumbers):
    """A listener of a run; `text` may be asked for by any thread."""

    def __init__(self, *, listen: str | int | None = None, wall_s: Callable[[], float] = time.time) -> None:
        """`listen` is a port of this machine, or HOST:PORT, where `/metrics` is; 0 takes a free one: see `port`."""
        super().__init__(FAMILIES, listen)
        self._wall_s = wall_s
        self._pipeline = ""

    def describe(self, pipeline: str) -> None:
        """What the run is of; its first event may be a failure."""
        self._pipeline = pipeline
        self._set("up", 1)

    def __call__(self, event: Event) -> None:
        with self.numbers.lock:
            match event:
                case Started():
                    self._started(event)
                case BatchDone():
                    self._done(event)
                case Waiting():
                    self._set("lag_offsets", event.lag)
                    if not event.lag:
                        self._set("complete_until_timestamp_seconds", self._wall_s())
                case Retrying():
                    self._add("retries_total", sink=event.sink)
                    self._set("failing", 1, sink=event.sink)
                case Warned():
                    self._add("warnings_total")
                case Failed():
                    self._set("failing", 1, sink=event.sink)
                    self._set("up", 0)
                case Ended():
                    self._set("up", 0)

    def _started(self, event: Started) -> None:
        self.describe(event.pipeline)
        self._set("lag_offsets", event.lag)
        for name in ("complete_until_timestamp_seconds", "last_batch_timestamp_seconds"):
            self._set(name, 0)
        for name in ("batches_total", "records_total", "warnings_total"):
            self._add(name, 0)
        for sink in ("", *event.sinks):
            self._set("failing", 0, sink=sink)
            self._add("retries_total", 0, sink=sink)

    def _done(self, event: BatchDone) -> None:
        now_s, routes = self._wall_s(), event.routes
        self._add("batches_total")
        self._add("records_total", event.intake.records)
        self._set("batch_records", event.intake.records, at="intake")
        self._set("batch_records", routes.total, at="routes")
        counts = {
            "main": routes.main,
            "dead-letter": sum(routes.dead_letter.values()),
            "filtered": sum(routes.filtered.values()),
            "duplicate": routes.duplicate,
            "late": routes.late,
        }
        for route, count in counts.items():
            self._add("routed_total", count, route=route)
        for reason, count in routes.dead_letter.items():
            self._add("dead_letters_total", count, reason=reason)
        for sink, count in event.rows_by_sink.items():
            self._add("rows_total", count, sink=sink)
            self._set("failing", 0, sink=sink)
        self._set("failing", 0, sink="")
        self._set("lag_offsets", event.lag)
        self._set("last_batch_timestamp_seconds", now_s)
        if not event.lag:
            self._set("complete_until_timestamp_seconds", now_s - event.duration_ms / 1000)
        self.numbers.observe(_PREFIX + "batch_seconds", event.duration_ms / 1000, pipeline=self._pipeline)
        for phase, took_ms in event.times_ms.items():
            self._add("phase_seconds_total", took_ms / 1000, phase=phase)
        for sink, took_ms in event.sink_times_ms.items():
            self._add("sink_seconds_total", took_ms / 1000, sink=sink)
        for step, (rows, size) in event.state.steps.items() if event.state is not None else ():
            self._set("state_rows", rows, step=step)
            self._set("state_bytes", size, step=step)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self.numbers.set(_PREFIX + name, value, pipeline=self._pipeline, **labels)

    def _add(self, name: str, amount: float = 1, **labels: str) -> None:
        self.numbers.add(_PREFIX + name, amount, pipeline=self._pipeline, **labels)
