"""Which range the next batch takes, and which sinks get it: decided from the sinks' ledgers alone.

Pure: ledgers and logs in, a plan out. The rules, which together give every offset to every sink exactly once whatever
crashed in between:

- Before a sink gets rows of a partition, it has an entry that names the partition: the *opening*. So a sink without
  a ledger is a new one, never one that crashed in its first batch. No sink has a ledger: the pipeline starts where its
  definition says. Others have one: a new sink starts at the lowest place they stand at. A partition that a sink's
  ledger does not name is new, and starts at its log's start.
- All sinks stand at the same place: one batch goes to all of them, cut by the limits.
- Some are behind: the one furthest behind, and those that stand exactly where it does, catch up alone, in those
  partitions where another sink is ahead, up to the next position any other sink stands at and never past it. A batch
  that another sink took whole from here is taken again as it was, with the time that stood for "now" in it.
- A batch that a sink has half (`unfinished`) comes first, as it was.
- A plan that was written down and not finished is taken again if it still starts where its sinks stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span

RECORD_BYTES_GUESS = 512
"""Of a record, before any was seen."""


@dataclass(frozen=True)
class Log:
    """How far one partition's log reaches."""

    start: int
    end: int
    """The last stable offset: nothing beyond it is decided."""
    leader_epoch: int = -1


Logs = Mapping[Place, Log]
Ledgers = Mapping[str, Entry | None]
"""The newest entry of each sink, by the sink's name."""


@dataclass(frozen=True)
class Bounds:
    """The part of the source that a run is about, where it is not all of it."""

    start: Mapping[Place, int]
    end: Mapping[Place, int]
    """Of the same partitions; the others are not read."""

    def within(self, logs: Logs) -> dict[Place, Log]:
        """As much of the logs as lies before the ends."""
        return {
            place: replace(log, end=min(log.end, self.end[place]))
            for place, log in logs.items()
            if place in self.end
        }


