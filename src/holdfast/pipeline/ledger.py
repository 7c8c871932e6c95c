"""The ledger of a sink: what it has, by source range, written in the sink's own transaction.

The rule that makes every sink exactly-once, whatever happened to the driver, its files or Spark:

- a batch whose end is at or below what the ledger says, in every partition, is in the sink already: skip it;
- a batch that starts exactly where the ledger ends, in every partition: write it, and move the ledger in the same
  transaction;
- anything else would lose or repeat rows: stop and say so.

Batch numbers are never compared: a new run starts counting again, a source range means the same for ever. A partition
the ledger does not know yet may start anywhere: where a pipeline begins is decided once, by its planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions

LEDGER_VERSION = 1
STATELESS = -1
"""In place of a version's number: the batch was taken by a pipeline without state."""


class LedgerMismatch(HoldfastError):
    """A batch neither continues a sink's ledger nor lies behind it."""


class Decision(Enum):
    WRITE = "write"
    SKIP = "skip"


@dataclass(frozen=True)
class Routes:
    """Where the records of a batch went, by count: each in exactly one route (once per row it was expanded to)."""

    main: int = 0
    dead_letter: Mapping[str, int] = field(default_factory=dict)
    """By reason: a rule's name, or `parse`."""
    filtered: Mapping[str, int] = field(default_factory=dict)
    """By step."""
    duplicate: int = 0
    late: int = 0

    @property
    def total(self) -> int:
        by_name = sum((*self.dead_letter.values(), *self.filtered.values()))
        return self.main + by_name + self.duplicate + self.late

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "dead_letter": dict(self.dead_letter), "filtered": dict(self.filtered)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Routes:
        return cls(**document)


@dataclass(frozen=True)
class Intake:
    """What the reader found in a range, counted and digested before the first step."""

    records: int = 0
    control: int = 0
    aborted: int = 0
    missing: int = 0
    """Offsets in no batch: compacted away."""
    bytes: int = 0
    digest: int = 0
    """Sum, modulo 2**64, of a hash of each record's place: the same in any order."""

    def as_json(self) -> dict[str, int]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, document: Mapping[str, int]) -> Intake:
        return cls(**document)


class Reached(NamedTuple):
    """How far a sink had come, as somebody outside it says. Compared in this order."""

    generation: int
    number: int
    """Of its newest entry; -1: its ledger was forgotten, on purpose."""
    place: str
    """Which place the definition named for its rows: at another one the sink is another."""


