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
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.json_paths import JsonPaths
from holdfast.audit.matching import Call, Condition, Constant, Expression, Field, fields_of
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


def kind_of(type_: pa.DataType) -> Kind | None:
    """How values of an Arrow type are compared; None for what cannot be."""
    types = pa.types
    if types.is_dictionary(type_):
        return kind_of(type_.value_type)
    checks: Sequence[tuple[Callable[[Any], bool], Kind]] = (
        (lambda each: types.is_string(each) or types.is_large_string(each), Kind.TEXT),
        (lambda each: types.is_binary(each) or types.is_large_binary(each), Kind.BYTES),
        (types.is_string_view, Kind.TEXT),
        (types.is_binary_view, Kind.BYTES),
        (types.is_fixed_size_binary, Kind.BYTES),
        (types.is_integer, Kind.INTEGER),
        (types.is_decimal, Kind.NUMBER),
        (types.is_float32, Kind.SINGLE),
        (types.is_floating, Kind.DOUBLE),
        (types.is_boolean, Kind.BOOLEAN),
        (types.is_timestamp, Kind.MOMENT),
        (types.is_date, Kind.DATE),
    )
    return next((kind for check, kind in checks if check(type_)), None)


def fine(array: pa.Array) -> Values:
    return Values(array, np.zeros(len(array), np.bool_))


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
                is_null = np.asarray(pc.is_null(left.array).to_numpy(zero_copy_only=False), np.bool_)
                holds &= is_null if each.comparison == "is null" else ~is_null
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
        return _FUNCTIONS[expression.function](
            [self._value(batch, each) for each in expression.arguments], expression
        )

    def _read_field(self, batch: pa.RecordBatch, field: Field) -> None:
        if field.name == "headers":
            self._read[field] = fine(last_header(batch.column("headers"), str(field.path[0])).cast(BYTES))
        elif not field.path:
            column = batch.column(field.name)
            if field.name in ("key", "value"):
                column = column.cast(BYTES)
            elif field.name == "topic":
                column = column.cast(TEXT)
            elif field.name == "timestamp":
                column = column.cast(MOMENT)
            else:
                column = column.cast(pa.int64())
            self._read[field] = fine(column)
        else:
            found = self._paths[field.name].read(batch.column(field.name))
            for path, (array, bad) in found.items():
                self._read[Field(field.name, path)] = Values(array, bad)


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
                wordy |= side.array.is_valid().to_numpy(zero_copy_only=False) & [
                    each is None for each in numbers
                ]
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
            texts = [_decoded(each) for each in array.to_pylist()]
            wrong = np.array(
                [
                    text is None and each is not None
                    for text, each in zip(texts, array.to_pylist(), strict=True)
                ]
            )
            return Values(pa.array(texts, TEXT), bad | wrong)
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
    is_wrong = pc.fill_null(pc.invert(fits), False).to_numpy(zero_copy_only=False)
    signless = pc.utf8_ltrim(pc.if_else(fits, trimmed, None), "+")
    return Values(signless.cast(pa.int64()), text.bad | is_wrong)


def _bad_of(arguments: Sequence[Values]) -> Flags:
    bad = arguments[0].bad.copy()
    for each in arguments[1:]:
        bad |= each.bad
    return bad


def _on_text(compute: Callable[[pa.Array], pa.Array]) -> Callable[[Sequence[Values], Call], Values]:
    def apply(arguments: Sequence[Values], call: Call) -> Values:
        text = as_text(arguments[0])
        return Values(compute(text.array).cast(TEXT), text.bad)

    return apply


def _on_bytes(compute: Callable[[bytes], str]) -> Callable[[Sequence[Values], Call], Values]:
    def apply(arguments: Sequence[Values], call: Call) -> Values:
        data = as_bytes(arguments[0])
        texts = [None if each is None else compute(each) for each in data.array.to_pylist()]
        return Values(pa.array(texts, TEXT), data.bad)

    return apply


