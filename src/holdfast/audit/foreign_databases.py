"""A table of PostgreSQL that we did not write, in one snapshot, by a role that needs no more than to read it.

A table of SQLite that we did not write, in one snapshot, opened for reading only.
"""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import numpy as np
import pyarrow as pa

from holdfast.audit.evaluating import BYTES, TEXT, Kind, Values, fine
from holdfast.audit.foreign_rows import ForeignTable, RowBatch, missing_column
from holdfast.audit.matching import Match
from holdfast.audit.model import AuditError
from holdfast.errors import UsageError

SLICE_BLOCKS: Final = 4096
"""Of a table, read at once: 32 MiB."""
SLICE_ROWS: Final = 200_000

_POSTGRES_KINDS: Final[Mapping[str, Kind]] = dict.fromkeys(("int2", "int4", "int8"), Kind.INTEGER) | {
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


class DatabaseTable(ForeignTable):
    """A table whose columns have their types in the database."""

    @abstractmethod
    def columns(self) -> dict[str, str]:
        """Names and types."""

    @abstractmethod
    def kind_of(self, type_: str) -> Kind: ...

    def names(self) -> list[str]:
        return list(self.columns())

    def kinds(self) -> list[Kind]:
        columns = self.columns()
        for pair in self.match.pairs:
            if len(pair.path) > 1 or pair.path[0] not in columns:
                raise missing_column(pair, pair.path[0], list(columns), self.name)
        return [self.kind_of(columns[pair.path[0]]) for pair in self.match.pairs]


class PostgresTable(DatabaseTable):
    kind = "postgres"

    def __init__(self, url: str, match: Match) -> None:
        self._url, self._schema, self._table = split_table(url)
        shown = self._table if self._schema == "public" else f"{self._schema}.{self._table}"
        super().__init__(f"postgresql table {shown}", match)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """A connection in a transaction that sees one moment and may change nothing."""
        import psycopg

        try:
            connection = psycopg.connect(self._url, connect_timeout=10, application_name="holdfast audit")
        except psycopg.Error as error:
            raise AuditError(f"{self.name}: PostgreSQL cannot be reached: {str(error).strip()}") from error
        try:
            with connection:
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                connection.read_only = True
                yield connection
        except psycopg.Error as error:
            raise AuditError(f"{self.name} cannot be read: {str(error).strip()}") from error

    def columns(self) -> dict[str, str]:
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

    def kind_of(self, type_: str) -> Kind:
        return _POSTGRES_KINDS.get(type_, Kind.TEXT)

    def rows(self) -> Iterator[RowBatch]:
        kinds = self.kinds()
        with self.connected() as connection:
            connection.execute("SET LOCAL extra_float_digits = 1")
            for statement in self._statements(connection, kinds):
                with connection.cursor(binary=True) as cursor:
                    for packed in cursor.execute(statement):
                        if packed[0] is not None:
                            parts = zip(packed[::2], packed[1::2], kinds, strict=True)
                            yield RowBatch([_unpacked(*each) for each in parts], self.name, -1)

    def _statements(self, connection: Any, kinds: Sequence[Kind]) -> Iterator[Any]:
        """What to ask for, slice by slice: rows packed by the server, since a row by itself costs a microsecond here.

        A plain table is cut by its blocks; a view or a partitioned table by a number for each row.
        """
        from psycopg import sql

        table = sql.Identifier(self._schema, self._table)
        packed = sql.SQL(", ").join(
            _packed(pair.path[0], kind) for pair, kind in zip(self.match.pairs, kinds, strict=True)
        )
        found = connection.execute(
            "SELECT relkind::text, pg_relation_size(c.oid) / current_setting('block_size')::int "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s AND relname = %s",
            (self._schema, self._table),
        ).fetchone()
        if found is None or found[0] != "r":
            yield sql.SQL(
                "SELECT {} FROM (SELECT *, row_number() OVER () / {} AS _hf_slice FROM {}) s GROUP BY _hf_slice"
            ).format(packed, sql.Literal(SLICE_ROWS), table)
            return
        for first in range(0, int(found[1]), SLICE_BLOCKS):
            ends = [sql.Literal(f"({block},0)") for block in (first, first + SLICE_BLOCKS)]
            yield sql.SQL("SELECT {} FROM {} WHERE ctid >= {}::tid AND ctid < {}::tid").format(
                packed, table, *ends
            )


def _packed(column: str, kind: Kind) -> Any:
    """The lengths of a column's values, -1 for null, and the values, each one behind the other."""
    from psycopg import sql

    value: Any = sql.SQL("convert_to({}::text, 'UTF8')").format(sql.Identifier(column))
    if kind is Kind.BYTES:
        value = sql.Identifier(column)
    elif kind is Kind.MOMENT:
        micros = sql.SQL("(extract(epoch FROM {}) * 1000000)::bigint").format(sql.Identifier(column))
        value = sql.SQL("convert_to({}::text, 'UTF8')").format(micros)
    return sql.SQL(
        "string_agg(int4send(coalesce(octet_length({0}), -1)), ''::bytea), "
        "string_agg(coalesce({0}, ''::bytea), ''::bytea)"
    ).format(value)


def _unpacked(packed_lengths: bytes, content: bytes, kind: Kind) -> Values:
    lengths = np.frombuffer(packed_lengths, ">i4").astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(np.maximum(lengths, 0))))
    nulls = int((lengths < 0).sum())
    valid = pa.py_buffer(np.packbits(lengths >= 0, bitorder="little")) if nulls else None
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(content)]
    array = pa.Array.from_buffers(BYTES if kind is Kind.BYTES else TEXT, len(lengths), buffers, nulls)
    if kind is Kind.MOMENT:
        array = array.cast(pa.int64()).cast(pa.timestamp("us", "UTC"))
    return fine(array)


