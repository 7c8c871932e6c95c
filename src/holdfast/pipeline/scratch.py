"""Rows that may be more than memory should hold, compared by SQL: a DuckDB database for the length of one comparison.

    with ScratchDatabase(directory) as database:
        database.create("records", schema)
        database.add("records", rows)          # Arrow in
        found = database.query("SELECT …")     # Arrow out

The rules:

- It reads and writes nothing but its own directory, which the caller makes and removes: access to files, to the network
  and to extensions is off before the first statement, and the configuration is locked.
- Memory is bounded by `memory_bytes`; what does not fit goes to the directory. Beside it, `ROWS_TOGETHER` rows of each
  table wait to be added. DuckDB groups and sorts a few times as much as fits its memory, and gives up beyond: rows are
  compared in `passes`, each over those whose value has a hash of one kind, so that equal ones meet in one pass.
- Values come as bytes, in the form in which they are compared: DuckDB compares them byte by byte and never as numbers
  or texts of its own. No statement casts, rounds or collates a value that is compared.
- Long values (`LONG_BYTES`) are told apart by how they begin and by 256 bits of their BLAKE2 (`shortened`): DuckDB
  holds whole values in memory while it groups them, and a few thousand messages of a megabyte would not fit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import ExitCode, HoldfastError

MEMORY_BYTES: Final = 256 << 20
"""Of the database. Below it, sorting and grouping cut their work into parts and go to files."""
THREADS: Final = 2
"""An audit runs beside what it audits."""
ROWS_TOGETHER: Final = 65_536
"""Ten thousand files of ten rows are not ten thousand inserts."""
BYTES_TOGETHER: Final = 16 << 20
"""Of rows that wait to be added: values may be large."""
PASS_SHARE: Final = 1.0
"""How many times the memory the rows of one pass may take."""
LONG_BYTES: Final = 512
"""Of a value as it is compared, at most."""
DIGEST_BYTES: Final = 32

_TYPES: Final = {
    pa.large_binary(): "BLOB",
    pa.int64(): "BIGINT",
    pa.int32(): "INTEGER",
    pa.int8(): "TINYINT",
    pa.bool_(): "BOOLEAN",
    pa.string(): "VARCHAR",
}


class CannotCompare(HoldfastError):
    """The database could not do its work: no room on the disk, mostly. That is no difference."""

    exit_code = ExitCode.CANNOT_CONNECT


def closed_database(memory_bytes: int, **more: str) -> duckdb.DuckDBPyConnection:
    """In memory, in UTC, with files, network and extensions out of its reach, and a configuration that stays so."""
    config: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "autoload_known_extensions": "false",
        "autoinstall_known_extensions": "false",
        "python_enable_replacements": "false",
        "memory_limit": f"{memory_bytes}B",
        **more,
    }
    connection = duckdb.connect(":memory:", config=config)
    connection.execute("SET TimeZone = 'UTC'")
    # It would draw its bar on standard output, among what a command prints there for others to read.
    connection.execute("SET enable_progress_bar = false")
    connection.execute("SET lock_configuration = true")
    return connection


class ScratchDatabase:
    def __init__(self, directory: str, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._connection = closed_database(
            memory_bytes, temp_directory=directory, threads=str(THREADS), preserve_insertion_order="false"
        )
        self._memory_bytes = memory_bytes
        self._added_bytes = 0
        self._schemas: dict[str, pa.Schema] = {}
        self._waiting: dict[str, list[pa.Table]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def create(self, name: str, schema: pa.Schema) -> None:
        """A table of bytes and numbers."""
        self._schemas[name], self._waiting[name] = schema, []
        columns = ", ".join(f"{quoted(each.name)} {_TYPES[each.type]}" for each in schema)
        self.execute(f"CREATE TABLE {quoted(name)} ({columns})")

    def add(self, name: str, rows: pa.Table) -> None:
        """Rows with the columns of the table at least."""
        waiting = self._waiting[name]
        schema = self._schemas[name]
        columns = [
            rows.column(each).cast(type_) for each, type_ in zip(schema.names, schema.types, strict=True)
        ]
        waiting.append(pa.table(list(map(shortened, columns)), schema=schema))
        self._added_bytes += waiting[-1].nbytes
        sizes = [(each.num_rows, each.nbytes) for each in waiting]
        if (
            sum(rows for rows, _ in sizes) >= ROWS_TOGETHER
            or sum(size for _, size in sizes) >= BYTES_TOGETHER
        ):
            self._settle(name)

    def _settle(self, name: str) -> None:
        waiting, self._waiting[name] = self._waiting[name], []
        if not waiting:
            return
        self._connection.register("_added", pa.concat_tables(waiting))
        self._run(f"INSERT INTO {quoted(name)} SELECT * FROM _added")
        self._connection.unregister("_added")

    def passes(self, columns: Sequence[str]) -> list[str]:
        """Conditions that each choose a part of the rows, together all of them: equal ones by the same."""
        count = max(1, math.ceil(self._added_bytes / (PASS_SHARE * self._memory_bytes)))
        return [f"hash({', '.join(columns)}) % {count} = {number}" for number in range(count)]

    def execute(self, statement: str) -> None:
        self._settle_all()
        self._run(statement)

    def query(self, statement: str) -> pa.Table:
        """All of the answer: ask for no more than fits."""
        self._settle_all()
        with _room():
            return self._connection.sql(statement).to_arrow_table()

    def _settle_all(self) -> None:
        for name in self._waiting:
            self._settle(name)

    def _run(self, statement: str) -> None:
        with _room():
            self._connection.execute(statement)


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        raise CannotCompare(f"there is no room to compare the rows: {error}") from error


def shortened(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Bytes as they are compared: a value of `LONG_BYTES` or more as that many, which no shorter one is."""
    if not pa.types.is_large_binary(values.type):
        return values
    longest = pc.max(pc.binary_length(values)).as_py()
    if longest is None or longest < LONG_BYTES:
        return values
    found = [each if each is None else _shortened(each) for each in values.to_pylist()]
    return pa.array(found, pa.large_binary())


def _shortened(value: bytes) -> bytes:
    if len(value) < LONG_BYTES:
        return value
    digest = hashlib.blake2b(value, digest_size=DIGEST_BYTES).digest()
    return value[: LONG_BYTES - DIGEST_BYTES] + digest


def beginning(value: bytes) -> str:
    """A value out of the database for people: of a long one, how it begins."""
    is_long = len(value) == LONG_BYTES
    text = (value[: LONG_BYTES - DIGEST_BYTES] if is_long else value).decode("utf-8", "backslashreplace")
    return f"{text}…" if is_long else text


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
