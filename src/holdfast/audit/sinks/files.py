"""Parquet files as an auditor reads them: rows, lineage, columns, and what is wrong with the file.

Files are opened for reading and nothing else. A file that cannot be read is told with the reason (`Damaged`); rows that
come before the damage are given, so that what is missing is no more than what is really gone.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import abstractmethod
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
from holdfast.audit.model import Finding, Range, ranges_text
from holdfast.audit.sinks.base import (
    CONTENT,
    EVERYTHING,
    LINEAGE,
    ContentBatch,
    SinkReader,
    SinkScope,
    SinkUnreadable,
    Values,
    erased_at,
)
from holdfast.errors import ConfigError
from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition
from holdfast.pipeline.definition.streams import stream_of
from holdfast.pipeline.formats.types import parse_type
from holdfast.pipeline.positions import BatchRange, Place

Spans = Mapping[tuple[str, int], Sequence[tuple[int, int]]]
"""By topic and partition, the offsets that were taken: ascending, the second not among them."""

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
        system, where = file_system(path)
        return pq.ParquetFile(where, filesystem=system, **options)
    except FileNotFoundError as error:
        raise Damaged("it is missing") from error
    except PermissionError as error:
        raise unreadable(path) from error
    except BROKEN as error:
        raise Damaged(f"it is no whole Parquet file ({first_line(error)})") from error


def unreadable(path: str) -> SinkUnreadable:
    return SinkUnreadable(f"{path} may not be read: give the user who audits the right to")


def file_system(path: str) -> tuple[Any, str]:
    """Of Arrow's, with the path in it; credentials come from the environment, as `deltalake`'s do."""
    scheme, is_url, rest = path.partition("://")
    if not is_url:
        return _file_system("file", ""), path
    bucket, _, inside = rest.partition("/")
    if scheme == "file":
        return _file_system("file", ""), "/" + inside.lstrip("/")
    return _file_system(scheme, bucket), f"{bucket}/{inside}"


@lru_cache(maxsize=16)
def _file_system(scheme: str, bucket: str) -> Any:
    from pyarrow import fs

    return fs.FileSystem.from_uri(f"{scheme}://{bucket}/")[0]


def names_in(directory: str) -> list[str]:
    """Of a directory, here or under a URL; nothing when it is not there."""
    from pyarrow import fs

    system, where = file_system(directory)
    try:
        found = system.get_file_info(fs.FileSelector(where, allow_not_found=True))
    except PermissionError as error:
        raise unreadable(directory) from error
    return sorted(info.base_name for info in found)


def size_of(path: str) -> int | None:
    """In bytes; None when there is no such file."""
    system, where = file_system(path)
    size: int | None = system.get_file_info(where).size
    return size


def text_of(path: str) -> str:
    """A small file; `OSError` when it cannot be read, `ValueError` when it is no text."""
    system, where = file_system(path)
    try:
        with system.open_input_file(where) as file:
            return str(file.read().decode("utf-8"))
    except PermissionError as error:
        raise unreadable(path) from error


def _batches(path: str, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """None is of two row groups: Arrow cannot join their dictionaries."""
    with _opened_with_lineage(path) as file:
        for group in range(file.num_row_groups):
            yield from map(_without_views, file.iter_batches(BATCH_ROWS, [group], columns))


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """What is found out about a file while its rows are taken apart, as damage of the file."""
    try:
        yield
    except BROKEN as error:
        raise Damaged(f"it cannot be read ({first_line(error)})") from error


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Others write texts as views, which few of Arrow's functions take."""
    wanted = pa.schema([each.with_type(_without_view(each.type)) for each in batch.schema])
    return batch if wanted.equals(batch.schema) else batch.cast(wanted)


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
        for batch in _batches(path, [LINEAGE]):
            if LINEAGE in batch.schema.names:
                yield from split_struct(batch.column(LINEAGE), where)
            else:
                rows = batch.num_rows or count_rows(path)
                nowhere = np.full(rows, -1, np.int64)
                yield LineageBatch(NOWHERE, -1, nowhere, nowhere.astype(np.int32), where)
                return


