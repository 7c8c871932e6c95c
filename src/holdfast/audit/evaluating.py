"""Expressions on records computed, whole batches at a time, and brought into the form in which they are compared.

A value of a record and one of a sink are the same when they are the same *as what the sink's column is*: text as text,
17 and "017" as a whole number, 1.50 and 1.5 as a number, moments to the microsecond. `canonical` gives that form as
bytes; null is null. What a record has in a place and cannot be read as that (no JSON, no UTF-8, a word where a number
belongs) is *unreadable*: it is never compared, always counted, and named.

Numbers of JSON are texts as they are spelled, objects and arrays are JSON without blanks and with sorted names.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import reduce
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.json_paths import JsonPaths
from holdfast.audit.matching import Condition, Constant, Expression, Field, fields_of
from holdfast.audit.sinks.headers import last_header

Flags = npt.NDArray[np.bool_]

TEXT: Final = pa.large_string()
BYTES: Final = pa.large_binary()
MOMENT: Final = pa.timestamp("us", "UTC")
WHOLE: Final = re.compile(r"[+-]?\d+")
FITS: Final = r"^[+-]?\d{1,18}$"
"""Whole numbers that fit 64 bits for certain."""
NUMBER: Final = re.compile(r"-?[0-9]{1,300}(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?")


class Kind(StrEnum):
    """What a column of a sink is, as far as comparing goes."""

    TEXT = "text"
    BYTES = "bytes"
    INTEGER = "whole number"
    NUMBER = "number"
    DOUBLE = "number of double precision"
    SINGLE = "number of single precision"
    BOOLEAN = "true or false"
    MOMENT = "moment"
    DATE = "date"


class Values(NamedTuple):
    array: pa.Array
    """Of texts, bytes, int64, booleans or moments."""
    bad: Flags
    """Rows that could not be read; null in the array."""


_TYPES: Final = {
    Kind.TEXT: ("string", "large_string", "string_view"),
    Kind.BYTES: ("binary", "large_binary", "binary_view", "fixed_size_binary"),
    Kind.INTEGER: ("integer",),
    Kind.NUMBER: ("decimal",),
    Kind.SINGLE: ("float32",),
    Kind.DOUBLE: ("floating",),
    Kind.BOOLEAN: ("boolean",),
    Kind.MOMENT: ("timestamp",),
    Kind.DATE: ("date",),
}
"""Arrow's types, as `pyarrow.types` asks for them; the first that is so counts."""


def kind_of(type_: pa.DataType) -> Kind | None:
    """How values of an Arrow type are compared; None for what cannot be."""
    if pa.types.is_dictionary(type_):
        return kind_of(type_.value_type)
    asked = ((kind, name) for kind, names in _TYPES.items() for name in names)
    return next((kind for kind, name in asked if getattr(pa.types, f"is_{name}")(type_)), None)


def fine(array: pa.Array) -> Values:
    return Values(array, np.zeros(len(array), np.bool_))


def flags(array: pa.Array) -> Flags:
    """Truths; null is none."""
    return np.asarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False), np.bool_)


# ---------------------------------------------------------------------------- expressions


