"""What a sink is to the auditor: a snapshot that is read and never written.

The rules of every reader:

- `open_sink` takes the snapshot. The ledger is read first, rows after it; what the pipeline adds meanwhile is not in
  the snapshot, or lies beyond the ledger's positions and is left alone by the comparison (`is_exact` says which).
- Nothing is locked, created, renamed or flushed: directories may be `r-x`, a role may only SELECT, a principal may
  only READ.
- What cannot be read is a finding or a gap, never an empty answer.

Entries of a ledger as an auditor takes them: read with suspicion, and compared with their neighbours.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.audit.lineage import LineageBatch
from holdfast.audit.model import AuditError, Fate, Finding, Range, Unproven
from holdfast.errors import HoldfastError
from holdfast.pipeline.ledger import Entry, Erasure
from holdfast.pipeline.positions import Place, Positions

if TYPE_CHECKING:
    import pyarrow as pa


LINEAGE: Final = "_hf"
CONTENT: Final = "_hf_content"
ERASED: Final = "erased by "
"""How the words for an erased row begin."""


class SinkUnreadable(AuditError):
    """A sink cannot be reached or read at all; the message says what to do."""


class SinkRebuilt(SinkUnreadable):
    """A sink's small batches were merged while it was read; it can be read again."""


NOWHERE_YET: Final = Positions({})


@dataclass(frozen=True)
class SinkScope:
    """Which rows a reader must give: by partition, from the start up to and without the end. A reader may give more;
    rows of partitions that are not named here it always gives, since nobody knows them."""

    spans: Mapping[Place, tuple[int, int]]
    turn: int | None = None
    """Of rows that a step made: those of later turns."""


EVERYTHING: Final = SinkScope({})


class Values(NamedTuple):
    """Rows as values, with their lineage as `_hf_topic`, `_hf_partition`, `_hf_offset` and `_hf_index`.

    Of rows of a window step `_hf_topic` is the step's name and `_hf_offset` the turn; one that takes a window back (a
    tombstone) has 0 in `_hf_count`."""

    table: pa.Table
    where: str = ""


@dataclass(frozen=True)
class ContentBatch:
    """Rows as they are stored, every column that the pipeline wrote, for their digests."""

    columns: Mapping[str, pa.Array]
    lineage: Mapping[str, pa.Array]
    """`topic`, `partition`, `offset` and `index`."""
    constants: Mapping[str, str | None] = field(default_factory=dict)
    """Columns that directories or a log name for all of these rows, as they are written there."""
    digests: Sequence[int | None] | None = None
    """Of an upsert, the digest kept beside each row."""
    is_before_reset: bool = False
    """The rows are in no ledger of today."""


@dataclass(frozen=True)
class ErasedRows:
    """Rows that an entry of the ledger says were taken out on purpose."""

    entry: Entry
    erasure: Erasure
    places: tuple[LineageBatch, ...]

    @property
    def words(self) -> str:
        moment = datetime.fromtimestamp(self.entry.batch_time_ms / 1000, UTC)
        return f"{ERASED}{self.erasure.reason!r} on {moment:%Y-%m-%d} (entry {self.entry.number})"


class SinkReader(ABC):
    """One sink, as it stood when it was opened."""

    kind: str
    """parquet, delta, postgres, kafka, dead_letter."""
    is_exact = True
    """Rows and ledger are of one moment: a row beyond the ledger was not written by the pipeline. Otherwise it may
    have come since, and only rows within the positions are judged."""
    erased: Sequence[ErasedRows] = ()
    """What the audit believes to be erased: none until it has looked at the ledger's chain."""
    keeps_digests: bool | None = None
    """Whether each row has its digest beside it, as those of an upsert have where their table has a column for
    it; nothing: entries have the sums of theirs."""
    undecided_offsets = 0
    """At a topic's ends, behind transactions that stayed open: nobody can say yet whether records there count."""

    def __init__(self, pipeline: str, name: str, takes: str) -> None:
        self.name = name
        self.pipeline = pipeline
        self.takes = takes
        """The step whose rows it has; nothing: those at the end of the steps."""
        self._entries: list[Entry] = []
        self._found: list[Finding] = []
        """While the ledger and the rows were read."""

    @property
    def gone_offsets(self) -> int:
        """What it once had and dropped by itself, as far as is known after its rows were read."""
        return 0

    def entries(self) -> Sequence[Entry]:
        """Every entry of the ledger that is kept, ascending. Nothing: the pipeline never wrote here."""
        return self._entries

    def positions(self) -> Positions:
        """Where the newest entry stands; empty without one."""
        return self._entries[-1].positions if self._entries else NOWHERE_YET

    @abstractmethod
    def columns(self) -> Sequence[str]:
        """What its rows are made of, the lineage as one column `_hf`."""

    @abstractmethod
    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        """The lineage of every row, each row once."""

    def values(self, columns: Sequence[str] | None = None, scope: SinkScope = EVERYTHING) -> Iterator[Values]:
        """The rows with these columns; nothing: with all. A sink of dead letters has none in this form."""
        return iter(())

    @abstractmethod
    def table_batches(self, columns: Sequence[str], scope: SinkScope = EVERYTHING) -> Iterator[pa.Table]:
        """The rows with their lineage (`_hf_topic`, `_hf_partition`, `_hf_offset`, `_hf_index`) and these columns, as
        they are stored. Of dead letters `reason` (`parse`, or a rule's name) and `error` are columns too."""

    @abstractmethod
    def contents(self, types: Mapping[str, str], scope: SinkScope = EVERYTHING) -> Iterator[ContentBatch]:
        """Every row with these columns, by the types they have for Spark; a column that is not there is left out. With
        a scope, rows from before it may be left out."""

    @abstractmethod
    def find(self, place: Place, offset: int) -> list[str]:
        """Where the rows made of one record are: file and row, table row, topic record."""

    @abstractmethod
    def problems(self) -> Iterable[Finding]:
        """What is wrong with the sink itself: files truncated, missing, or there and nobody's, holes in a log,
        rows of a file or batch that do not fit the ledger. May be asked for after `rows`."""

    @abstractmethod
    def gaps(self) -> Iterable[Unproven]:
        """What of it cannot be read any more: expired, vacuumed, compacted."""

    def close(self) -> None:  # noqa: B027  files are not held open
        """Let go of what is held open."""

    def _altered(self, detail: str, place: Place | None = None, ranges: Sequence[Range] = ()) -> None:
        self._found.append(Finding(Fate.ALTERED, self.name, place, tuple(ranges), detail=detail))


