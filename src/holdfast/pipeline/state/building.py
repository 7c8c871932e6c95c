"""From the definition of a step with a memory to the step."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.definition.model import (
    Dedupe,
    EventTime,
    Join,
    Keyed,
    PipelineDefinition,
    Step,
    Window,
)
from holdfast.pipeline.definition.streams import side_condition
from holdfast.pipeline.state.operator import Operator

Remembering: TypeAlias = Dedupe | Window | Keyed | Join
"""Steps whose turn depends on what came before."""


def remembers(step: Step) -> bool:
    return isinstance(step, Remembering)


def operator_of(step: Step, definition: PipelineDefinition) -> Operator:
    """The step as the engine runs it."""
    event = definition.source.event_time
    if event is None:
        raise StepError(
            step.name,
            "it remembers rows by the time of their events, and the source does not say when those happen: name the "
            "field by `source.event_time`",
        )
    if isinstance(step, Join):
        source = definition.source
        step = replace(step, left=side_condition(source, step.left), right=side_condition(source, step.right))
    return _built(step, event, definition.directory)


def _built(step: Step, event: EventTime, directory: str) -> Operator:
    match step:
        case Dedupe():
            from holdfast.pipeline.state.dedupe import DedupeOperator

            return DedupeOperator(step, event)
        case Window():
            from holdfast.pipeline.state.windows import WindowOperator

            return WindowOperator(step, event)
        case Join():
            from holdfast.pipeline.state.joins import JoinOperator

            return JoinOperator(step, event)
        case Keyed():
            from holdfast.pipeline.state.keyed import KeyedOperator

            return KeyedOperator(step, event, directory)
        case _:
            raise AssertionError(f"{step.name!r} has no memory")