class Evaluator:
    """Computes expressions on batches of records as `holdfast.reader` gives them."""

    def __init__(self, expressions: Sequence[Expression], conditions: Sequence[Condition] = ()) -> None:
        self.expressions = tuple(expressions)
        self.conditions = tuple(conditions)
        used = list(fields_of(self.expressions))
        for each in self.conditions:
            used += fields_of([each.left] if each.right is None else [each.left, each.right])
        self.needs_headers = any(field.name == "headers" for field in used)
        self._paths = {
            name: JsonPaths(
                sorted({field.path for field in used if field.name == name and field.path}, key=str)
            )
            for name in ("key", "value")
        }
        self._read: dict[Field, Values] = {}

    def evaluate(self, batch: pa.RecordBatch) -> list[Values]:
        """One result for each of the expressions."""
        self._read = {}
        return [self._value(batch, each) for each in self.expressions]

    def chosen(self, batch: pa.RecordBatch) -> tuple[Flags, Flags]:
        """Which rows all conditions hold for, and for which that cannot be read."""
        self._read = {}
        holds = np.ones(batch.num_rows, np.bool_)
        bad = np.zeros(batch.num_rows, np.bool_)
        for each in self.conditions:
            left = self._value(batch, each.left)
            bad |= left.bad
            if each.right is None:
                holds &= flags(
                    left.array.is_null() if each.comparison == "is null" else left.array.is_valid()
                )
                continue
            right = self._value(batch, each.right)
            holding, wordy = _compared(left, right, each.comparison)
            bad |= right.bad | wordy
            holds &= holding
        return holds & ~bad, bad

    def _value(self, batch: pa.RecordBatch, expression: Expression) -> Values:
        if isinstance(expression, Constant):
            scalar = pa.scalar(expression.value, TEXT if isinstance(expression.value, str) else pa.int64())
            return fine(pa.repeat(scalar, batch.num_rows))
        if isinstance(expression, Field):
            if expression not in self._read:
                self._read_field(batch, expression)
            return self._read[expression]
        arguments = [self._value(batch, each) for each in expression.arguments]
        literals = [each.value for each in expression.arguments[1:] if isinstance(each, Constant)]
        return _FUNCTIONS[expression.function](arguments, literals)

    def _read_field(self, batch: pa.RecordBatch, field: Field) -> None:
        if field.name == "headers":
            self._read[field] = fine(last_header(batch.column("headers"), str(field.path[0])).cast(BYTES))
        elif not field.path:
            self._read[field] = fine(batch.column(field.name).cast(_COLUMNS[field.name]))
        else:
            found = self._paths[field.name].read(batch.column(field.name))
            for path, (array, bad) in found.items():
                self._read[Field(field.name, path)] = Values(array, bad)


_COLUMNS: Final = dict.fromkeys(("key", "value"), BYTES) | {
    "topic": TEXT,
    "partition": pa.int64(),
    "offset": pa.int64(),
    "timestamp": MOMENT,
}
"""Of a batch of records."""
_COMPARED: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _compared(left: Values, right: Values, comparison: str) -> tuple[Flags, Flags]:
    """Whether it holds, row by row; null never does, nor is a word equal or unequal to a number. And where nobody can
    say: which of a word and a number is greater.

    Both sides are numbers, exact ones, where one of them is a whole number or where greater and smaller are asked for,
    unless they are moments: those are compared as texts, which ISO 8601 allows.
    """
    types = pa.types
    kinds = [side.array.type for side in (left, right)]
    is_number = comparison not in ("=", "!=") or any(map(types.is_integer, kinds))
    wordy = np.zeros(len(left.array), np.bool_)
    if is_number and not any(map(types.is_timestamp, kinds)):
        sides = [_numbers(side) for side in (left, right)]
        if comparison not in ("=", "!="):
            for side, numbers in zip((left, right), sides, strict=True):
                wordy |= flags(side.array.is_valid()) & [each is None for each in numbers]
    else:
        sides = [as_text(side).array.to_pylist() for side in (left, right)]
    compare = _COMPARED[comparison]
    pairs = zip(*sides, strict=True)
    holds = [one is not None and other is not None and compare(one, other) for one, other in pairs]
    return np.array(holds, np.bool_), wordy


def _numbers(values: Values) -> list[int | Decimal | None]:
    """As they are, without rounding; nothing for what is no number."""
    if pa.types.is_integer(values.array.type):
        return list(values.array.to_pylist())
    encoded = pc.dictionary_encode(as_text(values).array)
    texts = (each.strip() for each in encoded.dictionary.to_pylist())
    known = [Decimal(each) if NUMBER.fullmatch(each) else None for each in texts]
    return [None if at is None else known[at] for at in encoded.indices.to_pylist()]


# ---------------------------------------------------------------------------- functions


def as_text(values: Values) -> Values:
    """Values as texts; bytes that are no UTF-8 are unreadable."""
    array, bad = values
    type_ = array.type
    if pa.types.is_large_string(type_):
        return values
    if pa.types.is_large_binary(type_) or pa.types.is_binary(type_):
        try:
            return Values(array.cast(TEXT), bad)
        except pa.ArrowInvalid:
            texts = pa.array([_decoded(each) for each in array.to_pylist()], TEXT)
            return Values(texts, bad | flags(pc.and_(texts.is_null(), array.is_valid())))
    if pa.types.is_timestamp(type_):
        milliseconds = array.cast(pa.timestamp("ms", array.type.tz), safe=False)
        return Values(pc.strftime(milliseconds, "%Y-%m-%dT%H:%M:%SZ").cast(TEXT), bad)
    return Values(array.cast(TEXT), bad)