def erased_at(erased: Sequence[ErasedRows], place: Place, offset: int) -> list[str]:
    """The words for rows of one record that were erased."""
    return [
        each.words
        for each in erased
        if any(
            (batch.topic, batch.partition) == (place.topic, place.partition)
            and (batch.offsets == offset).any()
            for batch in each.places
        )
    ]


# ---------------------------------------------------------------------------- ledger


def read_entry(document: str | bytes | dict[str, Any], pipeline: str, sink: str) -> Entry:
    """An entry of this sink; `ValueError` says why it is none."""
    try:
        parsed = document if isinstance(document, dict) else json.loads(document)
        entry = Entry.from_json(parsed)
    except (HoldfastError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no entry: {type(error).__name__} {error}") from error
    wrong = _malformed(entry)
    if wrong:
        raise ValueError(f"it is no entry: {wrong}")
    if (entry.pipeline, entry.sink) != (pipeline, sink):
        raise ValueError(f"it is of the sink {entry.sink!r} of the pipeline {entry.pipeline!r}")
    return entry


def _malformed(entry: Entry) -> str:
    """What is not what it has to be; nothing: it is an entry."""
    routes = entry.routes
    tables = {"dead_letter": routes.dead_letter, "filtered": routes.filtered}
    texts = {"lookups": entry.lookups, "digests": entry.digests}
    if isinstance(entry.taps, dict):
        tables |= entry.taps
    for name, each in ({"taps": entry.taps} | tables | texts).items():
        if not isinstance(each, dict):
            return f"{name} is {each!r}"
    counts = {
        "number": entry.number,
        "rows": entry.rows,
        "batch_time_ms": entry.batch_time_ms,
        **{f"intake {name}": value for name, value in entry.intake.as_json().items() if name != "digest"},
        **{f"routes {name}": getattr(routes, name) for name in ("main", "duplicate", "late")},
        **{f"{name} {key}": value for name, by in tables.items() for key, value in by.items()},
        **{f"position of {place}": at.offset for place, at in entry.positions.at.items()},
    }
    for place, span in entry.range.spans.items():
        counts |= {f"start of {place}": span.start, f"end of {place}": span.end}
        if _is_count(span.start) and _is_count(span.end) and span.start > span.end:
            return f"the range of {place} is {span}"
    marks = {"watermark_ms": entry.watermark_ms, "state": entry.state, "digest": entry.intake.digest}
    wrong: dict[str, Any] = {name: value for name, value in counts.items() if not _is_count(value)}
    wrong |= {
        name: value
        for name, value in marks.items()
        if isinstance(value, bool) or not isinstance(value, int | None)
    }
    wrong |= {
        name: by for name, by in texts.items() if not all(isinstance(each, str) for each in by.values())
    }
    return next((f"{name} is {value!r}" for name, value in wrong.items()), "")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def hole_findings(sink: str, what: str, before: Entry | None, after: Entry | None) -> list[Finding]:
    """Entries that are missing between two others: by partition the offsets they took."""
    if before is None or after is None:
        what += "" if before is after else "; what they took is not known"
        return [Finding(Fate.ALTERED, sink, detail=what)]
    ends = {place: at.offset for place, at in after.positions.at.items()}
    ends |= {place: span.start for place, span in after.range.spans.items()}
    found = [
        Finding(Fate.ALTERED, sink, place, ((start.offset, end - 1),), detail=what)
        for place, end in sorted(ends.items())
        if (start := before.positions.at.get(place)) is not None and start.offset < end
    ]
    return found or [Finding(Fate.ALTERED, sink, detail=f"{what}; they took no offset")]


def number_holes(sink: str, entries: Sequence[Entry], what: str) -> Iterator[Finding]:
    """Numbers missing in a ledger that keeps every entry."""
    before: Entry | None = None
    for entry in entries:
        expected = 0 if before is None else before.number + 1
        if entry.number > expected:
            numbers = f"{expected}" if entry.number == expected + 1 else f"{expected} to {entry.number - 1}"
            yield from hole_findings(sink, f"entry {numbers} missing from {what}", before, entry)
        before = entry


def newest_turn(entries: Sequence[Entry]) -> int | None:
    """Of the rows that a step made in these batches; nothing where one does not tell."""
    turns = [entry.state for entry in entries if entry.range]
    return max((turn for turn in turns if turn is not None), default=None) if None not in turns else None