def _digest(arguments: Sequence[Values], call: Call) -> Values:
    """128 bits of values that are too long to be kept."""
    data = as_bytes(arguments[0])
    short = [
        None if each is None else hashlib.blake2b(each, digest_size=16).digest()
        for each in data.array.to_pylist()
    ]
    return Values(pa.array(short, BYTES), data.bad)


def _concat(arguments: Sequence[Values], call: Call) -> Values:
    texts = [as_text(each) for each in arguments]
    joined = pc.binary_join_element_wise(*(each.array for each in texts), pa.scalar("", TEXT))
    return Values(joined, _bad_of(texts))


def _coalesce(arguments: Sequence[Values], call: Call) -> Values:
    texts = [as_text(each) for each in arguments]
    bad = np.zeros(len(texts[0].array), np.bool_)
    open_ = np.ones(len(bad), np.bool_)
    for each in texts:
        bad |= open_ & each.bad
        open_ &= pc.is_null(each.array).to_numpy(zero_copy_only=False)
    return Values(pc.coalesce(*(each.array for each in texts)), bad)


def _substring(arguments: Sequence[Values], call: Call) -> Values:
    numbers = [each.value for each in call.arguments[1:] if isinstance(each, Constant)]
    start = int(numbers[0]) - 1
    stop = start + int(numbers[1]) if len(numbers) > 1 else None
    text = as_text(arguments[0])
    return Values(pc.utf8_slice_codeunits(text.array, start=start, stop=stop).cast(TEXT), text.bad)


def _replace(arguments: Sequence[Values], call: Call) -> Values:
    old, new = (str(each.value) for each in call.arguments[1:] if isinstance(each, Constant))
    text = as_text(arguments[0])
    return Values(pc.replace_substring(text.array, old, new).cast(TEXT), text.bad)


def _split_part(arguments: Sequence[Values], call: Call) -> Values:
    separator, part = (each.value for each in call.arguments[1:] if isinstance(each, Constant))
    at = int(part) - 1
    text = as_text(arguments[0])
    split = (None if each is None else each.split(str(separator)) for each in text.array.to_pylist())
    parts = [None if each is None else each[at] if at < len(each) else "" for each in split]
    return Values(pa.array(parts, TEXT), text.bad)


_FUNCTIONS: Final[Mapping[str, Callable[[Sequence[Values], Call], Values]]] = {
    "string": lambda arguments, call: as_text(arguments[0]),
    "int": lambda arguments, call: as_integers(arguments[0]),
    "lower": _on_text(pc.utf8_lower),
    "upper": _on_text(pc.utf8_upper),
    "trim": _on_text(pc.utf8_trim_whitespace),
    "hex": _on_bytes(lambda data: data.hex()),
    "md5": _on_bytes(lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest()),
    "sha256": _on_bytes(lambda data: hashlib.sha256(data).hexdigest()),
    "digest": _digest,
    "concat": _concat,
    "coalesce": _coalesce,
    "substring": _substring,
    "replace": _replace,
    "split_part": _split_part,
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
            except (ValueError, InvalidOperation, OverflowError):
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


def _boolean(text: str) -> str:
    word = text.lower()
    if word in ("true", "t", "1"):
        return "true"
    if word in ("false", "f", "0"):
        return "false"
    raise ValueError(text)


def _moment(text: str) -> str:
    moment = datetime.fromisoformat(text)
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return str((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


_READERS: Final[Mapping[Kind, Callable[[str], str]]] = {
    Kind.NUMBER: _number,
    Kind.DOUBLE: lambda text: repr(float(text) + 0.0),
    Kind.SINGLE: _single,
    Kind.BOOLEAN: _boolean,
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
    is_nothing = pc.is_null(columns[0].array)
    for each in columns[1:]:
        is_nothing = pc.and_(is_nothing, pc.is_null(each.array))
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
