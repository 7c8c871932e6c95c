"""Writing down which rows left the steps, before any sink has the batch (`holdfast.pipeline.aside`).

When the routes are settled, each knows the rows that are its own. Of small batches, rows that filters turn away are
noted while the routes are counted; all others that leave the chain are asked for once more, by their lineage alone, in
one job for all of them. The driver counts and digests what it got, compares that with what the routes counted, and
writes one file. A batch whose rows all stayed costs nothing.

- The file is durable, and so is its name, before the first sink commits.
- A batch repeated replaces its own file, byte for byte: rows are sorted by place.
- What an attempt left that no sink ever took goes when another batch takes the same offsets.
- Only batches that every sink has are merged, 64 files of about the same size to one, so that a record of years is some
  hundreds of files. The merged file is durable before the ones it is made of go.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from holdfast.atomic import write_atomically
from holdfast.pipeline.aside import (
    FOOTER,
    LATE_FOR,
    SUFFIX,
    VERSION,
    AsideBatch,
    AsideDamaged,
    aside_path,
    batch_name,
    batches_in,
    read_file,
    schema,
)
from holdfast.pipeline.core.failures import Unbalanced
from holdfast.pipeline.core.sql import LINEAGE, PLACE, literal
from holdfast.pipeline.digest import MASK, Tally, digest_of_offsets
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import BatchRange, to_text
from holdfast.real import RealFileSystem

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql import DataFrame

FANOUT: Final = 64
"""Files of one tier that are merged to one of the next."""
MERGED_ROWS_MAX: Final = 65_536
"""Files with more rows are large enough to stay: a merge holds 64 times this in memory at most, some 100 MB."""
LEFT_NUMBERS: Final = 4
"""Noted of each row: code, topic, partition and offset."""
COLLECTED_ROWS_MAX: Final = 4_000_000
"""More than these, at some 24 bytes each, do not go through the driver's JVM but through files of the stage."""


@dataclass(frozen=True)
class SideOutput:
    """Rows that left at one step, by one route."""

    route: str
    step: str
    tally: Tally


@dataclass(frozen=True)
class Gathering:
    """The rows of some side outputs: the number of a row's is its `code`."""

    frame: Callable[[], DataFrame]
    """Their lineage and code."""
    codes: Mapping[int, SideOutput]
    base: int = 0
    noted: str | None = None
    """The same as text, noted while routes were counted: for each the code less the base, the number of the topic among
    those of the source, partition and offset."""


def route_digests(aside: Sequence[Gathering], main: Tally, dead_letter: Tally) -> dict[str, str]:
    """For the ledger: the digest of each route that has rows, and of what was late for each step with rows of its
    own."""
    totals = {"main": main, "dead_letter": dead_letter}
    for gathering in aside:
        for part in gathering.codes.values():
            name = f"{part.route}:{part.step}" if part.route == LATE_FOR else part.route
            totals[name] = totals.get(name, Tally()) + part.tally
    return {name: f"{tally.digest:016x}" for name, tally in totals.items() if tally.rows}


# ---------------------------------------------------------------------------- the rows of a batch


def collect_rows(
    gatherings: Sequence[Gathering], source: Sequence[str], batch: BatchRange, scratch: str
) -> pa.Table | None:
    """The places of the rows, sorted, with route and step; `Unbalanced` when they are not what was counted.

    `source` are the topics of the definition, by whose numbers rows are noted.
    """
    if not gatherings:
        return None
    parts = {code: part for gathering in gatherings for code, part in gathering.codes.items()}
    topics = sorted({place.topic for place in batch.spans} | set(source))
    noted = [_noted(gathering, source, topics) for gathering in gatherings]
    asked = [gathering for gathering, rows in zip(gatherings, noted, strict=True) if rows is None]
    found = [rows for rows in noted if rows is not None]
    if asked:
        found.append(_asked(asked, topics, scratch))
    rows = found[0] if len(found) == 1 else found[0].joined(found[1:])
    rows = rows.sorted()
    _balance(parts, topics, rows)
    return _table(parts, topics, rows)


@dataclass(frozen=True)
class _Rows:
    """Places, by the numbers of their topics and partitions, and the part that each row is in."""

    place: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    code: npt.NDArray[np.int64]

    def joined(self, others: Sequence[_Rows]) -> _Rows:
        names = ("place", "offset", "index", "code")
        return _Rows(*(np.concatenate([getattr(each, name) for each in (self, *others)]) for name in names))

    def sorted(self) -> _Rows:
        order = np.lexsort((self.code, self.index, self.offset, self.place))
        return _Rows(self.place[order], self.offset[order], self.index[order], self.code[order])