def parts_of(batch: pa.RecordBatch) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """Its columns, and the lineage of its rows by part; nothing where they have none."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    places = columns.pop(LINEAGE, None)
    return columns, {} if places is None else {name: pc.struct_field(places, name) for name in PARTS}


def tables(
    path: str, columns: Sequence[str] | None, constants: Mapping[str, pa.Scalar] | None = None
) -> Iterator[pa.Table]:
    """Rows of a file with these columns (None: all), as stored, and the lineage as `_hf_topic`, `_hf_partition`,
    `_hf_offset`, `_hf_index`. A column the file lacks has its value from `constants`, or is left out."""
    with _telling():
        for batch in _batches(path, None if columns is None else [LINEAGE, *columns]):
            held, places = parts_of(batch)
            found = {
                f"{LINEAGE}_{name}": part.dictionary_decode() if pa.types.is_dictionary(part.type) else part
                for name, part in places.items()
            } | held
            for name, value in (constants or {}).items():
                if name not in found and (columns is None or name in columns):
                    found[name] = pa.repeat(value, batch.num_rows)
            yield pa.table(found)


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
    found = {name: pa.scalar(text, pa.string()) for name, text in values.items()}
    for name in found.keys() & kinds.keys():
        with contextlib.suppress(pa.ArrowException):
            found[name] = pc.cast(found[name], kinds[name])
    return found


def arrow_kinds(types: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """By column, from types in Spark's words; of others nothing."""
    found = {}
    for name, kind in types.items():
        with contextlib.suppress(ConfigError):
            found[name] = parse_type(str(kind)).arrow
    return found


def spark_kinds(document: Mapping[str, Any]) -> dict[str, pa.DataType]:
    """The plain columns of a schema in Spark's JSON."""
    return arrow_kinds({field["name"]: field["type"] for field in document.get("fields", ())})


def listed(directory: str) -> list[os.DirEntry[str]]:
    """A directory's entries by name; `FileNotFoundError` when it is not there."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except PermissionError as error:
        raise unreadable(directory) from error


def files_below(directory: str, folders: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every data file, with the directories between, by name; names with `_` or `.` before are no data."""
    for entry in listed(directory):
        if entry.name.startswith(("_", ".")):
            continue
        if entry.is_dir():
            yield from files_below(entry.path, (*folders, entry.name))
        else:
            yield entry.path, folders


def outside(batch: LineageBatch, spans: Spans) -> Offsets:
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


def not_there(spans: Spans, there: Sequence[LineageBatch]) -> dict[tuple[str, int], list[Range]]:
    """The offsets of these spans that no row is from, as ranges."""
    missing: dict[tuple[str, int], list[Range]] = {}
    for key, parts in spans.items():
        held = [batch.offsets for batch in there if (batch.topic, batch.partition) == key]
        seen = np.unique(np.concatenate(held)) if held else np.empty(0, np.int64)
        for start, end in parts:
            left = np.setdiff1d(np.arange(start, end, dtype=np.int64), seen, assume_unique=True)
            missing.setdefault(key, []).extend(as_ranges(left))
    return {key: ranges for key, ranges in missing.items() if ranges}


# ------------------------------------------------------------------------ sinks of files


class DataFile(NamedTuple):
    """One file of a sink."""

    path: str
    where: str
    """As findings name it."""
    spans: Spans
    """The offsets that its batch took; nothing: they are not known, or its rows name none."""
    texts: Mapping[str, str | None]
    """The values of columns that are not in the file, as directories or the log write them."""
    kinds: Callable[[], Mapping[str, pa.DataType]]
    """The types of columns."""
    is_before_reset: bool = False
    turn: int | None = None
    """Of rows that a step made, the newest turn among them; nothing: it is not known."""


