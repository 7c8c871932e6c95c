"""A table of SQLite that we did not write, in one snapshot, opened for reading only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final
from urllib.parse import parse_qsl, quote

import pyarrow as pa

from holdfast.audit.evaluating import BYTES, TEXT, Kind, Values, fine
from holdfast.audit.foreign_rows import RowBatch, missing_column
from holdfast.audit.matching import Match
from holdfast.audit.model import AuditError, Finding
from holdfast.errors import UsageError

BATCH_ROWS: Final = 65_536
_KINDS: Final[Mapping[str, Kind]] = {
    "INT": Kind.INTEGER,
    "CHAR": Kind.TEXT,
    "TEXT": Kind.TEXT,
    "CLOB": Kind.TEXT,
    "BLOB": Kind.BYTES,
    "REAL": Kind.DOUBLE,
    "FLOA": Kind.DOUBLE,
    "DOUB": Kind.DOUBLE,
    "BOOL": Kind.BOOLEAN,
    "DEC": Kind.NUMBER,
    "NUM": Kind.NUMBER,
}
"""By what is in a column's declared type, as SQLite itself looks at it."""


def split_sqlite(place: str) -> tuple[str, str]:
    """The path and the table of `sqlite:PATH?table=NAME`; `sqlite:///relative` and `sqlite:////absolute` too."""
    path, _, query = place.partition("?")
    table = dict(parse_qsl(query)).get("table", "")
    if not table or not path.strip("/"):
        raise UsageError("--sink sqlite:PATH?table=NAME names a file and a table in it")
    return path[3:] if path.startswith("///") else path, table


class SqliteTable:
    kind = "sqlite"
    forgotten = 0
    undecided = 0

    def __init__(self, place: str, match: Match) -> None:
        self.match = match
        self.problems: list[Finding] = []
        self.notes: list[str] = []
        self._path, self._table = split_sqlite(place)
        self.name = f"sqlite table {self._table}"

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

    def kinds(self) -> list[Kind]:
        columns = self.columns()
        kinds = []
        for pair in self.match.pairs:
            if len(pair.path) > 1 or pair.path[0] not in columns:
                raise missing_column(pair, pair.path[0], list(columns), self.name)
            declared = columns[pair.path[0]]
            kinds.append(next((kind for word, kind in _KINDS.items() if word in declared), Kind.TEXT))
        return kinds

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
