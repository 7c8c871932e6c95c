"""Whether two pipelines made the same of the same source: version two beside version one, before switching.

Sinks are compared in pairs, as multisets of rows.

- Rows that carry the lineage of a record are compared up to the place of the source that both have reached, from the
  place where both had begun; their lineage is part of them. One pipeline may be ahead, and both may run meanwhile.
- Rows of windows, joins and keyed functions, and tables that keep one row per key, follow from everything that was
  read: both pipelines must stand at the same place, or the answer is that it cannot be told. Rows of windows are paired
  by key and window, and `_hf_count` and `_hf_digest` tell whether they were made of the same records.

"Different" is only said of what cannot be explained by one being behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import UsageError
from holdfast.pipeline.definition.columns import WINDOW_COLUMNS
from holdfast.pipeline.definition.model import (
    Join,
    KafkaSink,
    PipelineDefinition,
    SinkDefinition,
    Step,
    Window,
)
from holdfast.pipeline.definition.naming import kind_of_sink
from holdfast.pipeline.definition.streams import Stream, merge_key, merged, stream_of
from holdfast.pipeline.engine.deployment import Deployment
from holdfast.pipeline.engine.history import beginnings, kept_entries, of_entries, recorded_batches
from holdfast.pipeline.ledger import NOWHERE, Entry
from holdfast.pipeline.operations.multisets import GONE, ORDER, SIDES, Differences, Multisets
from holdfast.pipeline.operations.outputs import Output, Rows, open_output, plain_json
from holdfast.pipeline.positions import Place, Positions
from holdfast.pipeline.scratch import ScratchDatabase
from holdfast.pipeline.sinks.building import build_sink

FROM = "_hf"
"""The column of a row's lineage, as text."""
FILES = frozenset({"parquet", "delta"})


class Verdict(Enum):
    EQUAL = "equal"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class SinkComparison:
    """What was found about one pair of sinks."""

    sink_a: str
    sink_b: str
    verdict: Verdict
    notes: tuple[str, ...] = ()
    """What to know about the verdict: who is behind, what could not be read."""
    differences: Differences = field(default_factory=Differences)
    columns_a: tuple[str, ...] = ()
    """Only in A."""
    columns_b: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        found = self.differences
        return {
            "a": self.sink_a,
            "b": self.sink_b,
            "verdict": self.verdict.value,
            "notes": list(self.notes),
            "rows_a": found.rows_a,
            "rows_b": found.rows_b,
            "only_a": found.only_a,
            "only_b": found.only_b,
            "differing": found.differing,
            "differing_columns": dict(found.columns.most_common()),
            "columns_only_a": list(self.columns_a),
            "columns_only_b": list(self.columns_b),
            "examples": {
                "only_a": found.examples_a,
                "only_b": found.examples_b,
                "differing": [{"a": one, "b": other} for one, other in found.examples],
            },
        }


def overall(found: Sequence[SinkComparison]) -> Verdict:
    """Different if any is; equal only if all are."""
    verdicts = {each.verdict for each in found}
    for verdict in (Verdict.DIFFERENT, Verdict.INCONCLUSIVE):
        if verdict in verdicts:
            return verdict
    return Verdict.EQUAL if found else Verdict.INCONCLUSIVE


# ---------------------------------------------------------------------------- sides