class Content(NamedTuple):
    """The digests of the rows that a batch wrote (`holdfast.pipeline.row_digest`), added modulo 2**128."""

    key: str
    """The id of the key that they were taken with."""
    digest: int
    """Of this batch's rows."""
    total: int
    """Of all rows since the entry `since`; of an upsert, of those that the table has after this batch."""
    since: int
    """The number of the first entry whose rows are in the total."""
    columns: Mapping[str, str]
    """Every column that a row since then had in its digest, with the type that it has for Spark."""

    def as_json(self) -> dict[str, Any]:
        sums = {name: f"{getattr(self, name):032x}" for name in ("digest", "total")}
        return {**self._asdict(), **sums, "columns": dict(self.columns)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Content:
        sums = {name: int(document[name], 16) for name in ("digest", "total")}
        return cls(**{**document, **sums})


class Rejected(NamedTuple):
    """A record that became a dead letter because a sink does not take a row made of it."""

    topic: str
    partition: int
    offset: int
    sink: str
    why: str


@dataclass(frozen=True)
class Erasure:
    """Rows that were taken out of a sink on purpose (`holdfast pipeline erase`), and which those were.

    It names places and sums, never a value: what was erased for a person's sake stays unknown.
    """

    reason: str
    rows: int
    entries: Mapping[str, tuple[int, str]]
    """By the number of the entry that they belonged to: how many rows, and the sum of their digests in hexadecimal.
    `BEFORE_LEDGER` stands for rows that are in no entry of the ledger of today."""
    places: tuple[tuple[str, int, str, str], ...]
    """Of each partition its topic, its number, and the rows' offsets and indexes (`pipeline.erased_places`)."""
    files: tuple[str, ...] = ()
    """That held them, and are to be removed."""

    def as_json(self) -> dict[str, Any]:
        entries = {number: list(each) for number, each in self.entries.items()}
        places = [list(each) for each in self.places]
        return {**vars(self), "entries": entries, "places": places, "files": list(self.files)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Erasure:
        return cls(
            document["reason"],
            document["rows"],
            {number: (rows, digest) for number, (rows, digest) in document["entries"].items()},
            tuple((topic, partition, at, of) for topic, partition, at, of in document["places"]),
            tuple(document["files"]),
        )


BEFORE_LEDGER = "-1"


@dataclass(frozen=True)
class Entry:
    """One entry of one sink's ledger: the batch it describes is in that sink, whole and once."""

    pipeline: str
    sink: str
    number: int
    """Counts this ledger's entries from 0, without a gap."""
    range: BatchRange
    positions: Positions
    """Where the sink stands after this batch, in every partition it knows: the last entry alone is enough."""
    batch_time_ms: int
    """The time that stood for "now" in the batch's steps."""
    fingerprint: str
    """Of the definition the batch was made with."""
    intake: Intake = Intake()
    routes: Routes = Routes()
    rows: int = 0
    """Rows this sink wrote for it."""
    watermark_ms: int | None = None
    """The pipeline's where the batch began."""
    state: int | None = STATELESS
    """The number of the version of the state that stands where the sink stands; nothing: no offset was taken yet."""
    lookups: Mapping[str, str] = field(default_factory=dict)
    """By step, the version of the reference table that the batch was made with."""
    taps: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By stateful step, what it counted: `taken`, `late`, `rows`, and its own counters."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the rows of each route that had some, in hexadecimal: `main`, `dead_letter`, `filtered`, `duplicate`, `late`,
    and `late-for:<step>` of those that were late for a tap. Entries of an earlier holdfast have none."""
    rejected: tuple[Rejected, ...] = ()
    """Records of the batch that are dead letters for a sink's sake: a batch that is repeated leaves them out again."""
    generation: int = 0
    """Counts how often the sink was made to begin anew, or again from an earlier place, on purpose."""
    others: Mapping[str, Reached] = field(default_factory=dict)
    """By name, how far the pipeline's other sinks had come when this entry was made: a sink that is lost later is known
    by the ledgers of those that are not. Entries of an earlier holdfast have none."""
    content: Content | None = None
    """Entries of an earlier holdfast have none: what their rows were is not known."""
    chain: str = ""
    """A key's id, and a keyed hash over the chain of the entry before and over this entry
    (`holdfast.pipeline.sealing`)."""
    erased: Erasure | None = None
    """The entry is about rows that were taken out: it takes no offset, and writes none."""

    def as_json(self) -> dict[str, Any]:
        return {
            "version": LEDGER_VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "range": self.range.as_json(),
            "positions": self.positions.as_json(),
            "intake": self.intake.as_json(),
            "routes": self.routes.as_json(),
            **({} if self.state == _unwritten_state(self.number) else {"state": self.state}),
            **{name: value for name in _SELDOM if (value := getattr(self, name))},
            **({"taps": {name: dict(counts) for name, counts in self.taps.items()}} if self.taps else {}),
            **({"rejected": [list(each) for each in self.rejected]} if self.rejected else {}),
            **({"others": {name: list(each) for name, each in self.others.items()}} if self.others else {}),
            **({"content": self.content.as_json()} if self.content is not None else {}),
            **({"erased": self.erased.as_json()} if self.erased is not None else {}),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Entry:
        if document["version"] != LEDGER_VERSION:
            raise LedgerMismatch(
                f"a ledger entry of sink {document.get('sink')!r} has version {document['version']}; "
                f"this holdfast reads version {LEDGER_VERSION}"
            )
        return cls(
            **{name: document[name] for name in _PLAIN},
            **{name: document[name] for name in (*_SELDOM, "taps") if name in document},
            range=BatchRange.from_json(document["range"]),
            positions=Positions.from_json(document["positions"]),
            intake=Intake.from_json(document["intake"]),
            routes=Routes.from_json(document["routes"]),
            state=document.get("state", _unwritten_state(document["number"])),
            rejected=tuple(Rejected(*each) for each in document.get("rejected", ())),
            others={name: Reached(*each) for name, each in document.get("others", {}).items()},
            content=Content.from_json(document["content"]) if "content" in document else None,
            erased=Erasure.from_json(document["erased"]) if "erased" in document else None,
        )


_PLAIN = ("pipeline", "sink", "number", "batch_time_ms", "fingerprint", "rows", "watermark_ms")
"""What every entry has, as it stands in JSON."""
_SELDOM = ("lookups", "digests", "generation", "chain")
"""What is written where there is something to say: entries of pipelines without it read as they always did."""


def erased_rows(entries: Iterable[Entry]) -> Counter[str]:
    """By the number of an entry, how many of its rows were erased since, as these entries say."""
    found: Counter[str] = Counter()
    for entry in entries:
        if entry.erased is not None:
            found.update({number: rows for number, (rows, _) in entry.erased.entries.items()})
    return found


def _unwritten_state(number: int) -> int | None:
    """What an entry without a state means: the first of a ledger is an opening, which takes no offset."""
    return None if number == 0 else STATELESS


NOWHERE = Positions({})


def decide(sink: str, standing: Positions, batch: BatchRange) -> Decision:
    """Whether this sink writes the batch or has it already; `LedgerMismatch` when it is neither."""
    decisions = {
        place: _decide_one(sink, standing, place, batch)
        for place, span in batch.spans.items()
        if span.offsets
    }
    kinds = set(decisions.values())
    if len(kinds) > 1:
        has = ", ".join(_name(place) for place, kind in sorted(decisions.items()) if kind is Decision.SKIP)
        raise LedgerMismatch(
            f"sink {sink!r} has part of the batch {batch} already ({has}) and part of it not: "
            "it was cut across a position of its ledger"
        )
    return kinds.pop() if kinds else Decision.WRITE


def _decide_one(sink: str, standing: Positions, place: Place, batch: BatchRange) -> Decision:
    span = batch.spans[place]
    known = standing.of(place.topic, place.partition)
    if known is None:
        return Decision.WRITE
    other, at = known
    if other.topic_id != place.topic_id:
        raise LedgerMismatch(
            f"sink {sink!r} was fed from {_name(place)} of another incarnation of the topic "
            f"(id {other.topic_id}, now {place.topic_id}): it was deleted and created again, and offsets of the two "
            "must not be mixed"
        )
    if span.end <= at.offset:
        return Decision.SKIP
    if span.start == at.offset:
        return Decision.WRITE
    verb = "would leave out" if span.start > at.offset else "would repeat"
    first, last = sorted((span.start, at.offset))
    raise LedgerMismatch(
        f"sink {sink!r} stands at {at.offset} of {_name(place)}, and a batch from {span.start} to {span.end} "
        f"{verb} the offsets {first} to {last - 1}"
    )


def _name(place: Place) -> str:
    return f"{place.topic}-{place.partition}"


def lowest(standings: Mapping[str, Positions]) -> Positions:
    """Where the sink that is furthest behind stands, partition by partition, among those that know the partition."""
    found: dict[Place, Position] = {}
    for standing in standings.values():
        for place, position in standing.at.items():
            if place not in found or position.offset < found[place].offset:
                found[place] = position
    return Positions(found)
