"""What sinks that we did not write hold: the columns of a match, batch by batch, as values to compare.

    parquet:PATH                        a directory of Parquet files, or one file
    delta:PATH                          a Delta table's newest version
    postgresql://…/db?table=NAME        one table, in one snapshot
    topic:NAME                          a topic's committed records

Read only, and read as everybody reads it: of a directory that Spark's streaming file sink wrote, the files that its
`_spark_metadata` names; files whose name begins with `_` or `.` never. A file that cannot be read is a problem, named,
and reading goes on behind it: what was in it shows as lost.
"""

from __future__ import annotations

import difflib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.evaluating import TEXT, Evaluator, Kind, Values, fine, kind_of
from holdfast.audit.matching import Condition, Expression, Field, Match, MatchError, Pair, parse_match
from holdfast.audit.model import AuditError, Fate, Finding
from holdfast.errors import UsageError

BATCH_ROWS: Final = 65_536
COPIED_BYTES: Final = 8 << 20
NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
SPARK_METADATA: Final = "_spark_metadata"


class RowBatch(NamedTuple):
    values: list[Values]
    """One for each pair of the match."""
    where: str
    first: int
    """The number of the first row in there, from 0 on; -1: rows have no numbers."""
    numbers: npt.NDArray[np.int64] | None = None
    """Of each row, where they do not just go on from the first."""


class ForeignTable(Protocol):
    name: str
    kind: str
    match: Match
    problems: list[Finding]
    notes: list[str]

    def kinds(self) -> list[Kind]:
        """How each pair is compared."""

    def rows(self) -> Iterator[RowBatch]:
        """Everything that is there now. A snapshot is taken at the first row."""


def parse_sink(text: str) -> tuple[str, str]:
    """The kind and the place of `--sink`."""
    for kind in ("parquet", "delta", "topic"):
        if text.startswith(f"{kind}:") and len(text) > len(kind) + 1:
            return kind, text[len(kind) + 1 :]
    if text.startswith(("postgresql://", "postgres://")):
        return "postgres", text
    raise UsageError(
        f"--sink {text!r}: write parquet:PATH, delta:PATH, postgresql://…?table=NAME or topic:NAME"
    )


def open_table(sink: str, match_text: str, settings: Mapping[str, str]) -> ForeignTable:
    """The sink of `--sink` with its match; `settings` reach the cluster of a topic."""
    kind, place = parse_sink(sink)
    match = parse_match(match_text, is_topic=kind == "topic")
    match kind:
        case "parquet":
            return ParquetTable(place, match)
        case "delta":
            return DeltaTableRows(place, match)
        case "postgres":
            return PostgresTable(place, match)
        case _:
            return TopicTable(place, match, settings)


def column_names(kind: str, place: str) -> list[str]:
    """The columns of a sink that has such, those in structs with their paths."""
    nothing = Match(())
    match kind:
        case "parquet":
            return _flat(ParquetTable(place, nothing).schema())
        case "delta":
            return _flat(DeltaTableRows(place, nothing).schema())
        case _:
            return list(PostgresTable(place, nothing).columns())


def _flat(schema: pa.Schema) -> list[str]:
    names: list[str] = []
    for each in schema:
        names.append(each.name)
        if pa.types.is_struct(each.type):
            names += [f"{each.name}.{inner.name}" for inner in each.type]
    return names


def _missing(pair: Pair, name: str, there: Sequence[str], where: str) -> MatchError:
    near = difflib.get_close_matches(name, there, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(there)}"
    return MatchError(f"--match {str(pair)!r}: {where} has no column {name!r}; {hint}")


def _type_at(schema: pa.Schema, pair: Pair, where: str) -> pa.DataType:
    names = list(schema.names)
    if pair.path[0] not in names:
        raise _missing(pair, pair.path[0], names, where)
    type_ = schema.field(pair.path[0]).type
    for step in pair.path[1:]:
        inner = [field.name for field in type_] if pa.types.is_struct(type_) else []
        if step not in inner:
            raise _missing(pair, step, inner or ["no fields"], f"{pair.path[0]!r} of {where}")
        type_ = type_.field(step).type
    return type_


def _kind_at(type_: pa.DataType, pair: Pair, where: str) -> Kind:
    kind = kind_of(type_)
    if kind is None:
        raise MatchError(
            f"--match {str(pair)!r}: {pair.column} of {where} is {type_}, which cannot be compared; "
            "name a field of it, or another column"
        )
    return kind


