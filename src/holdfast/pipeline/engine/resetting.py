"""Making sinks forget where they stand: what that would replay or leave out, and then doing it.

A sink without a ledger is a new one. When all sinks of a pipeline are new, it starts where its definition says; a
sink that is new beside others starts where the one furthest behind of them stands. Rows that sinks hold stay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.pipeline.changes.classifying import without_sinks
from holdfast.pipeline.core.failures import DefinitionWrong
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.engine.aside import forget_aside
from holdfast.pipeline.engine.deployment import Deployment
from holdfast.pipeline.engine.home import Home
from holdfast.pipeline.engine.planning import openings
from holdfast.pipeline.positions import Place, Positions
from holdfast.pipeline.sinks.base import Sink


@dataclass(frozen=True)
class ResetSink:
    """What becomes of one sink."""

    name: str
    stands: Positions | None
    """None where the sink has no ledger: there is nothing to reset."""
    starts: Positions
    """Where its next run begins, as the source is now."""

    @property
    def replayed(self) -> int:
        """Offsets it has and would get again."""
        return self._difference(lambda at, start: at - start)

    @property
    def left_out(self) -> int:
        """Offsets it has not, and would never get."""
        return self._difference(lambda at, start: start - at)

    def _difference(self, between: Callable[[int, int], int]) -> int:
        at = {} if self.stands is None else self.stands.at
        return sum(
            max(0, between(at[place].offset, start.offset))
            for place, start in self.starts.at.items()
            if place in at
        )

    def __str__(self) -> str:
        if self.stands is None:
            return f"{self.name}: has no ledger; nothing to forget"
        where = ", ".join(
            f"{place.topic}-{place.partition} {self._from(place)}→ {start.offset}"
            for place, start in sorted(self.starts.at.items())
        )
        return f"{self.name}: {self.replayed} offsets again, {self.left_out} left out ({where})"

    def _from(self, place: Place) -> str:
        at = {} if self.stands is None else self.stands.at
        return f"{at[place].offset} " if place in at else ""


@dataclass(frozen=True)
class ResetPlan:
    """What a reset would do; made without changing anything."""

    definition: PipelineDefinition
    bootstrap: str | None
    sinks: tuple[ResetSink, ...]

    def __str__(self) -> str:
        return "\n".join(str(sink) for sink in self.sinks)


def plan_reset(
    definition: PipelineDefinition, *, sinks: Sequence[str] | None = None, bootstrap: str | None = None
) -> ResetPlan:
    """Look at the ledgers and the source; nothing is changed."""
    from holdfast.reader.cluster import Cluster

    deployed = Deployment.of(definition, bootstrap)
    with Cluster(deployed.settings) as cluster:
        source = deployed.source(cluster)
        logs = source.look({})
        with deployed.sinks() as opened:
            chosen = _chosen(opened, sinks)
            ledgers = {name: sink.last_entry() for name, sink in opened.items()}
        after = {name: None if name in chosen else entry for name, entry in ledgers.items()}
        is_new = all(entry is None for entry in after.values())
        starts = openings(after, logs, source.beginning(logs) if is_new else {})
    return ResetPlan(
        definition,
        bootstrap,
        tuple(
            ResetSink(name, None if entry is None else entry.positions, starts[name])
            for name, entry in ledgers.items()
            if name in chosen
        ),
    )


def perform_reset(plan: ResetPlan) -> None:
    """Forget the ledgers. A copy that runs keeps its home locked, and this is refused."""
    deployed = Deployment.of(plan.definition, plan.bootstrap)
    names = {sink.name for sink in plan.sinks}
    with deployed.home() as home, deployed.sinks() as opened:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(home.path, "plan.json"))
        known = deployed.known_sinks()
        ledgers = {name: sink.last_entry() for name, sink in opened.items()}
        for name in names:
            if ledgers[name] is not None:
                opened[name].forget()
                ledgers[name] = None
            known.begin_anew(name, ledgers)
        _forget_definition(home, names, opened)
        home.log({"event": "reset", "pipeline": plan.definition.name, "sinks": sorted(names)})


def _forget_definition(home: Home, names: set[str], opened: Mapping[str, Sink]) -> None:
    """A sink without a ledger is a new one: nothing about it is a change any more."""
    kept = home.kept_definition()
    if all(sink.last_entry() is None for sink in opened.values()):
        home.forget_definition()
        forget_aside(home.path)
    elif kept is not None:
        home.note_definition(without_sinks(kept, names))


def _chosen(opened: Mapping[str, Sink], sinks: Sequence[str] | None) -> set[str]:
    for name in sinks or ():
        if name not in opened:
            raise DefinitionWrong(f"there is no sink {name!r}; there are {', '.join(opened)}")
    return set(opened) if sinks is None else set(sinks)
