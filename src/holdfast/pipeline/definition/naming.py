"""Names and places that a definition leaves to us, decided once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from holdfast.pipeline.definition.errors import Path
from holdfast.pipeline.definition.model import (
    LETTERS_NAME,
    DeadLetter,
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
    Step,
)

NAME: Final = re.compile(r"(?=.{1,100}\Z)[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")
"""No two separators meet, so that names joined by two of them can be told apart again."""
TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
DEAD_LETTER_NAME: Final = LETTERS_NAME
"""The name of the dead letter sink; no other may have it."""
LEDGER_PREFIX: Final = "hf-ledger-"
"""Of topics in which sinks keep their ledgers: no pattern means them."""
DIGEST_KEY_NAME: Final = "digest-key"
"""What `--accept-loss` calls the key of the digests."""
VALID_FROM: Final = "valid_from"
VALID_TO: Final = "valid_to"
IS_CURRENT: Final = "is_current"
IS_DELETED: Final = "is_deleted"
"""Of `scd2`: from when on a version counts, up to and without when, whether it still does, and whether it is a
deletion, whose span is empty. A deletion is kept: an older row that is read later ends there."""
VERSION_COLUMNS: Final = (VALID_FROM, VALID_TO, IS_CURRENT, IS_DELETED)
DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
BOOTSTRAP_VARIABLE: Final = "HOLDFAST_BOOTSTRAP_SERVER"
TEXT_KEYS: Final = {
    "expect": "that",
    "filter": "where",
    "sql": "query",
    "python": "function",
    "dedupe": "key",
    "lookup": "table",
    "window": "aggregates",
    "keyed": "function",
    "join": "select",
}
"""Where in a step stands what an error is about."""


def kind_of_step(step: Step) -> str:
    """A step's class is called as definitions call the step."""
    return type(step).__name__.lower()


def kind_of_sink(sink: SinkDefinition) -> str:
    return type(sink).__name__.removesuffix("Sink").lower()


def place_of_step(index: int, step: Step) -> Path:
    """Where in a definition stands what is wrong with a step."""
    kind = kind_of_step(step)
    return ("steps", index, kind, TEXT_KEYS[kind])


def path_of(where: str, definition: PipelineDefinition) -> Path:
    """A place by its names, as `sinks.lake.path`, by the definition's own order."""
    first, *names = where.split(".")
    for index, step in enumerate(definition.steps if first == "steps" else ()):
        if names[:1] == [step.name]:
            return (*place_of_step(index, step)[:3], *names[1:]) if names[1:] else place_of_step(index, step)
    for index, sink in enumerate(definition.sinks if first == "sinks" else ()):
        if names[:1] == [sink.name]:
            return (first, index, kind_of_sink(sink), *names[1:])
    return (first, *names)


def home_of(definition: PipelineDefinition) -> str:
    """The pipeline's own directory, absolute."""
    return resolve_path(definition, definition.home or os.path.join(".holdfast", definition.name))


def resolve_path(definition: PipelineDefinition, path: str) -> str:
    """A path as the definition means it: relative ones start in its directory; addresses stay."""
    if re.match(r"[a-z][a-z0-9+.-]*://", path):
        return path
    return os.path.abspath(os.path.join(definition.directory, os.path.expanduser(path)))


def monitoring_group(definition: PipelineDefinition) -> str:
    return definition.monitoring_group or f"hf-{definition.name}"


def ledger_topic(pipeline: str, sink: str) -> str:
    """Where a sink that writes to Kafka keeps its ledger, in the cluster of its topic."""
    return f"{LEDGER_PREFIX}{pipeline}--{sink}"


def dead_letter_of(definition: PipelineDefinition) -> DeadLetter:
    return definition.dead_letter or DeadLetter(topic=f"{definition.name}-dlt")


def letter_table(dead: DeadLetter) -> ParquetSink | DeltaSink | PostgresSink | None:
    """The sink that has dead letters as rows; nothing: they go to the topic."""
    return dead.parquet or dead.delta or dead.postgres


def dead_letter_sink(definition: PipelineDefinition) -> SinkDefinition:
    """Where dead letters go, as the sink that it is."""
    dead = dead_letter_of(definition)
    table = letter_table(dead)
    if table is not None:
        return replace(table, name=DEAD_LETTER_NAME)
    return KafkaSink(dead.topic, DEAD_LETTER_NAME, dead.bootstrap, dead.settings)


def own_topics(definition: PipelineDefinition) -> set[str]:
    """Topics that the pipeline writes to."""
    sinks = (*definition.sinks, dead_letter_sink(definition))
    return {sink.topic for sink in sinks if isinstance(sink, KafkaSink)}


def bootstrap_of(
    definition: PipelineDefinition, given: str | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """Whom to ask first: what the caller says, then the definition, then the environment."""
    return given or definition.source.bootstrap or environment.get(BOOTSTRAP_VARIABLE) or DEFAULT_BOOTSTRAP


def client_settings(definition: PipelineDefinition, bootstrap: str | None = None) -> dict[str, str]:
    """The client settings of the source, of a definition whose secrets are expanded."""
    return {**definition.source.settings, "bootstrap.servers": bootstrap_of(definition, bootstrap)}
