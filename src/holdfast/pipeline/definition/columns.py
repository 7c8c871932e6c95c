"""Columns that can be known without Spark: of decodings, of texts that list columns, and of rows before a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.model import Decoding, Lookup, PipelineDefinition, Python, Source, Sql
from holdfast.pipeline.definition.streams import decodings_of

RECORD_TIME: Final = "_timestamp"
"""The time Kafka keeps with a record, under the name that steps know it by."""
KEY_PREFIX: Final = "_key_"
"""Before the names of a decoded key's fields."""
WINDOW_COLUMNS: Final = ("window_start", "window_end")
"""What every row of a window step has beside its key and its aggregates."""

JOIN_COLUMNS: Final = ("left_hf", "right_hf")
"""Where the two rows of a pair come from."""


def columns_of(decoding: Decoding) -> Mapping[str, str] | None:
    """Types by name, as Spark writes them; nothing when only the registry knows, or when the decoding is wrong."""
    from holdfast.pipeline.formats import compile_columns, compile_decoder

    if decoding.registry is not None and not decoding.fields:
        return None
    try:
        if decoding.registry is not None:
            columns = compile_columns(decoding.fields)
        else:
            columns = list(compile_decoder(decoding).columns)
    except HoldfastError:
        return None
    return {column.name: column.type.ddl for column in columns}


def key_columns(source: Source) -> Mapping[str, str]:
    """Of the record's key, by the names that steps know; none where it is left as bytes, or only the registry knows."""
    if source.key.format == "bytes" and not source.key.fields:
        return {}
    return {KEY_PREFIX + name: type_ for name, type_ in (columns_of(source.key) or {}).items()}


def source_columns(source: Source) -> Mapping[str, str] | None:
    """Of the rows that enter the first step: those of all decodings; nothing when one of them is not known."""
    found: dict[str, str] = {}
    for _, decoding in decodings_of(source):
        columns = columns_of(decoding)
        if columns is None:
            return None
        found |= columns
    return found


def columns_before(definition: PipelineDefinition, place: int) -> frozenset[str] | None:
    """Names of the rows' columns before a step; nothing behind a query or a function, which make their own."""
    columns = source_columns(definition.source)
    if columns is None:
        return None
    found = set(columns)
    for step in definition.steps[:place]:
        if isinstance(step, Sql) or (isinstance(step, Python) and step.schema):
            return None
        if isinstance(step, Lookup):
            found |= set(step.columns)
    return frozenset(found)


def conflicts(source: Source) -> Iterator[tuple[str | None, str, str]]:
    """Columns that two decodings have with different types or spellings: topic, name, and what is wrong."""
    first: dict[str, tuple[str, str, str]] = {}
    for topic, decoding in decodings_of(source):
        here = "other topics" if topic is None else repr(topic)
        for name, type_ in (columns_of(decoding) or {}).items():
            known = first.setdefault(name.lower(), (name, type_, here))
            if known[0] != name:
                yield topic, name, f"{known[0]!r} of {known[2]} and {name!r} are one column to Spark"
            elif known[1] != type_:
                yield topic, name, f"it is {type_} here and {known[1]} for {known[2]}; a column has one type"


def listed_columns(text: str) -> Mapping[str, str]:
    """The columns of `id long, total decimal(10,2)`; `ConfigError` or `ValueError` says what is wrong with one."""
    from holdfast.pipeline.formats.types import parse_type

    found: dict[str, str] = {}
    for part in _parts(text):
        name, type_ = _split(part)
        if not name or not type_:
            raise ValueError(f"{part.strip()!r} is no column; write a name and a type, as 'total double'")
        if name.lower() in {known.lower() for known in found}:
            raise ValueError(f"{name!r} is listed twice")
        found[name] = parse_type(type_).ddl
    return found


def _parts(text: str) -> Iterator[str]:
    """Between the commas that stand inside nothing."""
    depth, part = 0, ""
    for character in text:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield part
            part = ""
        else:
            part += character
    yield part


def _split(part: str) -> tuple[str, str]:
    part = part.strip()
    if part.startswith("`"):
        name, _, type_ = part[1:].partition("`")
    else:
        name, _, type_ = part.replace("\n", " ").partition(" ")
    return name.removesuffix(":"), type_.strip().removeprefix(":").strip()
