"""What one audit hands on to the next, so that what is new can be judged without what is old.

Stateful steps and tables that keep one row for each key are made again from records. Of the records that an audit has
proven, the next needs those that may still matter: the ones in windows that are not over, those that went on at a
deduplication and may have a duplicate yet, and the one of each key that stands in a table. They are handed on as they
were decoded, with what became of them, and are put before the new ones (`holdfast.audit.stateful`).

Of tables whose rows change by design, and which therefore have no marks, the digest of every row is handed on, under a
key of the auditor's own: a row of a proven record is the one that was proven, or everything is looked at.

The form is one Arrow stream for the records and one for each table; a file of it is named by its SHA-256, which stands
in the state beside the positions (`holdfast.audit.proven`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa

from holdfast.audit.model import Document
from holdfast.audit.sinks.base import ContentBatch
from holdfast.audit.stateful.rows import Flags, Rows
from holdfast.audit.stateful.turns import ChainEnd
from holdfast.pipeline.erased_places import by_partition
from holdfast.pipeline.positions import Place
from holdfast.pipeline.row_digest import DigestKey, Digests, RowHasher

META: Final = b"holdfast"
FORM: Final = 2
"""Of these streams: another holdfast may have written them otherwise."""
LEFT: Final = "left"
"""The column of the number of the step at which each record left."""
WATERMARK: Final = "watermark"
ROUTE: Final = "route "
"""Before the names of columns that say by which route records left at a step: `route late totals`."""


@dataclass(frozen=True)
class _About(Document):
    form: int = FORM
    places: tuple[Place, ...] = ()
    sizes: tuple[int, ...] = ()
    greatest: tuple[int, ...] = ()
    chains: Mapping[str, ChainEnd] = field(default_factory=dict)
    main: str = ""
    turns: Mapping[str, int] = field(default_factory=dict)
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Carried:
    """What is handed on."""

    lacks: str = ""
    """Why the next audit cannot go on from here; nothing: it can."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """By sink, the newest entry of its ledger that lies wholly in what is proven."""
    turns: Mapping[str, int] = field(default_factory=dict)
    """By sink, the newest turn of those entries: rows that steps made are old up to it."""
    chains: Mapping[str, ChainEnd] = field(default_factory=dict)
    """By sink whose ledger has all batches."""
    main: str = ""
    """The sink whose batches lateness was judged by."""
    rows: Rows | None = None
    """Records, with what became of them."""
    tables: Mapping[str, Digests] = field(default_factory=dict)
    """By sink without marks, the digests of its rows, ascending."""

    @property
    def is_needed(self) -> bool:
        """Whether there is more to it than numbers."""
        return self.rows is not None or bool(self.tables)

    def as_bytes(self) -> bytes:
        sink, table = io.BytesIO(), pa.table({})
        about = _About(chains=self.chains, main=self.main, turns=self.turns, tables=tuple(self.tables))
        if (rows := self.rows) is not None:
            sizes = tuple(np.diff(rows.bounds).tolist())
            about, table = replace(about, places=rows.places, sizes=sizes, greatest=rows.greatest), rows.table
        table = table.replace_schema_metadata({META: json.dumps(about.as_json())})
        for each in (table, *(pa.table({"a": kept[:, 0], "b": kept[:, 1]}) for kept in self.tables.values())):
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.ipc.new_stream(sink, each.schema, options=options) as writer:
                writer.write_table(each)
        return sink.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Carried | None:
        """Nothing: it has a form that is not known here."""
        source = pa.BufferReader(data)
        table = pa.ipc.open_stream(source).read_all()
        said = json.loads(table.schema.metadata[META])
        if said["form"] != FORM:
            return None
        about = _About.from_json(said)
        tables = {}
        for name in about.tables:
            kept = pa.ipc.open_stream(source).read_all()
            tables[name] = np.column_stack([kept.column(each).to_numpy() for each in ("a", "b")])
        is_there = bool(table.column_names)
        rows = Rows.of(table, about.places, about.sizes, about.greatest) if is_there else None
        return cls("", {}, about.turns, about.chains, about.main, rows, tables)


@dataclass
class Memory:
    """What goes into an audit from an earlier one, and comes out of it for the next."""

    key: DigestKey
    before: Carried | None = None
    after: Carried | None = None

    def table(self, sink: str, old: Bounds, ends: Bounds, *, is_kept_whole: bool) -> TableRows:
        """To be shown all rows of a table without marks."""
        known = self.before.tables.get(sink) if self.before is not None else None
        return TableRows(RowHasher(self.key), known, old, ends, is_kept_whole)


Bounds = Mapping[tuple[str, int], int]
"""By topic and partition the first offset that is not meant; of rows that a step made, by step and any partition
(-1)."""


@dataclass
class TableRows:
    """The rows of a table without marks: those of what was proven are the ones that were proven."""

    hasher: RowHasher
    known: Digests | None
    old: Bounds
    ends: Bounds
    is_kept_whole: bool
    """No row is ever replaced."""
    wrong: int = 0
    _there: int = 0
    _kept: list[Digests] = field(default_factory=list)

    def take(self, batch: ContentBatch) -> None:
        made = self.hasher.digests(batch.columns, batch.lineage, batch.constants)
        self._kept.append(made[_below(batch, self.ends)])
        if self.known is not None:
            old = made[_below(batch, self.old)]
            self._there += len(old)
            self.wrong += int((~_among(old, self.known)).sum())

    def finish(self) -> Digests:
        """Their digests, for the next audit."""
        if self.known is not None and self.is_kept_whole:
            self.wrong += abs(len(self.known) - self._there)
        found = np.concatenate(self._kept) if self._kept else np.zeros((0, 2), np.uint64)
        return found[np.lexsort((found[:, 1], found[:, 0]))]


def _below(batch: ContentBatch, bounds: Bounds) -> Flags:
    found = np.zeros(len(batch.lineage["offset"]), np.bool_)
    for topic, partition, rows, offsets in by_partition(batch.lineage):
        end = bounds.get((topic, partition), bounds.get((topic, -1)))
        found[rows] = end is not None and offsets < end
    return found


def _among(rows: Digests, known: Digests) -> Flags:
    if not len(known):
        return np.zeros(len(rows), np.bool_)
    at = np.minimum(np.searchsorted(known[:, 0], rows[:, 0]), len(known) - 1)
    return np.asarray((known[at] == rows).all(axis=1), np.bool_)
