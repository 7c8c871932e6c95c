"""What an audit of a pipeline is about: which partitions, from which offset to which, and why.

A partition's scope begins where the pipeline began there (the first entry of a ledger that names it), or where the
caller says; it ends at the lowest position of all sinks' ledgers, fixed before anything else is read. What lies beyond
is pending: some sink has it not yet, and that is no loss. What lies below the log's start has expired, and nobody can
say any more what it was: a gap, unless the caller gave a beginning.

A sink that was added later begins later, and is held to what came since. One that began anew is held to what it has,
and what it had before is a gap; unless it has all that it ever had, as one that was added later, lost and refilled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from holdfast.audit.ledgers import Chain
from holdfast.audit.model import Scope, Unproven, gap
from holdfast.audit.source import LogEnds
from holdfast.errors import UsageError
from holdfast.pipeline.positions import Place

Span = tuple[int, int]
EARLIEST: Final = "earliest"


@dataclass
class PipelineScope:
    """By partition of the source, what is audited."""

    spans: dict[Place, Span] = field(default_factory=dict)
    sink_starts: dict[str, dict[Place, int]] = field(default_factory=dict)
    """For sinks that began later than the scope does: from where on they are held to it."""
    expired: dict[Place, int] = field(default_factory=dict)
    pending: dict[Place, int] = field(default_factory=dict)
    unproven: list[Unproven] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    begins: str = ""
    ends: str = "the lowest position of all sinks' ledgers"

    @property
    def offsets(self) -> int:
        return sum(end - start for start, end in self.spans.values())

    def summary(self) -> Scope:
        return Scope(
            self.begins, self.ends, self.offsets, sum(self.expired.values()), sum(self.pending.values())
        )


def start_ms(text: str) -> int | None:
    """The time that `--from` names, in milliseconds; nothing for `earliest`."""
    if text == EARLIEST:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"--from {text}: write earliest, for what the source still has, or a time such as 2026-01-31T12:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def decide_scope(
    chains: Mapping[str, Chain],
    logs: Mapping[Place, LogEnds],
    *,
    given: Callable[[Place], int] | None = None,
    given_text: str = "",
    since: Mapping[Place, int] | None = None,
    starts_at_log_start: bool = True,
) -> PipelineScope:
    """Put the ledgers and the logs together. `given` is where the caller begins, `since` up to where all is proven."""
    begins = "where the pipeline began" if since is None else "what was proven before"
    scope = PipelineScope(begins=given_text if given_text and since is None else begins)
    places = sorted({place for chain in chains.values() for place in chain.positions})
    now = {(place.topic, place.partition): place for place in logs}
    for place in places:
        if place not in logs:
            scope.unproven.append(_gone(place, now.get((place.topic, place.partition))))
            continue
        log = logs[place]
        start, end = _decide(scope, place, chains, log, starts_at_log_start)
        if given is not None:
            start = max(start, given(place), log.start)
        if since is not None:
            start = max(start, since.get(place, start))
        start = min(start, end)
        scope.spans[place] = (start, end)
        scope.pending[place] = max(0, log.end - end)
        gone = min(max(0, log.start - start), end - start)
        if gone:
            scope.expired[place] = gone
            why = "they have expired: retention has removed them from the source; --from earliest audits what is left"
            scope.unproven.append(_offsets(place, start, start + gone, why))
        for name, chain in chains.items():
            own = chain.starts.get(place, end)
            if place in chain.unsure or own <= start:
                continue
            scope.sink_starts.setdefault(name, {})[place] = own
            begins = f"sink {name!r} begins at {own} of {place.topic}-{place.partition}"
            if chain.begins_anew and own > chain.added_at.get(place, start):
                why = f"it was reset, or lost, and that was meant: {begins}; --from audits what came since"
                scope.unproven.append(gap(f"what sink {name!r} had before", why))
            else:
                scope.notes.append(f"{begins}: it was added later")
    named = {(place.topic, place.partition) for place in places}
    for place, log in sorted(logs.items()):
        if (place.topic, place.partition) in named:
            continue
        scope.pending[place] = log.end - log.start
        if log.end > log.start:
            scope.notes.append(
                f"{place.topic}-{place.partition} is new: the pipeline has taken nothing of it yet"
            )
    return scope


def _decide(
    scope: PipelineScope, place: Place, chains: Mapping[str, Chain], log: LogEnds, starts_at_log_start: bool
) -> Span:
    """From where the pipeline began there to where every sink has come."""
    kept = {name: chain.starts[place] for name, chain in chains.items() if place in chain.starts}
    sure = [start for name, start in kept.items() if place not in chains[name].unsure]
    if sure:
        began = min(sure)
    else:
        began = min([log.start] * starts_at_log_start + [*kept.values()])
        what = f"where the pipeline began in {place.topic}-{place.partition}"
        why = f"no ledger keeps its first entry; the audit begins at {began}"
        scope.unproven.append(Unproven(what, why))
    stands = [chain.positions.at.get(place) for chain in chains.values()]
    end = max(began, min(began if each is None else each.offset for each in stands))
    cut = max(began, log.end)
    if end > log.end:
        why = f"the sinks have taken them, and the log ends at {cut}: an election has cut it, and the source has lost "
        scope.unproven.append(_offsets(place, cut, end, f"{why}records"))
    return began, min(end, cut)


def _gone(place: Place, now: Place | None) -> Unproven:
    what = f"every record of {place.topic}-{place.partition}"
    if now is None:
        return gap(what, "the topic is not there any more")
    return gap(
        what,
        f"the topic was deleted and created again (its id was {place.topic_id}, now {now.topic_id}): the records "
        "that the sinks have are of the old one",
    )


def _offsets(place: Place, start: int, end: int, why: str) -> Unproven:
    return gap(f"{end - start:,} offsets of {place.topic}-{place.partition} ({start}-{end - 1})", why)
