"""What every decoder of record values is: bytes in, typed columns and one error text per row out.

Rules kept by all formats:

- A null value (a tombstone) is no error: all its columns are null.
- A row with an error has null in every column, so that nothing of a half-read record gets anywhere.
- An error text names the field and says what was found there; of the record's content it shows 80 characters at most.
- Decoders hold settings only. They are pickled as the `Decoding` they came from and compile themselves again where
  they arrive, so nothing that was fetched or connected travels to a worker.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from holdfast.errors import ConfigError, HoldfastError
from holdfast.pipeline.formats.decoding import Decoding
from holdfast.pipeline.formats.types import Column, same_name, spark_ddl

CONTENT_SHOWN_MAX: Final = 60
"""Characters of a record shown in an error: a name and a value together stay under 80."""
NAME_SHOWN_MAX: Final = 18


class Decoded(NamedTuple):
    """One array for each of the decoder's fields, and the reason why a row has none (null: it is fine)."""

    columns: list[pa.Array]
    errors: pa.Array


class FormatError(ConfigError):
    """A format, schema or field of the definition that cannot work, whatever the records hold."""


class Undecodable(HoldfastError):
    """One record that is not what the definition says; the text is the reason its dead letter carries."""


def check_names(columns: Sequence[Column]) -> None:
    """Raises `FormatError` for names that cannot stand side by side in one table."""
    for each in columns:
        if not each.name or each.name.startswith("_"):
            raise FormatError(f"field {each.name!r}: names are not empty and do not start with an underscore")
    twice = same_name(columns)
    if twice is not None:
        raise FormatError(
            f"field {twice!r} stands twice (Spark does not tell names apart by case): rename one"
        )


class Decoder(ABC):
    """Turns the values of a batch into columns. `columns` are set by each format's constructor."""

    def __init__(self, decoding: Decoding, prefix: str, columns: Sequence[Column]) -> None:
        self.decoding = decoding
        self.prefix = prefix
        self.columns = tuple(columns)
        self.arrow_fields: list[pa.Field] = [
            pa.field(prefix + each.name, each.type.arrow) for each in self.columns
        ]

    @property
    def spark_ddl(self) -> str:
        """The same columns as a Spark schema: `` `id` bigint, `at` timestamp ``."""
        return spark_ddl([(self.prefix + each.name, each.type) for each in self.columns])

    @abstractmethod
    def decode(self, values: pa.Array) -> Decoded:
        """Decode a binary array; it may hold nulls and may be a slice."""

    def decode_plainly(self, values: pa.Array) -> Decoded:
        """The same, by the format's library or in plain Python, one record after the other: what is right is decided
        there. A format that is decoded so anyhow has nothing else."""
        return self.decode(values)

    def prepare(self) -> None:  # noqa: B027
        """Make what `decode` needs and what takes time to make, once for all processes of this machine.

        Worth calling before many workers start: they would each make it, side by side.
        """

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.decoding, self.prefix)


def _again(decoding: Decoding, prefix: str) -> Decoder:
    from holdfast.pipeline.formats import compile_decoder

    return compile_decoder(decoding, prefix=prefix)


_NO_ARRAY: Final = (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeError, OverflowError)
"""What Arrow raises for a value that is not of a column's type."""


class RowDecoder(Decoder):
    """A format decoded record by record: `decode_row` returns a value for each column, or raises `Undecodable`."""

    @abstractmethod
    def decode_row(self, value: bytes) -> Sequence[Any]: ...

    def decode(self, values: pa.Array) -> Decoded:
        return self.decode_rows(values.to_pylist())

    def decode_rows(self, values: Sequence[bytes | None]) -> Decoded:
        nothing: Sequence[Any] = (None,) * len(self.columns)
        rows: list[Sequence[Any]] = []
        errors: list[str | None] = []
        for value in values:
            row, error = nothing, None
            if value is not None:
                try:
                    row = self.decode_row(value)
                except Undecodable as undecodable:
                    error = str(undecodable)
                except UnicodeError as broken:
                    error = f"a text is not valid UTF-8: {broken}"
            rows.append(row)
            errors.append(error)
        try:
            columns = self._arrays(rows)
        except _NO_ARRAY:
            for at, row in enumerate(rows):
                errors[at] = errors[at] or self._unfit(row)
            columns = self._arrays(
                [nothing if error else row for row, error in zip(rows, errors, strict=True)]
            )
        return Decoded(columns, pa.array(errors, type=pa.string()))

    def _arrays(self, rows: Sequence[Sequence[Any]]) -> list[pa.Array]:
        cells = list(zip(*rows, strict=True)) if rows else [()] * len(self.columns)
        return [pa.array(cell, type=each.type.arrow) for cell, each in zip(cells, self.columns, strict=True)]

    def _unfit(self, row: Sequence[Any]) -> str | None:
        """Why a record's values are none of their columns' types: one record must not stop those beside it."""
        for value, each in zip(row, self.columns, strict=True):
            try:
                pa.array([value], type=each.type.arrow)
            except _NO_ARRAY as error:
                return f'field "{each.name}": {shown(str(error), 3 * CONTENT_SHOWN_MAX)}'
        return None


def utf8(value: bytes) -> str:
    """The text of a value; raises `Undecodable`."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise Undecodable(f"invalid UTF-8 at byte {wrong.start}") from None


def shown(text: str, characters_max: int = CONTENT_SHOWN_MAX) -> str:
    """Content of a record for an error text: quoted, on one line, cut."""
    cut = text if len(text) <= characters_max else text[: characters_max - 1] + "…"
    safe = cut.encode("utf-8", "replace").decode("utf-8")
    quoted = json.dumps(safe, ensure_ascii=False)
    if len(quoted) <= characters_max + 2:
        return quoted
    return quoted[:characters_max].rstrip("\\") + '…"'


def shown_bytes(content: bytes, characters_max: int = CONTENT_SHOWN_MAX) -> str:
    return shown(content[: characters_max * 4].decode("utf-8", "replace"), characters_max)


def shown_name(name: str) -> str:
    """A name that came from the record: the definition's own names are shown in full."""
    return shown(name, NAME_SHOWN_MAX)
