"""What became of a record, concluded from what was found of it.

Nothing is concluded from what is absent unless a ledger says that it should be there: a record that no ledger covers is
pending, not lost; one whose batch kept no record of what left it may have left; and what cannot be read may hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.audit.left import expands
from holdfast.audit.lives import ENDS, Departure, Life, SinkLife
from holdfast.audit.model import Fate
from holdfast.audit.sinks.base import DeadLetterRow
from holdfast.audit.stored import Stored
from holdfast.pipeline.aside import LATE_FOR, LEAVING
from holdfast.pipeline.definition.model import PipelineDefinition


def without_pipeline(stored: Stored) -> Life:
    if stored.outcome == "record":
        return Life(stored, fate="record", conclusion="it is in the log, and can be read")
    return Life(stored, fate=stored.outcome, conclusion=ENDS[stored.outcome])


def conclude(
    definition: PipelineDefinition,
    stored: Stored,
    sinks: Sequence[SinkLife],
    departures: Sequence[Departure],
    dead: Sequence[DeadLetterRow],
    is_known: bool,
) -> tuple[str, str]:
    if any(each.standing == "other" for each in sinks):
        return (
            "other",
            "the sinks were fed from an earlier topic of this name, which was deleted: this record is not of it",
        )
    mains = [each for each in sinks if not each.takes and each.kind != "dead_letter"]
    held = [each for each in mains if each.held]
    if stored.outcome in ("aborted", "control", "not_yet", "open"):
        if held:
            names = _names(held)
            return str(Fate.EXTRA), f"{ENDS[stored.outcome]}; and yet {names} has a row of it"
        return stored.outcome, ENDS[stored.outcome]
    twice = [each for each in held if len(each.held) > 1]
    if twice and not expands(definition):
        return str(Fate.DUPLICATED), f"it is there more than once in {_names(twice)}"
    found = _found(definition, stored, mains, held, departures, dead)
    if found is not None:
        return found
    if any(each.standing == "unreadable" or each.problem for each in mains):
        troubled = _names([each for each in mains if each.standing == "unreadable" or each.problem])
        return "unknown", f"it is nowhere that can be read, and {troubled} cannot be read"
    if stored.outcome in ENDS:
        return stored.outcome, f"{ENDS[stored.outcome]}; no sink holds a row of it"
    if all(each.standing in ("pending", "empty") for each in sinks):
        return str(Fate.PENDING), "no sink has taken its offset yet"
    if all(each.standing == "before" for each in sinks if each.standing not in ("pending", "empty")):
        return "before", "the pipeline began behind it"
    if not is_known:
        return (
            "unknown",
            "its batch let rows go, and the record of which ones is missing or damaged: it may be one",
        )
    windows = [each for each in sinks if each.takes and each.held]
    if not mains and windows:
        return str(Fate.AGGREGATED), f"it counts in {_names(windows)}"
    if not mains:
        return (
            "unknown",
            "no sink keeps rows by themselves, and which windows it counts in cannot be told here",
        )
    return (
        str(Fate.LOST),
        f"the ledger of {_names([each for each in mains if each.standing == 'taken'])} covers it, and it is nowhere",
    )


def _found(
    definition: PipelineDefinition,
    stored: Stored,
    mains: Sequence[SinkLife],
    held: Sequence[SinkLife],
    departures: Sequence[Departure],
    dead: Sequence[DeadLetterRow],
) -> tuple[str, str] | None:
    """Where it is, if it is anywhere."""
    leaving = [each for each in departures if each.route in LEAVING]
    if held and (leaving or dead) and not expands(definition):
        route = "a dead letter" if dead else f"the record of what step {leaving[0].step!r} let go"
        return str(Fate.DUPLICATED), f"it is in {_names(held)} and in {route}"
    if dead:
        why = f"{dead[0].reason}: {dead[0].error}" if dead[0].error else dead[0].reason
        return str(Fate.DEAD_LETTER), f"it is a dead letter, because of {why}"
    if leaving and not held:
        return leaving[0].route, {
            "filtered": f"step {leaving[0].step!r} let it go",
            "duplicate": f"its key had been seen by step {leaving[0].step!r}",
            "late": f"it came too late for step {leaving[0].step!r}",
        }[leaving[0].route]
    missing = [each for each in mains if not each.held and each.standing == "taken" and not each.problem]
    replaced = [each for each in missing if each.keeps_last]
    if replaced and not (not held and any(not each.keeps_last for each in missing)):
        judged = _replaced(stored, replaced)
        if judged[0] != Fate.SUPERSEDED or not held:
            return judged
    if not held:
        return None
    lost = [each for each in missing if not each.keeps_last]
    if lost:
        return str(Fate.LOST), f"it is in {_names(held)}, and not in {_names(lost)}, whose ledger covers it"
    late = [each for each in departures if each.route == LATE_FOR]
    more = f"; it was too late for {', '.join(repr(each.step) for each in late)}" if late else ""
    waits = [each for each in mains if each.standing == "pending"]
    rest = f"; {_names(waits)} has not taken it yet" if waits else ""
    if replaced:
        rest += f"; {_replaced(stored, replaced)[1]}"
    return str(Fate.OUTPUT), f"it is in {_names(held)}{rest}{more}"


def _replaced(stored: Stored, sinks: Sequence[SinkLife]) -> tuple[str, str]:
    """What became of a record that tables of one row for each key do not have."""
    place = stored.place
    for sink in sinks:
        instead = sink.instead
        if instead is None:
            return (
                "unknown",
                f"{sink.name} keeps the last row of each key, and its key cannot be told without the steps",
            )
        if not instead.topic:
            return "unknown", f"{sink.name} has no row of {instead.key}: it was deleted, or it is lost"
        if instead.is_older_than(place.topic, place.partition, stored.offset):
            return str(Fate.LOST), f"{sink.name} has an older row of {instead.key}, made of {instead.name}"
    return str(Fate.SUPERSEDED), "; ".join(
        f"{each.name} has a newer row of {each.instead.key}, made of {each.instead.name}"
        for each in sinks
        if each.instead is not None
    )


def _names(sinks: Sequence[SinkLife]) -> str:
    return " and ".join(each.name for each in sinks) or "no sink"
