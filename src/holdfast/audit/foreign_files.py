"""Tables of files that we did not write: directories of Parquet, and Delta.

Read as everybody reads them: of a directory that Spark's streaming file sink wrote, the files that its
`_spark_metadata` names; files whose name begins with `_` or `.` never. A file that cannot be read is a problem, named,
and reading goes on behind it: what was in it shows as lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from holdfast.audit.evaluating import TEXT, Kind, Values, fine
from holdfast.audit.foreign_rows import ForeignTable, RowBatch, column_at, kinds_in, names_in
from holdfast.audit.matching import Match, MatchError, Pair
from holdfast.audit.model import AuditError, Fate, Finding
from holdfast.audit.sinks.files import BROKEN, files_below, first_line, folder_values

BATCH_ROWS: Final = 65_536
SPARK_METADATA: Final = "_spark_metadata"
UNREADABLE: Final = (*BROKEN, KeyError)
"""What a damaged Parquet file makes pyarrow raise."""


@dataclass(frozen=True)
class _DataFile:
    path: str
    folders: Mapping[str, str | None]
    """What the directories above it say of its rows."""


class ParquetTable(ForeignTable):
    kind = "parquet"

    def __init__(self, path: str, match: Match) -> None:
        super().__init__(f"parquet:{path}", match)
        self._path = path.removeprefix("file://").rstrip("/") or "/"
        if not os.path.exists(self._path):
            raise AuditError(f"the sink {self.name} is not there")

    def _files(self) -> list[_DataFile]:
        if os.path.isfile(self._path):
            return [_DataFile(self._path, {})]
        listed = self._named_by_spark()
        found: list[_DataFile] = []
        strangers = 0
        for path, folders in files_below(self._path):
            if not path.endswith((".parquet", ".parq")):
                continue
            if listed is not None and path not in listed:
                strangers += 1
                continue
            found.append(_DataFile(path, folder_values(folders)))
        if strangers:
            self.notes.append(
                f"{strangers} file{'s' if strangers > 1 else ''} in {self._path} that {SPARK_METADATA} does not name "
                "(batches that were not committed) were not read, as Spark does not read them"
            )
        for path in sorted((listed or set()) - {each.path for each in found}):
            self._problem(path, f"is named by {SPARK_METADATA} and is not there")
        return found

    def _named_by_spark(self) -> set[str] | None:
        """The files that the log of Spark's file sink names; None where there is no such log."""
        directory = os.path.join(self._path, SPARK_METADATA)
        if not os.path.isdir(directory):
            return None
        # Sorted, a compacted entry comes behind the plain one of its number.
        names = sorted(name for name in os.listdir(directory) if name.removesuffix(".compact").isdigit())
        entries = {int(name.removesuffix(".compact")): name for name in names}
        compacted = max((number for number, name in entries.items() if name.endswith(".compact")), default=-1)
        found: set[str] = set()
        for number in sorted(each for each in entries if each >= compacted):
            with open(os.path.join(directory, entries[number]), encoding="utf-8") as file:
                lines = file.read().splitlines()
            for line in lines[1:]:
                entry = json.loads(line)
                path = os.path.join(self._path, _relative(unquote(urlsplit(entry["path"]).path), self._path))
                (found.discard if entry.get("action") == "delete" else found.add)(path)
        return found

    def _problem(self, path: str, what: str) -> None:
        place = os.path.relpath(path, self._path) if os.path.isdir(self._path) else path
        self.problems.append(Finding(Fate.ALTERED, self.name, detail=f"{place} {what}"))

    def schema(self) -> pa.Schema:
        """Of the first file that can be read, with what its directories say; empty when there is none."""
        return next(self._schemas(), pa.schema([]))

    def names(self) -> list[str]:
        return names_in(self.schema())

    def _schemas(self) -> Iterator[pa.Schema]:
        import pyarrow.parquet as pq

        for each in self._files():
            try:
                schema = pq.read_schema(each.path)
            except UNREADABLE:
                continue  # named when its rows are read
            for name in each.folders:
                if name not in schema.names:
                    schema = schema.append(pa.field(name, pa.string()))
            yield schema

    def kinds(self) -> list[Kind]:
        refused: MatchError | None = None
        for schema in self._schemas():
            try:
                return kinds_in(schema, self.match, self.name)
            except MatchError as wrong:
                refused = refused or wrong  # a column may have been added later
        if refused is not None:
            raise refused
        return [Kind.TEXT for _ in self.match.pairs]

    def rows(self) -> Iterator[RowBatch]:
        self.problems.clear()
        self.notes.clear()
        for each in self._files():
            place = os.path.relpath(each.path, self._path) if each.path != self._path else each.path
            try:
                yield from self._rows_of(each, place)
            except FileNotFoundError as gone:
                raise _vanished(self.name, place) from gone
            except UNREADABLE as error:
                self._problem(each.path, f"cannot be read: {first_line(error)}")

    def _rows_of(self, file: _DataFile, place: str) -> Iterator[RowBatch]:
        import pyarrow.parquet as pq

        first = 0
        with pq.ParquetFile(file.path) as opened:
            there = set(opened.schema_arrow.names) - set(file.folders)
            wanted = sorted({pair.path[0] for pair in self.match.pairs} & there)
            rows = opened.metadata.num_rows
            if not wanted:  # nothing to read but how many there are
                yield RowBatch([_constant(file, pair, rows) for pair in self.match.pairs], place, first)
                return
            for batch in opened.iter_batches(BATCH_ROWS, columns=wanted):
                values = [
                    column_at(batch, pair.path)
                    if pair.path[0] in there
                    else _constant(file, pair, batch.num_rows)
                    for pair in self.match.pairs
                ]
                yield RowBatch(values, place, first)
                first += batch.num_rows


