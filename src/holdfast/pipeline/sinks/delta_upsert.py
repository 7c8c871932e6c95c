"""The Delta sink that keeps one row for each key: merge and ledger entry are one commit.

Tasks stage the rows of a batch in files that no commit names. The driver merges them (`delta_merge`) into the table as
it is at one version, and commits for exactly the next one: files that lost a row are removed, what is left of them and
what came is added, and the entry is carried along. If anybody has written since, all new files are thrown away and the
merge is made again, with their rows. An attempt that is killed leaves files that no commit names, as of an append: a
vacuum of the table takes them. Deltalake's own merge would name files that are not flushed yet, and tells which rows
went only after the commit that the ledger's digests have to stand in.

When the ledger is forgotten, so are the places of all rows, in the same commit (`sinks/postgres` says why).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Transaction
from deltalake.transaction import RemoveAction

from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.sealing import Written, goes_on_from, resealed
from holdfast.pipeline.sinks import delta_merge
from holdfast.pipeline.sinks.base import Batch, Prepared, Problem, RowsRejected, SinkError
from holdfast.pipeline.sinks.columns import (
    SPANS,
    check_merge,
    column_named,
    deletes_of,
    fitting_schema,
    projected,
    stored_schema,
    with_versions,
)
from holdfast.pipeline.sinks.compacting import OURS, table_files
from holdfast.pipeline.sinks.delta import COMMIT_TRIES, FORGOTTEN, DeltaSinkWriter, PreparedDelta
from holdfast.pipeline.sinks.delta_merge import DELETE, Rewriting, Rules, Source
from holdfast.pipeline.sinks.files import explained
from holdfast.pipeline.sinks.writing import CONTENT, WrittenFile, reject_unreadable, write_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

NAMES_ARE_UNBOUNDED = 1 << 62
"""A table's files are not named by their partition."""


class PreparedMerge(PreparedDelta):
    """Rows in staged files, and what of them decides."""

    def __init__(
        self, sink: DeltaUpsertWriter, schema: StructType | None, files: list[WrittenFile], *, keeps: bool
    ) -> None:
        super().__init__(sink, schema, files)
        if self.written is not None:
            undigested = sink.undigested
            digested = {name: kind for name, kind in self.written.columns.items() if name not in undigested}
            self.written = Written(self.written.digest, digested) if keeps else None
        self.keeps_digests = keeps
        self.heads = pa.concat_tables(sink.heads_of(files)) if files else None


@dataclass(frozen=True)
class Merged:
    """What one commit does to the table."""

    actions: list[Any]
    new: list[WrittenFile]
    came: int = 0
    went: int = 0
    """The sums of the digests of rows that came, and of those that went."""