class FilesReader(SinkReader):
    """A sink of Parquet files, as it stood when it was opened: what every kind of those has in common."""

    def __init__(self, definition: PipelineDefinition, sink: ParquetSink | DeltaSink) -> None:
        super().__init__(definition.name, sink.name, sink.rows)
        stream = stream_of(definition, sink)
        self._is_tap = bool(stream.step) and not stream.kind
        self.path = place_of(definition, sink.path)
        self._damaged: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._misplaced: dict[tuple[str, int, str], list[Range]] = {}
        """By topic, partition and file: rows from offsets that are not of its batch."""

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

    def columns(self) -> Sequence[str]:
        found: dict[str, None] = {}
        for file in self._files():
            with self._noting(file), opened(file.path) as content:
                found |= dict.fromkeys((*content.schema_arrow.names, *file.texts))
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

    def _not_below(self, scope: SinkScope) -> Iterator[DataFile]:
        """The files that may hold rows of the scope."""
        starts = {(each.topic, each.partition): start for each, (start, _) in scope.spans.items()}
        turn = scope.turn
        for file in self._files():
            ends = {partition: parts[-1][1] for partition, parts in file.spans.items()}
            is_below = bool(ends) and all(end <= starts.get(each, -1) for each, end in ends.items())
            if not is_below and (turn is None or file.turn is None or file.turn > turn):
                yield file

    def values(self, columns: Sequence[str] | None = None, scope: SinkScope = EVERYTHING) -> Iterator[Values]:
        for file in self._not_below(scope):
            with self._noting(file):
                constants = typed_values(file.texts, file.kinds()) if file.texts else {}
                for table in tables(file.path, columns, constants):
                    yield Values(table, file.where)

    def table_batches(self, columns: Sequence[str], scope: SinkScope = EVERYTHING) -> Iterator[pa.Table]:
        return (each.table for each in self.values(columns, scope))

    def contents(self, types: Mapping[str, str], scope: SinkScope = EVERYTHING) -> Iterator[ContentBatch]:
        for file in self._not_below(scope):
            with self._noting(file), _telling():
                for batch in _batches(file.path, None):
                    columns, lineage = parts_of(batch)
                    if lineage:  # others are nobody's
                        yield ContentBatch(
                            {name: column for name, column in columns.items() if name in types},
                            lineage,
                            {
                                each: text
                                for each, text in file.texts.items()
                                if each in types.keys() - columns
                            },
                            _digests(batch) if self.keeps_digests else None,
                            file.is_before_reset,
                        )

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
            what = f"{where} holds rows from offsets that are not of its batch"
            self._altered_in(what, (topic, partition), ranges)
        found, self._found = self._found, known
        return found

    def _altered_in(self, detail: str, partition: tuple[str, int], ranges: Sequence[Range]) -> None:
        known = self.positions().of(*partition)
        self._altered(detail, None if known is None else known[0], ranges)

    def _gone(
        self, what: str, spans: Spans, others: Sequence[str], missing: int, otherwise: str = ""
    ) -> None:
        """A batch lacks rows: with their offsets exactly, if each offset was to have a row, else with those among which
        they are, as far as what is left in these files tells."""
        if missing <= 0 or not spans:
            self._altered(what + otherwise)
            return
        left: list[LineageBatch] = []
        for path in others:
            with contextlib.suppress(Damaged):
                left += lineage(path, path)
        absent = not_there(spans, left)
        is_exact = missing == sum(last - first + 1 for ranges in absent.values() for first, last in ranges)
        what += f"; {missing:,} rows are gone" if missing > 1 else "; 1 row is gone"
        if is_exact and len(absent) == 1:
            [(partition, ranges)] = absent.items()
            self._altered_in(what, partition, ranges)
            return
        parts = [
            f"{topic}-{number} {ranges_text(ranges)}" for (topic, number), ranges in sorted(absent.items())
        ]
        self._altered(what + (f": {'' if is_exact else 'among '}{'; '.join(parts)}" if parts else ""))


def _digests(batch: pa.RecordBatch) -> list[int | None]:
    """As they stand beside rows in files, 16 bytes each; other bytes are no row's digest."""
    if CONTENT not in batch.schema.names:
        return [None] * batch.num_rows
    kept: list[bytes | None] = batch.column(CONTENT).to_pylist()
    return [
        None if each is None else int.from_bytes(each, "little") if len(each) == 16 else -1 for each in kept
    ]