def _noted(gathering: Gathering, source: Sequence[str], topics: Sequence[str]) -> _Rows | None:
    """What was noted on the way, if that is all of it."""
    if gathering.noted is None:
        return None
    numbers = np.fromstring(gathering.noted, np.int64, sep=",") if gathering.noted else np.zeros(0, np.int64)
    if len(numbers) != LEFT_NUMBERS * sum(part.tally.rows for part in gathering.codes.values()):
        return None
    route, topic, partition, offset = numbers.reshape(-1, LEFT_NUMBERS).T
    if len(route) and (topic.min() < 1 or not set(np.unique(route + gathering.base)) <= set(gathering.codes)):
        return None
    ours = np.array([topics.index(name) for name in source], np.int64)
    return _Rows((ours[topic - 1] << 32) | partition, offset, np.zeros_like(offset), route + gathering.base)


def _asked(gatherings: Sequence[Gathering], topics: Sequence[str], scratch: str) -> _Rows:
    """The rows, by a job of their own."""
    names = ", ".join(map(literal, topics))
    columns = (
        f"CAST(array_position(array({names}), {LINEAGE}.topic) AS INT) AS topic",
        *(f"{LINEAGE}.`{name}` AS `{name}`" for name in ("partition", "offset", "index")),
        "CAST(code AS INT) AS code",
    )
    frames = [gathering.frame().selectExpr(*columns) for gathering in gatherings]
    total = sum(part.tally.rows for gathering in gatherings for part in gathering.codes.values())
    table = _collected(reduce(lambda one, other: one.unionAll(other), frames), total, scratch)
    topic, partition, offset, index, code = (
        table.column(name).to_numpy().astype(np.int64) for name in (*PLACE, "code")
    )
    return _Rows(((topic - 1) << 32) | partition, offset, index, code)


def _collected(frame: DataFrame, rows: int, scratch: str) -> pa.Table:
    import pyarrow.parquet as pq

    if rows <= COLLECTED_ROWS_MAX:
        return frame.toArrow()
    directory = os.path.join(scratch, "aside")
    frame.write.parquet(directory)
    return pq.read_table(directory)


def _balance(parts: Mapping[int, SideOutput], topics: Sequence[str], rows: _Rows) -> None:
    """By number and digest, part by part."""
    found = dict.fromkeys(parts, Tally())
    cuts = np.flatnonzero(np.diff(rows.place)) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(rows.place)] if len(rows.place) else [0]):
        at = int(rows.place[begin])
        codes = rows.code[begin:end]
        for each in np.unique(codes).tolist():
            offsets = rows.offset[begin:end][codes == each]
            digest = digest_of_offsets(topics[at >> 32], at & 0xFFFFFFFF, offsets)
            found[each] = found.get(each, Tally()) + Tally(len(offsets), digest & MASK)
    for each, part in parts.items():
        if found[each] != part.tally:
            raise Unbalanced(
                f"{part.tally.rows} rows left as {part.route} at step {part.step!r} (digest {part.tally.digest:016x}), "
                f"and {found[each].rows} were found to be written down (digest {found[each].digest:016x}). Nothing was "
                "committed: a step gives other rows when it is asked again; please report this with its definition"
            )


def _table(parts: Mapping[int, SideOutput], topics: Sequence[str], rows: _Rows) -> pa.Table:
    import pyarrow as pa

    routes, steps = (sorted({getattr(part, name) for part in parts.values()}) for name in ("route", "step"))
    of_code = np.zeros((max(parts) + 1, 2), np.int32)
    for number, part in parts.items():
        of_code[number] = routes.index(part.route), steps.index(part.step)
    columns = [
        pa.DictionaryArray.from_arrays((rows.place >> 32).astype(np.int32), pa.array(topics, pa.string())),
        pa.array((rows.place & 0xFFFFFFFF).astype(np.int32)),
        pa.array(rows.offset),
        pa.array(rows.index.astype(np.int32)),
        pa.DictionaryArray.from_arrays(of_code[rows.code, 0], pa.array(routes, pa.string())),
        pa.DictionaryArray.from_arrays(of_code[rows.code, 1], pa.array(steps, pa.string())),
    ]
    return pa.Table.from_arrays(columns, schema=schema())


# ---------------------------------------------------------------------------- files


@dataclass(frozen=True)
class _File:
    path: str
    tier: int
    batches: tuple[AsideBatch, ...]

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)


