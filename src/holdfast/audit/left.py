"""The records that left a pipeline before its sinks: dead letters, and what its home says was filtered or set aside.

Dead letters are records of a topic, and evidence by themselves. The others are nowhere but in the record that the
pipeline keeps in its home (`holdfast.pipeline.aside`): the auditor takes their places from there, holds their numbers
and digests against the ledgers, makes again what it can, and says what it could not.

Of which batches the record is needed, the ledgers' entries say. One that says rows left, and whose record is not
there, leaves a gap: what is in no sink may have been filtered, or lost. If just as many are in no sink as the entry
says have left, and their digests agree, they are taken for those; the gap is told all the same where no digest is kept.

Sinks that take a stream beside the chain of steps: the rows a step set aside, or those it made itself.

- `<step>.late` and `<step>.duplicates` hold rows of records, as they came. The pipeline's home records which those are,
  and a sink must have exactly them.
- `<step>` of a keyed function or a join holds rows of the step's own making, numbered within the turn of the batch that
  made them. The ledger tells how many rows each turn gave: as many are there, each number once, and no others. That the
  step made the right ones is taken on its word. Windows are recomputed instead (`stateful`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.audit.compare import Holding, marked
from holdfast.audit.coverage import ANY
from holdfast.audit.lineage import LineageBatch, as_ranges, split_columns
from holdfast.audit.model import (
    ColumnCoverage,
    Examined,
    Fate,
    Finding,
    Said,
    Unproven,
    gap,
    ranges_text,
)
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.audit.sinks.letters import letters
from holdfast.audit.source import RECORD, PartitionWalk
from holdfast.pipeline.aside import (
    DUPLICATE,
    FILTERED,
    LATE,
    LATE_FOR,
    AsideDamaged,
    batch_name,
    counts_of,
    read_all,
)
from holdfast.pipeline.definition.model import Dedupe, KafkaSink, PipelineDefinition, SinkDefinition
from holdfast.pipeline.definition.streams import DUPLICATES, has_own_rows, is_stateful, merged, streams
from holdfast.pipeline.digest import MASK, digest_of_offsets
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    import pyarrow as pa

ROUTES: Final = {FILTERED: Fate.FILTERED, DUPLICATE: Fate.DUPLICATE, LATE: Fate.LATE}
PARSE: Final = "parse"
"""The reason of a dead letter that could not be decoded."""
REJECTED_BY: Final = "sink:"
"""Begins the reason of a dead letter of which a sink did not take a row."""

Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]


Routes = dict[Fate, Holding]
"""The rows that left, by where to."""


class Departure(NamedTuple):
    """Rows of one partition that left the chain at a step, or were late for one that lets rows go on (`LATE_FOR`)."""

    rows: LineageBatch
    step: str
    """Of dead letters their reason."""
    route: str


@dataclass
class Left:
    """The routes out of the steps, as counts for each offset of the scope."""

    routes: Routes
    own: dict[str, Left] = field(default_factory=dict)
    """For sinks that took batches by themselves: what left of theirs."""
    examined: Examined = field(default_factory=Examined)
    unrecorded: list[Entry] = field(default_factory=list)
    """Entries that say rows left, whose record is not there."""
    unparsed: Holding | None = None
    """Dead letters that could not be decoded."""
    departures: list[Departure] = field(default_factory=list)
    """The same step by step, for a pipeline that remembers rows."""
    unknown: str = ""
    """Why of some records nobody knows at which step they left; nothing: of all it is known."""

    def of(self, route: str, step: str) -> Holding:
        """What left a step by a route."""
        every = self.routes[Fate.LATE]
        found = Holding(step, every.spans, numbers_rows=every.numbers_rows)
        found.add(each.rows for each in self.departures if (each.route, each.step) == (route, step))
        return found


def remembering(definition: PipelineDefinition) -> str:
    """Why what is new of this pipeline cannot be judged by itself; nothing: it can."""
    for step in definition.steps:
        if is_stateful(step):
            return f"step {step.name!r} remembers rows"
    for sink in definition.sinks:
        if merged(sink) is not None:
            return f"sink {sink.name!r} keeps the last row of each key"
    return ""


def expands(definition: PipelineDefinition) -> bool:
    """Whether a step may make several rows of a record."""
    return any(getattr(step, "expand", False) for step in definition.steps)


def read_left(
    definition: PipelineDefinition,
    home: str,
    spans: Mapping[Place, Span],
    entries: Sequence[Entry],
) -> Left:
    """What the home's record says of these entries' batches."""
    numbers, by_step = expands(definition), bool(remembering(definition))
    left = Left({fate: Holding(str(fate), spans, numbers_rows=numbers) for fate in ROUTES.values()})
    wanted = {batch_name(entry.range, entry.fingerprint): entry for entry in entries}
    try:
        recorded = read_all(home, wanted)
    except (AsideDamaged, OSError) as error:
        left.unrecorded = [entry for entry in entries if leaving(entry)]
        left.unknown = "the pipeline's record of rows that left cannot be read"
        detail = f"the pipeline's record of rows that left: {error}"
        is_damaged = isinstance(error, AsideDamaged)
        altered = [Finding(Fate.ALTERED, "", count=1, detail=detail)]
        left.examined = Examined.of(altered if is_damaged else _unrecorded(left.unrecorded, detail))
        return left
    found: list[Finding] = []
    seen: set[str] = set()
    for batch, table in recorded:
        seen.add(batch.name)
        digests = _take(table, left, by_step)
        counts, entry = counts_of(table), wanted[batch.name]
        found += against(entry, counts)
        found += _differing(entry, LATE_FOR, "late for", _late_for(definition, entry), counts)
        found += _misplaced(entry, digests)
    missing = [entry for name, entry in wanted.items() if name not in seen]
    left.unrecorded = [entry for entry in missing if leaving(entry)]
    if any(leaving(entry) or _late_for(definition, entry) for entry in missing):
        left.unknown = "the pipeline's home has no record of which records left or were late in some batches"
    left.examined = Examined.of((*found, *_unrecorded(left.unrecorded)))
    return left


def _take(table: pa.Table, left: Left, by_step: bool) -> dict[tuple[str, str], int]:
    """Count the rows; by route and step, the digest of their places."""
    import pyarrow.compute as pc

    digests: dict[tuple[str, str], int] = {}
    routes, steps = table["route"].cast("string"), table["step"].cast("string")
    for route, step in sorted(counts_of(table)):
        chosen = table.filter(pc.and_(pc.equal(routes, route), pc.equal(steps, step)))
        columns = [chosen[name].combine_chunks() for name in ("topic", "partition", "offset", "index")]
        for rows in split_columns(*columns):
            digest = digest_of_offsets(rows.topic, rows.partition, rows.offsets)
            digests[route, step] = (digests.get((route, step), 0) + digest) & MASK
            if route in ROUTES:
                left.routes[ROUTES[route]].add([rows])
            if by_step:
                left.departures.append(Departure(rows, step, route))
    return digests


def _misplaced(entry: Entry, digests: Mapping[tuple[str, str], int]) -> Iterator[Finding]:
    """Of rows that were late for a step and went on, which no sink lacks: others are recorded than were counted."""
    for (route, step), digest in sorted(digests.items()):
        said = entry.digests.get(f"{LATE_FOR}:{step}")
        if route == LATE_FOR and said is not None and int(said, 16) != digest:
            detail = (
                f"the pipeline's record of rows that were late for {step!r} has others than entry {entry.number} of "
                f"the ledger of {entry.sink!r} knows: their digest is another"
            )
            yield Finding(Fate.ALTERED, "", count=1, detail=detail)


def leaving(entry: Entry) -> int:
    return sum(entry.routes.filtered.values()) + entry.routes.duplicate + entry.routes.late


def _late_for(definition: PipelineDefinition, entry: Entry) -> dict[str, int]:
    """By tap, how many rows were late for it."""
    taps = [step.name for step in definition.steps if has_own_rows(step)]
    return {name: late for name in taps if (late := entry.taps.get(name, {}).get("late", 0))}


def against(entry: Entry, counts: Mapping[tuple[str, str], int]) -> Iterator[Finding]:
    """By step, what the record and the ledger's entry count."""
    yield from _differing(entry, FILTERED, "filtered by", entry.routes.filtered, counts)
    for route, said in ((DUPLICATE, entry.routes.duplicate), (LATE, entry.routes.late)):
        yield from _disagree(entry, route, said, sum(each for key, each in counts.items() if key[0] == route))


