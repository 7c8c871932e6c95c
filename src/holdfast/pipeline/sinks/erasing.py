"""Taking rows out of a sink for good, with an entry in its ledger that says which: `holdfast pipeline erase`.

Rows are chosen by a condition on the sink's columns. What is left and the entry become visible in one atomic act, as a
batch does, so a kill in the middle leaves the sink as it was, or erased; whoever calls again finishes the rest.

- *Parquet*: a table without the rows is built beside the old one, and the two directories change places, as
  `compacting` does it. The old one is removed; where a kill prevents that, the next call does.
- *Delta*: one commit removes the files that had them, adds what is left of those, and carries the entry. The old files
  are removed from the disk after it: a version from before the erasure can no longer be read. The entry names them, so
  that the next call can finish this.
- *PostgreSQL* (`erasing_postgres`): one transaction.

A topic's records cannot be taken out by a pipeline: they go by retention, by compaction, or by `delete-records`.

DuckDB evaluates conditions on files, over Arrow, with files, network and extensions out of its reach. A row is erased
where the condition is true, not where it is null. A condition that cannot be evaluated for some row is an error.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.model import DeltaSink, ParquetSink
from holdfast.pipeline.erased_places import RowsByEntry, by_partition, pack
from holdfast.pipeline.ledger import BEFORE_LEDGER, Content, Entry, Erasure
from holdfast.pipeline.positions import to_text
from holdfast.pipeline.row_digest import MASK, DigestKey, hasher_of, totals
from holdfast.pipeline.sinks import compacting, parquet
from holdfast.pipeline.sinks.base import SinkError
from holdfast.pipeline.sinks.delta_merge import digest_sum
from holdfast.pipeline.sinks.files import explained
from holdfast.pipeline.sinks.writing import (
    CONTENT,
    NO_VALUE,
    ROW_GROUP_ROWS,
    FileSet,
    FileWriter,
    WrittenFile,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from holdfast.pipeline.sinks.delta import DeltaSinkWriter

ROW: Final = "_hf_row"
FILES_TOGETHER_BYTES: Final = 256 << 20
"""Of memory that DuckDB may use for one batch of rows."""
_MASKED: Final = re.compile(r"'(?:[^']|'')*'")

Seal = Callable[[Erasure, int], Entry]
"""The next entry of the ledger, with its chain, for what is erased and the sum of digests that a table loses."""


class WrongCondition(SinkError):
    """The condition of an erasure cannot be evaluated. Nothing was erased."""

    exit_code = 2


@dataclass(frozen=True)
class Request:
    """What is to be erased from a sink, and why."""

    where: str
    reason: str
    key: DigestKey | None = None
    """Of the digests; not needed to count."""


class Eraser(Protocol):
    """One sink, locked or in a transaction as long as it is used."""

    def count(self) -> int:
        """How many rows the condition is true for; nothing is changed but what an earlier call has left."""

    def erase(self, seal: Seal) -> Erasure | None:
        """Take them out, and add the entry; None where there are none."""


# ---------------------------------------------------------------------------- which rows


class Condition:
    """A condition in SQL, on rows in Arrow's form."""

    def __init__(self, sink: str, text: str) -> None:
        import duckdb

        from holdfast.pipeline.scratch import closed_database

        self._sink = sink
        self._text = text
        self._errors: type[Exception] = duckdb.Error
        self._connection = closed_database(FILES_TOGETHER_BYTES, threads="1")

    def __del__(self) -> None:
        self._connection.close()

    def chosen(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        names = [name.lower() for name in rows.column_names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise WrongCondition(
                f"sink {self._sink!r}: columns that differ by capitals only ({', '.join(twice)}) cannot be told apart "
                "in a condition"
            )
        numbered = rows.append_column(ROW, pa.array(np.arange(rows.num_rows)))
        self._connection.register("sink_rows", numbered)
        try:
            found = self._connection.sql(f"SELECT {ROW} FROM sink_rows WHERE ({self._text}\n)").fetchnumpy()
        except self._errors as error:
            raise WrongCondition(f"sink {self._sink!r}: {first_line(error)}") from error
        finally:
            self._connection.unregister("sink_rows")
        mask = np.zeros(rows.num_rows, np.bool_)
        mask[np.asarray(found[ROW], np.int64)] = True
        return mask


def first_line(error: Exception) -> str:
    """What is wrong, without the values in quotation marks: they may be those that are to be forgotten."""
    return _MASKED.sub("'…'", str(error).splitlines()[0])


@dataclass
class Removed:
    """Rows that are being erased: their places, and the sums of their digests."""

    reason: str
    entries: RowsByEntry
    key: DigestKey | None
    types: Mapping[str, str]
    """Of the columns in the digests."""
    rows: int = 0
    went: int = 0
    """Of an upsert, the sum of the digests that stood beside the rows."""
    files: list[str] = field(default_factory=list)
    _rows: Counter[int] = field(default_factory=Counter)
    """By entry, by its place in the list."""
    _digests: Counter[int] = field(default_factory=Counter)
    _places: dict[tuple[str, int], list[npt.NDArray[np.int64]]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Sequence[Entry], request: Request | None = None) -> Removed:
        """Rows of a sink with this ledger. Digests are taken where the newest entry has some."""
        content: Content | None = entries[-1].content
        if request is None:
            return cls("", RowsByEntry(entries), None, {})
        key = None if content is None else request.key
        return cls(request.reason, RowsByEntry(entries), key, {} if content is None else content.columns)

    def take(
        self,
        lineage: Mapping[str, pa.Array],
        columns: Mapping[str, pa.Array],
        constants: Mapping[str, str | None] | None = None,
    ) -> None:
        """These rows, with all columns that the sink has."""
        groups = self.add(lineage)
        if self.key is None:
            return
        held = {name: values for name, values in columns.items() if name in self.types}
        texts = {name: text for name, text in (constants or {}).items() if name in self.types}
        made = hasher_of(self.key).digests(held, lineage, texts)
        for group, digest in enumerate(totals(made, groups, self.entries.before + 1)):
            self._digests[group] += digest

    def add(self, lineage: Mapping[str, pa.Array]) -> npt.NDArray[np.int64]:
        """These rows, without their digests; the entries that they belong to."""
        groups = self.entries.groups(lineage)
        self._rows.update(groups.tolist())
        self.rows += len(groups)
        indexes = lineage["index"].fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        for topic, partition, rows, offsets in by_partition(lineage):
            self._places.setdefault((topic, partition), []).append(np.stack([offsets, indexes[rows]]))
        return groups

    def erasure(self) -> Erasure:
        """In the words of the ledger; rows behind the newest entry are in none of today's, too."""
        rows, digests = Counter[str](), Counter[str]()
        for group, count in self._rows.items():
            is_known = group < self.entries.beyond
            number = str(self.entries.entries[group].number) if is_known else BEFORE_LEDGER
            rows[number] += count
            digests[number] += self._digests[group]
        entries = {
            number: (rows[number], f"{digests[number] & MASK:032x}") for number in sorted(rows, key=int)
        }
        places = []
        for (topic, partition), parts in sorted(self._places.items()):
            offsets, indexes = np.concatenate(parts, axis=1)
            order = np.lexsort((indexes, offsets))
            places.append((topic, partition, pack(offsets[order]), pack(indexes[order])))
        return Erasure(self.reason, self.rows, entries, tuple(places), tuple(self.files))


# ---------------------------------------------------------------------------- files


class RowFile(NamedTuple):
    """A file of rows, and what its place says of all of them."""

    path: str
    texts: Mapping[str, str | None]
    """Columns that the table is partitioned by, as they are written there."""


@dataclass
class FileRows:
    """The files of one sink, looked at row by row."""

    sink: str
    condition: Condition
    schema: pa.Schema
    """Of the table as it is now: a file may lack some of it."""
    open_file: Callable[[str], Any]
    is_merged: bool = False
    """The table keeps one row for each key, with its digest beside it."""

    def look(self, file: RowFile, removed: Removed) -> tuple[int, int]:
        """How many of its rows are to go, and how many it has."""
        hits = rows = 0
        for batch, chosen in self._batches(file):
            rows += len(chosen)
            if chosen.any():
                hits += int(chosen.sum())
                gone = batch.filter(pa.array(chosen))
                places = gone.column(LINEAGE)
                lineage = dict(zip((each.name for each in places.type), places.flatten(), strict=True))
                columns = {name: gone.column(name) for name in gone.schema.names if name != LINEAGE}
                if not self.is_merged:
                    removed.take(lineage, columns, file.texts)
                    continue
                removed.add(lineage)
                if CONTENT in columns:
                    removed.went = (removed.went + digest_sum(columns[CONTENT])) & MASK
        return hits, rows

    def rest(self, file: RowFile, files: FileSet) -> list[WrittenFile]:
        """What is left of it, in files of its own."""
        with self.open_file(file.path) as handle, pq.ParquetFile(handle) as content:
            writer = FileWriter(files, (), content.schema_arrow.remove_metadata())
        try:
            for batch, chosen in self._batches(file):
                if not chosen.all():
                    writer.add(batch.filter(pa.array(~chosen)))
            return writer.close()
        except BaseException:
            writer.abandon()
            raise

    def _batches(self, file: RowFile) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.bool_]]]:
        try:
            with self.open_file(file.path) as handle, pq.ParquetFile(handle) as content:
                if LINEAGE not in content.schema_arrow.names:
                    raise SinkError(
                        f"sink {self.sink!r}: {file.path} is no file of a pipeline; nothing was erased"
                    )
                for batch in content.iter_batches(batch_size=ROW_GROUP_ROWS):
                    yield batch, self.condition.chosen(self._table(batch, file.texts))
        except (pa.ArrowException, FileNotFoundError) as error:
            raise SinkError(
                f"sink {self.sink!r}: {file.path} cannot be read ({error}); nothing was erased"
            ) from error

    def _table(self, batch: pa.RecordBatch, texts: Mapping[str, str | None]) -> pa.Table:
        """With every column of the table."""
        found = {name: batch.column(name) for name in batch.schema.names}
        for each in self.schema:
            if each.name in texts:
                found[each.name] = pa.repeat(
                    pa.scalar(texts[each.name], pa.string()).cast(each.type), batch.num_rows
                )
            elif each.name not in found:
                found[each.name] = pa.nulls(batch.num_rows, each.type)
        return pa.table(found)