# ---------------------------------------------------------------------------- foreign sqlite


BATCH_ROWS: Final = 65_536
_SQLITE_KINDS: Final[Mapping[str, Kind]] = {
    "INT": Kind.INTEGER,
    **dict.fromkeys(("CHAR", "TEXT", "CLOB"), Kind.TEXT),
    "BLOB": Kind.BYTES,
    **dict.fromkeys(("REAL", "FLOA", "DOUB"), Kind.DOUBLE),
    "BOOL": Kind.BOOLEAN,
    **dict.fromkeys(("DEC", "NUM"), Kind.NUMBER),
}
"""By what is in a column's declared type, as SQLite itself looks at it."""


def split_sqlite(place: str) -> tuple[str, str]:
    """The path and the table of `sqlite:PATH?table=NAME`; `sqlite:///relative` and `sqlite:////absolute` too."""
    path, _, query = place.partition("?")
    table = dict(parse_qsl(query)).get("table", "")
    if not table or not path.strip("/"):
        raise UsageError("--sink sqlite:PATH?table=NAME names a file and a table in it")
    return path[3:] if path.startswith("///") else path, table


class SqliteTable(DatabaseTable):
    kind = "sqlite"

    def __init__(self, place: str, match: Match) -> None:
        self._path, self._table = split_sqlite(place)
        super().__init__(f"sqlite table {self._table}", match)

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """A connection that cannot write; what goes wrong with it is told in one line."""
        try:
            with closing(sqlite3.connect(f"file:{quote(self._path)}?mode=ro", uri=True)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise AuditError(f"{self.name} in {self._path} cannot be read: {error}") from error

    def columns(self) -> dict[str, str]:
        with self.connected() as connection:
            found = connection.execute(
                "SELECT name, type FROM pragma_table_info(?)", (self._table,)
            ).fetchall()
        if not found:
            raise AuditError(f"{self.name}: there is no such table in {self._path}")
        return {str(name): str(type_).upper() for name, type_ in found}

    def kind_of(self, type_: str) -> Kind:
        return next((kind for word, kind in _SQLITE_KINDS.items() if word in type_), Kind.TEXT)

    def rows(self) -> Iterator[RowBatch]:
        kinds = self.kinds()
        names = ", ".join(_quoted(pair.path[0]) for pair in self.match.pairs)
        with self.connected() as connection:
            cursor = connection.execute(f"SELECT {names} FROM {_quoted(self._table)}")
            first = 0
            while rows := cursor.fetchmany(BATCH_ROWS):
                columns = zip(zip(*rows, strict=True), kinds, strict=True)
                yield RowBatch([_values(column, kind) for column, kind in columns], self.name, first)
                first += len(rows)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _values(column: Sequence[Any], kind: Kind) -> Values:
    """A cell may hold anything, whatever its column was declared as."""
    if kind is Kind.BYTES:
        data = [each if each is None or isinstance(each, bytes) else str(each).encode() for each in column]
        return fine(pa.array(data, BYTES))
    texts = [
        None if each is None else each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each)
        for each in column
    ]
    return fine(pa.array(texts, TEXT))
