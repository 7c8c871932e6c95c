"""What the function of a keyed step returns, gathered and brought to the columns its step declares.

Dicts are turned into columns once for a bucket and not for each call: only when that fails is the row looked for that
does not fit. A column of the key that a row does not have is filled in; any other must be there, and none besides.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

KEY: Final = "_key"
TIMESTAMP: Final = "_timestamp"


class WrongRows(Exception):
    """The function returned what cannot be its step's rows; reads on after the function's name."""

    def __init__(self, message: str, key: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.key = key


def as_arrow(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """`WrongRows` says which value does not fit."""
    import pyarrow as pa

    try:
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise WrongRows(str(error)) from error


def key_bytes(key: tuple[Any, ...]) -> bytes | None:
    """The key as a record would have it: its text, bytes as they are, or a JSON array of the texts of several."""
    if len(key) == 1:
        return key[0] if isinstance(key[0], bytes) else _bytes(_text(key[0]))
    return _bytes(json.dumps([_text(part) for part in key], ensure_ascii=False, separators=(",", ":")))


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _text(value: Any) -> str | None:
    """As Spark's SQL would write it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        text = value.replace(tzinfo=None).isoformat(" ")
        return text.rstrip("0") if value.microsecond else text
    return str(value)


class OutputRows:
    """The rows of one bucket, in the order they were given."""

    def __init__(self, schema: pa.Schema, key: tuple[str, ...]) -> None:
        self._schema = schema
        self._names = frozenset(schema.names)
        self._filled = {name: number for number, name in enumerate(key) if name in self._names}
        self._waiting: list[Mapping[str, Any]] = []
        self._parts: list[pa.Table] = []
        self._calls: list[tuple[tuple[Any, ...], int, int]] = []
        """Key, time and number of rows, of each call that gave any."""

    def take(self, returned: Any, key: tuple[Any, ...], time_ms: int) -> None:
        """Add what one call returned."""
        import pyarrow as pa

        if returned is None:
            return
        if isinstance(returned, pa.RecordBatch):
            returned = pa.Table.from_batches([returned])
        if isinstance(returned, pa.Table):
            self._flush()
            self._parts.append(self._fitted(returned, key))
            count = returned.num_rows
        else:
            before = len(self._waiting)
            for row in _rows_of(returned):
                self._waiting.append(self._checked(row, key))
            count = len(self._waiting) - before
        if count:
            self._calls.append((key, time_ms, count))

    def table(self) -> pa.Table:
        """`_key`, `_timestamp`, then the columns."""
        import pyarrow as pa

        self._flush()
        rows = pa.concat_tables([self._schema.empty_table(), *self._parts])
        keys: list[bytes | None] = []
        times: list[int] = []
        for key, time_ms, count in self._calls:
            keys += [key_bytes(key)] * count
            times += [time_ms * 1000] * count
        timestamps = pa.array(times, pa.int64()).cast(pa.timestamp("us", "UTC"))
        return pa.Table.from_arrays(
            [pa.array(keys, pa.binary()), timestamps, *rows.columns],
            names=[KEY, TIMESTAMP, *self._schema.names],
        )

    def _checked(self, row: Any, key: tuple[Any, ...]) -> Mapping[str, Any]:
        if type(row) is not dict and not isinstance(row, Mapping):
            raise WrongRows(f"returned rows that are {type(row).__name__} and not dicts")
        if row.keys() == self._names:
            return dict(row)  # a generator may use one dict for all its rows
        filled = {**{name: key[number] for name, number in self._filled.items()}, **row}
        self._check_names(filled.keys())
        return filled

    def _check_names(self, names: Iterable[str]) -> None:
        given = set(names)
        unknown, missing = sorted(map(str, given - self._names)), sorted(self._names - given)
        if missing:
            raise WrongRows(f"returned rows without the column {missing[0]!r} of its schema")
        if unknown:
            raise WrongRows(
                f"returned the column {unknown[0]!r}, which its schema ({', '.join(self._schema.names)}) does not have"
            )

    def _fitted(self, table: pa.Table, key: tuple[Any, ...]) -> pa.Table:
        import pyarrow as pa

        if len(set(table.schema.names)) < len(table.schema.names):
            raise WrongRows("returned a table with two columns of one name")
        for name, number in self._filled.items():
            if name not in table.schema.names:
                filled = pa.array([key[number]] * table.num_rows, self._schema.field(name).type)
                table = table.append_column(name, filled)
        self._check_names(table.schema.names)
        columns = []
        for field in self._schema:
            try:
                columns.append(table.column(field.name).cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise WrongRows(
                    f"returned a column {field.name!r} that is no {field.type}: {error}"
                ) from None
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _flush(self) -> None:
        """Make columns of the dicts that wait."""
        import pyarrow as pa

        if not self._waiting:
            return
        columns = []
        for field in self._schema:
            try:
                columns.append(as_arrow([row[field.name] for row in self._waiting], field.type))
            except WrongRows as error:
                raise self._culprit(field, error) from error
        self._parts.append(pa.Table.from_arrays(columns, schema=self._schema))
        self._waiting = []

    def _culprit(self, field: pa.Field, error: WrongRows) -> WrongRows:
        for number, row in enumerate(self._waiting):
            try:
                as_arrow([row[field.name]], field.type)
            except WrongRows as wrong:
                return WrongRows(
                    f"returned {row[field.name]!r} for {field.name!r}, which is no {field.type}: {wrong}",
                    self._key_of_waiting(number),
                )
        return error

    def _key_of_waiting(self, number: int) -> tuple[Any, ...]:
        number += sum(part.num_rows for part in self._parts)
        for key, _, count in self._calls:
            if number < count:
                return key
            number -= count
        return ()


def _rows_of(returned: Any) -> Iterable[Any]:
    if type(returned) is list:
        return returned
    if isinstance(returned, Mapping):
        return (returned,)
    if isinstance(returned, Iterable) and not isinstance(returned, str | bytes):
        return returned
    raise WrongRows(f"returned {type(returned).__name__}: a table, dicts or nothing are rows")
