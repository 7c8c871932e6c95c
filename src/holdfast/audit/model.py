"""The words of an audit's report: what an offset is, what became of a record, what was found, and the verdict.

Every value is plain and frozen, and has one JSON form (`as_json`, `from_json`), the one that certificates keep. Unknown
names in a document are left alone, so that an older reader takes a newer certificate of the same major version.

The rules of the verdict:

- `failed`: something is lost, there twice, there and never produced, or not what the source says. It wins over all.
- `inconclusive`: nothing was found wrong, and something that had to be looked at could not be (`Unproven.is_gap`), or
  a cell is trusted that nobody has accepted by name.
- `accepted`: cells are trusted, and somebody has accepted each of their columns by name.
- `unaltered`: every cell is recomputed, or is what its digest says was written.
- `proven`: every offset of the scope is accounted for, and every cell is recomputed.

A cell is one column of one row of a sink; a nested value is one cell, since it is compared as a whole. What a step let
go is no cell of any sink: it stands under the sink `steps`, with the step for its column and a cell for each record.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, wraps
from types import UnionType
from typing import Any, Final, Literal, ParamSpec, Self, cast, get_args, get_origin, get_type_hints

from holdfast.errors import HoldfastError
from holdfast.pipeline.positions import Place

REPORT_VERSION: Final = 1
KEYS_MAX: Final = 5
"""Keys named with a finding: enough to look for it, few enough to read back one by one."""
RANGES_SHOWN: Final = 5
BUCKETS_MAX: Final = 200
"""Points of a plot."""

Range = tuple[int, int]
"""Offsets from the first to the last, both included."""
Mode = Literal["pipeline", "checkpoint", "topics", "group", "spool"]


class AuditError(HoldfastError):
    """An audit cannot be made: what it has to read is not there, or cannot be read."""

    exit_code = 3


class Kind(StrEnum):
    """What an offset of the source is."""

    RECORD = "record"
    CONTROL = "control"
    ABORTED = "aborted"
    COMPACTED = "compacted"
    """In no batch of the log: compacted away, or never given to a record."""
    EXPIRED = "expired"
    """Below the log's start: nobody can say what it was."""


class Fate(StrEnum):
    """What became of a record. The first are fine; the last four are findings."""

    OUTPUT = "output"
    AGGREGATED = "aggregated"
    SUPERSEDED = "superseded"
    DEAD_LETTER = "dead_letter"
    DUPLICATE = "duplicate"
    LATE = "late"
    FILTERED = "filtered"
    ERASED = "erased"
    """Taken out of the sinks on purpose, as an entry of their ledgers says."""
    PENDING = "pending"
    """Beyond what a sink's ledger has: not yet."""
    LOST = "lost"
    DUPLICATED = "duplicated"
    """Twice in a sink, or in two routes."""
    EXTRA = "extra"
    """A row whose place is not a record of the source: never produced, aborted, or beyond the ledger."""
    ALTERED = "altered"
    """A window, a file or a ledger that does not say what the source says."""

    @property
    def is_fault(self) -> bool:
        return self in FAULTS


FAULTS: Final = frozenset({Fate.LOST, Fate.DUPLICATED, Fate.EXTRA, Fate.ALTERED})


class Verdict(StrEnum):
    PROVEN = "proven"
    UNALTERED = "unaltered"
    ACCEPTED = "accepted"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        return {Verdict.FAILED: 1, Verdict.INCONCLUSIVE: 4}.get(self, 0)


class Evidence(StrEnum):
    """How far a cell of a sink is known to be what it should be."""

    RECOMPUTED = "recomputed"
    """Made again from the log, and equal."""
    UNALTERED = "unaltered"
    """Equal to what was written, by its digest; nobody has looked whether that was right."""
    TRUSTED = "trusted"
    """Neither."""


STEPS: Final = "steps"
"""In place of a sink: what steps let go."""


