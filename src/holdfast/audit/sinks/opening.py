"""From a sink's definition to the reader of what it holds. Definitions come with their secrets expanded."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.audit.sinks.base import SinkReader, SinkUnreadable
from holdfast.audit.sinks.delta import DeltaReader
from holdfast.audit.sinks.kafka import DeadLetters, KafkaReader
from holdfast.audit.sinks.parquet import ParquetReader
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, dead_letter_sink


def open_sink(
    definition: PipelineDefinition, sink: SinkDefinition, settings: Mapping[str, str]
) -> SinkReader:
    """A snapshot of one sink; `settings` are the source's client settings, `bootstrap.servers` among them."""
    match sink:
        case ParquetSink():
            return ParquetReader(definition, sink)
        case DeltaSink():
            return DeltaReader(definition, sink)
        case PostgresSink():
            try:
                from holdfast.audit.sinks.postgres import PostgresReader
            except ImportError as error:
                raise SinkUnreadable(
                    f"sink {sink.name!r} needs PostgreSQL's client: pip install 'holdfast[postgres]' ({error})"
                ) from error
            return PostgresReader(definition, sink)
        case KafkaSink():
            reader = DeadLetters if sink.name == DEAD_LETTER_NAME else KafkaReader
            return reader(definition, sink, settings)


def open_dead_letters(definition: PipelineDefinition, settings: Mapping[str, str]) -> SinkReader:
    """A snapshot of the pipeline's dead letters."""
    reader = open_sink(definition, dead_letter_sink(definition), settings)
    reader.kind = "dead_letter"
    return reader
