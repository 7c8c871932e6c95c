"""The records that left a pipeline before its sinks: dead letters, and what its home says was filtered or set aside.

Dead letters are records of a topic, and evidence by themselves. The others are nowhere but in the record that the
pipeline keeps in its home (`holdfast.pipeline.aside`): the auditor takes their places from there, holds their numbers
and digests against the ledgers, makes again what it can, and says what it could not.

Of which batches the record is needed, the ledgers' entries say. One that says rows left, and whose record is not
there, leaves a gap: what is in no sink may have been filtered, or lost. If just as many are in no sink as the entry
says have left, and their digests agree, they are taken for those; the gap is told all the same where no digest is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.audit.compare import Holding
from holdfast.audit.lineage import LineageBatch, split_columns
from holdfast.audit.model import Examined, Fate, Finding, Unproven
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
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.streams import is_tap
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.audit.sinks.base import DeadLetterReader

ROUTES: Final = {FILTERED: Fate.FILTERED, DUPLICATE: Fate.DUPLICATE, LATE: Fate.LATE}
PARSE: Final = "parse"
"""The reason of a dead letter that could not be decoded."""
REJECTED_BY: Final = "sink:"
"""Begins the reason of a dead letter of which a sink did not take a row."""

Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]


class Listener(Protocol):
    """Somebody who wants to know which record left at which step."""

    def left(self, topic: str, partition: int, offsets: Offsets, step: str, route: str = ...) -> None: ...

    def late_for(self, topic: str, partition: int, offsets: Offsets, step: str) -> None: ...

    def not_recorded(self, why: str) -> None:
        """Of some records nobody knows at which step they left."""


Routes = dict[Fate, Holding]
"""The rows that left, by where to."""


@dataclass
class Left:
    """The routes out of the steps, as counts for each offset of the scope."""

    routes: Routes
    own: dict[str, Routes] = field(default_factory=dict)
    """For sinks that took batches by themselves: what left of theirs."""
    examined: Examined = field(default_factory=Examined)
    unrecorded: list[Entry] = field(default_factory=list)
    """Entries that say rows left, whose record is not there."""
    unparsed: Holding | None = None
    """Dead letters that could not be decoded."""
    kept: dict[tuple[str, str], Holding] = field(default_factory=dict)
    """By route and step, of those that were asked for."""


def expands(definition: PipelineDefinition) -> bool:
    """Whether a step may make several rows of a record."""
    return any(getattr(step, "expand", False) for step in definition.steps)


def read_left(
    definition: PipelineDefinition,
    home: str,
    spans: Mapping[Place, Span],
    entries: Sequence[Entry],
    listener: Listener | None = None,
    kept: Iterable[tuple[str, str]] = (),
) -> Left:
    """What the home's record says of these entries' batches; `kept` are routes of steps to keep apart as well."""
    numbers = expands(definition)
    left = Left({fate: Holding(str(fate), spans, numbers_rows=numbers) for fate in ROUTES.values()})
    left.kept = {each: Holding(each[1], spans, numbers_rows=numbers) for each in kept}
    wanted = {batch_name(entry.range, entry.fingerprint): entry for entry in entries}
    try:
        recorded = read_all(home, wanted)
    except (AsideDamaged, OSError) as error:
        left.unrecorded = [entry for entry in entries if leaving(entry)]
        if listener is not None:
            listener.not_recorded("the pipeline's record of rows that left cannot be read")
        detail = f"the pipeline's record of rows that left: {error}"
        if isinstance(error, AsideDamaged):
            left.examined = Examined((Finding(Fate.ALTERED, "", count=1, detail=detail),))
        else:
            left.examined = Examined((), tuple(_unrecorded(left.unrecorded, detail)))
        return left
    found: list[Finding] = []
    seen: set[str] = set()
    for batch, table in recorded:
        seen.add(batch.name)
        _take(table, left, listener)
        counts = counts_of(table)
        found.extend(against(wanted[batch.name], counts))
        late_for = {step: count for (route, step), count in counts.items() if route == LATE_FOR}
        said = _late_for(definition, wanted[batch.name])
        found.extend(
            _disagree(wanted[batch.name], f"late for {step!r}", said.get(step, 0), late_for.get(step, 0))
            for step in sorted(said.keys() | late_for.keys())
            if said.get(step, 0) != late_for.get(step, 0)
        )
    missing = [entry for name, entry in wanted.items() if name not in seen]
    left.unrecorded = [entry for entry in missing if leaving(entry)]
    if listener is not None and any(leaving(entry) or _late_for(definition, entry) for entry in missing):
        listener.not_recorded(
            "the pipeline's home has no record of which records left or were late in some batches"
        )
    left.examined = Examined(tuple(found), tuple(_unrecorded(left.unrecorded)))
    return left


def _take(table: pa.Table, left: Left, listener: Listener | None) -> None:
    import pyarrow.compute as pc

    routes, steps = table["route"].cast("string"), table["step"].cast("string")
    for route, step in sorted(counts_of(table)):
        chosen = table.filter(pc.and_(pc.equal(routes, route), pc.equal(steps, step)))
        columns = [chosen[name].combine_chunks() for name in ("topic", "partition", "offset", "index")]
        holdings = [left.routes[ROUTES[route]]] if route in ROUTES else []
        if (route, step) in left.kept:
            holdings.append(left.kept[route, step])
        for rows in split_columns(*columns):
            for holding in holdings:
                holding.add([rows])
            if listener is None:
                continue
            if route == LATE_FOR:
                listener.late_for(rows.topic, rows.partition, rows.offsets, step)
            else:
                listener.left(rows.topic, rows.partition, rows.offsets, step, route=route)


def leaving(entry: Entry) -> int:
    return sum(entry.routes.filtered.values()) + entry.routes.duplicate + entry.routes.late


def _late_for(definition: PipelineDefinition, entry: Entry) -> dict[str, int]:
    """By tap, how many rows were late for it."""
    taps = [step.name for step in definition.steps if is_tap(step)]
    return {name: late for name in taps if (late := entry.taps.get(name, {}).get("late", 0))}


def against(entry: Entry, counts: Mapping[tuple[str, str], int]) -> list[Finding]:
    """By step, what the record and the ledger's entry count."""
    said = {(FILTERED, step): count for step, count in entry.routes.filtered.items() if count}
    recorded = {key: count for key, count in counts.items() if key[0] == FILTERED}
    found = [
        _disagree(entry, f"filtered by {key[1]!r}", said.get(key, 0), recorded.get(key, 0))
        for key in sorted(said.keys() | recorded.keys())
        if said.get(key, 0) != recorded.get(key, 0)
    ]
    for route, count in ((DUPLICATE, entry.routes.duplicate), (LATE, entry.routes.late)):
        listed = sum(number for key, number in counts.items() if key[0] == route)
        if listed != count:
            found.append(_disagree(entry, route, count, listed))
    return found


