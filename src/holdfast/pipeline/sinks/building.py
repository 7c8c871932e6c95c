"""From a sink's definition to the sink. Definitions come with their secrets expanded."""

from __future__ import annotations

from holdfast.pipeline.definition.model import (
    DeadLetter,
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.rules_rows import last_of_key
from holdfast.pipeline.sinks.base import Sink, SinkError
from holdfast.pipeline.sinks.dead_letter import DeadLetterSink
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter
from holdfast.pipeline.sinks.parquet import ParquetSinkWriter


def build_sink(definition: PipelineDefinition, sink: SinkDefinition) -> Sink:
    """The sink as the engine uses it; connects to nothing yet."""
    match sink:
        case ParquetSink():
            return ParquetSinkWriter(sink, definition.name, definition.directory)
        case KafkaSink():
            return KafkaSinkWriter(sink, definition.name, last_of_key(definition, sink))
        case DeltaSink():
            return DeltaSinkWriter(sink, definition.name, definition.directory)
        case PostgresSink():
            return _postgres(definition, sink)


def _postgres(definition: PipelineDefinition, sink: PostgresSink) -> Sink:
    try:
        from holdfast.pipeline.sinks.postgres import PostgresSinkWriter
    except ImportError as error:
        raise SinkError(
            f"sink {sink.name!r} needs PostgreSQL's client: pip install 'holdfast[postgres]' ({error})"
        ) from error
    return PostgresSinkWriter(sink, definition.name)


def build_dead_letter(definition: PipelineDefinition) -> Sink:
    """The sink of records that are set aside; the topic `<pipeline>-dlt` unless the definition names one."""
    dead_letter = definition.dead_letter or DeadLetter(f"{definition.name}-dlt")
    return DeadLetterSink(dead_letter, definition.name)