class AsideFiles:
    """The record of one pipeline, written by the one process that runs it."""

    def __init__(self, home: str) -> None:
        self.path = aside_path(home)
        self._disk = RealFileSystem()
        self._unsettled: dict[str, _File] | None = None
        """By path, what some sink may not have; nothing before the first look."""
        self._settled: dict[int, list[str]] = {}
        """By tier, in their order: what waits to be merged. Nobody asks any more which offsets are in it."""

    def write(
        self, batch: BatchRange, fingerprint: str, table: pa.Table | None, ledgers: Iterable[Entry]
    ) -> None:
        """Record this batch, durably; with nothing to record, only what stood in its place goes."""
        name = batch_name(batch, fingerprint)
        own = os.path.join(self.path, name + SUFFIX)
        if table is not None:
            self._create()
            entry = AsideBatch(name, batch, fingerprint, table.num_rows, own)
            write_atomically(self._disk, own, _encoded(table, [entry]))
            self._files()[own] = _File(own, 0, (entry,))
        entries = list(ledgers)
        stale = [
            file
            for file in self._files().values()
            if (file.path != own or table is None)
            and (file.path == own or (_overlap(file, batch) and not any(_taken(file, entries))))
        ]
        self._remove([file.path for file in stale])
        for file in stale:
            del self._files()[file.path]

    def merge(self, ledgers: Iterable[Entry]) -> None:
        """Make one file of many, where every sink has what they hold."""
        self._settle(list(ledgers))
        for tier, paths in sorted(self._settled.items()):
            if len(paths) >= FANOUT:
                self._merge(tier, paths[:FANOUT])

    def _settle(self, entries: Sequence[Entry]) -> None:
        """Let go of what is known about files that every sink has: no batch takes their offsets again."""
        if not self._unsettled or not entries:
            return
        settled = [file for file in self._unsettled.values() if all(_taken(file, entries))]
        for file in sorted(settled, key=_order):
            del self._unsettled[file.path]
            self._wait(file.path, file.tier, file.rows)

    def _wait(self, path: str, tier: int, rows: int) -> None:
        if rows <= MERGED_ROWS_MAX:
            self._settled.setdefault(tier, []).append(path)

    def _merge(self, tier: int, paths: Sequence[str]) -> None:
        import pyarrow as pa

        batches: list[AsideBatch] = []
        slices: list[pa.Table] = []
        for path in paths:
            table = read_file(path)
            for batch in batches_in(path):
                slices.append(table.slice(batch.first_row, batch.rows))
                batches.append(batch)
        merged = pa.concat_tables(slices).unify_dictionaries()
        digest = batch_name(BatchRange({}), to_text({"batches": sorted(batch.name for batch in batches)}))
        path = os.path.join(self.path, f"merged-{tier + 1}-{digest}{SUFFIX}")
        write_atomically(self._disk, path, _encoded(merged, batches))
        self._settled[tier] = self._settled[tier][len(paths) :]
        self._wait(path, tier + 1, merged.num_rows)
        self._remove(paths)

    def _files(self) -> dict[str, _File]:
        if self._unsettled is None:
            self._unsettled = self._look()
        return self._unsettled

    def _look(self) -> dict[str, _File]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return {}
        found: dict[str, _File] = {}
        for name in names:
            path = os.path.join(self.path, name)
            if not name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)  # written half
                continue
            tier = int(name.split("-")[1]) if name.startswith("merged-") else 0
            with contextlib.suppress(AsideDamaged):  # it stays, for an audit to tell
                found[path] = _File(path, tier, tuple(batches_in(path)))
        merged = {batch.name for file in found.values() if file.tier for batch in file.batches}
        left = [
            file
            for file in found.values()
            if file.tier == 0 and all(batch.name in merged for batch in file.batches)
        ]
        for file in left:  # a merge was cut short before it had removed what it merged
            os.unlink(file.path)
            del found[file.path]
        return found

    def _remove(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._disk.flush_directory(self.path)

    def _create(self) -> None:
        if not os.path.isdir(self.path):
            os.makedirs(self.path, exist_ok=True)
            self._disk.flush_directory(os.path.dirname(self.path))


def forget_aside(home: str) -> None:
    """No sink knows the pipeline any more: what its batches let go belongs to a life before."""
    import shutil

    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside_path(home))


def _order(file: _File) -> list[tuple[Any, ...]]:
    return sorted((*place, span.start) for place, span in file.batches[0].range.spans.items())


def _overlap(file: _File, batch: BatchRange) -> bool:
    return any(
        place in batch.spans and span.start < batch.spans[place].end and batch.spans[place].start < span.end
        for each in file.batches
        for place, span in each.range.spans.items()
    )


def _taken(file: _File, entries: Sequence[Entry]) -> Iterator[bool]:
    """For each of these sinks and each batch of the file: whether the sink has the batch."""
    for batch in file.batches:
        spans = {place: span for place, span in batch.range.spans.items() if span.offsets}
        for at in (entry.positions.at for entry in entries):
            yield all(place in at and at[place].offset >= span.end for place, span in spans.items())


def _encoded(table: pa.Table, batches: Sequence[AsideBatch]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    document = {"version": VERSION, "batches": [batch.as_json() for batch in batches]}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=["topic", "route", "step"],
        column_encoding=dict.fromkeys(("partition", "offset", "index"), "DELTA_BINARY_PACKED"),
        store_schema=False,
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({FOOTER: to_text(document)})
    data: bytes = sink.getvalue().to_pybytes()
    return data