def _disagree(entry: Entry, what: str, said: int, recorded: int) -> Finding:
    return Finding(
        Fate.ALTERED,
        "",
        count=abs(said - recorded),
        detail=f"entry {entry.number} of the ledger of {entry.sink!r} counts {said} rows {what}, and the pipeline's "
        f"record of rows that left has {recorded}",
    )


def _unrecorded(
    entries: Sequence[Entry], why: str = "the pipeline's home has no record of them"
) -> list[Unproven]:
    if not entries:
        return []
    rows = sum(leaving(entry) for entry in entries)
    numbers = f"{entries[0].number}" if len(entries) == 1 else f"{entries[0].number} to {entries[-1].number}"
    return [
        Unproven(
            f"which {rows:,} records left by a filter, as duplicates or late, in the batches {numbers}",
            why,
            is_gap=True,
        )
    ]


def read_dead_letters(
    reader: DeadLetterReader | None, spans: Mapping[Place, Span], listener: Listener | None
) -> tuple[Holding, Holding]:
    """The dead letters, and those of them that could not be decoded; who listens hears which rule sent each away."""
    name = str(Fate.DEAD_LETTER) if reader is None else reader.name
    dead, unparsed = Holding(name, spans), Holding(PARSE, spans)
    for rows, reasons in () if reader is None else reader.letters():
        dead.add([rows])
        texts = reasons.fill_null("").dictionary_encode()
        codes = texts.indices.to_numpy(zero_copy_only=False)
        for code, reason in enumerate(texts.dictionary.to_pylist()):
            chosen = codes == code
            offsets = rows.offsets[chosen]
            if reason == PARSE:
                unparsed.add([LineageBatch(rows.topic, rows.partition, offsets, rows.indexes[chosen])])
            if listener is not None:
                listener.left(rows.topic, rows.partition, offsets, reason, route=str(Fate.DEAD_LETTER))
    return dead, unparsed
