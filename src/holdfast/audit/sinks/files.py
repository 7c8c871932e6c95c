"""Parquet files as an auditor reads them: rows, lineage, columns, and what is wrong with the file.

Files are opened for reading and nothing else. A file that cannot be read is told with the reason (`Damaged`); rows that
come before the damage are given, so that what is missing is no more than what is really gone.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.audit.lineage import (
    NOWHERE,
    PARTS,
    LineageBatch,
    Offsets,
    as_ranges,
    partitions_of,
    split_struct,
)
from holdfast.audit.model import Fate, Finding, Range, ranges_text
from holdfast.audit.sinks.base import (
    LINEAGE,
    NOWHERE_YET,
    ContentBatch,
    ErasedRows,
    SinkScope,
    SinkUnreadable,
    Values,
    contents_of,
    erased_at,
    is_below,
)
from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition
from holdfast.pipeline.definition.streams import stream_of
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import BatchRange, Place, Positions

BATCH_ROWS: Final = 256 * 1024
"""Read at once: a column of places takes a few megabytes."""
OURS: Final = re.compile(r"part-[0-9a-f]{32}\.parquet")
"""The names of files that a sink writes."""
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)


BROKEN: Final = (pa.ArrowException, OSError, ValueError, OverflowError, IndexError)
"""What Arrow raises on bytes that are no Parquet: names that are no text, and sizes that are none, among them."""


class Damaged(Exception):
    """A file that is not there or cannot be read to its end."""


def place_of(definition: PipelineDefinition, path: str) -> str:
    """Where a sink's files are: a path of this machine, or a URL."""
    if path.startswith("file:"):
        path = "/" + path.removeprefix("file:").lstrip("/")
    if _URL.match(path):
        return path.rstrip("/")
    return os.path.abspath(os.path.join(definition.directory, path))


def count_rows(path: str) -> int:
    """From the footer."""
    with opened(path) as file:
        return int(file.metadata.num_rows)


def is_parquet(path: str) -> bool:
    """By its first bytes."""
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def opened(path: str, **options: Any) -> Any:
    """A Parquet file, on this machine or under a URL."""
    try:
        if "://" in path:
            system, where = file_system(path)
            return pq.ParquetFile(system.open_input_file(where), **options)
        return pq.ParquetFile(path, **options)
    except FileNotFoundError as error:
        raise Damaged("it is missing") from error
    except PermissionError as error:
        raise SinkUnreadable(f"{path} may not be read: give the user who audits the right to") from error
    except BROKEN as error:
        raise Damaged(f"it is no whole Parquet file ({first_line(error)})") from error


