"""Which batches a replay is made of. Pure: what was recorded in, batches out.

A replay goes from where the pipeline began to where it stands now, through every offset once. It takes the batches that
are recorded, with the times that stood for "now" in them, wherever they continue it; what lies between two of them, or
behind the last, it cuts itself, with the time of the next recorded batch, or of the replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.pipeline.changes.history import Recorded
from holdfast.pipeline.engine.planning import Limits, share_out
from holdfast.pipeline.ledger import Intake, Rejected
from holdfast.pipeline.positions import BatchRange, Place, Span


@dataclass(frozen=True)
class Cut:
    """One batch of a replay."""

    range: BatchRange
    batch_time_ms: int | None
    """Nothing: the time of the replay itself."""
    opened: frozenset[Place]
    """The partitions that the pipeline knew then."""
    is_recorded: bool = False
    intake: Intake | None = None
    rejected: tuple[Rejected, ...] = ()
    """Records of it that are dead letters for a sink's sake."""


def cuts(
    begin: Mapping[Place, int], end: Mapping[Place, int], recorded: Sequence[Recorded], limits: Limits
) -> Iterator[Cut]:
    """From `begin` to `end`, which name the same partitions."""
    replay = _Replay(dict(begin), end, limits, _opened_at_first(begin, recorded))
    for batch in recorded:
        spans = {place: span for place, span in batch.range.spans.items() if place in begin}
        if not any(span.offsets for span in spans.values()):
            replay.opened |= spans.keys()
            continue
        taken = {place: span for place, span in spans.items() if span.offsets}
        if not replay.can_reach(taken):
            continue
        yield from replay.up_to({place: span.start for place, span in taken.items()}, batch.batch_time_ms)
        yield replay.take(
            taken,
            batch.batch_time_ms,
            is_recorded=True,
            intake=batch.intake if taken.keys() == batch.range.spans.keys() else None,
            rejected=batch.rejected,
        )
    replay.opened |= begin.keys()
    yield from replay.up_to(end, None)


def _opened_at_first(begin: Mapping[Place, int], recorded: Sequence[Recorded]) -> set[Place]:
    """All partitions, unless openings are recorded: then those whose opening is not."""
    has_openings = bool(recorded) and not recorded[0].range
    if not has_openings:
        return set(begin)
    mentioned = {place for batch in recorded for place in batch.range.spans}
    return {place for place in begin if place not in mentioned}


@dataclass
class _Replay:
    at: dict[Place, int]
    end: Mapping[Place, int]
    limits: Limits
    opened: set[Place]

    def can_reach(self, spans: Mapping[Place, Span]) -> bool:
        """Whether the replay is not past the start of any of these, and may go to their ends."""
        return all(
            self.at[place] <= span.start and span.end <= self.end[place] for place, span in spans.items()
        )

    def up_to(self, ends: Mapping[Place, int], batch_time_ms: int | None) -> Iterator[Cut]:
        """Cut by ourselves what is missing before these."""
        while True:
            available = {
                place: ends[place] - self.at[place] for place in ends if ends[place] > self.at[place]
            }
            if not available:
                return
            shares = share_out(available, self.limits.allowed)
            yield self.take(
                {place: Span(self.at[place], self.at[place] + share) for place, share in shares.items()},
                batch_time_ms,
            )

    def take(
        self,
        spans: Mapping[Place, Span],
        batch_time_ms: int | None,
        *,
        is_recorded: bool = False,
        intake: Intake | None = None,
        rejected: tuple[Rejected, ...] = (),
    ) -> Cut:
        self.opened |= spans.keys()
        self.at.update({place: span.end for place, span in spans.items()})
        return Cut(
            BatchRange(dict(spans)), batch_time_ms, frozenset(self.opened), is_recorded, intake, rejected
        )


def best_cuts(
    begin: Mapping[Place, int],
    end: Mapping[Place, int],
    histories: Sequence[Sequence[Recorded]],
    limits: Limits,
) -> tuple[Cut, ...]:
    """By the history that tells most of the batches; all cut by ourselves where none does."""
    found = (tuple(cuts(begin, end, history, limits)) for history in (*histories, ()))
    return max(found, key=recorded_offsets)


def recorded_offsets(found: Sequence[Cut]) -> int:
    """How many of the offsets are replayed in the batches they came in."""
    return sum(cut.range.offsets for cut in found if cut.is_recorded)