@dataclass
class Side:
    """One of the two sinks of a pair."""

    label: str
    deployed: Deployment
    sink: SinkDefinition

    @property
    def definition(self) -> PipelineDefinition:
        """With its secrets."""
        return self.deployed.definition

    @property
    def stream(self) -> Stream:
        return stream_of(self.definition, self.sink)

    @property
    def step(self) -> Step | None:
        """The one that makes the rows, where they are not rows of records."""
        stream = self.stream
        if not stream.step or stream.kind:
            return None
        return next(step for step in self.definition.steps if step.name == stream.step)

    @property
    def is_upsert(self) -> bool:
        return merged(self.sink) is not None

    @property
    def carries_lineage(self) -> bool:
        """Every row says which record it came from, and stays."""
        return self.step is None and not self.is_upsert

    @property
    def is_folded(self) -> bool:
        """A topic in which later records take the place of earlier ones, batch by batch."""
        return isinstance(self.sink, KafkaSink) and self._is_corrected

    @property
    def is_final(self) -> bool:
        """A row that is there will not change."""
        return not self.is_upsert and not self._is_corrected

    @property
    def _is_corrected(self) -> bool:
        """Rows of windows that are given out again when they change."""
        step = self.step
        return isinstance(step, Window) and (step.emit == "changes" or step.late == "correct")

    def entry(self) -> Entry | None:
        name = self.sink.name
        with self.deployed.sinks(lambda whole: {name: build_sink(whole, self.sink)}) as opened:
            return opened[name].last_entry()

    def begun(self) -> dict[Place, int]:
        """Where the sink began in each partition, as far as it is known."""
        entries = kept_entries(self.definition, self.sink)
        if entries:
            return beginnings(of_entries(entries))
        log = recorded_batches(self.deployed.home_path)
        return beginnings(batch for batch in log if self.sink.name in batch.sinks)

    def key(self) -> tuple[str, ...]:
        """What makes a row one of its own, where it is not its lineage."""
        step = self.step
        if (table := merged(self.sink)) is not None:
            return merge_key(table)
        if isinstance(self.sink, KafkaSink):
            return ("key",)
        match step:
            case Window():
                return (*step.key, *WINDOW_COLUMNS)
            case Join():
                return ("left_hf", "right_hf")
            case _:
                return ()


def pair_up(
    a: PipelineDefinition, b: PipelineDefinition, chosen: Mapping[str, str] | None
) -> list[tuple[SinkDefinition, SinkDefinition]]:
    """Which sinks are compared: those named, else those of the same name, else the only one of each."""
    mine = {sink.name: sink for sink in a.sinks}
    theirs = {sink.name: sink for sink in b.sinks}
    if chosen:
        for known, names, file in ((mine, chosen.keys(), "first"), (theirs, chosen.values(), "second")):
            for name in names:
                if name not in known:
                    raise UsageError(f"the {file} pipeline has no sink {name!r}; it has {', '.join(known)}")
        pairs = [(mine[one], theirs[other]) for one, other in chosen.items()]
    else:
        pairs = [(sink, theirs[name]) for name, sink in mine.items() if name in theirs]
        if not pairs and len(mine) == len(theirs) == 1:
            pairs = [(a.sinks[0], b.sinks[0])]
    if not pairs:
        raise UsageError(
            f"no sink of the one ({', '.join(mine)}) has the name of one of the other ({', '.join(theirs)}); say which "
            "belong together with --sink NAME=NAME"
        )
    for one, other in pairs:
        kinds = {kind_of_sink(one), kind_of_sink(other)}
        if len(kinds) > 1 and not kinds <= FILES:
            raise UsageError(
                f"sinks {one.name!r} and {other.name!r} are {kind_of_sink(one)} and {kind_of_sink(other)}, and write "
                "values in ways of their own: compare sinks of one kind"
            )
    return pairs


# ---------------------------------------------------------------------------- comparing


def compare_pipelines(
    a: PipelineDefinition,
    b: PipelineDefinition,
    *,
    sinks: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    bootstrap: str | None = None,
) -> list[SinkComparison]:
    """Every pair of sinks. Nothing is changed; both pipelines may be running."""
    first, second = Deployment.of(a, bootstrap), Deployment.of(b, bootstrap)
    return [
        compare_sinks(Side("A", first, one), Side("B", second, other), ignore)
        for one, other in pair_up(first.definition, second.definition, sinks)
    ]