@dataclass(frozen=True)
class Limits:
    """How much one batch takes at most; a partition with anything to read gives one offset at least."""

    offsets: int
    bytes: int
    record_bytes: int = RECORD_BYTES_GUESS
    """The average size of a record so far."""

    @property
    def allowed(self) -> int:
        return max(1, min(self.offsets, self.bytes // max(self.record_bytes, 1)))


@dataclass(frozen=True)
class Plan:
    """One batch to be."""

    range: BatchRange
    targets: tuple[str, ...]
    """The sinks it is for."""
    batch_time_ms: int | None
    """The time that stands for "now" in its steps, if it has been set already."""
    is_catch_up: bool = False
    watermark_ms: int | None = None
    """The pipeline's where the batch begins, if it has been set already."""
    lookups: Mapping[str, str] = field(default_factory=dict)
    """By step, the version of a reference table, as far as they have been set already."""
    rejected: tuple[Rejected, ...] = ()
    """Records of the range that are dead letters, because a sink does not take a row made of them."""

    def as_json(self) -> dict[str, Any]:
        return {
            "range": self.range.as_json(),
            "targets": list(self.targets),
            "batch_time_ms": self.batch_time_ms,
            "is_catch_up": self.is_catch_up,
            "watermark_ms": self.watermark_ms,
            "lookups": dict(self.lookups),
            **({"rejected": [list(each) for each in self.rejected]} if self.rejected else {}),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Plan:
        return cls(
            BatchRange.from_json(document["range"]),
            tuple(document["targets"]),
            document["batch_time_ms"],
            document["is_catch_up"],
            document.get("watermark_ms"),
            document.get("lookups", {}),
            tuple(Rejected(*each) for each in document.get("rejected", ())),
        )

    @classmethod
    def again(cls, entry: Entry, targets: tuple[str, ...]) -> Plan:
        """The batch of this entry, as it was, for sinks that do not have it."""
        return cls(
            entry.range,
            targets,
            entry.batch_time_ms,
            is_catch_up=True,
            watermark_ms=entry.watermark_ms,
            lookups=entry.lookups,
            rejected=entry.rejected,
        )


def openings(ledgers: Ledgers, logs: Logs, beginning: Mapping[Place, int]) -> dict[str, Positions]:
    """What each sink's next opening entry must name, for the sinks that need one.

    `beginning` is where a pipeline starts that no sink knows; it names every partition of `logs` in that case. Sinks
    that were opened when there was no partition yet know the pipeline: to them each one is new.
    """
    known = [entry.positions.at for entry in ledgers.values() if entry is not None]
    found: dict[str, Positions] = {}
    for sink, entry in ledgers.items():
        missing = [place for place in logs if entry is None or place not in entry.positions.at]
        if missing or entry is None:
            found[sink] = Positions(
                {place: _opening(place, entry, known, logs, beginning) for place in sorted(missing)}
            )
    return found


def _opening(
    place: Place,
    entry: Entry | None,
    known: Sequence[Mapping[Place, Position]],
    logs: Logs,
    beginning: Mapping[Place, int],
) -> Position:
    others = [positions[place] for positions in known if place in positions]
    if entry is None and others:
        return min(others)
    if not known:
        return Position(beginning[place], logs[place].leader_epoch)
    return Position(logs[place].start, -1)


def unread(ledgers: Ledgers, logs: Logs, needed: Mapping[str, Positions]) -> list[str]:
    """What somebody may wonder about who finds records missing in sinks that are opened here: where these begin.

    Sinks that others stand before begin there, and a log that was cut begins where it does.
    """
    told = []
    new = {name: positions.at for name, positions in needed.items() if ledgers[name] is None and positions.at}
    if len(new) < len(ledgers):
        for name, at in new.items():
            behind = sum(position.offset - logs[place].start for place, position in at.items())
            if behind > 0:
                told.append(
                    f"sink {name!r} is new and begins where the others stand: {behind:,} offsets of the log are before "
                    f"that. `holdfast pipeline refill FILE {name}` before a run writes them too"
                )
    elif new:
        starts = next(iter(new.values()))
        cut = [place for place, at in sorted(starts.items()) if at.offset == logs[place].start > 0]
        if cut:
            first = cut[0]
            told.append(
                f"the logs of {len(cut)} partitions do not begin at offset 0 ({first.topic}-{first.partition} at "
                f"{logs[first].start:,}): retention has deleted what was before, and the pipeline begins behind it"
            )
    return told


def opening_range(positions: Positions) -> BatchRange:
    """The range of an opening entry: nothing, at these positions."""
    return BatchRange(
        {place: Span(at.offset, at.offset, at.leader_epoch) for place, at in positions.at.items()}
    )


def plan_batch(
    ledgers: Ledgers,
    logs: Logs,
    limits: Limits,
    *,
    until: Mapping[Place, int] | None = None,
    unfinished: Mapping[str, Entry] | None = None,
    noted: Plan | None = None,
) -> Plan | None:
    """The next batch, or nothing when every sink has all there is (up to `until`, when given).

    Every sink has been opened for every partition of `logs`. `noted` is the plan found on the disk, if it was not
    finished.
    """
    standings = {sink: _standing(entry, logs) for sink, entry in ledgers.items()}
    for sink, entry in (unfinished or {}).items():
        return Plan.again(entry, (sink,))
    if noted is not None and _continues(noted, standings, logs):
        return noted
    ends = {
        place: log.end if until is None else min(log.end, until.get(place, 0)) for place, log in logs.items()
    }
    behind = _furthest_behind(standings)
    if len(behind) < len(standings):
        return _catch_up(behind, standings, ledgers, logs, limits)
    start = standings[behind[0]]
    available = {place: ends[place] - start[place] for place in logs if ends[place] > start[place]}
    if not available:
        return None
    return Plan(_cut(start, share_out(available, limits.allowed), logs), behind, None)


def share_out(available: Mapping[Place, int], allowed: int) -> dict[Place, int]:
    """How many offsets each partition gives: all it has while that fits, else about equal shares, at least one."""
    shares: dict[Place, int] = {}
    rest = allowed
    waiting = sorted(available, key=lambda place: (available[place], place))
    for number, place in enumerate(waiting):
        share = max(1, min(available[place], rest // (len(waiting) - number)))
        shares[place] = share
        rest = max(0, rest - share)
    return shares


def remaining(ledgers: Ledgers, ends: Mapping[Place, int]) -> int:
    """Offsets between the lowest standing of the sinks and these ends."""
    entries = [entry for entry in ledgers.values() if entry is not None]
    total = 0
    for place, end in ends.items():
        known = [entry.positions.at[place].offset for entry in entries if place in entry.positions.at]
        if known:
            total += max(0, end - min(known))
    return total


def _standing(entry: Entry | None, logs: Logs) -> dict[Place, int]:
    assert entry is not None, "planned before it was opened"
    return {place: entry.positions.at[place].offset for place in logs}


def _continues(noted: Plan, standings: Mapping[str, Mapping[Place, int]], logs: Logs) -> bool:
    """Whether an unfinished plan still starts where its sinks stand, ends within the logs, and nobody is elsewhere."""
    if set(noted.targets) != set(standings) or not noted.range:
        return False
    return (
        all(
            place in logs
            and span.end <= logs[place].end
            and all(standing[place] == span.start for standing in standings.values())
            for place, span in noted.range.spans.items()
        )
        and len({tuple(sorted(standing.items())) for standing in standings.values()}) == 1
    )


def _furthest_behind(standings: Mapping[str, Mapping[Place, int]]) -> tuple[str, ...]:
    """The sinks that stand lowest: all at one and the same place."""
    lowest = min(standings, key=lambda sink: (sum(standings[sink].values()), sorted(standings[sink].items())))
    return tuple(sink for sink in standings if standings[sink] == standings[lowest])


def _catch_up(
    behind: tuple[str, ...],
    standings: Mapping[str, Mapping[Place, int]],
    ledgers: Ledgers,
    logs: Logs,
    limits: Limits,
) -> Plan:
    start = standings[behind[0]]
    next_positions: dict[Place, int] = {}
    for place in logs:
        ahead = [standing[place] for standing in standings.values() if standing[place] > start[place]]
        if ahead:
            next_positions[place] = min(ahead)
    for entry in ledgers.values():
        if entry is not None and _took_from_here(entry, start, next_positions):
            return Plan.again(entry, behind)
    available = {place: end - start[place] for place, end in next_positions.items()}
    return Plan(
        _cut(start, share_out(available, limits.allowed), logs, ledgers), behind, None, is_catch_up=True
    )


def _took_from_here(entry: Entry, start: Mapping[Place, int], next_positions: Mapping[Place, int]) -> bool:
    """Whether this entry's batch starts where the sink behind stands and ends at no position it must not cross."""
    spans = {place: span for place, span in entry.range.spans.items() if span.offsets}
    return bool(spans) and all(
        place in start and span.start == start[place] and span.end <= next_positions.get(place, -1)
        for place, span in spans.items()
    )


def _cut(
    start: Mapping[Place, int], shares: Mapping[Place, int], logs: Logs, ledgers: Ledgers | None = None
) -> BatchRange:
    spans = {}
    for place, share in shares.items():
        end = start[place] + share
        spans[place] = Span(start[place], end, _epoch_at(place, end, logs, ledgers or {}))
    return BatchRange(spans)


def _epoch_at(place: Place, end: int, logs: Logs, ledgers: Ledgers) -> int:
    """The epoch to keep with a position: the one another ledger keeps with it, else the leader's of now."""
    for entry in ledgers.values():
        if entry is not None and place in entry.positions.at and entry.positions.at[place].offset == end:
            return entry.positions.at[place].leader_epoch
    return logs[place].leader_epoch