def _decoded(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def as_bytes(values: Values) -> Values:
    if pa.types.is_large_binary(values.array.type):
        return values
    text = as_text(values)
    return Values(text.array.cast(BYTES), text.bad)


def as_integers(values: Values) -> Values:
    """Whole numbers that fit 64 bits; anything else is unreadable."""
    array, bad = values
    if pa.types.is_integer(array.type):
        return Values(array.cast(pa.int64()), bad)
    if pa.types.is_timestamp(array.type):
        milliseconds = pc.divide(array.cast(pa.timestamp("us")).cast(pa.int64()), 1000)
        return Values(milliseconds, bad)
    text = as_text(values)
    trimmed = pc.utf8_trim_whitespace(text.array)
    fits = pc.match_substring_regex(trimmed, FITS)
    signless = pc.utf8_ltrim(pc.if_else(fits, trimmed, None), "+")
    return Values(signless.cast(pa.int64()), text.bad | flags(pc.invert(fits)))


def _bad_of(arguments: Sequence[Values]) -> Flags:
    return np.asarray(np.logical_or.reduce([each.bad for each in arguments]), np.bool_)


_Function = Callable[[Sequence[Values], Sequence[str | int]], Values]
"""Of arguments as computed, and those behind the first that stand there as they are."""


def _on_texts(compute: Callable[..., pa.Array]) -> _Function:
    """Computed by the whole array."""

    def apply(arguments: Sequence[Values], literals: Sequence[str | int]) -> Values:
        text = as_text(arguments[0])
        return Values(compute(text.array, *literals).cast(TEXT), text.bad)

    return apply


def _on_each(
    compute: Callable[..., Any], of: Callable[[Values], Values] = as_bytes, type_: pa.DataType = TEXT
) -> _Function:
    """Computed value by value."""

    def apply(arguments: Sequence[Values], literals: Sequence[str | int]) -> Values:
        values = of(arguments[0])
        found = [None if each is None else compute(each, *literals) for each in values.array.to_pylist()]
        return Values(pa.array(found, type_), values.bad)

    return apply


def _concat(arguments: Sequence[Values], _: Sequence[str | int]) -> Values:
    texts = [as_text(each) for each in arguments]
    joined = pc.binary_join_element_wise(*(each.array for each in texts), pa.scalar("", TEXT))
    return Values(joined, _bad_of(texts))


def _coalesce(arguments: Sequence[Values], _: Sequence[str | int]) -> Values:
    texts = [as_text(each) for each in arguments]
    bad = np.zeros(len(texts[0].array), np.bool_)
    open_ = np.ones(len(bad), np.bool_)
    for each in texts:
        bad |= open_ & each.bad
        open_ &= flags(each.array.is_null())
    return Values(pc.coalesce(*(each.array for each in texts)), bad)


def _substring(texts: pa.Array, first: int, length: int | None = None) -> pa.Array:
    stop = None if length is None else first - 1 + length
    return pc.utf8_slice_codeunits(texts, start=first - 1, stop=stop)


def _part(text: str, separator: str, number: int) -> str:
    return "".join(text.split(separator)[number - 1 : number])


_FUNCTIONS: Final[Mapping[str, _Function]] = {
    "string": lambda arguments, _: as_text(arguments[0]),
    "int": lambda arguments, _: as_integers(arguments[0]),
    "lower": _on_texts(pc.utf8_lower),
    "upper": _on_texts(pc.utf8_upper),
    "trim": _on_texts(pc.utf8_trim_whitespace),
    "hex": _on_each(bytes.hex),
    "md5": _on_each(lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest()),
    "sha256": _on_each(lambda data: hashlib.sha256(data).hexdigest()),
    # 128 bits of values that are too long to be kept.
    "digest": _on_each(lambda data: hashlib.blake2b(data, digest_size=16).digest(), type_=BYTES),
    "concat": _concat,
    "coalesce": _coalesce,
    "substring": _on_texts(_substring),
    "replace": _on_texts(pc.replace_substring),
    "split_part": _on_each(_part, as_text),
}


# ---------------------------------------------------------------------------- the form that is compared


def canonical(kind: Kind, values: Values) -> Values:
    """The same bytes for values that are the same as what the column is."""
    if kind is Kind.BYTES:
        return as_bytes(values)
    if kind is Kind.TEXT:
        text = as_text(values)
        return Values(text.array.cast(BYTES), text.bad)
    if kind is Kind.INTEGER:
        return _canonical_integers(values)
    if kind is Kind.MOMENT and pa.types.is_timestamp(values.array.type):
        # The zone is how a moment is shown; one without a zone is taken as UTC.
        micros = values.array.cast(pa.timestamp("us", values.array.type.tz), safe=False).cast(pa.int64())
        return Values(micros.cast(TEXT).cast(BYTES), values.bad)
    return _one_by_one(values, _READERS[kind])


def _canonical_integers(values: Values) -> Values:
    if pa.types.is_integer(values.array.type):
        return Values(values.array.cast(TEXT).cast(BYTES), values.bad)
    whole = as_integers(values)
    array = whole.array.cast(TEXT).cast(BYTES)
    new = whole.bad & ~values.bad
    if not new.any():
        return Values(array, whole.bad)
    # What is too long for 64 bits may still be a whole number.
    slow = _one_by_one(values, _whole_number)
    return Values(slow.array, slow.bad)


def _one_by_one(values: Values, read: Callable[[str], str]) -> Values:
    text = as_text(values)
    found: list[bytes | None] = []
    bad = text.bad.copy()
    known: dict[str, bytes | None] = {}
    for row, each in enumerate(text.array.to_pylist()):
        if each is None:
            found.append(None)
            continue
        if each not in known:
            try:
                known[each] = read(each.strip()).encode()
            except (ValueError, KeyError, InvalidOperation, OverflowError):
                known[each] = None
            if len(known) > 100_000:
                known = {each: known[each]}
        bad[row] |= known[each] is None
        found.append(known[each])
    return Values(pa.array(found, BYTES), bad)


def _whole_number(text: str) -> str:
    if WHOLE.fullmatch(text) is None:
        raise ValueError(text)
    return str(int(text))


def _number(text: str) -> str:
    value = Decimal(text)
    if not value.is_finite():
        return str(float(value))
    return (
        "0" if value == 0 else format(value.normalize(), "f") if abs(value.adjusted()) < 400 else str(value)
    )


def _single(text: str) -> str:
    return repr(float(np.float32(text)) + 0.0)


def _moment(text: str) -> str:
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return str((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


_TRUTHS: Final = dict.fromkeys(("true", "t", "1"), "true") | dict.fromkeys(("false", "f", "0"), "false")
_READERS: Final[Mapping[Kind, Callable[[str], str]]] = {
    Kind.NUMBER: _number,
    Kind.DOUBLE: lambda text: repr(float(text) + 0.0),
    Kind.SINGLE: _single,
    Kind.BOOLEAN: lambda text: _TRUTHS[text.lower()],
    Kind.MOMENT: _moment,
    Kind.DATE: lambda text: date.fromisoformat(text[:10]).isoformat(),
}


def joined(columns: Sequence[Values]) -> Values:
    """Several values as one, so that equal ones are those whose parts are all equal; null where all parts are."""
    bad = _bad_of(columns)
    if len(columns) == 1:
        return Values(columns[0].array, bad)
    parts: list[Any] = []
    for each in columns:
        lengths = pc.binary_length(each.array).cast(TEXT).cast(BYTES)
        parts.append(pc.coalesce(lengths, pa.scalar(b"-", BYTES)))
        parts.append(pc.coalesce(each.array, pa.scalar(b"", BYTES)))
    whole = pc.binary_join_element_wise(*parts, pa.scalar(b":", BYTES))
    is_nothing = reduce(pc.and_, [each.array.is_null() for each in columns])
    return Values(pc.if_else(is_nothing, pa.scalar(None, BYTES), whole), bad)


def shown(value: bytes | None, columns: int, parts_shown: int = 100) -> str:
    """A joined value for people; only the first parts, where the others mean nothing to them."""
    if columns == 1:
        return _shown_one(value)
    if value is None:
        return "null"
    parts: list[str] = []
    rest = value
    while rest and len(parts) < columns:
        length, _, rest = rest.partition(b":")
        if length == b"-":
            parts.append("null")
            rest = rest.removeprefix(b":")
        elif not length.isdigit():
            break  # a long value, of which only the beginning is here
        else:
            parts.append(_shown_one(rest[: int(length)]))
            rest = rest[int(length) + 1 :]
    parts = parts[:parts_shown]
    return parts[0] if len(parts) == 1 else "(" + ", ".join(parts) + ")"


def _shown_one(value: bytes | None) -> str:
    if value is None:
        return "null"
    text = value.decode("utf-8", "backslashreplace")
    return text if len(text) <= 60 else text[:59] + "…"