def compare_sinks(a: Side, b: Side, ignore: Sequence[str] = ()) -> SinkComparison:
    if a.carries_lineage != b.carries_lineage or (a.step is None) != (b.step is None):
        raise UsageError(
            f"sinks {a.sink.name!r} and {b.sink.name!r} hold rows of different kinds (rows of records, rows of a step, "
            "one row per key): they cannot be compared"
        )
    entries = {side.label: side.entry() for side in (a, b)}
    mine, theirs = (NOWHERE if entry is None else entry.positions for entry in entries.values())
    _same_source(a, b, mine, theirs)
    notes = [*_behind(mine, theirs)]
    is_level = not notes
    if any(entry is None for entry in entries.values()):
        nobody = " and ".join(label for label, entry in entries.items() if entry is None)
        return SinkComparison(a.sink.name, b.sink.name, Verdict.INCONCLUSIVE, (f"{nobody} has not run yet",))
    begun_a, begun_b = a.begun(), b.begun()
    outputs = [open_output(side.definition, side.sink, side.deployed.settings) for side in (a, b)]
    bounds = _bounds(mine, theirs, begun_a, begun_b) if a.carries_lineage else None
    if bounds is not None and not any(end > start for start, end in bounds.values()):
        notes.append("there is no part of the source that both have read")
        return SinkComparison(a.sink.name, b.sink.name, Verdict.INCONCLUSIVE, tuple(notes))
    apart = _began_apart(begun_a, begun_b)
    notes += [
        f"where {label} began is not recorded"
        for label, begun in (("A", begun_a), ("B", begun_b))
        if not begun
    ]
    notes += [*apart, *(output.note for output in outputs if output.note)]
    columns_a, columns_b, common = _columns(outputs, ignore)
    differences = _read_and_compare(a, b, outputs, common, bounds, ignore)
    verdict = _verdict(
        a,
        differences,
        has_same_columns=not (columns_a or columns_b),
        is_level=is_level,
        is_whole=not any(output.note for output in outputs),
        began_together=not apart,
    )
    if bounds is None and any(side.entry() != entries[side.label] for side in (a, b)):
        notes.append("a pipeline went on while its rows were read: stop both at one place, and compare again")
        verdict = Verdict.INCONCLUSIVE
    return SinkComparison(a.sink.name, b.sink.name, verdict, tuple(notes), differences, columns_a, columns_b)


def _verdict(
    a: Side,
    differences: Differences,
    *,
    has_same_columns: bool,
    is_level: bool,
    is_whole: bool,
    began_together: bool,
) -> Verdict:
    if not has_same_columns:
        return Verdict.DIFFERENT
    if a.carries_lineage:
        if differences.are_none:
            return Verdict.EQUAL
        return Verdict.DIFFERENT if is_whole or differences.differing else Verdict.INCONCLUSIVE
    if differences.are_none:
        return Verdict.EQUAL if is_level else Verdict.INCONCLUSIVE
    if is_level and is_whole and began_together:
        return Verdict.DIFFERENT
    # What stands in both and will not change is judged, wherever they stand; the rest may be on its way.
    if differences.differing and a.is_final and a.key() and began_together:
        return Verdict.DIFFERENT
    return Verdict.INCONCLUSIVE


def _same_source(a: Side, b: Side, mine: Positions, theirs: Positions) -> None:
    for place in mine.at:
        known = theirs.of(place.topic, place.partition)
        if known is not None and known[0].topic_id != place.topic_id:
            raise UsageError(
                f"{a.sink.name!r} and {b.sink.name!r} read different topics of the name {place.topic!r}: their ids "
                f"are {place.topic_id} and {known[0].topic_id}, and offsets of the two mean different records"
            )


def _behind(mine: Positions, theirs: Positions) -> Iterator[str]:
    """Who is behind, and where."""
    for label, other, one, two in (("A", "B", mine, theirs), ("B", "A", theirs, mine)):
        gaps = {
            place: at.offset - one.at[place].offset
            for place, at in two.at.items()
            if place in one.at and at.offset > one.at[place].offset
        }
        if gaps:
            where = ", ".join(f"{place.topic}-{place.partition}" for place in sorted(gaps))
            yield f"{label} is behind {other} by {sum(gaps.values()):,} offsets of {where}"
        missing = sorted(place for place in two.at if place not in one.at)
        if missing:
            where = ", ".join(f"{place.topic}-{place.partition}" for place in missing)
            yield f"{label} does not know {where}, which {other} reads"