def _plain(column: pa.Array | pa.ChunkedArray) -> Values:
    """A column as stored, in one of the types that values have."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    types = pa.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_string_view(column.type) or types.is_binary_view(column.type):
        column = column.cast(TEXT if types.is_string_view(column.type) else pa.large_binary())
    type_ = column.type
    if types.is_string(type_):
        return fine(column.cast(TEXT))
    if types.is_binary(type_) or types.is_fixed_size_binary(type_):
        return fine(column.cast(pa.binary()).cast(pa.large_binary()))
    if types.is_unsigned_integer(type_) or types.is_decimal(type_) or types.is_date(type_):
        return fine(column.cast(TEXT))
    if types.is_integer(type_):
        return fine(column.cast(pa.int64()))
    if types.is_floating(type_):
        return fine(pa.array([None if each is None else repr(each) for each in column.to_pylist()], TEXT))
    if types.is_boolean(type_):
        return fine(column.cast(TEXT))
    return fine(column)


def _at(batch: pa.RecordBatch | pa.Table, path: Sequence[str]) -> Values:
    column = batch.column(path[0])
    for step in path[1:]:
        column = pc.struct_field(column, step)
    return _plain(column)


# ---------------------------------------------------------------------------- Parquet


@dataclass(frozen=True)
class _DataFile:
    path: str
    folders: Mapping[str, str | None]
    """What the directories above it say of its rows."""


class ParquetTable:
    kind = "parquet"

    def __init__(self, path: str, match: Match) -> None:
        self.name = f"parquet:{path}"
        self.match = match
        self.problems: list[Finding] = []
        self.notes: list[str] = []
        self._path = path.removeprefix("file://").rstrip("/") or "/"
        if not os.path.exists(self._path):
            raise AuditError(f"the sink {self.name} is not there")

    def _files(self) -> list[_DataFile]:
        if os.path.isfile(self._path):
            return [_DataFile(self._path, {})]
        listed = self._named_by_spark()
        found: list[_DataFile] = []
        strangers = 0
        for directory, directories, names in os.walk(self._path):
            directories[:] = sorted(name for name in directories if not name.startswith(("_", ".")))
            for name in sorted(names):
                path = os.path.join(directory, name)
                if name.startswith(("_", ".")) or not name.endswith((".parquet", ".parq")):
                    continue
                if listed is not None and path not in listed:
                    strangers += 1
                    continue
                found.append(_DataFile(path, _folders(self._path, path)))
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
        entries: dict[int, str] = {}
        compacted = -1
        for name in os.listdir(directory):
            digits = name.removesuffix(".compact")
            if not digits.isdigit():
                continue
            if name.endswith(".compact"):
                compacted = max(compacted, int(digits))
                entries[int(digits)] = name
            else:
                entries.setdefault(int(digits), name)
        found: set[str] = set()
        for number in sorted(each for each in entries if each >= compacted):
            with open(os.path.join(directory, entries[number]), encoding="utf-8") as file:
                lines = file.read().splitlines()
            for line in lines[1:]:
                entry = json.loads(line)
                path = os.path.join(self._path, _relative(unquote(urlsplit(entry["path"]).path), self._path))
                if entry.get("action", "add") == "delete":
                    found.discard(path)
                else:
                    found.add(path)
        return found

    def _problem(self, path: str, what: str) -> None:
        place = os.path.relpath(path, self._path) if os.path.isdir(self._path) else path
        self.problems.append(Finding(Fate.ALTERED, self.name, detail=f"{place} {what}"))

    def schema(self) -> pa.Schema:
        """Of the first file that can be read, with what its directories say; empty when there is none."""
        import pyarrow.parquet as pq

        for each in self._files():
            try:
                schema = pq.read_schema(each.path)
            except (pa.ArrowInvalid, OSError):
                continue  # named when its rows are read
            for name in each.folders:
                if name not in schema.names:
                    schema = schema.append(pa.field(name, pa.string()))
            return schema
        return pa.schema([])

    def kinds(self) -> list[Kind]:
        schema = self.schema()
        if not schema.names:
            return [Kind.TEXT for _ in self.match.pairs]
        return [_kind_at(_type_at(schema, pair, self.name), pair, self.name) for pair in self.match.pairs]

    def rows(self) -> Iterator[RowBatch]:
        self.problems.clear()
        self.notes.clear()
        for each in self._files():
            place = os.path.relpath(each.path, self._path) if each.path != self._path else each.path
            try:
                yield from self._rows_of(each, place)
            except (pa.ArrowInvalid, OSError) as error:
                self._problem(each.path, f"cannot be read: {str(error).splitlines()[0]}")

    def _rows_of(self, file: _DataFile, place: str) -> Iterator[RowBatch]:
        import pyarrow.parquet as pq

        wanted = sorted({pair.path[0] for pair in self.match.pairs} - set(file.folders))
        first = 0
        with pq.ParquetFile(file.path) as opened:
            for pair in self.match.pairs:
                if pair.path[0] not in file.folders:
                    _type_at(opened.schema_arrow, pair, place)
            for batch in opened.iter_batches(BATCH_ROWS, columns=wanted):
                values = [
                    _at(batch, pair.path)
                    if pair.path[0] not in file.folders
                    else fine(pa.repeat(pa.scalar(file.folders[pair.path[0]], TEXT), batch.num_rows))
                    for pair in self.match.pairs
                ]
                yield RowBatch(values, place, first)
                first += batch.num_rows


def _folders(root: str, path: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for folder in os.path.relpath(os.path.dirname(path), root).split(os.sep):
        name, equals, value = folder.partition("=")
        if equals:
            found[unquote(name)] = None if value == NO_VALUE else unquote(value)
    return found


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


class DeltaTableRows:
    kind = "delta"

    def __init__(self, path: str, match: Match) -> None:
        self.name = f"delta:{path}"
        self.match = match
        self.problems: list[Finding] = []
        self.notes: list[str] = []
        self._path = path

    def _open(self) -> Any:
        try:
            from deltalake import DeltaTable
            from deltalake.exceptions import DeltaError
        except ImportError as missing:
            raise UsageError("a Delta table needs deltalake: pip install 'holdfast[delta]'") from missing
        try:
            return DeltaTable(self._path)
        except (DeltaError, OSError) as error:
            raise AuditError(f"the sink {self.name} is no Delta table that can be read: {error}") from error

    def schema(self) -> pa.Schema:
        return self._open().to_pyarrow_dataset().schema

    def kinds(self) -> list[Kind]:
        schema = self.schema()
        return [_kind_at(_type_at(schema, pair, self.name), pair, self.name) for pair in self.match.pairs]

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
                    yield RowBatch([_at(batch, pair.path) for pair in self.match.pairs], place, first)
                    first += batch.num_rows
            except (pa.ArrowInvalid, OSError) as error:
                detail = f"{place} cannot be read: {str(error).splitlines()[0]}"
                self.problems.append(Finding(Fate.ALTERED, self.name, detail=detail))


# ---------------------------------------------------------------------------- PostgreSQL

_POSTGRES_KINDS: Final[Mapping[str, Kind]] = {
    "int2": Kind.INTEGER,
    "int4": Kind.INTEGER,
    "int8": Kind.INTEGER,
    "numeric": Kind.NUMBER,
    "float8": Kind.DOUBLE,
    "float4": Kind.SINGLE,
    "bool": Kind.BOOLEAN,
    "timestamp": Kind.MOMENT,
    "timestamptz": Kind.MOMENT,
    "date": Kind.DATE,
    "bytea": Kind.BYTES,
}


def split_table(url: str) -> tuple[str, str, str]:
    """The address of a database without `?table=`, and the schema and table in it."""
    parts = urlsplit(url)
    given = parse_qsl(parts.query, keep_blank_values=True)
    table = dict(given).get("table", "")
    if not table:
        raise UsageError("--sink postgresql://…: add ?table=NAME, or ?table=SCHEMA.NAME")
    rest = urlencode([(name, value) for name, value in given if name != "table"])
    schema, dot, name = table.rpartition(".")
    return urlunsplit(parts._replace(query=rest)), schema if dot else "public", name


class PostgresTable:
    kind = "postgres"

    def __init__(self, url: str, match: Match) -> None:
        self.match = match
        self.problems: list[Finding] = []
        self.notes: list[str] = []
        self._url, self._schema, self._table = split_table(url)
        shown = self._table if self._schema == "public" else f"{self._schema}.{self._table}"
        self.name = f"postgresql table {shown}"
        self._kinds: list[Kind] = []

    def connected(self) -> Any:
        """A connection in a transaction that sees one moment and may change nothing."""
        try:
            import psycopg
        except ImportError as missing:
            raise UsageError("PostgreSQL needs psycopg: pip install 'holdfast[postgres]'") from missing
        try:
            connection = psycopg.connect(self._url, connect_timeout=10, application_name="holdfast audit")
        except psycopg.Error as error:
            raise AuditError(f"{self.name}: PostgreSQL cannot be reached: {str(error).strip()}") from error
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        return connection

    def columns(self) -> dict[str, str]:
        """Names and types."""
        with self.connected() as connection:
            found = connection.execute(
                "SELECT column_name, udt_name FROM information_schema.columns "
                "WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
                (self._schema, self._table),
            ).fetchall()
        if not found:
            raise AuditError(
                f"{self.name}: there is no such table, or this role may not read it (schema {self._schema!r})"
            )
        return {str(name): str(type_) for name, type_ in found}

    def kinds(self) -> list[Kind]:
        columns = self.columns()
        for pair in self.match.pairs:
            if len(pair.path) > 1 or pair.path[0] not in columns:
                raise _missing(pair, pair.path[0], list(columns), self.name)
        self._kinds = [_POSTGRES_KINDS.get(columns[pair.path[0]], Kind.TEXT) for pair in self.match.pairs]
        return self._kinds

    def rows(self) -> Iterator[RowBatch]:
        from psycopg import sql

        kinds = self._kinds or self.kinds()
        selected = sql.SQL(", ").join(
            _selected(pair.path[0], kind) for pair, kind in zip(self.match.pairs, kinds, strict=True)
        )
        statement = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT csv)").format(
            selected, sql.Identifier(self._schema, self._table)
        )
        with self.connected() as connection, connection.cursor() as cursor:
            connection.execute("SET LOCAL extra_float_digits = 1")
            with cursor.copy(statement) as copy:
                held = bytearray()
                for chunk in copy:
                    held += chunk
                    if len(held) > COPIED_BYTES:
                        yield self._parsed(bytes(held), kinds)
                        held.clear()
                if held:
                    yield self._parsed(bytes(held), kinds)

    def _parsed(self, text: bytes, kinds: Sequence[Kind]) -> RowBatch:
        import pyarrow.csv

        names = [str(number) for number in range(len(kinds))]
        table = pyarrow.csv.read_csv(
            io.BytesIO(text),
            pyarrow.csv.ReadOptions(column_names=names, block_size=max(len(text), 1)),
            pyarrow.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            pyarrow.csv.ConvertOptions(
                column_types={name: pa.string() for name in names},
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        values = [_copied(table.column(name), kind) for name, kind in zip(names, kinds, strict=True)]
        return RowBatch(values, self.name, -1)


def _selected(column: str, kind: Kind) -> Any:
    from psycopg import sql

    name = sql.Identifier(column)
    if kind is Kind.MOMENT:
        return sql.SQL("(extract(epoch FROM {}) * 1000000)::bigint").format(name)
    if kind is Kind.BYTES:
        return sql.SQL("encode({}, 'hex')").format(name)
    return sql.SQL("{}::text").format(name)


def _copied(column: pa.ChunkedArray, kind: Kind) -> Values:
    text = _plain(column)
    if kind is Kind.MOMENT:
        return fine(text.array.cast(pa.int64()).cast(pa.timestamp("us", "UTC")))
    if kind is Kind.BYTES:
        data = [None if each is None else bytes.fromhex(each) for each in text.array.to_pylist()]
        return fine(pa.array(data, pa.large_binary()))
    return text


# ---------------------------------------------------------------------------- a topic


class TopicTable:
    kind = "topic"

    def __init__(
        self, topic: str, match: Match, settings: Mapping[str, str], conditions: Sequence[Condition] = ()
    ) -> None:
        """`conditions` choose the records that count."""
        self.name = f"topic:{topic}"
        self._conditions = tuple(conditions)
        self.match = match
        self.problems: list[Finding] = []
        self.notes: list[str] = []
        self._topic = topic
        self._settings = dict(settings)

    def kinds(self) -> list[Kind]:
        from holdfast.reader.cluster import Cluster

        with Cluster(self._settings) as cluster:
            cluster.topics([self._topic])
        return [
            Kind.BYTES if is_bytes(pair.left) and is_bytes(pair.right) else Kind.TEXT
            for pair in self.match.pairs
        ]

    def batches(self, *, headers: bool = True) -> Iterator[pa.RecordBatch]:
        """The committed records there are now."""
        from holdfast.reader.topic_reader import read

        settings = {name: value for name, value in self._settings.items() if name != "bootstrap.servers"}
        bootstrap = self._settings["bootstrap.servers"]
        for batch in read(bootstrap, self._topic, settings=settings, headers=headers):
            if batch.num_rows:
                yield batch

    def rows(self) -> Iterator[RowBatch]:
        expressions = [pair.left for pair in self.match.pairs if pair.left is not None]
        evaluator = Evaluator(expressions, self._conditions)
        for batch in self.batches(headers=evaluator.needs_headers):
            if self._conditions:
                batch = batch.filter(pa.array(evaluator.chosen(batch)[0]))
            if batch.num_rows:
                place = f"{self._topic}-{batch.column('partition')[0].as_py()}"
                offsets = batch.column("offset").to_numpy()
                yield RowBatch(evaluator.evaluate(batch), place, int(offsets[0]), offsets)


def is_bytes(expression: Expression | None) -> bool:
    """Whether an expression gives bytes as they are, rather than texts."""
    return isinstance(expression, Field) and (
        expression.name == "headers" or (expression.name in ("key", "value") and not expression.path)
    )