class DeltaUpsertWriter(DeltaSinkWriter):
    """The sink to the engine."""

    @property
    def _rules(self) -> Rules:
        definition = self._definition
        return Rules(definition.key, definition.order_by, definition.mode == "scd2")

    @property
    def undigested(self) -> frozenset[str]:
        return SPANS if self._rules.keeps_versions else frozenset({DELETE})

    def check(self, rows: StructType) -> list[Problem]:
        order_by, by = self._definition.order_by, self._definition.partition_by
        found = [*super().check(rows), *check_merge(self._definition, rows)]
        if order_by in by:
            found.append(
                Problem("order_by", f"the table is partitioned by {order_by!r}; order by another column")
            )
        return found

    def holds_rows(self) -> bool:
        """Rows give way to those of their keys."""
        return False

    # Batches

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        from pyspark.sql.types import BinaryType, StructField, StructType

        rows = with_versions(rows, self._definition)
        stored = stored_schema(rows.schema)
        beside = [StructField(CONTENT, BinaryType(), True)] if self.key is not None else []
        there = self._held(StructType([*stored.fields, *beside]))
        keeps = self.key is not None and CONTENT in there.fieldNames()
        if batch.is_empty:
            return PreparedMerge(self, None, [], keeps=keeps)
        held = StructType([field for field in there.fields if field.name != CONTENT])
        schema = fitting_schema(self.name, held, stored, self._definition.schema)
        files = replace(
            self.file_set(),
            key=self.key if keeps else None,
            keeps_digests=CONTENT in there.fieldNames(),
            undigested=self.undigested,
        )
        staged = write_files(self._staged(rows, schema), files, is_small=batch.local is not None)
        try:
            reject_unreadable(self.name, rows, self._definition.partition_by, staged, NAMES_ARE_UNBOUNDED)
            prepared = PreparedMerge(self, schema, staged, keeps=keeps)
            self._reject_keyless(prepared.heads)
        except BaseException:
            PreparedDelta(self, None, staged).discard()
            raise
        return prepared

    def _staged(self, rows: DataFrame, schema: StructType) -> DataFrame:
        """A row that deletes, and has no key among its columns, takes it from the record's key."""
        from pyspark.sql import functions

        definition = self._definition
        if definition.delete_when is None:
            return projected(rows, schema)
        deletes, present = deletes_of(definition.delete_when), set(rows.columns)
        keys = {
            name: functions.when(
                deletes,
                functions.coalesce(
                    column_named(name), column_named(KEY_PREFIX + name).cast(schema[name].dataType)
                ),
            ).otherwise(column_named(name))
            for name in definition.key
            if KEY_PREFIX + name in present
        }
        if self._rules.keeps_versions:
            return projected(rows.withColumns(keys), schema)
        marked = rows.withColumns({DELETE: deletes, **keys})
        return projected(marked, schema, (column_named(DELETE),))

    def heads_of(self, files: Iterable[WrittenFile]) -> Iterable[pa.Table]:
        by = self._definition.partition_by
        for number, file in enumerate(files):
            texts = dict(zip(by, file.partition, strict=True))
            yield delta_merge.heads(self._located(file), texts, number, self._rules, self.ledger.disk)

    def _located(self, file: WrittenFile) -> str:
        if "://" in file.path or file.path.startswith("/"):
            raise SinkError(
                f"sink {self.name!r}: {file.path} lies outside of {self.ledger.uri}; rows of such a table cannot be "
                "merged. Nothing was committed"
            )
        return f"{self.ledger.uri}/{file.path}"

    def _reject_keyless(self, heads: pa.Table | None) -> None:
        """A row without its key could neither be stored nor deleted, and a version without its beginning not placed."""
        found: list[Rejected] = []
        parts = {f"key {at}": name for at, name in enumerate(self._definition.key)}
        if self._rules.keeps_versions and self._rules.order_by is not None:
            parts["order"] = self._rules.order_by
        for column, name in parts.items() if heads is not None else ():
            assert heads is not None
            without = heads.filter(pc.is_null(heads.column(column)))
            why = f"column {name!r} is null, and is part of the key"
            found += [
                Rejected(row["topic"], row["partition"], row["offset"], self.name, why)
                for row in without.select(["topic", "partition", "offset"]).to_pylist()
            ]
        if found:
            raise RowsRejected(found)

    def commit(self, prepared: PreparedDelta, entry: Entry) -> Entry:
        assert isinstance(prepared, PreparedMerge)
        for _ in range(COMMIT_TRIES):
            table = self._checked(entry)
            if prepared.schema is not None:
                table = self._widened(table, prepared.schema)
            previous = self.ledger.last_entry(table)
            with explained(self.name, self.ledger.uri):
                merged = self._merge(table, prepared, entry, previous)
            done = entry
            if (
                prepared.keeps_digests
                and prepared.files
                and entry.content is not None
                and self.key is not None
            ):
                done = resealed(entry, previous, merged.came, merged.went, self.key)
            if self.commit_entry(table, merged.actions, done, self.keep(done)):
                self.remove(prepared.files)
                return done
            self.remove(merged.new)
        raise self._crowded_out()

    def _merge(
        self, table: DeltaTable, prepared: PreparedMerge, entry: Entry, previous: Entry | None
    ) -> Merged:
        """The files of the next version, written and flushed."""
        if prepared.heads is None:
            return Merged([], [])
        files = self._files(table)
        batch = prepared.heads
        held = delta_merge.held_heads(batch, self.heads_of(files), self._rules)
        found = delta_merge.standing(batch, held, self._rules)
        gone = held.filter(pa.array(found.goes))
        came = batch.filter(pa.array(found.comes))
        # Digests of another key say nothing any more.
        forgets = prepared.keeps_digests and entry.content is not None and not goes_on_from(entry, previous)
        sources: list[Source] = []
        old: list[WrittenFile] = []
        rows_gone, rows_changed = _by_file(gone), _by_file(held.filter(pa.array(found.changes)))
        held_spans, batch_spans = _spans_by_file(found, batch, held)
        for number, file in enumerate(files):
            if number in rows_gone or number in rows_changed or forgets:
                left = np.ones(self._rows_in(file), np.bool_)
                left[rows_gone.get(number, [])] = False
                old.append(file)
                spans = held_spans.get(number)
                sources.append(self._source(file, kept=left, without_digests=forgets, spans=spans))
        rows_come = _by_file(came)
        for number, file in enumerate(prepared.files):
            if number in rows_come:
                taken = np.zeros(file.rows, np.bool_)
                taken[rows_come[number]] = True
                sources.append(self._source(file, kept=taken, spans=batch_spans.get(number)))
        new = self._written(sources, [file.path for file in prepared.files])
        went = 0 if forgets else delta_merge.digest_sum(gone.column("digest"))
        came_sum = delta_merge.digest_sum(came.column("digest"))
        return Merged(self._replacing(old, new), new, came_sum, went)

    def _files(self, table: DeltaTable) -> list[WrittenFile]:
        if "deletionVectors" in (table.protocol().reader_features or ()):
            raise SinkError(
                f"sink {self.name!r}: {self.ledger.uri} has deletion vectors, and rows cannot be merged into it. "
                "Nothing was committed; purge the table with Spark (REORG TABLE … APPLY (PURGE)) and drop the feature"
            )
        return list(table_files(table, self._definition.partition_by))

    def _rows_in(self, file: WrittenFile) -> int:
        with self.ledger.disk.open_existing(self._located(file)) as handle, pq.ParquetFile(handle) as content:
            return int(content.metadata.num_rows)

    def _source(self, file: WrittenFile, **how: Any) -> Source:
        return Source(self._located(file), file.partition, is_ours=bool(OURS.fullmatch(file.path)), **how)

    def _written(self, sources: list[Source], shaped_like: list[str]) -> list[WrittenFile]:
        """New files for these rows, durable; they have the columns of the files named."""
        ledger = self.ledger
        schemas = []
        for path in shaped_like:
            with ledger.disk.open_existing(f"{ledger.uri}/{path}") as handle, pq.ParquetFile(handle) as file:
                schemas.append(file.schema_arrow.remove_metadata())
        whole = pa.unify_schemas(schemas, promote_options="permissive")
        schema = pa.schema([field for field in whole if field.name != DELETE])
        rewriting = Rewriting(replace(self.file_set(), has_lineage=False), schema)
        try:
            rewriting.write(sources)
        except BaseException:
            self.remove(rewriting.written)
            raise
        ledger.disk.flush_directory(ledger.uri)
        return rewriting.written

    def _replacing(self, old: list[WrittenFile], new: list[WrittenFile]) -> list[Any]:
        now_ms = time.time_ns() // 1_000_000
        by = self._definition.partition_by
        removes = [
            RemoveAction(file.path, True, now_ms, file.bytes, dict(zip(by, file.partition, strict=True)))
            for file in old
        ]
        return [*(self.named(file) for file in new), *removes]

    # Reset

    def forget(self) -> None:
        for _ in range(COMMIT_TRIES):
            table = self.ledger.table()
            if table is None or self.ledger.number(table) is None:
                return
            files = self._files(table)
            sources = [self._source(file, without_digests=True, without_places=True) for file in files]
            with explained(self.name, self.ledger.uri):
                new = self._written(sources, [file.path for file in files]) if files else []
            over = [Transaction(f"{self.ledger.application}/number", FORGOTTEN)]
            if self.commit_actions(table, self._replacing(files, new), over, {}):
                return
            self.remove(new)
        raise self._crowded_out()