def _bounds(
    mine: Positions, theirs: Positions, begun_a: Mapping[Place, int], begun_b: Mapping[Place, int]
) -> dict[Place, tuple[int, int]]:
    """What both have read of each partition."""
    return {
        place: (
            max(begun_a.get(place, 0), begun_b.get(place, 0)),
            min(at.offset, theirs.at[place].offset),
        )
        for place, at in mine.at.items()
        if place in theirs.at
    }


def _began_apart(begun_a: Mapping[Place, int], begun_b: Mapping[Place, int]) -> list[str]:
    return [
        f"A began {place.topic}-{place.partition} at {begun_a[place]:,} and B at {begun_b[place]:,}"
        for place in sorted(begun_a)
        if place in begun_b and begun_a[place] != begun_b[place]
    ]


def _columns(
    outputs: Sequence[Output], ignore: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    mine, theirs = ([name for name in output.columns if name not in ignore] for output in outputs)
    if not mine or not theirs:  # one of them has not a single row yet, and so no columns
        return (), (), list(dict.fromkeys([*mine, *theirs]))
    return (
        tuple(name for name in mine if name not in theirs),
        tuple(name for name in theirs if name not in mine),
        [name for name in mine if name in theirs],
    )


def _read_and_compare(
    a: Side,
    b: Side,
    outputs: Sequence[Output],
    columns: Sequence[str],
    bounds: Mapping[Place, tuple[int, int]] | None,
    ignore: Sequence[str],
) -> Differences:
    key = (FROM,) if bounds is not None else tuple(name for name in a.key() if name in columns)
    if bounds is None and len(key) < len(a.key()):
        key = ()
    is_folded = (a.is_folded or b.is_folded) and bool(key)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-compare-") as directory,
        ScratchDatabase(directory) as database,
    ):
        multisets = Multisets(database, columns, key=key, is_folded=is_folded)
        for side, output in zip(SIDES, outputs, strict=True):
            for rows in output.rows():
                multisets.add(side, _prepared(rows, columns, bounds, ignore, is_folded=is_folded))
        return multisets.compare()


def _prepared(
    rows: Rows,
    columns: Sequence[str],
    bounds: Mapping[Place, tuple[int, int]] | None,
    ignore: Sequence[str],
    *,
    is_folded: bool,
) -> pa.Table:
    """The rows within the bounds, in the form that heaps take."""
    table = rows.content
    missing = [name for name in columns if name not in table.column_names]
    for name in missing:
        table = table.append_column(name, pa.nulls(len(rows.offsets), pa.large_binary()))
    if ignore and "value" in table.column_names:
        values = [plain_json(value, ignore) for value in table.column("value").to_pylist()]
        place = table.column_names.index("value")
        table = table.set_column(place, "value", pa.array(values, pa.large_binary()))
    if is_folded:
        gone = np.zeros(len(rows.offsets), np.bool_) if rows.gone is None else rows.gone
        order = (rows.offsets << 31) + rows.indexes
        table = table.append_column(ORDER, pa.array(order)).append_column(GONE, pa.array(gone))
    if bounds is None:
        return table
    table = table.append_column(FROM, _lineage_texts(rows))
    return table.filter(pa.array(_within(rows, bounds)))


def _lineage_texts(rows: Rows) -> pa.Array:
    parts = [rows.topics.cast(pa.string())]
    parts += [
        pa.array(numbers).cast(pa.string()) for numbers in (rows.partitions, rows.offsets, rows.indexes)
    ]
    topic, partition, offset, index = parts
    text = pc.binary_join_element_wise(topic, partition, "-")
    text = pc.binary_join_element_wise(text, offset, "@")
    return pc.binary_join_element_wise(text, index, "#").cast(pa.large_binary())


def _within(rows: Rows, bounds: Mapping[Place, tuple[int, int]]) -> Any:
    chosen = np.zeros(len(rows.offsets), np.bool_)
    for topic in {place.topic for place in bounds}:
        is_of_topic = pc.fill_null(pc.equal(rows.topics, topic), False).to_numpy(zero_copy_only=False)
        for place, (start, end) in bounds.items():
            if place.topic == topic:
                chosen |= (
                    is_of_topic
                    & (rows.partitions == place.partition)
                    & (rows.offsets >= start)
                    & (rows.offsets < end)
                )
    return chosen
