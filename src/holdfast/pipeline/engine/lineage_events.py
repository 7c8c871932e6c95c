"""What a run tells a catalogue of data: OpenLineage's events, to a file or an address.

START when the run begins, RUNNING after each batch, COMPLETE or FAIL at its end. The source's topics are its inputs,
the sinks its outputs. A batch tells its balance as a facet of the run, `holdfast_batch`: the range that was read, how
many records came in, and where each of them went.

A file gets an object a line. An address gets each event by POST and has `POST_SECONDS` to answer; one that does not is
logged, and the pipeline goes on: nothing depends on a catalogue. Of a database's address an event holds host, port and
name, and of settings nothing.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

from holdfast.errors import UsageError
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.naming import dead_letter_sink
from holdfast.pipeline.engine.progress import BatchDone, Ended, Event, Failed, Started

_LOG: Final = logging.getLogger(__name__)
PRODUCER: Final = "urn:holdfast:pipeline"
SCHEMA: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
FACET: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunFacet"
ERROR_FACET: Final = (
    "https://openlineage.io/spec/facets/1-0-0/ErrorMessageRunFacet.json#/$defs/ErrorMessageRunFacet"
)
POST_SECONDS: Final = 5.0

Dataset = dict[str, str]


class Lineage:
    """A listener of a run."""

    def __init__(self, to: str, *, namespace: str = "holdfast") -> None:
        """`to` is the path of a file, or an address that begins with http. `namespace` is that of the job."""
        self._to = to
        self._is_address = to.startswith(("http://", "https://"))
        if not self._is_address:
            try:
                open(to, "a", encoding="utf-8").close()
            except OSError as error:
                raise UsageError(f"{to} cannot be written for lineage: {error.strerror}") from error
        self._namespace = namespace
        self._run_id = str(uuid.uuid4())
        self._job = ""
        self._inputs: list[Dataset] = []
        self._outputs: list[Dataset] = []

    def describe(self, definition: PipelineDefinition, bootstrap: str) -> None:
        """What the run is about."""
        source = _kafka(bootstrap)
        self._job = definition.name
        self._inputs = [{"namespace": source, "name": topic} for topic in definition.source.topics]
        if definition.source.pattern is not None:
            self._inputs.append({"namespace": source, "name": definition.source.pattern})
        self._outputs = [_dataset(sink, source) for sink in definition.sinks]
        if definition.dead_letter is not None:
            self._outputs.append(_dataset(dead_letter_sink(definition), source))

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._tell("START", {})
            case BatchDone():
                self._tell("RUNNING", {"holdfast_batch": _facet(FACET, **_balance(event))})
            case Ended():
                self._tell("COMPLETE", {})
            case Failed():
                facet = _facet(ERROR_FACET, message=event.reason, programmingLanguage="python")
                self._tell("FAIL", {"errorMessage": facet})

    def _tell(self, kind: str, facets: Mapping[str, Any]) -> None:
        event = {
            "eventType": kind,
            "eventTime": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "run": {"runId": self._run_id, "facets": facets},
            "job": {"namespace": self._namespace, "name": self._job, "facets": {}},
            "inputs": self._inputs,
            "outputs": self._outputs,
            "producer": PRODUCER,
            "schemaURL": SCHEMA,
        }
        try:
            self._send(json.dumps(event).encode())
        except (OSError, ValueError) as error:
            _LOG.warning("lineage of %s was not told (%s): %s", self._job, kind, error)

    def _send(self, body: bytes) -> None:
        if not self._is_address:
            with open(self._to, "ab") as file:
                file.write(body + b"\n")
            return
        request = urllib.request.Request(self._to, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=POST_SECONDS) as answer:
            answer.read()


def _facet(schema: str, **fields: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": schema, **fields}


def _balance(done: BatchDone) -> dict[str, Any]:
    routes = done.routes.as_json()
    return {
        "number": done.number,
        "range": done.range.as_json(),
        "intake": done.intake.as_json(),
        "routes": routes,
        "rows": dict(done.rows_by_sink),
        "lag": done.lag,
    }


def _kafka(bootstrap: str) -> str:
    return f"kafka://{bootstrap.partition(',')[0]}"


def _dataset(sink: SinkDefinition, source: str) -> Dataset:
    match sink:
        case KafkaSink():
            return {
                "namespace": source if sink.bootstrap is None else _kafka(sink.bootstrap),
                "name": sink.topic,
            }
        case PostgresSink():
            url = urlsplit(sink.url)
            schema, _, table = sink.table.rpartition(".")
            host = f"{url.hostname or 'localhost'}:{url.port or 5432}"
            name = f"{url.path.lstrip('/') or 'postgres'}.{schema or 'public'}.{table}"
            return {"namespace": f"postgres://{host}", "name": name}
        case ParquetSink() | DeltaSink():
            scheme, divided, rest = sink.path.partition("://")
            if not divided:
                return {"namespace": "file", "name": sink.path}
            place, _, path = rest.partition("/")
            return {"namespace": f"{scheme}://{place}", "name": path or "/"}