@dataclass(frozen=True)
class Document:
    """A value with one JSON form: an object with its fields, in which unknown names are left alone."""

    def as_json(self) -> dict[str, Any]:
        kinds: Mapping[str, Any] = _kinds(cast("Any", type(self)))
        return {name: _written(kind, getattr(self, name)) for name, kind in kinds.items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        kinds: Mapping[str, Any] = _kinds(cast("Any", cls))
        return cls(**{name: _read(kind, document[name]) for name, kind in kinds.items() if name in document})


@cache
def _kinds(kind: type[Document]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _written(kind: Any, value: Any) -> Any:
    """A value of this type in JSON: places are objects, and so are mappings, but for those of places to offsets."""
    if type(value) in (str, int, bool, float):  # most are
        return value
    inner = get_args(kind)
    if isinstance(value, Document):
        return value.as_json()
    if isinstance(value, Place):
        return place_json(value)
    if isinstance(value, Mapping) and inner[0] is Place:
        return [{**place_json(place), "offset": offset} for place, offset in sorted(value.items())]
    if isinstance(value, Mapping):
        return {str(name): _written(inner[1], each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_written(inner[0], each) for each in value]
    return str(value) if isinstance(value, StrEnum) else value


def _read(kind: Any, document: Any) -> Any:
    """A value of this type out of JSON."""
    inner = get_args(kind)
    if get_origin(kind) is UnionType:
        return None if document is None else _read(inner[0], document)
    if get_origin(kind) is tuple:
        kinds = (inner[0],) * len(document) if inner[-1] is Ellipsis else inner
        return tuple(_read(each, part) for each, part in zip(kinds, document, strict=True))
    if get_origin(kind) is Mapping and inner[0] is Place:
        return {place_from_json(each): each["offset"] for each in document}
    if get_origin(kind) is Mapping:
        return {inner[0](name): _read(inner[1], each) for name, each in document.items()}
    if isinstance(kind, type) and issubclass(kind, Document):
        return kind.from_json(document)
    if kind is Place:
        return place_from_json(document)
    return kind(document) if isinstance(kind, type) and issubclass(kind, StrEnum) else document


@dataclass(frozen=True)
class Finding(Document):
    """Something that is wrong, as far as possible with the offsets and the keys of the records it is about."""

    fate: Fate
    sink: str
    """The sink's name; nothing: no sink in particular."""
    place: Place | None = None
    ranges: tuple[Range, ...] = ()
    count: int = 0
    """How many records or rows: the ranges may be cut short, this is not."""
    keys: tuple[str, ...] = ()
    """Of the first of them."""
    detail: str = ""

    def what(self) -> str:
        """One line."""
        parts = [f"{self.count:,} {self.fate}" if self.count else str(self.fate)]
        if self.place is not None:
            parts.append(f"{self.place.topic}-{self.place.partition}")
        if self.ranges:
            parts.append("at " + ranges_text(self.ranges))
        if self.sink:
            parts.append(f"in {self.sink}")
        if self.keys:
            parts.append("key " + ", ".join(self.keys))
        return " ".join(parts) + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Unproven(Document):
    """Something the audit takes on somebody's word, or could not look at."""

    what: str
    why: str
    is_gap: bool = False
    """It makes the verdict inconclusive; otherwise it is printed and no more."""


def gap(what: str, why: str) -> Unproven:
    """Something that had to be looked at and could not be."""
    return Unproven(what, why, is_gap=True)


@dataclass(frozen=True)
class PartitionAccount(Document):
    """Every offset of a partition's scope, by what it is and by what became of it."""

    place: Place
    start: int
    end: int
    """Without it."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    fates: Mapping[str, int] = field(default_factory=dict)
    """Of the records; they add up to `kinds["record"]`, pending ones apart, which lie beyond the end."""
    log_start: int = 0
    log_end: int = 0
    """When the audit began: the last stable offset."""
    digest: str = ""
    """Of the places of the records in the scope (`holdfast.pipeline.digest`), 16 hexadecimal digits."""


@dataclass(frozen=True)
class SinkAccount(Document):
    """One sink: what it holds, and how far its ledger is."""

    name: str
    kind: str
    """parquet, delta, postgres, kafka, dead_letter, topic, table…"""
    rows: int = 0
    entries: int = 0
    """Of its ledger, those that are kept."""
    positions: Mapping[str, int] = field(default_factory=dict)
    """By `topic-partition`: the next offset it takes."""
    fates: Mapping[str, int] = field(default_factory=dict)
    takes: str = ""
    """The step whose rows it has; nothing: those at the end of the steps."""


@dataclass(frozen=True)
class WindowAccount(Document):
    """The windows of one step in one sink."""

    sink: str
    step: str
    windows: int = 0
    """Rows of the sink that stand for a window today (what was replaced or taken back apart)."""
    records: int = 0
    """Places in them, each window counting its own: the sum of their counts."""
    recomputed: int = 0
    """Windows whose count and digest were made again from the source, and agree."""
    expected: int = 0
    """Windows that the source says there must be, where that could be computed."""
    open: int = 0
    """Windows of the source that are not closed yet, and are not expected in the sink."""


@dataclass(frozen=True)
class ColumnCoverage(Document):
    """The cells of one column of one sink, in the rows of the scope, by what is known of them."""

    sink: str
    column: str
    recomputed: int = 0
    unaltered: int = 0
    trusted: int = 0
    why: str = ""
    """Why not all of them are recomputed."""

    @property
    def name(self) -> str:
        """As `--accept` takes it."""
        return f"{self.sink}.{self.column}"

    @property
    def cells(self) -> int:
        return self.recomputed + self.unaltered + self.trusted


@dataclass(frozen=True)
class Timeline(Document):
    """Records by the time kept with them and by fate, for plots: at most `BUCKETS_MAX` points."""

    bucket_ms: int = 0
    starts_ms: tuple[int, ...] = ()
    counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By fate, one number for each start."""


@dataclass(frozen=True)
class Scope(Document):
    """What an audit is about, in words and numbers: where it starts, where it ends, and why."""

    begins: str = ""
    """Why it starts where it does: `the pipeline's first entry`, `--from`, `the oldest entry kept`…"""
    ends: str = ""
    offsets: int = 0
    expired: int = 0
    pending: int = 0
    """Records' offsets between the scope's end and the log's end, when the audit began."""


@dataclass(frozen=True)
class Report(Document):
    """What one audit found."""

    subject: str
    """The pipeline's name, the group's, the two topics'…"""
    mode: Mode = "pipeline"
    started_ms: int = 0
    took_ms: int = 0
    scope: Scope = Scope()
    partitions: tuple[PartitionAccount, ...] = ()
    sinks: tuple[SinkAccount, ...] = ()
    windows: tuple[WindowAccount, ...] = ()
    findings: tuple[Finding, ...] = ()
    unproven: tuple[Unproven, ...] = ()
    timeline: Timeline = Timeline()
    lag: Mapping[str, int] = field(default_factory=dict)
    """By sink: offsets between its position and the log's end."""
    notes: tuple[str, ...] = ()
    """What a reader should know and is neither wrong nor unproven."""
    fingerprint: str = ""
    """Of the definition that was audited."""
    versions: Mapping[str, str] = field(default_factory=dict)
    coverage: tuple[ColumnCoverage, ...] = ()
    accepted: tuple[str, ...] = ()
    """Columns, as `SINK.COLUMN`, whose cells somebody accepts as they are."""
    erased: tuple[Finding, ...] = ()
    """Rows that were taken out on purpose, by sink, erasure and partition: nothing is wrong with that."""

    @property
    def verdict(self) -> Verdict:
        if self.findings:
            return Verdict.FAILED
        if any(each.is_gap for each in self.unproven) or self.trusted:
            return Verdict.INCONCLUSIVE
        if any(each.trusted for each in self.coverage):
            return Verdict.ACCEPTED
        return Verdict.UNALTERED if any(each.unaltered for each in self.coverage) else Verdict.PROVEN

    def exit_code(self, *, is_strict: bool = False) -> int:
        """Of the verdict; strictly, what is unaltered has to be accepted by name too."""
        code = self.verdict.exit_code
        is_open = any(each.unaltered for each in self.coverage if each.name not in self.accepted)
        return Verdict.INCONCLUSIVE.exit_code if is_strict and is_open and code == 0 else code

    @property
    def trusted(self) -> tuple[ColumnCoverage, ...]:
        """Columns with cells that nobody can vouch for, and nobody has accepted."""
        return tuple(each for each in self.coverage if each.trusted and each.name not in self.accepted)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is `failed` or `inconclusive`."""
        if self.findings:
            return tuple(each.what() for each in self.findings)
        return (
            *(f"{each.what}: {each.why}" for each in self.unproven if each.is_gap),
            *(f"{each.trusted:,} cells of {each.name} are trusted: {each.why}" for each in self.trusted),
        )

    def cells(self, evidence: Evidence) -> int:
        return sum(int(getattr(each, evidence)) for each in self.coverage)

    def total(self, fate: Fate) -> int:
        """Records with this fate, one that is missing in two sinks once; faults that are about no partition (windows,
        files) count too."""
        of_fate = [each for each in self.findings if each.fate is fate]
        by_sink: Counter[tuple[Place, str]] = Counter()
        for each in of_fate:
            if each.place is not None:
                by_sink[each.place, each.sink] += each.count or 1
        counted = {account.place: account.fates.get(fate, 0) for account in self.partitions}
        for (place, _), count in by_sink.items():
            counted[place] = max(counted.get(place, 0), count)
        return sum(counted.values()) + sum(each.count or 1 for each in of_fate if each.place is None)

    def as_json(self) -> dict[str, Any]:
        return {"version": REPORT_VERSION, "verdict": str(self.verdict), **super().as_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        if document["version"] != REPORT_VERSION:
            raise AuditError(
                f"a report of version {document['version']} cannot be read; this holdfast reads {REPORT_VERSION}"
            )
        return super().from_json(document)


@dataclass(frozen=True)
class Examined:
    """What one part of an audit found: parts are put together into a report."""

    findings: tuple[Finding, ...] = ()
    unproven: tuple[Unproven, ...] = ()
    windows: tuple[WindowAccount, ...] = ()
    notes: tuple[str, ...] = ()
    coverage: tuple[ColumnCoverage, ...] = ()
    """What this part knows of cells: several may speak of one column, each of other cells."""

    @classmethod
    def of(cls, said: Iterable[Said]) -> Examined:
        """Each in its place."""
        listed = tuple(said)
        kinds: tuple[Any, ...] = (Finding, Unproven, WindowAccount, str, ColumnCoverage)
        return cls(*(tuple(each for each in listed if isinstance(each, kind)) for kind in kinds))

    def __add__(self, other: Examined) -> Examined:
        return Examined(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Examined)))


Said = Finding | Unproven | WindowAccount | str | ColumnCoverage
"""One thing that a part of an audit says; a text is a note."""
_P = ParamSpec("_P")


def examining(check: Callable[_P, Iterable[Said]]) -> Callable[_P, Examined]:
    """A part of an audit that says one thing after the other."""

    @wraps(check)
    def examined(*given: _P.args, **named: _P.kwargs) -> Examined:
        return Examined.of(check(*given, **named))

    return examined


def place_json(place: Place) -> dict[str, Any]:
    return {"topic": place.topic, "topic_id": str(place.topic_id), "partition": place.partition}


def place_from_json(document: Mapping[str, Any]) -> Place:
    return Place(document["topic"], uuid.UUID(document["topic_id"]), document["partition"])


def ranges_text(ranges: Iterable[Range], shown: int = RANGES_SHOWN) -> str:
    """`3, 7–9 and 12 more ranges`."""
    listed = list(ranges)
    parts = [f"{first}" if first == last else f"{first}-{last}" for first, last in listed[:shown]]
    more = len(listed) - shown
    return ", ".join(parts) + (f" and {more} more range{'s' if more > 1 else ''}" if more > 0 else "")
