"""The types of columns in Spark's words, and what they are in Arrow.

The grammar is the part of Spark's DDL that a record can be decoded to:

    string boolean byte|tinyint short|smallint int|integer long|bigint float|real double date timestamp timestamp_ntz
    binary decimal[(precision[, scale])] array<T> map<string, T> struct<name: T [NOT NULL], …>

Arrow's side is chosen so that Parquet files written from it are read by Spark as exactly these types. Everything is
nullable there, as Spark's Parquet reader has it; `NOT NULL` inside a struct is a rule for decoding only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from holdfast.errors import ConfigError
from holdfast.pipeline.core.sql import quoted

PRECISION_MAX: Final = 38
DEPTH_MAX: Final = 32
"""Types nested deeper than this are a mistake, and every level costs stack."""

SIMPLE: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "binary": pa.binary(),
}
ALIASES: Final = {
    "bool": "boolean",
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "dec": "decimal",
    "numeric": "decimal",
    "timestamp_ltz": "timestamp",
}
FRIENDLY: Final = {"tinyint": "byte", "smallint": "short", "bigint": "long"}
INTEGER_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


@dataclass(frozen=True)
class Type:
    """One type: `kind` is a key of SIMPLE, or decimal, array, map, struct."""

    kind: str
    precision: int = 0
    scale: int = 0
    element: Type | None = None
    """Of an array; the value's of a map."""
    columns: tuple[Column, ...] = ()
    """Of a struct."""

    @property
    def arrow(self) -> pa.DataType:
        if self.kind == "decimal":
            return pa.decimal128(self.precision, self.scale)
        if self.kind == "array":
            return pa.list_(self.inner.arrow)
        if self.kind == "map":
            return pa.map_(pa.string(), self.inner.arrow)
        if self.kind == "struct":
            return pa.struct([pa.field(each.name, each.type.arrow) for each in self.columns])
        return SIMPLE[self.kind]

    @property
    def inner(self) -> Type:
        assert self.element is not None
        return self.element

    @property
    def ddl(self) -> str:
        """As Spark writes it."""
        if self.kind == "decimal":
            return f"decimal({self.precision},{self.scale})"
        if self.kind == "array":
            return f"array<{self.inner.ddl}>"
        if self.kind == "map":
            return f"map<string,{self.inner.ddl}>"
        if self.kind == "struct":
            return f"struct<{','.join(f'{quoted(each.name)}:{each.type.ddl}' for each in self.columns)}>"
        return self.kind

    def __str__(self) -> str:
        """As error texts write it: Spark's other words for integers, which are the ones definitions use."""
        if self.kind in ("array", "map", "struct"):
            return self.kind
        return FRIENDLY.get(self.kind, self.ddl)


@dataclass(frozen=True)
class Column:
    """A named type; `required` makes its absence, or null, an error."""

    name: str
    type: Type
    required: bool


def spark_ddl(columns: Iterable[tuple[str, Type]]) -> str:
    return ", ".join(f"{quoted(name)} {kind.ddl}" for name, kind in columns)


def same_name(columns: Sequence[Column]) -> str | None:
    """A name that two columns share, as Spark compares names: without case."""
    seen: set[str] = set()
    for each in columns:
        if each.name.lower() in seen:
            return each.name
        seen.add(each.name.lower())
    return None


TOKEN: Final = re.compile(r"\s*(?:(?P<quoted>`(?:[^`]|``)+`)|(?P<word>\w+)|(?P<mark>[<>(),:]))")


class _Reading:
    """The text of a type, taken apart from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while text[position:].strip():
            match = TOKEN.match(text, position)
            if match is None:
                raise self.wrong(f"unexpected {text[position:].strip()[:10]!r}")
            self.tokens.append((match.lastgroup or "", match[match.lastgroup or ""]))
            position = match.end()
        self.tokens.reverse()

    def wrong(self, what: str) -> ConfigError:
        types = (
            "write Spark's types, such as string, long, double, decimal(10,2), "
            "timestamp, array<string>, map<string,long> or struct<name:string,age:int>"
        )
        hint = what if "did you mean" in what else f"{what}; {types}"
        return ConfigError(hint if hint.startswith(repr(self.text)) else f"type {self.text!r}: {hint}")

    def peek(self) -> str:
        return self.tokens[-1][1].lower() if self.tokens else ""

    def take(self) -> tuple[str, str]:
        if not self.tokens:
            raise self.wrong("it ends too early")
        return self.tokens.pop()

    def expect(self, mark: str) -> None:
        found = self.take()[1]
        if found.lower() != mark:
            raise self.wrong(f"expected {mark!r} where {found!r} stands")

    def number(self) -> int:
        found = self.take()[1]
        if not (found.isascii() and found.isdigit()) or len(found) > 3:
            raise self.wrong(f"expected a number where {found!r} stands")
        return int(found)

    def type(self, depth: int = 0) -> Type:
        if depth > DEPTH_MAX:
            raise self.wrong(f"nested deeper than {DEPTH_MAX} levels")
        group, found = self.take()
        word = ALIASES.get(found.lower(), found.lower())
        if group == "word" and word in SIMPLE:
            return Type(word)
        if group == "word" and word == "decimal":
            return self.decimal()
        if group == "word" and word in ("array", "map", "struct"):
            self.expect("<")
            kind = getattr(self, word)(depth + 1)
            self.expect(">")
            assert isinstance(kind, Type)
            return kind
        near = difflib.get_close_matches(
            found.lower(), (*SIMPLE, *ALIASES, "decimal", "array", "map", "struct"), 1
        )
        raise self.wrong(f"{found!r} is no type{f'; did you mean {near[0]!r}?' if near else ''}")

    def decimal(self) -> Type:
        precision, scale = 10, 0
        if self.peek() == "(":
            self.take()
            precision = self.number()
            if self.peek() == ",":
                self.take()
                scale = self.number()
            self.expect(")")
        if not 1 <= precision <= PRECISION_MAX or scale > precision:
            raise self.wrong(f"decimal needs a precision of 1 to {PRECISION_MAX} and a scale up to it")
        return Type("decimal", precision=precision, scale=scale)

    def array(self, depth: int) -> Type:
        return Type("array", element=self.type(depth))

    def map(self, depth: int) -> Type:
        if self.type(depth).kind != "string":
            raise self.wrong("a map's keys are strings")
        self.expect(",")
        return Type("map", element=self.type(depth))

    def struct(self, depth: int) -> Type:
        columns: list[Column] = []
        while True:
            group, name = self.take()
            if group == "mark":
                raise self.wrong(f"expected a field's name where {name!r} stands")
            if group == "quoted":
                name = name[1:-1].replace("``", "`")
            if self.peek() == ":":
                self.take()
            kind = self.type(depth)
            required = self.peek() == "not"
            if required:
                self.take()
                self.expect("null")
            columns.append(Column(name, kind, required))
            if self.peek() != ",":
                break
            self.take()
        twice = same_name(columns)
        if twice is not None:
            raise self.wrong(f"the field {twice!r} stands twice in a struct (case does not count)")
        return Type("struct", columns=tuple(columns))


def parse_type(text: str) -> Type:
    """The type a text names; raises `ConfigError` that says what is wrong with it."""
    reading = _Reading(text)
    kind = reading.type()
    if reading.tokens:
        raise reading.wrong(f"unexpected {reading.peek()!r} after its end")
    return kind
