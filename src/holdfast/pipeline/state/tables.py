"""Reference tables of lookups, read whole into Arrow: Parquet, CSV, Delta, PostgreSQL.

What is read comes in one form, the same for the same content: only the columns asked for, in types that Spark has,
sorted by key, without rows whose key is null, since nothing can equal them. Two rows for one key are refused: a lookup
must not multiply rows.

A CSV's values are text: what they look like today says nothing about tomorrow's file. Cast them in a later step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.core.failures import EnvironmentFails, StepError
from holdfast.pipeline.definition.model import Lookup

if TYPE_CHECKING:
    import psycopg

TABLE_BYTES_MAX: Final = 512 * 1024 * 1024
"""A table goes to every task as a whole."""
ROWS_AT_ONCE: Final = 10_000
CONNECT_SECONDS: Final = 10
QUERY_MS_MAX: Final = 300_000
"""A batch waits for it."""
ATTEMPTS: Final = 3
"""To read a file that changes while it is read."""
_ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_POSTGRES: Final = ("postgresql", "postgres")
_CSV: Final = {".csv": ",", ".tsv": "\t"}


class LookupUnavailable(EnvironmentFails):
    """The table of a lookup cannot be read now; the same batch may be tried again."""


@dataclass(frozen=True)
class Mark:
    """What tells, without reading it, that a table is the one read before; empty: it has to be read."""

    text: str = ""
    version: str = ""
    """A version number of the table's own."""


