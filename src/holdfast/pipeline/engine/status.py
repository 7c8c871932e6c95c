"""Where a pipeline stands, read from its sinks' ledgers; Spark is not started and nothing is changed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from holdfast.admin.errors import Unreachable
from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import EnvironmentFails
from holdfast.pipeline.definition.model import KafkaSink, PipelineDefinition
from holdfast.pipeline.definition.naming import (
    DEAD_LETTER_NAME,
    dead_letter_sink,
    kind_of_sink,
    monitoring_group,
)
from holdfast.pipeline.definition.streams import is_stateful
from holdfast.pipeline.engine.deployment import Deployment, build_sinks, redacted
from holdfast.pipeline.engine.failures import explain_failure
from holdfast.pipeline.engine.home import holder, last_logged
from holdfast.pipeline.engine.planning import Ledgers
from holdfast.pipeline.engine.progress import StateNow
from holdfast.pipeline.engine.source_view import ends_of
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.pipeline.sinks.base import Sink, SinkContext
from holdfast.pipeline.state.store import StateStore, state_path
from holdfast.pipeline.state.watermarks import Clock, Watermarks


@dataclass(frozen=True)
class SinkStatus:
    name: str
    kind: str
    entry: Entry | None
    """The newest of its ledger."""
    lag: int | None = None
    """Offsets between its positions and the end of what can be read; None where the source was not asked."""
    is_of_this_definition: bool = True
    """Its newest entry was made by the definition as it stands."""
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "entry": None if self.entry is None else self.entry.as_json()}


@dataclass(frozen=True)
class StateStatus:
    """What the pipeline remembers, at its newest version."""

    now: StateNow | None
    """None before a batch has made one."""
    waits_for: str | None = None
    """The partition that holds the watermark where it is."""
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            **({} if self.now is None else self.now.as_json()),
            "waits_for": self.waits_for,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Status:
    pipeline: str
    home: str
    group: str
    """That shows the positions to lag tools."""
    sinks: tuple[SinkStatus, ...]
    source_problem: str | None
    """Why lag is not known, or why the next batch would not start."""
    running_pid: int | None
    last_batch: dict[str, Any] | None
    """From the log, if the home is there."""
    state: StateStatus | None = None
    """Of a pipeline with stateful steps."""

    @property
    def lag(self) -> int | None:
        """Of the sink furthest behind."""
        known = [sink.lag for sink in self.sinks if sink.lag is not None]
        return max(known) if known else None

    def as_json(self) -> dict[str, Any]:
        state = {} if self.state is None else {"state": self.state.as_json()}
        sinks = [sink.as_json() for sink in self.sinks]
        known = {name: value for name, value in vars(self).items() if name != "state"}
        return {**known, "lag": self.lag, "sinks": sinks, **state}


def read_status(definition: PipelineDefinition, *, bootstrap: str | None = None) -> Status:
    """What the ledgers, the source and the log say; a part that cannot be read says why, the others stand."""
    deployed = Deployment.of(definition, bootstrap)
    expanded, context = deployed.definition, deployed.sink_context()
    kinds = {DEAD_LETTER_NAME: DEAD_LETTER_NAME, **{sink.name: kind_of_sink(sink) for sink in expanded.sinks}}
    entries: dict[str, Entry | None] = {}
    problems: dict[str, str] = {}
    unreachable = _unreachable(deployed)
    beside = sinks_beside_source(expanded, deployed.settings["bootstrap.servers"]) if unreachable else set()
    for name, sink in build_sinks(expanded).items():
        if name in beside and unreachable is not None:
            problems[name] = unreachable
            continue
        try:
            entries[name], missing = _entry_of(sink, context)
            if missing is not None:
                problems[name] = missing
        except (HoldfastError, OSError) as error:
            problems[name] = str(redacted(explain_failure(error), deployed.redactor))
    try:
        known = deployed.known_sinks()
        problems |= {name: why for name in entries if (why := known.behind(name, entries)) is not None}
    except EnvironmentFails as error:
        problems |= dict.fromkeys(entries, str(error))
    ends, source_problem = (None, unreachable) if unreachable else _ends(deployed, entries)
    return Status(
        pipeline=expanded.name,
        home=deployed.home_path,
        group=monitoring_group(expanded),
        sinks=tuple(
            _sink_status(name, kind, entries.get(name), ends, deployed.fingerprint, problems.get(name))
            for name, kind in kinds.items()
        ),
        source_problem=source_problem,
        running_pid=holder(deployed.home_path),
        last_batch=last_logged(deployed.home_path),
        state=_state_status(expanded, deployed.home_path),
    )


def _state_status(definition: PipelineDefinition, home: str) -> StateStatus | None:
    event = definition.source.event_time
    if event is None or not any(is_stateful(step) for step in definition.steps):
        return None
    path = state_path(home)
    try:
        newest = StateStore(path, is_writer=False).newest() if os.path.isdir(path) else None
    except (HoldfastError, OSError) as error:
        return StateStatus(None, problem=str(explain_failure(error)))
    if newest is None:
        return StateStatus(None)
    waits_for = Watermarks.from_json(newest.watermark).waits_for(Clock.of(event), newest.batch_time_ms)
    place = None if waits_for is None else f"{waits_for.topic}-{waits_for.partition}"
    return StateStatus(StateNow.of(newest), place)


def _unreachable(deployed: Deployment) -> str | None:
    """Why nobody of the source's cluster answers: asked once, before several sinks wait for the same silence."""
    from holdfast.reader.cluster import Cluster

    try:
        with Cluster(deployed.settings) as cluster:
            cluster.refresh([])
    except Unreachable as error:
        return str(redacted(error, deployed.redactor))
    return None


def sinks_beside_source(definition: PipelineDefinition, bootstrap: str) -> set[str]:
    """The sinks whose ledgers are on the source's cluster."""
    sinks = (dead_letter_sink(definition), *definition.sinks)
    places = {sink.name: sink.bootstrap for sink in sinks if isinstance(sink, KafkaSink)}
    return {name for name, place in places.items() if place is None or place == bootstrap}


def _entry_of(sink: Sink, context: SinkContext) -> tuple[Entry | None, str | None]:
    """The newest entry, and what is missing of what it speaks of."""
    try:
        sink.open(context, None)
        return sink.last_entry(), sink.missing()
    finally:
        sink.close()


def _ends(deployed: Deployment, ledgers: Ledgers) -> tuple[dict[Place, int] | None, str | None]:
    from holdfast.reader.cluster import Cluster

    try:
        with Cluster(deployed.settings) as cluster:
            return ends_of(deployed.source(cluster).look(ledgers)), None
    except (HoldfastError, OSError) as error:
        return None, str(redacted(explain_failure(error), deployed.redactor))


def _sink_status(
    name: str, kind: str, entry: Entry | None, ends: dict[Place, int] | None, mark: str, problem: str | None
) -> SinkStatus:
    lag = None
    if entry is not None and ends is not None:
        at = entry.positions.at
        lag = sum(max(0, end - at[place].offset) if place in at else end for place, end in ends.items())
    is_same = entry is None or entry.fingerprint == mark
    return SinkStatus(name, kind, entry, lag, is_same, problem)