def file_system(url: str) -> tuple[Any, str]:
    """Of Arrow's, with the path in it; credentials come from the environment, as `deltalake`'s do."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    if scheme == "file":
        return _file_system("file", ""), "/" + path.lstrip("/")
    return _file_system(scheme, bucket), f"{bucket}/{path}"


@lru_cache(maxsize=16)
def _file_system(scheme: str, bucket: str) -> Any:
    from pyarrow import fs

    return fs.FileSystem.from_uri(f"{scheme}://{bucket}/")[0]


def names_in(directory: str) -> list[str]:
    """Of a directory, here or under a URL; nothing when it is not there."""
    if "://" not in directory:
        try:
            return [entry.name for entry in listed(directory)]
        except FileNotFoundError:
            return []
    from pyarrow import fs

    system, where = file_system(directory)
    found = system.get_file_info(fs.FileSelector(where, allow_not_found=True))
    return sorted(info.base_name for info in found)


def size_of(path: str) -> int | None:
    """In bytes; None when there is no such file."""
    if "://" not in path:
        try:
            return os.path.getsize(path)
        except FileNotFoundError:
            return None
    from pyarrow import fs

    system, where = file_system(path)
    info = system.get_file_info(where)
    return None if info.type == fs.FileType.NotFound else int(info.size)


def text_of(path: str) -> str:
    """A small file; `OSError` when it cannot be read, `ValueError` when it is no text."""
    if "://" not in path:
        with open(path, encoding="utf-8") as file:
            return file.read()
    system, where = file_system(path)
    with system.open_input_file(where) as file:
        return str(file.read().decode("utf-8"))


def _batches(path: str, columns: Sequence[str] | None) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches with the number of their first row. None is of two row groups: Arrow cannot join their dictionaries."""
    row = 0
    with _opened_with_lineage(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(BATCH_ROWS, [group], columns):
                yield row, _without_views(batch)
                row += batch.num_rows


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """What is found out about a file while its rows are taken apart, as damage of the file."""
    try:
        yield
    except SinkUnreadable:
        raise
    except BROKEN as error:
        raise Damaged(f"it cannot be read ({first_line(error)})") from error


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Others write texts as views, which few of Arrow's functions take."""
    wanted = [pa.field(each.name, _without_view(each.type)) for each in batch.schema]
    if all(each.type == other.type for each, other in zip(wanted, batch.schema, strict=True)):
        return batch
    columns = [
        column.cast(each.type) if column.type != each.type else column
        for column, each in zip(batch.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(wanted))


def _without_view(kind: pa.DataType) -> pa.DataType:
    if kind == pa.string_view():
        return pa.string()
    if kind == pa.binary_view():
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _without_view(each.type)) for each in kind])
    return kind


def _opened_with_lineage(path: str) -> Any:
    """Topics repeat: they are read as a dictionary, where the file has them."""
    try:
        return opened(path, read_dictionary=[f"{LINEAGE}.topic"])
    except KeyError:
        return opened(path)


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def lineage(path: str, where: str) -> Iterator[LineageBatch]:
    """The places of all rows of a file."""
    with _telling():
        for _, batch in _batches(path, [LINEAGE]):
            if LINEAGE in batch.schema.names:
                yield from split_struct(batch.column(LINEAGE), where)
            else:
                rows = batch.num_rows or count_rows(path)
                nowhere = np.full(rows, -1, np.int64)
                yield LineageBatch(NOWHERE, -1, nowhere, nowhere.astype(np.int32), where)
                return


def tables(
    path: str, columns: Sequence[str] | None, constants: Mapping[str, pa.Scalar] | None = None
) -> Iterator[pa.Table]:
    """Rows of a file with these columns (None: all), as stored, and the lineage as `_hf_topic`, `_hf_partition`,
    `_hf_offset`, `_hf_index`. A column the file lacks has its value from `constants`, or is left out."""
    wanted = None if columns is None else [LINEAGE, *columns]
    with _telling():
        for _, batch in _batches(path, wanted):
            yield with_places(batch, constants or {}, columns)


def with_places(
    batch: pa.RecordBatch, constants: Mapping[str, pa.Scalar], columns: Sequence[str] | None
) -> pa.Table:
    found: dict[str, pa.Array] = {}
    if LINEAGE in batch.schema.names:
        places = batch.column(LINEAGE)
        for name in PARTS:
            part = pc.struct_field(places, name)
            found[f"_hf_{name}"] = part.dictionary_decode() if pa.types.is_dictionary(part.type) else part
    found |= {name: batch.column(name) for name in batch.schema.names if name != LINEAGE}
    for name, value in constants.items():
        if name not in found and (columns is None or name in columns):
            found[name] = pa.repeat(value, batch.num_rows)
    return pa.table(found)


def rows_at(path: str, place: Place, offset: int) -> list[int]:
    """The numbers of a file's rows that were made of one record."""
    found: list[int] = []
    first = 0
    with _telling():
        for table in tables(path, ()):
            for topic, partition, rows, offsets in partitions_of(table):
                if (topic, partition) == (place.topic, place.partition):
                    found += (first + rows[offsets == offset]).tolist()
            first += table.num_rows
    return found