RowSpans = tuple[delta_merge.Numbers, pa.Array, delta_merge.Flags]


def _spans_by_file(
    found: delta_merge.Standing, batch: pa.Table, held: pa.Table
) -> tuple[dict[int, RowSpans], dict[int, RowSpans]]:
    """Of the rows that stand in the table afterwards, by the number of their file: the table's, and the batch's."""
    if found.spans is None:
        return {}, {}
    size = batch.num_rows
    parts: list[dict[int, RowSpans]] = []
    for heads, chosen, first in ((held, ~found.goes, size), (batch, found.comes, 0)):
        at = np.flatnonzero(chosen)
        files, rows = (np.asarray(heads.column(name).to_numpy(), np.int64)[at] for name in ("file", "row"))
        by_file: dict[int, RowSpans] = {}
        for number in np.unique(files).tolist():
            of = np.flatnonzero(files == number)
            of = of[np.argsort(rows[of])]
            places = at[of] + first
            by_file[number] = rows[of], found.spans.until.take(pa.array(places)), found.spans.counts[places]
        parts.append(by_file)
    return parts[0], parts[1]


def _by_file(heads: pa.Table) -> dict[int, list[int]]:
    """Row numbers by the number of their file."""
    found: dict[int, list[int]] = {}
    for file, row in zip(heads.column("file").to_pylist(), heads.column("row").to_pylist(), strict=True):
        found.setdefault(file, []).append(row)
    return found
