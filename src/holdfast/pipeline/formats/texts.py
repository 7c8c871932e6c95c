"""Scalars out of their texts, one reading for all formats that hold text (JSON, CSV).

Nothing is guessed and nothing coerced:

- integers: `-?` digits, no fraction, no exponent, within the type's range;
- double and float: any number of JSON's grammar, rounded to the nearest; beyond the range is an error, never infinity;
- decimal(p,s): exact; digits beyond the scale are an error unless they are zeros;
- timestamp: ISO 8601 with an offset (`2026-03-01T12:00:00.25Z`, `2026-03-01 12:00+01:00`), or an integer: epoch
  milliseconds. Kept in microseconds, finer digits (nine at most) are cut. timestamp_ntz: the same without an offset;
- date: `2026-03-01`;
- binary: Base64 with the standard alphabet and its padding.

Instants lie in the years 1 to 9999, which every sink can hold.
"""

from __future__ import annotations

import binascii
import datetime
import re
import struct
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import Any, Final

from holdfast.pipeline.formats.types import INTEGER_BITS, Type

NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
DATE: Final = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
INSTANT: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,9}))?)?"
    r"(?:(Z)|([+-])([0-9]{2})(?::?([0-9]{2}))?)?"
)
INTEGER_DIGITS_MAX: Final = 20
DECIMAL_CHARACTERS_MAX: Final = 100
"""Longer texts of a decimal are refused unread: 38 digits, zeros around them, an exponent."""
DAY_MICROS: Final = 86_400_000_000
INSTANT_MIN: Final = -62_135_596_800_000_000
INSTANT_END: Final = 253_402_300_800_000_000
DAY_MIN: Final = -719_162
DAY_END: Final = 2_932_897
OFFSET_MINUTES_MAX: Final = 18 * 60
EPOCH: Final = datetime.date(1970, 1, 1).toordinal()


class Unfit(ValueError):
    """A text that is none of its type's; its message says why, without the text."""


def epoch_day(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 of a date of the Gregorian calendar; raises `Unfit` when there is no such day."""
    try:
        return datetime.date(year, month, day).toordinal() - EPOCH
    except ValueError:
        raise Unfit("no such day") from None


def date(text: str) -> int:
    match = DATE.fullmatch(text)
    if match is None:
        raise Unfit("a date is written 2026-03-01")
    return epoch_day(int(match[1]), int(match[2]), int(match[3]))


def instant(text: str, with_offset: bool) -> int:
    """Microseconds since the epoch: of the instant, or of the wall clock's reading when there is no offset."""
    match = INSTANT.fullmatch(text)
    if match is None or bool(match[8] or match[9]) != with_offset:
        raise Unfit("needs ISO 8601 with an offset" if with_offset else "needs ISO 8601 without an offset")
    hour, minute, second = int(match[4]), int(match[5]), int(match[6] or 0)
    if hour > 23 or minute > 59 or second > 59:
        raise Unfit("no such time of day")
    micros = epoch_day(int(match[1]), int(match[2]), int(match[3])) * DAY_MICROS
    micros += ((hour * 60 + minute) * 60 + second) * 1_000_000
    micros += int((match[7] or "")[:6].ljust(6, "0"))
    if match[9]:
        if int(match[11] or 0) > 59 or int(match[10]) * 60 + int(match[11] or 0) > OFFSET_MINUTES_MAX:
            raise Unfit("no such offset")
        minutes = int(match[10]) * 60 + int(match[11] or 0)
        micros -= minutes * 60_000_000 if match[9] == "+" else -minutes * 60_000_000
    return in_range_instant(micros)


def in_range_instant(micros: int) -> int:
    if not INSTANT_MIN <= micros < INSTANT_END:
        raise Unfit("out of the years 1 to 9999")
    return micros


def epoch_millis(text: str) -> int:
    if INTEGER.fullmatch(text) is None:
        raise Unfit("epoch milliseconds are an integer")
    if len(text) > INTEGER_DIGITS_MAX:
        raise Unfit("out of the years 1 to 9999")
    return in_range_instant(int(text) * 1000)


def integer(text: str, bits: int) -> int:
    if INTEGER.fullmatch(text) is None:
        raise Unfit("no integer")
    if len(text) > INTEGER_DIGITS_MAX:
        raise Unfit("out of range")
    return in_range_integer(int(text), bits)


def in_range_integer(value: int, bits: int) -> int:
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise Unfit("out of range")
    return value


def double(text: str) -> float:
    if NUMBER.fullmatch(text) is None:
        raise Unfit("no number")
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise Unfit("out of range")
    return value


def single(text: str) -> float:
    """Rounded once: a double in between may lie in the middle of two singles, where the text does not."""
    import pyarrow as pa

    in_range_single(double(text))
    found: float = pa.scalar(text).cast(pa.float32()).as_py()
    if found in (float("inf"), float("-inf")):
        raise Unfit("out of range")
    return found


def in_range_single(value: float) -> float:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        raise Unfit("out of range") from None
    found: float = struct.unpack("<f", packed)[0]
    return found


def decimal(text: str, precision: int, scale: int) -> Decimal:
    if NUMBER.fullmatch(text) is None:
        raise Unfit("no number")
    if len(text) > DECIMAL_CHARACTERS_MAX:
        raise Unfit("too many digits")
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise Unfit("out of range") from None
    return in_range_decimal(value, precision, scale)


def in_range_decimal(value: Decimal, precision: int, scale: int) -> Decimal:
    """The same value with the scale's digits, exactly; zero has no sign."""
    if not value.is_finite():
        raise Unfit("no number")
    exact = Context(prec=DECIMAL_CHARACTERS_MAX, traps=[Inexact, InvalidOperation])
    try:
        found = value.quantize(Decimal((0, (1,), -scale)), context=exact)
    except Inexact:
        raise Unfit(f"more than {scale} digits after the point") from None
    except InvalidOperation:
        raise Unfit("out of range") from None
    if len(found.as_tuple().digits) > precision:
        raise Unfit("out of range")
    return found.copy_abs() if found.is_zero() else found


def base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise Unfit("no Base64") from None


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise Unfit("neither true nor false")
    return text == "true"


def number_reader(kind: Type) -> Callable[[str], Any] | None:
    """What reads a number's text (of JSON's grammar) as this type; None for a type that holds no numbers."""
    if kind.kind in INTEGER_BITS:
        return partial(integer, bits=INTEGER_BITS[kind.kind])
    if kind.kind == "decimal":
        return partial(decimal, precision=kind.precision, scale=kind.scale)
    readers: dict[str, Callable[[str], Any]] = {
        "double": double,
        "float": single,
        "timestamp": epoch_millis,
    }
    return readers.get(kind.kind)


def string_reader(kind: Type) -> Callable[[str], Any] | None:
    """What reads a string's content as this type; None for a type that is not written as a string."""
    readers: dict[str, Callable[[str], Any]] = {
        "string": str,
        "date": date,
        "timestamp": partial(instant, with_offset=True),
        "timestamp_ntz": partial(instant, with_offset=False),
        "binary": base64,
    }
    return readers.get(kind.kind)