# ------------------------------------------------------------------------ directories


def folder_values(folders: Sequence[str]) -> dict[str, str | None]:
    """What the directories above a file say of its rows (`country=nl`)."""
    found: dict[str, str | None] = {}
    for folder in folders:
        name, is_value, value = folder.partition("=")
        if is_value:
            found[unquote(name)] = None if value == NO_VALUE else unquote(value)
    return found


def typed_values(values: Mapping[str, str | None], kinds: Mapping[str, pa.DataType]) -> dict[str, pa.Scalar]:
    """Texts of directories, or of a log, as values of their columns; a type that is not known stays text."""
    found: dict[str, pa.Scalar] = {}
    for name, text in values.items():
        scalar = pa.scalar(text, pa.string())
        kind = kinds.get(name)
        found[name] = scalar if kind is None else _cast(scalar, kind)
    return found


def _cast(scalar: pa.Scalar, kind: pa.DataType) -> pa.Scalar:
    try:
        return pc.cast(scalar, kind)
    except pa.ArrowException:
        return scalar


_ARROW: Final = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def spark_kinds(document: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """The plain columns of a schema in Spark's JSON."""
    kinds: dict[str, pa.DataType] = {}
    for field in document.get("fields", ()):
        kind = field["type"]
        if isinstance(kind, str) and kind in _ARROW:
            kinds[field["name"]] = _ARROW[kind]
        elif isinstance(kind, str) and kind.startswith("decimal("):
            precision, scale = kind[8:-1].split(",")
            kinds[field["name"]] = pa.decimal128(int(precision), int(scale))
    return kinds


def listed(directory: str) -> list[os.DirEntry[str]]:
    """A directory's entries by name; `FileNotFoundError` when it is not there."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except PermissionError as error:
        raise SinkUnreadable(f"{directory} may not be read: give the user who audits the right to") from error


def files_below(directory: str, folders: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every data file, with the directories between, by name; names with `_` or `.` before are no data."""
    for entry in listed(directory):
        if entry.name.startswith(("_", ".")):
            continue
        if entry.is_dir():
            yield from files_below(entry.path, (*folders, entry.name))
        else:
            yield entry.path, folders


def outside(batch: LineageBatch, spans: Mapping[tuple[str, int], Sequence[tuple[int, int]]]) -> Offsets:
    """Those of these rows' offsets that none of the spans has; of a topic nobody knows here, none."""
    known = spans.get((batch.topic, batch.partition))
    if not known or len(batch) == 0:
        return batch.offsets[:0]
    low, high = known[0][0], known[-1][1]
    is_out = (batch.offsets < low) | (batch.offsets >= high)
    if len(known) > 1:
        starts = np.array([start for start, _ in known], np.int64)
        ends = np.array([end for _, end in known], np.int64)
        at = np.searchsorted(starts, batch.offsets, "right") - 1
        is_out |= batch.offsets >= ends[np.maximum(at, 0)]
    return np.unique(batch.offsets[is_out])


def spans_of(ranges: Sequence[BatchRange]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """By topic and partition the offsets of some batches, ascending, joined where they touch."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for each in ranges:
        for place, span in each.spans.items():
            found.setdefault((place.topic, place.partition), []).append((span.start, span.end))
    for key, spans in found.items():
        joined: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        found[key] = joined
    return found


def not_there(
    spans: Mapping[tuple[str, int], Sequence[tuple[int, int]]], there: Sequence[LineageBatch]
) -> dict[tuple[str, int], list[Range]]:
    """The offsets of these spans that no row is from, as ranges."""
    missing: dict[tuple[str, int], list[Range]] = {}
    for key, parts in spans.items():
        held = [batch.offsets for batch in there if (batch.topic, batch.partition) == key]
        seen = np.unique(np.concatenate(held)) if held else np.empty(0, np.int64)
        for start, end in parts:
            left = np.setdiff1d(np.arange(start, end, dtype=np.int64), seen, assume_unique=True)
            missing.setdefault(key, []).extend(as_ranges(left))
    return {key: ranges for key, ranges in missing.items() if ranges}


class Gone(NamedTuple):
    """What a batch lacks."""

    place: tuple[str, int] | None
    """The one partition it is of, where the offsets are known for certain."""
    ranges: tuple[Range, ...]
    words: str
    """For the end of a sentence."""


def gone(
    spans: Mapping[tuple[str, int], Sequence[tuple[int, int]]], left: Sequence[LineageBatch], missing: int
) -> Gone:
    """Which offsets of a batch are gone with `missing` of its rows: exactly, if each offset was to have a row, else
    among which they are."""
    if missing <= 0 or not spans:
        return Gone(None, (), "")
    absent = not_there(spans, left)
    count = sum(last - first + 1 for ranges in absent.values() for first, last in ranges)
    words = f"; {missing:,} rows are gone" if missing > 1 else "; 1 row is gone"
    if count == missing and len(absent) == 1:
        key, ranges = next(iter(absent.items()))
        return Gone(key, tuple(ranges), words)
    parts = [
        f"{topic}-{partition} {ranges_text(ranges)}" for (topic, partition), ranges in sorted(absent.items())
    ]
    if not parts:
        return Gone(None, (), words)
    return Gone(None, (), f"{words}: {'' if count == missing else 'among '}{'; '.join(parts)}")


def readable(paths: Sequence[str]) -> list[LineageBatch]:
    """The rows of those of these files that can be read."""
    found: list[LineageBatch] = []
    for path in paths:
        with contextlib.suppress(Damaged):
            found += lineage(path, path)
    return found


# ------------------------------------------------------------------------ sinks of files


class DataFile(NamedTuple):
    """One file of a sink."""

    path: str
    where: str
    """As findings name it."""
    spans: Mapping[tuple[str, int], Sequence[tuple[int, int]]]
    """The offsets that its batch took; nothing: they are not known, or its rows name none."""
    constants: Callable[[], dict[str, pa.Scalar]]
    """The values of columns that are not in the file."""
    texts: Mapping[str, str | None] = {}
    """Those values, as directories or the log write them."""
    is_before_reset: bool = False
    turn: int | None = None
    """Of rows that a step made, the newest turn among them; nothing: it is not known."""


class FilesReader(ABC):
    """A sink of Parquet files, as it stood when it was opened: what every kind of those has in common."""

    is_exact = True
    keeps_digests: bool | None = None
    gone_offsets = 0
    erased: Sequence[ErasedRows] = ()

    def __init__(self, definition: PipelineDefinition, sink: ParquetSink | DeltaSink) -> None:
        self.name = sink.name
        self.takes = sink.rows
        stream = stream_of(definition, sink)
        self._is_tap = bool(stream.step) and not stream.kind
        self._pipeline = definition.name
        self.path = place_of(definition, sink.path)
        self._found: list[Finding] = []
        """While the ledger was read."""
        self._damaged: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._misplaced: dict[tuple[str, int, str], list[Range]] = {}
        """By topic, partition and file: rows from offsets that are not of its batch."""

    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """Of the ledger, ascending."""

    @abstractmethod
    def _files(self) -> Iterator[DataFile]:
        """Of the snapshot."""

    @abstractmethod
    def _note_damage(self, file: DataFile, why: str) -> None:
        """Remember it, unless the whole table was replaced while it was read."""

    @abstractmethod
    def _examine(self) -> None:
        """Tell what is wrong with the ledger and the files."""

    def _keeps(self, file: DataFile, batch: LineageBatch) -> bool:
        """Whether rows are the pipeline's to answer for."""
        return True

    def positions(self) -> Positions:
        entries = self.entries()
        return entries[-1].positions if entries else NOWHERE_YET

    def columns(self) -> Sequence[str]:
        found: dict[str, None] = {}
        for file in self._files():
            with self._noting(file), opened(file.path) as content:
                found |= dict.fromkeys((*content.schema_arrow.names, *file.constants()))
        return list(found)

    # -------------------------------------------------------------------- rows

    @contextlib.contextmanager
    def _noting(self, file: DataFile) -> Iterator[None]:
        try:
            yield
        except Damaged as damage:
            self._note_damage(file, str(damage))

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        self._misplaced = {}
        for file in self._not_below(scope):
            self._counts[file.where] = 0
            with self._noting(file):
                for batch in lineage(file.path, file.where):
                    self._counts[file.where] += len(batch)
                    if not self._keeps(file, batch):
                        continue
                    strays = outside(batch, file.spans)
                    if len(strays):
                        key = (batch.topic, batch.partition, batch.where)
                        self._misplaced.setdefault(key, []).extend(as_ranges(strays))
                    yield batch

    def _not_below(self, scope: SinkScope | None) -> Iterator[DataFile]:
        """The files that may hold rows of the scope."""
        starts = {(each.topic, each.partition): at[0] for each, at in (scope.spans if scope else {}).items()}
        turn = None if scope is None else scope.turn
        found = (file for file in self._files() if not is_below(file.spans, starts))
        return (file for file in found if turn is None or file.turn is None or file.turn > turn)

    def values(
        self, columns: Sequence[str] | None = None, scope: SinkScope | None = None
    ) -> Iterator[Values]:
        for file in self._not_below(scope):
            with self._noting(file):
                for table in tables(file.path, columns, file.constants()):
                    yield Values(table, file.where)

    def table_batches(self, columns: Sequence[str], scope: SinkScope | None = None) -> Iterator[pa.Table]:
        return (each.table for each in self.values(columns, scope))

    def contents(self, types: Mapping[str, str], scope: SinkScope | None = None) -> Iterator[ContentBatch]:
        for file in self._not_below(scope):
            with self._noting(file), _telling():
                for _, batch in _batches(file.path, None):
                    yield from contents_of(batch, types, file.texts, file.is_before_reset, self.keeps_digests)

    def find(self, place: Place, offset: int) -> list[str]:
        found = erased_at(self.erased, place, offset)
        for file in self._files():
            spans = file.spans.get((place.topic, place.partition), ())
            if file.spans and not any(start <= offset < end for start, end in spans):
                continue
            try:
                found += [f"{file.path} row {row}" for row in rows_at(file.path, place, offset)]
            except Damaged as damage:
                found.append(f"{file.path}: {damage}")
        return found

    # -------------------------------------------------------------------- what is wrong

    def problems(self) -> Sequence[Finding]:
        known, self._found = self._found, list(self._found)
        self._examine()
        for (topic, partition, where), ranges in self._misplaced.items():
            self._altered(
                f"{where} holds rows from offsets that are not of its batch", (topic, partition), ranges
            )
        found, self._found = self._found, known
        return found

    def _altered(
        self, detail: str, partition: tuple[str, int] | None = None, ranges: Sequence[Range] = ()
    ) -> None:
        known = None if partition is None else self.positions().of(*partition)
        place = None if known is None else known[0]
        self._found.append(Finding(Fate.ALTERED, self.name, place, tuple(ranges), detail=detail))

    def _gone(
        self,
        what: str,
        spans: Mapping[tuple[str, int], Sequence[tuple[int, int]]],
        others: Sequence[str],
        missing: int,
        otherwise: str = "",
    ) -> None:
        """A batch lacks rows: with their offsets, where what is left in these files tells."""
        lacking = gone(spans, readable(others), missing)
        self._altered(what + (lacking.words or otherwise), lacking.place, lacking.ranges)

    def close(self) -> None:  # noqa: B027  nothing is held open, of any kind of files
        """Nothing is held open."""