def _constant(file: _DataFile, pair: Pair, rows: int) -> Values:
    """What a directory says of all rows; null for a column that the file does not have, as readers give it."""
    return fine(pa.repeat(pa.scalar(file.folders.get(pair.path[0]), TEXT), rows))


def _vanished(name: str, place: str) -> AuditError:
    return AuditError(
        f"{name}: {place} was removed while it was read; audit again when nobody rewrites or cleans up the table"
    )


def _relative(path: str, root: str) -> str:
    """A file of the log relative to the directory, which may have been moved since it was written."""
    absolute = os.path.abspath(root) + os.sep
    if path.startswith(absolute):
        return path[len(absolute) :]
    parts = path.split(os.sep)
    name = os.path.basename(absolute.rstrip(os.sep))
    if name in parts:
        return os.sep.join(parts[len(parts) - parts[::-1].index(name) :])
    return os.path.basename(path)


# ---------------------------------------------------------------------------- Delta


class DeltaTableRows(ForeignTable):
    kind = "delta"

    def __init__(self, path: str, match: Match) -> None:
        super().__init__(f"delta:{path}", match)
        self._path = path

    def _open(self) -> Any:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            return DeltaTable(self._path)
        except (DeltaError, OSError) as error:
            raise AuditError(f"the sink {self.name} is no Delta table that can be read: {error}") from error

    def schema(self) -> pa.Schema:
        return self._open().to_pyarrow_dataset().schema

    def names(self) -> list[str]:
        return names_in(self.schema())

    def kinds(self) -> list[Kind]:
        return kinds_in(self.schema(), self.match, self.name)

    def rows(self) -> Iterator[RowBatch]:
        self.problems.clear()
        wanted = sorted({pair.path[0] for pair in self.match.pairs})
        dataset = self._open().to_pyarrow_dataset()
        for fragment in sorted(dataset.get_fragments(), key=lambda each: str(each.path)):
            first = 0
            place = os.path.basename(fragment.path)
            try:
                batches = fragment.to_batches(schema=dataset.schema, columns=wanted, batch_size=BATCH_ROWS)
                for batch in batches:
                    yield RowBatch([column_at(batch, pair.path) for pair in self.match.pairs], place, first)
                    first += batch.num_rows
            except FileNotFoundError as gone:
                raise _vanished(self.name, place) from gone
            except UNREADABLE as error:
                detail = f"{place} cannot be read: {first_line(error)}"
                self.problems.append(Finding(Fate.ALTERED, self.name, detail=detail))
