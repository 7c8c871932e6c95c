"""Whether a definition may take over from the one that ran last.

Two documents are compared: the canonical form of the definition that made the newest batch, which the engine keeps in
`<home>/definition.json`, and that of the definition at hand. Every difference is one of

- *safe*: the next run simply goes on;
- *rebuild*: the state was made by other rules, and `holdfast pipeline rebuild` rebuilds it by reading the source
  again, without touching a sink;
- *refused*: ledgers, or what sinks hold, would not fit; there is always another way, and the change says which.

What is not in the canonical form (when batches run, how large they are, where the home is) changes no row and is not
even listed. `run` refuses what is not safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from holdfast.pipeline.changes.levels import (
    WORST_FIRST,
    Change,
    Document,
    Facts,
    Level,
    from_to,
    rebuild,
    refused,
    safe,
)
from holdfast.pipeline.changes.sink_changes import sink_changes
from holdfast.pipeline.changes.source_changes import source_changes
from holdfast.pipeline.changes.step_changes import step_changes
from holdfast.pipeline.core.failures import FINDINGS, PipelineError, StateOutdated
from holdfast.pipeline.definition.fingerprint import state_marks

NO_FACTS = Facts()


class UnsafeChange(PipelineError):
    """The definition has changed in a way that a run must not simply go on with. Nothing was read or written."""

    def __init__(self, message: str, changes: Sequence[Change] = ()) -> None:
        super().__init__(message)
        self.changes = tuple(changes)


class NeedsRebuild(UnsafeChange, StateOutdated):
    """All that stands in the way is a state that other rules have made."""

    exit_code = FINDINGS


def classify(before: Document, after: Document, facts: Facts = NO_FACTS) -> list[Change]:
    """Every change between two canonical documents, the worst first, in the order of the definition."""
    found = _agreed(list(_changes(before, after, facts)), before, after)
    return sorted(found, key=lambda change: WORST_FIRST.index(change.level))


def _agreed(changes: list[Change], before: Document, after: Document) -> list[Change]:
    """The same judgement of states as the engine's, which compares the fingerprints of the steps that have one."""
    was, now = state_marks(before), state_marks(after)
    stale = [name for name, mark in now.items() if was.get(name) != mark]
    if not stale:
        return [
            replace(change, level=Level.SAFE, why="No state follows from it.", todo="")
            if change.level is Level.REBUILD
            else change
            for change in changes
        ]
    if not any(change.level is Level.REBUILD for change in changes):
        changes = [
            *changes,
            *(
                rebuild(
                    f"steps.{name}",
                    "its rows are made otherwise",
                    "Its state was made of rows that other rules had let through.",
                )
                for name in stale
            ),
        ]
    return changes


def _changes(before: Document, after: Document, facts: Facts) -> Iterator[Change]:
    if before["name"] != after["name"]:
        yield refused(
            "pipeline",
            from_to(before["name"], after["name"]),
            "Ledgers, state and fences are kept by the pipeline's name: another name is another pipeline, which would "
            "start anew.",
            "Keep the name; or give the new pipeline a home and sinks of its own.",
        )
    yield from source_changes(before, after, facts)
    yield from step_changes(before, after)
    yield from sink_changes(before, after)
    yield from _spark(before.get("spark") or {}, after.get("spark") or {})


def _spark(was: Document, now: Document) -> Iterator[Change]:
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            yield safe(f"spark.{name}", "changed", "It holds for the session of the next run.")


def worst(changes: Iterable[Change]) -> Level:
    found = {change.level for change in changes}
    return next((level for level in WORST_FIRST if level in found), Level.SAFE)


def refuse_unsafe(before: Document | None, after: Document, facts: Facts = NO_FACTS) -> list[Change]:
    """The changes, when all of them are safe; else `UnsafeChange`, which says what to do. `before` may be nothing."""
    if before is None:
        return []
    changes = classify(before, after, facts)
    level = worst(changes)
    if level is Level.SAFE:
        return changes
    bad = [change for change in changes if change.level is not Level.SAFE]
    first = "The definition cannot take over from the one that ran last"
    last = "Nothing was read or written; `holdfast pipeline check FILE --against-running` lists every change."
    kind = UnsafeChange
    if level is Level.REBUILD:
        kind = NeedsRebuild
        first = (
            "The state is of other rules: `holdfast pipeline rebuild FILE` rebuilds it, and touches no sink"
        )
    lines = "\n".join(f"  {change.level.value}: {change}" for change in bad)
    raise kind(f"{first}\n{lines}\n{last}", bad)


def without_sinks(document: Document, names: Iterable[str]) -> dict[str, Any]:
    """The document as if these sinks had never been: after their ledgers were reset, they are new ones."""
    gone = set(names)
    kept = [sink for sink in document.get("sinks") or [] if sink["name"] not in gone]
    return {**document, "sinks": kept}
