"""From a sink's definition to the sink. Definitions come with their secrets expanded."""

from __future__ import annotations

from holdfast.pipeline.definition.model import (
    ParquetSink,
    PipelineDefinition,
    SinkDefinition,
)
from holdfast.pipeline.sinks.base import Sink
from holdfast.pipeline.sinks.parquet import ParquetSinkWriter


def build_sink(definition: PipelineDefinition, sink: SinkDefinition) -> Sink:
    """The sink as the engine uses it; connects to nothing yet."""
    match sink:
        case ParquetSink():
            return ParquetSinkWriter(sink, definition.name, definition.directory)
    raise TypeError(f"no sink is made from {sink!r}")