def _differing(
    entry: Entry, route: str, what: str, said: Mapping[str, int], counts: Mapping[tuple[str, str], int]
) -> Iterator[Finding]:
    for step in sorted(said.keys() | {step for each, step in counts if each == route}):
        yield from _disagree(entry, f"{what} {step!r}", said.get(step, 0), counts.get((route, step), 0))


def _disagree(entry: Entry, what: str, said: int, recorded: int) -> Iterator[Finding]:
    detail = (
        f"entry {entry.number} of the ledger of {entry.sink!r} counts {said} rows {what}, and the pipeline's "
        f"record of rows that left has {recorded}"
    )
    if said != recorded:
        yield Finding(Fate.ALTERED, "", count=abs(said - recorded), detail=detail)


def _unrecorded(
    entries: Sequence[Entry], why: str = "the pipeline's home has no record of them"
) -> list[Unproven]:
    if not entries:
        return []
    rows = sum(leaving(entry) for entry in entries)
    numbers = f"{entries[0].number}" if len(entries) == 1 else f"{entries[0].number} to {entries[-1].number}"
    what = f"which {rows:,} records left by a filter, as duplicates or late, in the batches {numbers}"
    return [gap(what, why)]


def take_letters(reader: SinkReader, left: Left, *, by_step: bool) -> None:
    """The dead letters that could not be decoded; and of all, by step, which rule sent them away."""
    left.unparsed = Holding(PARSE, left.routes[Fate.LATE].spans)
    for rows, reasons in letters(reader):
        texts = reasons.fill_null("").dictionary_encode()
        codes = texts.indices.to_numpy(zero_copy_only=False)
        for code, reason in enumerate(texts.dictionary.to_pylist()):
            chosen = codes == code
            part = replace(rows, offsets=rows.offsets[chosen], indexes=rows.indexes[chosen])
            if reason == PARSE:
                left.unparsed.add([part])
            if by_step:
                left.departures.append(Departure(part, reason, str(Fate.DEAD_LETTER)))
    if reader.gone_offsets:
        left.unknown = "the dead letter topic has forgotten which records left"


