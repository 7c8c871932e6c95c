"""From a sink's definition to the sink. Definitions come with their secrets expanded."""

from __future__ import annotations

from holdfast.pipeline.definition import model
from holdfast.pipeline.definition.naming import dead_letter_of, dead_letter_sink
from holdfast.pipeline.definition.rules_rows import last_of_key
from holdfast.pipeline.definition.streams import merged
from holdfast.pipeline.sinks.base import Sink, SinkError
from holdfast.pipeline.sinks.dead_letter import DeadLetterSink, LettersAsRows
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.delta_upsert import DeltaUpsertWriter
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter
from holdfast.pipeline.sinks.parquet import ParquetSinkWriter


def build_sink(definition: model.PipelineDefinition, sink: model.SinkDefinition) -> Sink:
    """The sink as the engine uses it; connects to nothing yet."""
    match sink:
        case model.ParquetSink():
            return ParquetSinkWriter(sink, definition.name, definition.directory)
        case model.KafkaSink():
            return KafkaSinkWriter(sink, definition.name, last_of_key(definition, sink))
        case model.DeltaSink():
            kind = DeltaUpsertWriter if merged(sink) else DeltaSinkWriter
            return kind(sink, definition.name, definition.directory)
        case model.PostgresSink():
            return _postgres(definition, sink)


def _postgres(definition: model.PipelineDefinition, sink: model.PostgresSink) -> Sink:
    try:
        from holdfast.pipeline.sinks.postgres import PostgresSinkWriter
    except ImportError as error:
        raise SinkError(
            f"sink {sink.name!r} needs PostgreSQL's client: pip install 'holdfast[postgres]' ({error})"
        ) from error
    return PostgresSinkWriter(sink, definition.name)


def build_dead_letter(definition: model.PipelineDefinition) -> Sink:
    """The sink of records that are set aside; the topic `<pipeline>-dlt` unless the definition names another place."""
    sink = dead_letter_sink(definition)
    if isinstance(sink, model.KafkaSink):
        return DeadLetterSink(dead_letter_of(definition), definition.name)
    return LettersAsRows(build_sink(definition, sink))
