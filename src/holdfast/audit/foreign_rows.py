"""What every table that is not ours gives: the columns of a match, batch by batch, as values to compare."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.evaluating import BYTES, TEXT, Kind, Values, fine, kind_of
from holdfast.audit.matching import Match, MatchError, Pair
from holdfast.audit.model import Finding


class RowBatch(NamedTuple):
    values: list[Values]
    """One for each pair of the match."""
    where: str
    first: int
    """The number of the first row in there, from 0 on; -1: rows have no numbers."""
    numbers: npt.NDArray[np.int64] | None = None
    """Of each row, where they do not just go on from the first."""


class ForeignTable(ABC):
    kind: str

    def __init__(self, name: str, match: Match) -> None:
        self.name = name
        self.match = match
        self.forgotten = 0
        """How many rows it may have had and has not any more, through no fault of who wrote them; known after
        `rows`."""
        self.undecided = 0
        """How many rows it may have that nobody can read yet, behind an open transaction; known after `rows`."""
        self.problems: list[Finding] = []
        self.notes: list[str] = []

    def names(self) -> list[str]:
        """The columns that a match may name, those in structs with their paths; nothing of a topic."""
        return []

    @abstractmethod
    def kinds(self) -> list[Kind]:
        """How each pair is compared."""

    @abstractmethod
    def rows(self) -> Iterator[RowBatch]:
        """Everything that is there now. A snapshot is taken at the first row."""


def names_in(schema: pa.Schema) -> list[str]:
    names: list[str] = []
    for each in schema:
        names.append(each.name)
        if pa.types.is_struct(each.type):
            names += [f"{each.name}.{inner.name}" for inner in each.type]
    return names


def missing_column(pair: Pair, name: str, there: Sequence[str], where: str) -> MatchError:
    near = difflib.get_close_matches(name, there, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(there)}"
    return MatchError(f"--match {str(pair)!r}: {where} has no column {name!r}; {hint}")


def type_at(schema: pa.Schema, pair: Pair, where: str) -> pa.DataType:
    names = list(schema.names)
    if pair.path[0] not in names:
        raise missing_column(pair, pair.path[0], names, where)
    type_ = schema.field(pair.path[0]).type
    for step in pair.path[1:]:
        inner = [field.name for field in type_] if pa.types.is_struct(type_) else []
        if step not in inner:
            raise missing_column(pair, step, inner or ["no fields"], f"{pair.path[0]!r} of {where}")
        type_ = type_.field(step).type
    return type_


def kinds_in(schema: pa.Schema, match: Match, where: str) -> list[Kind]:
    """How each pair is compared with a column of these."""
    return [_kind_at(type_at(schema, pair, where), pair, where) for pair in match.pairs]


def _kind_at(type_: pa.DataType, pair: Pair, where: str) -> Kind:
    kind = kind_of(type_)
    if kind is None:
        raise MatchError(
            f"--match {str(pair)!r}: {pair.column} of {where} is {type_}, which cannot be compared; "
            "name a field of it, or another column"
        )
    return kind


def plain(column: pa.Array | pa.ChunkedArray) -> Values:
    """A column as stored, in one of the types that values have."""
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = kind_of(column.type)
    if kind is Kind.BYTES:
        return fine(column.cast(pa.binary()).cast(BYTES))
    if kind in (Kind.SINGLE, Kind.DOUBLE):
        return fine(pa.array([None if each is None else repr(each) for each in column.to_pylist()], TEXT))
    if pa.types.is_signed_integer(column.type):
        return fine(column.cast(pa.int64()))
    return fine(column if kind in (Kind.MOMENT, None) else column.cast(TEXT))


def column_at(batch: pa.RecordBatch | pa.Table, path: Sequence[str]) -> Values:
    column = batch.column(path[0])
    for step in path[1:]:
        column = pc.struct_field(column, step)
    return plain(column)