def _arrow_schema(columns: Any) -> pa.Schema:
    """Of a schema in Spark's JSON."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    schema: pa.Schema = to_arrow_schema(StructType.fromJson(columns), timezone="UTC")
    return schema


class ParquetEraser:
    def __init__(self, sink: ParquetSink, store: parquet.ParquetStore, request: Request) -> None:
        store.path = os.path.realpath(store.path)
        self._sink, self._store, self._request = sink, store, request

    def _rows(self) -> FileRows:
        text = self._store.held_schema()
        return FileRows(
            self._sink.name,
            Condition(self._sink.name, self._request.where),
            pa.schema([]) if text is None else _arrow_schema(json.loads(text)["columns"]),
            self._store.disk.open_existing,
        )

    def _files(self) -> Iterator[RowFile]:
        for number in self._store.numbers():
            root = os.path.join(self._store.path, parquet.batch_directory(number))
            for path in self._store.data_files(number):
                folders = os.path.relpath(path, root).split(os.sep)[:-1]
                pairs = (folder.split("=", 1) for folder in folders)
                texts = {unquote(name): None if text == NO_VALUE else unquote(text) for name, text in pairs}
                yield RowFile(path, texts)

    def count(self) -> int:
        rows, removed = self._rows(), Removed.of(list(self._store.entries()))
        return sum(rows.look(file, removed)[0] for file in self._files())

    def erase(self, seal: Seal) -> Erasure | None:
        store = self._store
        held = store.lock()
        try:
            with explained(store.name, store.path):
                compacting.sweep(store)
                rows, removed = self._rows(), Removed.of(list(store.entries()), self._request)
                looked = [(file, *rows.look(file, removed)) for file in self._files()]
                if not removed.rows:
                    return None
                hit = [(file, hits == there) for file, hits, there in looked if hits]
                return self._rebuild(rows, hit, removed, seal)
        finally:
            held.release()

    def _rebuild(
        self, rows: FileRows, hit: Sequence[tuple[RowFile, bool]], removed: Removed, seal: Seal
    ) -> Erasure:
        store = self._store
        gone = {os.path.relpath(file.path, store.path) for file, _ in hit}
        new = compacting.linked(store, gone)
        for file, is_whole in hit:
            folder = os.path.dirname(os.path.join(new, os.path.relpath(file.path, store.path)))
            if not is_whole:
                files = FileSet(folder, (), self._sink.file_bytes, self._sink.compression.lower(), store.disk)
                rows.rest(file, files)
            while os.path.dirname(folder) != new and not os.listdir(folder):
                os.rmdir(folder)
                folder = os.path.dirname(folder)
        erasure = removed.erasure()
        entry = seal(erasure, 0)
        target = os.path.join(new, parquet.batch_directory(entry.number + store.forgotten()))
        os.mkdir(target)
        store.disk.write(os.path.join(target, parquet.LEDGER), to_text(entry.as_json()).encode())
        compacting.take_the_place(store, new)
        return erasure


class DeltaEraser:
    def __init__(self, sink: DeltaSink, writer: DeltaSinkWriter, request: Request) -> None:
        self._sink, self._writer, self._request = sink, writer, request

    def _rows(self, table: DeltaTable) -> FileRows:
        if self._sink.mode == "scd2":
            raise SinkError(
                f"sink {self._sink.name!r} keeps versions in Delta, where rows cannot be erased yet; nothing "
                "was erased. Delete all versions of the keys with a tool of your own, and reset and refill the sink"
            )
        if "deletionVectors" in (table.protocol().reader_features or ()):
            raise SinkError(
                f"sink {self._sink.name!r}: {self._writer.ledger.uri} has deletion vectors; nothing was erased. Delete "
                "the rows and purge the table with Spark first"
            )
        return FileRows(
            self._sink.name,
            Condition(self._sink.name, self._request.where),
            _arrow_schema(json.loads(table.schema().to_json())),
            self._writer.ledger.disk.open_existing,
            self._sink.mode != "append",
        )

    def _files(self, table: DeltaTable) -> Iterator[tuple[RowFile, WrittenFile]]:
        """Those that the sink wrote; rows that somebody else added are theirs."""
        for file in compacting.own_files(table, self._sink):
            texts = dict(zip(self._sink.partition_by, file.partition, strict=True))
            yield RowFile(f"{self._writer.ledger.uri}/{file.path}", texts), file

    def count(self) -> int:
        table = self._writer.ledger.table()
        if table is None:
            return 0
        rows, removed = self._rows(table), Removed.of(self._writer.ledger.entries(table))
        return sum(rows.look(file, removed)[0] for file, _ in self._files(table))

    def erase(self, seal: Seal) -> Erasure | None:
        ledger = self._writer.ledger
        table = ledger.table()
        if table is None:
            return None
        entries = ledger.entries(table)
        with explained(self._sink.name, ledger.uri):
            for entry in entries:
                self._remove(table, () if entry.erased is None else entry.erased.files)
            rows, removed = self._rows(table), Removed.of(entries, self._request)
            looked = [(file, held, *rows.look(file, removed)) for file, held in self._files(table)]
            if not removed.rows:
                return None
            old, new = [], []
            for file, held, hits, there in looked:
                if hits:
                    old.append(held)
                    left = [] if hits == there else rows.rest(file, self._set())
                    new += [replace(each, partition=held.partition) for each in left]
            removed.files = [each.path for each in old]
            ledger.disk.flush_directory(ledger.uri)
            erasure = removed.erasure()
            entry = seal(erasure, removed.went)
            name = self._writer.keep(entry)

            def commit(table: DeltaTable, actions: list[Any]) -> bool:
                self._writer.require_next(table, entry)
                return self._writer.commit_entry(table, actions, entry, name)

            compacting.replace_files(self._writer, self._sink, old, new, commit, is_change=True)
            self._remove(ledger.table(), removed.files)
        return erasure

    def _set(self) -> FileSet:
        ledger = self._writer.ledger
        return FileSet(ledger.uri, (), self._sink.file_bytes, disk=ledger.disk)

    def _remove(self, table: DeltaTable | None, paths: Sequence[str]) -> None:
        """Files that an erasure took out of the table; one that is named again, by a restore, is an audit's to find."""
        if table is None or not paths:
            return
        named = {path.rpartition("/")[2] for path in table.file_uris()}
        for path in paths:
            if path not in named:
                self._writer.ledger.disk.remove(f"{self._writer.ledger.uri}/{path}")
