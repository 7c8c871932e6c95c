"""Erasing rows from the sinks of a pipeline: for the law, or because a sink keeps only what is young.

A condition names the rows. Each sink loses them in one act of its own, which also adds an entry to its ledger: how many
rows, of which batches and places, with which digests, and the reason that was given; never a value of theirs. The
entry is chained as all are, and its head is written to the home and to the group's committed offsets. So an audit tells
rows that were erased from rows that are missing, and nobody can pass off the one for the other without the key.

The pipeline must not be running, no sink may be lost, and no batch half done. Killed in the middle, some sinks may be
done and others not: the same command finishes the rest.

The log still has the records, unless somebody deletes them there: a refill, a backfill or a rebuild reads them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.admin.brokers import committed_metadata
from holdfast.admin.errors import ClusterError
from holdfast.pipeline.core.failures import DefinitionWrong, PipelineError
from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition, PostgresSink
from holdfast.pipeline.definition.naming import (
    DEAD_LETTER_NAME,
    dead_letter_of,
    letter_table,
    monitoring_group,
)
from holdfast.pipeline.engine.deployment import Deployment, explained
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.known_sinks import KnownSinks, refuse_lost
from holdfast.pipeline.engine.monitoring import Monitoring
from holdfast.pipeline.ledger import Entry, Erasure, lowest
from holdfast.pipeline.positions import BatchRange
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sealing import Written, heads_in, heads_of, key_for, resealed, sealed
from holdfast.pipeline.sinks.base import Sink
from holdfast.pipeline.sinks.erasing import DeltaEraser, Eraser, ParquetEraser, Request, Seal

Ledgers = dict[str, Entry | None]
LETTERS: Final = "dead letters stay as they came"
TOPIC: Final = (
    "a topic's records go by retention, by compaction (a tombstone for its key), or by delete-records"
)


class CannotErase(PipelineError):
    """Something has to be done first. Nothing was erased."""


@dataclass(frozen=True)
class ErasePlan:
    """What an erasure would take; made without changing anything."""

    definition: PipelineDefinition
    """Secrets as references."""
    bootstrap: str | None
    where: str
    reason: str
    rows: Mapping[str, int]
    """By sink."""
    untouched: Mapping[str, str]
    """By sink that keeps its rows: why."""

    def as_erased(self) -> Erased:
        """What would have been taken out."""
        return Erased(self.definition.name, self.reason, self.rows, self.untouched)

    def __str__(self) -> str:
        lines = [f"{name}: {rows:,} rows" for name, rows in self.rows.items()]
        lines += [f"{name}: not erased: {why}" for name, why in self.untouched.items()]
        return "\n".join(
            [*lines, "the source keeps its records: while it has them, a refill would write these rows again"]
        )


@dataclass(frozen=True)
class Erased:
    """What was taken out."""

    pipeline: str
    reason: str
    sinks: Mapping[str, int]
    untouched: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "event": "erased",
            "pipeline": self.pipeline,
            "reason": self.reason,
            "sinks": dict(self.sinks),
            "untouched": dict(self.untouched),
        }


def plan_erase(
    definition: PipelineDefinition,
    where: str,
    reason: str,
    *,
    sinks: Sequence[str] | None = None,
    bootstrap: str | None = None,
) -> ErasePlan:
    """Count the rows; nothing is changed."""
    for name, text in (("where", where), ("reason", reason)):
        if not text.strip():
            raise DefinitionWrong(f"--{name} is empty; nothing was erased")
    deployed = Deployment.of(definition, bootstrap)
    names = [sink.name for sink in deployed.definition.sinks]
    for name in sinks or ():
        if name not in (*names, DEAD_LETTER_NAME):
            raise DefinitionWrong(f"there is no sink {name!r}; there are {', '.join(names)}")
    rows: dict[str, int] = {}
    untouched = {DEAD_LETTER_NAME: TOPIC if letter_table(dead_letter_of(definition)) is None else LETTERS}
    with explained(deployed.redactor), deployed.sinks() as opened:
        for sink in deployed.definition.sinks:
            eraser = _eraser(sink, opened[sink.name], Request(where, reason))
            if eraser is None:
                untouched[sink.name] = TOPIC
            elif sinks is None or sink.name in sinks:
                rows[sink.name] = 0 if opened[sink.name].last_entry() is None else eraser.count()
    topics = [name for name in sinks or () if name in untouched]
    if topics:
        raise CannotErase(f"sink {topics[0]!r}: {untouched[topics[0]]}. Nothing was erased")
    return ErasePlan(definition, bootstrap, where, reason, rows, untouched)


def _eraser(definition: Any, sink: Any, request: Request) -> Eraser | None:
    if isinstance(definition, ParquetSink):
        return ParquetEraser(definition, sink.store, request)
    if isinstance(definition, DeltaSink):
        return DeltaEraser(definition, sink, request)
    if isinstance(definition, PostgresSink):
        from holdfast.pipeline.sinks.erasing_postgres import PostgresEraser

        return PostgresEraser(definition, sink, request)
    return None


def perform_erase(
    plan: ErasePlan, *, warn: Callable[[str], None] = lambda message: None, faults: Faults = no_faults
) -> Erased:
    """Erase. A copy that runs keeps its home locked, and this is refused.

    Whatever goes wrong is raised as a `HoldfastError` whose text says what to do and holds no secret.
    """
    from holdfast.reader.cluster import Cluster

    deployed = Deployment.of(plan.definition, plan.bootstrap)
    definition = deployed.definition
    done: dict[str, int] = {}
    with (
        explained(deployed.redactor),
        deployed.home() as home,
        Cluster(deployed.settings) as cluster,
        deployed.sinks() as opened,
    ):
        group = monitoring_group(definition)
        try:
            heads = heads_in(committed_metadata(cluster, group).values())
        except ClusterError:
            heads = {}  # a right that whoever erases may lack
        known = KnownSinks(home, deployed.canonical, heads)
        ledgers: Ledgers = {name: sink.last_entry() for name, sink in opened.items()}
        refuse_lost(known.lost(opened, ledgers), has_others=True)
        _refuse_unfinished(opened, ledgers)
        key = key_for(home.path, definition.digest_key, ledgers.values())
        for sink in definition.sinks:
            eraser = _eraser(sink, opened[sink.name], Request(plan.where, plan.reason, key))
            if eraser is None or sink.name not in plan.rows or ledgers[sink.name] is None:
                continue
            erasure = eraser.erase(_sealing(sink.name, ledgers, known, key))
            faults(f"erased:{sink.name}")
            done[sink.name] = 0 if erasure is None else erasure.rows
            ledgers[sink.name] = opened[sink.name].last_entry()
            known.note(ledgers)
        if any(done.values()):
            positions = {name: entry.positions for name, entry in ledgers.items() if entry is not None}
            texts = heads_of(ledgers, known.places)
            Monitoring(cluster, group, warn).show(lowest(positions), texts)
        erased = Erased(definition.name, plan.reason, done, plan.untouched)
        home.log(erased.as_json())
    return erased


def _refuse_unfinished(opened: Mapping[str, Sink], ledgers: Ledgers) -> None:
    """A batch that some sinks have and others have not is taken again by those: it must be their newest entry."""
    stand = {
        name: {place: at.offset for place, at in entry.positions.at.items()}
        for name, entry in ledgers.items()
        if entry is not None
    }
    half_done = [name for name, sink in opened.items() if sink.unfinished() is not None]
    ahead: dict[Any, int] = {}
    for each in stand.values():
        ahead = {place: max(offset, ahead.get(place, 0)) for place, offset in {**ahead, **each}.items()}
    behind = [name for name, each in stand.items() if any(at < ahead[place] for place, at in each.items())]
    if half_done or behind:
        raise CannotErase(
            f"sink {(half_done or behind)[0]!r} has not all that the others have: `holdfast pipeline run` finishes the "
            "batch. Nothing was erased"
        )


def _sealing(name: str, ledgers: Ledgers, known: KnownSinks, key: DigestKey) -> Seal:
    previous = ledgers[name]
    assert previous is not None, "it has a ledger"
    if previous.content is not None and previous.content.key != key.id:
        raise CannotErase(
            f"the newest entry of sink {name!r} was made with another key than today's: run the pipeline first. "
            "Nothing was erased"
        )

    def seal(erasure: Erasure, went: int) -> Entry:
        entry = Entry(
            previous.pipeline,
            name,
            previous.number + 1,
            BatchRange({}),
            previous.positions,
            time.time_ns() // 1_000_000,
            previous.fingerprint,
            watermark_ms=previous.watermark_ms,
            state=previous.state,
            generation=previous.generation,
            others=known.others(name, ledgers),
            erased=erasure,
        )
        entry = sealed(entry, previous, None if previous.content is None else Written(0, {}), key)
        return entry if entry.content is None else resealed(entry, previous, 0, went, key)

    return seal