# ---------------------------------------------------------------------------- side streams


@dataclass(frozen=True)
class SideStream:
    """What a sink takes, in the words of the home's record."""

    route: str
    step: str


def side_stream(definition: PipelineDefinition, takes: str) -> SideStream | None:
    """The rows a step set aside that a sink takes; nothing when it takes others."""
    stream = streams(definition).get(takes)
    if stream is None or not stream.kind:
        return None
    step = next(each for each in definition.steps if each.name == stream.step)
    if not isinstance(step, Dedupe):
        return SideStream(LATE_FOR, step.name)
    return SideStream(DUPLICATE if stream.kind == DUPLICATES else LATE, step.name)


def check_side(
    sink: Holding, expected: Holding, parts: Sequence[PartitionWalk], starts: Mapping[Place, int]
) -> Iterator[Finding]:
    """The sink has the rows that were set aside, and no others."""
    for part in parts:
        have, wanted = sink.counts[part.place], expected.counts[part.place]
        known = part.codes == RECORD
        known[: max(0, starts.get(part.place, part.start) - part.start)] = False
        for fate, mask, detail in (
            (Fate.LOST, known & (have < wanted), "set aside by the step, and not here"),
            (Fate.DUPLICATED, known & (wanted > 0) & (have > wanted), "more than once"),
            (Fate.EXTRA, (have > 0) & (wanted == 0), "not among the rows that the step set aside"),
        ):
            yield from marked(fate, sink.name, part, mask, detail)


def hides_rows(sink: SinkDefinition) -> bool:
    """Whether an expression makes a topic's values, which then do not show what they were made of."""
    return isinstance(sink, KafkaSink) and sink.value is not None


def check_turns(reader: SinkReader, entries: Sequence[Entry], before: int | None = None) -> Iterator[Said]:
    """The rows of a step's own making are as many in every turn as the ledger says, each once; `before` is the newest
    turn that an earlier audit has proven."""
    step = reader.takes
    since = -1 if before is None else before
    numbers: list[Offsets] = [np.empty(0, np.int64)]
    strangers = 0
    erased = (batch for each in reader.erased for batch in each.places)
    for batch in chain(reader.rows(SinkScope({}, before)), erased):
        if batch.topic != step:
            strangers += len(batch)
        else:
            numbers.append(((batch.offsets << 32) | batch.indexes.astype(np.int64))[batch.offsets > since])
    if strangers:
        detail = f"rows that step {step!r} did not make"
        yield Finding(Fate.EXTRA, reader.name, count=strangers, detail=detail)
    rows = np.sort(np.concatenate(numbers))
    repeated = rows[1:][rows[1:] == rows[:-1]]
    if len(repeated):
        turns = ranges_text(as_ranges(np.unique(repeated >> 32)))
        yield Finding(Fate.DUPLICATED, reader.name, count=len(repeated), detail=f"rows of turn {turns} twice")
    yield from _by_turn(reader, entries, rows >> 32, since)
    yield ColumnCoverage(reader.name, ANY, why=f"step {step!r} made it, which is not made again here")


def _by_turn(reader: SinkReader, entries: Sequence[Entry], turns: Offsets, since: int) -> Iterator[Finding]:
    said: Counter[int] = Counter()
    for entry in entries:
        if entry.range and entry.state is not None and entry.state > since:
            said[entry.state] += entry.rows
    is_complete = bool(entries) and entries[0].number == 0
    newest = max(said, default=-1)
    held = dict(zip(*(each.tolist() for each in np.unique(turns, return_counts=True)), strict=True))
    for turn in sorted(said.keys() | held.keys()):
        if turn not in said and (not is_complete or (turn > newest and not reader.is_exact)):
            continue  # its entry is not kept, or it is younger than the ledger we read
        wanted, have = said[turn], held.get(turn, 0)
        if wanted == have:
            continue
        fate = Fate.EXTRA if turn not in said else Fate.LOST if have < wanted else Fate.DUPLICATED
        detail = f"turn {turn} of {reader.takes!r} gave {wanted} rows by the ledger, and {have} are there"
        yield Finding(fate, reader.name, count=abs(wanted - have), detail=detail)