@dataclass(frozen=True)
class Table:
    """One reference table, as a step names it."""

    step: Lookup
    directory: str = "."
    """Where relative paths start."""

    @property
    def shown(self) -> str:
        """For messages."""
        return shown(self.step.table)

    @property
    def needed(self) -> list[str]:
        """Columns of the table that the step uses, the key first."""
        return list(dict.fromkeys([*self.step.on.values(), *self.step.columns]))

    @property
    def _scheme(self) -> str:
        match = _ADDRESS.match(self.step.table)
        scheme = match[1].lower() if match else ""
        return "" if scheme == "file" else scheme

    @property
    def _path(self) -> str:
        if self._scheme:
            return self.step.table
        path = re.sub(r"^file:(//(?=/))?", "", self.step.table)
        return os.path.abspath(os.path.join(self.directory, os.path.expanduser(path)))

    @property
    def kind(self) -> str:
        """`postgres`, `delta`, `csv` or `parquet`."""
        if self._scheme in _POSTGRES:
            return "postgres"
        if self._scheme or os.path.isdir(os.path.join(self._path, "_delta_log")):
            return "delta"
        return "csv" if os.path.splitext(self._path)[1].lower() in _CSV else "parquet"

    def mark(self) -> Mark:
        """As the table stands now."""
        kind = self.kind
        if kind == "postgres":
            return Mark()
        with _explained(self.step):
            if kind == "delta":
                table = self._delta()
                identity = str(table.metadata().id)
                return Mark(f"{identity} {table.version()}", str(table.version()))
            return Mark("\n".join(self._file_marks()))

    def schema(self) -> pa.Schema:
        """Of the columns the step uses, in the form in which rows are read; none is."""
        with _explained(self.step):
            match self.kind:
                case "postgres":
                    whole = self._read_postgres(is_schema_only=True).schema
                case "delta":
                    whole = pa.schema(self._delta().schema().to_arrow())
                case "csv":
                    whole = self._csv_schema()
                case _:
                    whole = self._dataset().schema
        names = self._check_names(whole)
        return pa.schema([(name, self._plain(whole.field(name))) for name in names])

    def read(self) -> tuple[pa.Table, Mark]:
        """All of it in one form, and the mark of what was read."""
        for _ in range(ATTEMPTS):
            mark = self.mark()
            with _explained(self.step):
                found = self._read_whole()
            if self.mark() == mark:
                return self._in_form(found), mark
        raise LookupUnavailable(
            f"step {self.step.name!r}: {self.shown} changes while it is read: replace it in one step (write "
            "it aside and rename it)"
        )

    # -------------------------------------------------------------------- one form

    def _in_form(self, table: pa.Table) -> pa.Table:
        names = self._check_names(table.schema)
        table = pa.table({name: table.column(name) for name in names})
        wanted = pa.schema([(field.name, self._plain(field)) for field in table.schema])
        try:
            table = table.cast(wanted)
        except pa.ArrowInvalid as error:
            raise StepError(self.step.name, f"{self.shown}: {error}") from error
        keys = list(dict.fromkeys(self.step.on.values()))
        for key in keys:
            table = table.filter(pc.is_valid(table.column(key)))
        self._refuse_large(table.nbytes)
        self._refuse_two(table, keys)
        return table.sort_by([(key, "ascending") for key in keys]).combine_chunks()

    def _refuse_large(self, size: int) -> None:
        if size > TABLE_BYTES_MAX:
            raise StepError(
                self.step.name,
                f"{self.shown} takes {size:,} bytes or more, and a lookup {TABLE_BYTES_MAX:,} at most, since "
                "every task gets it whole: take fewer columns or rows, or join two topics",
            )

    def _refuse_two(self, table: pa.Table, keys: list[str]) -> None:
        counted = table.select(keys).group_by(keys).aggregate([([], "count_all")])
        twice = counted.filter(pc.greater(counted.column("count_all"), 1))
        if not twice.num_rows:
            return
        first = twice.sort_by([(key, "ascending") for key in keys]).slice(0, 1).to_pylist()[0]
        named = ", ".join(f"{key} = {first[key]!r}" for key in keys)
        raise StepError(
            self.step.name,
            f"{self.shown} has {first['count_all']} rows for {named}, and a lookup must not multiply rows: make "
            f"`on` the table's whole key ({twice.num_rows:,} keys are there more than once)",
        )

    def _check_names(self, schema: pa.Schema) -> list[str]:
        for name in self.needed:
            if schema.names.count(name) != 1:
                there = ", ".join(schema.names) or "none"
                raise StepError(
                    self.step.name, f"{self.shown} has no column {name!r}; its columns are {there}"
                )
        return self.needed

    def _plain(self, field: pa.Field) -> pa.DataType:
        found = plain_type(field.type)
        if found is None:
            raise StepError(
                self.step.name,
                f"column {field.name!r} of {self.shown} is {field.type}, which Spark lacks",
            )
        is_key = field.name in self.step.on.values()
        if is_key and (pa.types.is_floating(found) or pa.types.is_nested(found)):
            raise StepError(
                self.step.name, f"column {field.name!r} of {self.shown} is {field.type}: that is no key"
            )
        return found

    # -------------------------------------------------------------------- each kind

    def _read_whole(self) -> pa.Table:
        match self.kind:
            case "postgres":
                return self._read_postgres()
            case "delta":
                table = self._delta()
                self._check_names(pa.schema(table.schema().to_arrow()))
                return table.to_pyarrow_table(columns=self.needed)
            case "csv":
                return self._read_csv()
            case _:
                dataset = self._dataset()
                self._check_names(dataset.schema)
                return dataset.to_table(columns=self.needed)

    def _file_marks(self) -> Iterator[str]:
        path = self._path
        if not os.path.isdir(path):
            yield _file_mark(os.stat(path))
            return
        for directory, _, names in sorted(os.walk(path)):
            for name in sorted(names):
                where = os.path.join(directory, name)
                try:
                    found = os.stat(where)
                except FileNotFoundError:
                    yield f"{where} went"  # which the next look will not find either: it counts as a change
                else:
                    yield f"{where} {_file_mark(found)}"

    def _dataset(self) -> Any:
        import pyarrow.dataset as ds

        return ds.dataset(self._path, format="parquet", partitioning="hive")

    def _delta(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self._path)

    def _csv_schema(self) -> pa.Schema:
        import csv

        with open(self._path, encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file, delimiter=self._delimiter), [])
        return pa.schema([(name, pa.string()) for name in header])

    def _read_csv(self) -> pa.Table:
        import pyarrow.csv as arrow_csv

        names = self._check_names(self._csv_schema())
        return arrow_csv.read_csv(
            self._path,
            parse_options=arrow_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=names,
                column_types=dict.fromkeys(names, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    @property
    def _delimiter(self) -> str:
        return _CSV[os.path.splitext(self._path)[1].lower()]

    def _read_postgres(self, *, is_schema_only: bool = False) -> pa.Table:
        import psycopg
        from psycopg.types.string import TextLoader

        query = self.step.query
        if not query:
            raise StepError(self.step.name, "PostgreSQL needs a `query`: what is read")
        with psycopg.connect(self.step.table, connect_timeout=CONNECT_SECONDS) as connection:
            connection.read_only = True
            for name in ("json", "jsonb"):
                connection.adapters.register_loader(name, TextLoader)
            connection.execute(f"SET LOCAL statement_timeout = {QUERY_MS_MAX:d}".encode())
            cursor = connection.cursor(name="lookup")
            cursor.execute(query.encode())
            schema, convert = self._postgres_schema(cursor)
            if is_schema_only:
                return schema.empty_table()
            places = [schema.get_field_index(name) for name in self._check_names(schema)]
            used = pa.schema([schema.field(at) for at in places])
            batches, size = [], 0
            while rows := cursor.fetchmany(ROWS_AT_ONCE):
                columns = list(zip(*rows, strict=True))
                arrays = [pa.array(_texts(columns[at], convert[at]), schema.field(at).type) for at in places]
                batches.append(pa.record_batch(arrays, schema=used))
                size += batches[-1].nbytes
                self._refuse_large(size)
            return pa.Table.from_batches(batches, used)

    def _postgres_schema(
        self, cursor: psycopg.ServerCursor[tuple[Any, ...]]
    ) -> tuple[pa.Schema, list[Callable[[Any], str] | None]]:
        fields, convert = [], []
        for column in cursor.description or ():
            name = column.type_display.split("(")[0]
            kind = _POSTGRES_TYPES.get(name)
            if name == "numeric" and column.precision is not None:
                kind = pa.decimal128(column.precision, column.scale or 0)
            if kind is None and column.name in self.needed:
                raise StepError(
                    self.step.name,
                    f"column {column.name!r} of the query is {column.type_display}: cast it there, to text or to "
                    "numeric(p,s)",
                )
            fields.append((column.name, kind or pa.string()))
            convert.append(_POSTGRES_TEXTS.get(name))
        return pa.schema(fields), convert


@contextmanager
def _explained(step: Lookup) -> Iterator[None]:
    """What a table's file system, format or server says, in words that name the step."""
    try:
        yield
    except Exception as error:
        import psycopg
        from deltalake.exceptions import DeltaError, TableNotFoundError

        name, table = step.name, shown(step.table)
        match error:
            case FileNotFoundError() | TableNotFoundError():
                raise StepError(name, f"there is no table {table}") from error
            case psycopg.OperationalError():
                raise LookupUnavailable(f"step {name!r}: {table} does not answer: {error}") from error
            case psycopg.Error():
                raise StepError(name, f"{table}: {str(error).strip()}") from error
            case pa.ArrowInvalid() | pa.ArrowNotImplementedError() | UnicodeDecodeError() | DeltaError():
                raise StepError(name, f"{table} cannot be read: {error}") from error
            case PermissionError():
                raise EnvironmentFails(f"step {name!r}: no permission to read {table}") from error
            case OSError():
                raise LookupUnavailable(f"step {name!r}: {table} cannot be read: {error}") from error
        raise


def _file_mark(found: os.stat_result) -> str:
    """The time of its last change too, which nobody can set: a copy may keep size and time of what it replaces."""
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def shown(table: str) -> str:
    """An address without its password."""
    return re.sub(r"(://[^/@:]*):[^@/]*@", r"\1:***@", table)


def _texts(values: Sequence[Any], text: Callable[[Any], str] | None) -> Sequence[Any]:
    return values if text is None else [None if value is None else text(value) for value in values]


_POSTGRES_TYPES: Final[dict[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "text": pa.string(),
    "varchar": pa.string(),
    "bpchar": pa.string(),
    "name": pa.string(),
    "uuid": pa.string(),
    "json": pa.string(),
    "jsonb": pa.string(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}
_POSTGRES_TEXTS: Final[dict[str, Callable[[Any], str]]] = {
    "uuid": str,
    "bpchar": lambda text: text.rstrip(" "),
}
"""PostgreSQL fills a char(n) up with spaces, which mean nothing to it; to a join they would."""


def plain_type(kind: pa.DataType) -> pa.DataType | None:
    """The type in which Spark reads these values, from a file of ours; None when it has none."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_null(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_unsigned_integer(kind):
        wider = {8: pa.int16(), 16: pa.int32(), 32: pa.int64()}
        return wider.get(kind.bit_width, pa.decimal128(20, 0))
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale) if kind.precision <= 38 else None
    if types.is_float16(kind):
        return pa.float32()
    if types.is_date(kind):
        return pa.date32()
    if types.is_list(kind) or types.is_large_list(kind):
        inner = plain_type(kind.value_type)
        return None if inner is None else pa.list_(inner)
    if types.is_struct(kind):
        fields = [(field.name, plain_type(field.type)) for field in kind]
        return None if any(inner is None for _, inner in fields) else pa.struct(fields)
    if types.is_map(kind):
        key, item = plain_type(kind.key_type), plain_type(kind.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    plain = (types.is_boolean, types.is_signed_integer, types.is_floating, types.is_string, types.is_binary)
    return kind if any(is_it(kind) for is_it in plain) else None
