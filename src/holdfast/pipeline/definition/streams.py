"""Which rows there are in a pipeline, and who takes which; decided once, for rules, engine and explanations.

Rows go down the chain of steps. Stateful steps have side outputs: `window`, `keyed` and `join` rows of
their own, under the step's name; every stateful step the rows that came too late, `<step>.late`; `dedupe` also those it
had seen before, `<step>.duplicates`. A sink takes the end of the chain, or the stream it names in `rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from holdfast.pipeline.core.sql import literal
from holdfast.pipeline.definition import model

LATE: Final = "late"
DUPLICATES: Final = "duplicates"


class Stream(NamedTuple):
    """Rows that a sink can take."""

    step: str = ""
    """Empty for the end of the chain."""
    kind: str = ""
    """`late` or `duplicates`; empty for the rows that a step makes."""

    @property
    def text(self) -> str:
        return f"{self.step}.{self.kind}" if self.kind else self.step


MAIN: Final = Stream()


def merged(sink: model.SinkDefinition | None) -> model.PostgresSink | model.DeltaSink | None:
    """The sink, where its rows are merged into its table by key; nothing for one that keeps every row."""
    return sink if isinstance(sink, model.PostgresSink | model.DeltaSink) and sink.mode != "append" else None


def merge_key(sink: model.PostgresSink | model.DeltaSink) -> tuple[str, ...]:
    """What makes a row one of its own in the table; nothing where every row is kept."""
    order = (sink.order_by,) if sink.mode == "scd2" and sink.order_by is not None else ()
    return () if sink.mode == "append" else (*sink.key, *order)


def is_stateful(step: model.Step) -> bool:
    return isinstance(step, model.Dedupe | model.Window | model.Keyed | model.Join)


def has_own_rows(step: model.Step) -> bool:
    """Whether the step lets rows pass unchanged and makes rows of its own as a side output."""
    return isinstance(step, model.Window | model.Keyed | model.Join)


def streams_of(step: model.Step) -> tuple[Stream, ...]:
    """The side outputs of a step."""
    if not is_stateful(step):
        return ()
    own = (Stream(step.name),) if has_own_rows(step) else (Stream(step.name, DUPLICATES),)
    return (*own, Stream(step.name, LATE))


def streams(definition: model.PipelineDefinition) -> Mapping[str, Stream]:
    """All that a sink can take, by what it writes in `rows`; the end of the chain is the empty text."""
    found = {"": MAIN}
    for step in definition.steps:
        found |= {stream.text: stream for stream in streams_of(step)}
    return found


def stream_of(definition: model.PipelineDefinition, sink: model.SinkDefinition) -> Stream:
    """What a sink takes; `KeyError` when it names what there is not, which the rules refuse."""
    return streams(definition)[sink.rows]


def takers(definition: model.PipelineDefinition, stream: Stream) -> tuple[model.SinkDefinition, ...]:
    return tuple(sink for sink in definition.sinks if sink.rows == stream.text)


def decodings_of(source: model.Source) -> Iterator[tuple[str | None, model.Decoding]]:
    """The decodings that values can meet: those of topics by name, then that of all others, if there can be others."""
    yield from source.values.items()
    if source.pattern is not None or not source.topics or set(source.topics) - set(source.values):
        yield None, source.value


def side_condition(source: model.Source, side: str) -> str:
    """The SQL that is true for the rows of a join's side, which may be given as a topic."""
    if side not in source.topics:
        return side
    return f"_hf.topic = {literal(side)}"
