"""What each step promises to the rows that pass it."""

from __future__ import annotations

from typing import Final

from holdfast.pipeline.definition.functions import name_of
from holdfast.pipeline.definition.hops import Hop, Strength, short, without_password
from holdfast.pipeline.definition.model import (
    Dedupe,
    EventTime,
    Expect,
    Filter,
    Join,
    Keyed,
    Lookup,
    PipelineDefinition,
    Python,
    Sql,
    Step,
    Window,
)
from holdfast.pipeline.definition.naming import kind_of_step
from holdfast.pipeline.definition.streams import LATE, Stream, takers

BROKEN: Final = {
    "warn": "kept, and counted in the log",
    "drop": "dropped: counted in the ledger, kept nowhere",
    "quarantine": "a dead letter, with the rule's name",
    "fail": "what stops the pipeline, before anything of its batch is committed",
}
MISSING: Final = {
    "null": "gets nulls",
    "filter": "leaves, counted under this name",
    "quarantine": "is a dead letter, with this name",
    "fail": "stops the pipeline, before anything of its batch is committed",
}
UNTAKEN: Final = "rows that are late are counted in the ledgers and kept nowhere"


def explain_step(step: Step, definition: PipelineDefinition) -> Hop:
    kind = kind_of_step(step)
    match step:
        case Expect():
            dropping = step.otherwise == "drop"
            return Hop(
                step.name,
                kind,
                f"{short(step.that)}, else {step.otherwise}",
                Strength.SOME_LEFT_OUT if dropping else Strength.EXACTLY_ONCE,
                f"a row that breaks it is {BROKEN[step.otherwise]}",
                f"else: quarantine, in the rule {step.name}" if dropping else None,
            )
        case Filter():
            why = "rows that leave are counted under this name in every ledger"
            return Hop(step.name, kind, short(step.where), Strength.EXACTLY_ONCE, why)
        case Sql():
            why = (
                "the same rows give the same result; every row carries its place, and none vanishes uncounted"
            )
            return Hop(step.name, kind, short(step.query), Strength.EXACTLY_ONCE, why)
        case Python():
            function = step.function if isinstance(step.function, str) else name_of(step.function)
            what = f"{function} of {step.file}" if step.file else function
            return Hop(
                step.name,
                kind,
                f"{what}, {step.mode}",
                Strength.CONDITIONAL,
                "if the function gives the same for the same rows: a crash between two sinks runs it again",
                "no setting; keep time, chance and other services out of the function (_batch_time is fixed)",
            )
        case Dedupe():
            what = "hf-id" if step.by == "hf-id" else ", ".join(step.key)
            return _with_late(
                step,
                definition,
                f"the first row of each {what} within {step.within}",
                f"a copy leaves, counted as a duplicate; one that comes more than {step.within} after the first is "
                "a first one again",
            )
        case Lookup():
            why = (
                "every sink gets the rows of one version of the table, which the plan of the batch and the ledgers "
                f"name; a row it has nothing for {MISSING[step.missing]}"
            )
            what = f"{', '.join(step.columns)} of {without_password(step.table)}, at most {step.refresh} old"
            return Hop(step.name, kind, what, Strength.EXACTLY_ONCE, why)
        case Window():
            return _window(step, definition)
        case Join():
            pairs = ", ".join(
                left if left == right else f"{left} = {right}" for left, right in step.on.items()
            )
            alone = ", left rows without one too" if step.kind == "left" else ""
            return _with_late(
                step,
                definition,
                f"{short(step.left, 40)} with {short(step.right, 40)} on {pairs}, {step.within} apart{alone}",
                f"each pair once; a row is remembered until nothing within {step.within} of it can come",
            )
        case Keyed():
            late = _with_late(step, definition, "", "")
            function = step.function if isinstance(step.function, str) else name_of(step.function)
            what = f"{function} of {step.file}" if step.file else function
            why = (
                "rows and state are one version: if the function gives the same for the same rows and state. "
                f"A key that nothing comes for is forgotten after {step.ttl}, counted"
            )
            weaker = late.strength < Strength.CONDITIONAL
            return Hop(
                step.name,
                kind,
                f"{what} by {', '.join(step.key)}, {step.timers} timers",
                late.strength if weaker else Strength.CONDITIONAL,
                f"{why}; {UNTAKEN}" if weaker else why,
                late.remedy
                if weaker
                else "no setting; keep time, chance and other services out of the function",
            )


def explain_event_time(event_time: EventTime) -> Hop:
    what = f"{event_time.field}, {event_time.delay} late at most"
    if event_time.idle is None:
        return Hop(
            "event time",
            "event time",
            what,
            Strength.EXACTLY_ONCE,
            "which rows are late follows from the log alone, however it is cut into batches; "
            "a partition that nothing comes to holds windows open",
        )
    return Hop(
        "event time",
        "event time",
        f"{what}, idle partitions left out after {event_time.idle}",
        Strength.CONDITIONAL,
        f"rows of a partition that was quiet for {event_time.idle} may be late because others went on: that depends "
        "on when they were read, and is fixed with the batch",
        "leave source.event_time.idle out, if every partition gets records",
    )


def _window(step: Window, definition: PipelineDefinition) -> Hop:
    match step.kind:
        case "tumbling":
            windows = f"windows of {step.size}"
        case "sliding":
            windows = f"windows of {step.size} every {step.every}"
        case "session":
            windows = f"sessions that end after {step.gap}"
    key = f" by {', '.join(step.key)}" if step.key else ""
    emitted = (
        "one row for each window, when it is over"
        if step.emit == "closed"
        else "a row each time a window changes; the last one counts"
    )
    bound = "windows that are over are forgotten"
    if step.late == "correct":
        emitted += "; late rows correct it"
        bound = f"windows are forgotten {step.correct_within} after their end"
    what = f"{', '.join(step.aggregates)}{key} in {windows}"
    return _with_late(step, definition, what, f"{emitted}; every row counts in it once; {bound}")


def _with_late(step: Step, definition: PipelineDefinition, what: str, why: str) -> Hop:
    """Late rows that nobody takes are left out; with a sink for them none is."""
    kind = kind_of_step(step)
    if takers(definition, Stream(step.name, LATE)):
        return Hop(step.name, kind, what, Strength.EXACTLY_ONCE, f"{why}; late rows have a sink")
    return Hop(
        step.name,
        kind,
        what,
        Strength.SOME_LEFT_OUT,
        f"{why}; {UNTAKEN}",
        f"a sink with rows: {step.name}.{LATE}",
    )
