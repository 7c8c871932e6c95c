"""Columns that can be known without Spark: of decodings, of texts that list columns, and of rows before a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.model import Decoding, Lookup, PipelineDefinition, Python, Source, Sql
from holdfast.pipeline.definition.sql_words import tokens as sql_tokens
from holdfast.pipeline.definition.streams import Stream, decodings_of

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
        if isinstance(step, Sql) or (isinstance(step, Python) and (step.schema or step.mode == "spark")):
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


# ------------------------------------------------------------------------ fields of the record, unchanged

_ENDS: Final = frozenset({"where"})
"""What may follow `FROM input` and leaves the columns of rows as they are."""


@dataclass(frozen=True)
class PlainColumns:
    """Columns of rows by their name there, each with the source's name for it, and why there are not more."""

    columns: Mapping[str, str]
    computed: tuple[str, ...] = field(default=())
    """Steps that made columns of their own, or may have."""


def plain_columns(definition: PipelineDefinition, source: Iterable[str], rows: str = "") -> PlainColumns:
    """Which columns of a sink are fields of the record, unchanged: what is known of them without running a step.

    Of the rows that a sink with this `rows` gets; `source` are the columns that decoding gives. Rules, filters,
    deduplication, windows, keyed functions and joins let rows pass as they are. A lookup adds columns. A query is
    followed where it selects from `input` by plain words: `*`, `* EXCEPT (…)`, names, names under another name;
    whatever else it selects is computed, and so unknown here. Behind a Python step nothing is known: it may have
    changed anything.
    """
    columns = {name: name for name in source}
    computed: list[str] = []
    stream = Stream(*rows.split(".", 1)) if "." in rows else Stream(rows)
    for step in definition.steps:
        if stream.step and step.name == stream.step:
            break
        if isinstance(step, Python):
            columns, computed = {}, [*computed, step.name]
        elif isinstance(step, Lookup):
            columns = {name: field for name, field in columns.items() if name not in step.columns}
            computed.append(step.name)
        elif isinstance(step, Sql):
            followed = after_query(step.query, columns)
            if followed is None:
                columns, computed = {}, [*computed, step.name]
            else:
                columns, makes_more = followed
                computed += [step.name] if makes_more else []
    return PlainColumns(columns, tuple(computed))


def after_query(query: str, columns: Mapping[str, str]) -> tuple[dict[str, str], bool] | None:
    """The plain columns behind a query, and whether it makes others; nothing when it cannot be followed."""
    tokens = [token.text for token in sql_tokens(query)]
    if [each.lower() for each in tokens[:1]] != ["select"]:
        return None
    end = _position(tokens, "from")
    if end is None or [each.lower() for each in tokens[end + 1 : end + 2]] != ["input"]:
        return None
    rest = [each.lower() for each in tokens[end + 2 :]]
    if rest and rest[0] not in _ENDS:
        return None
    if any(
        word in ("union", "group", "join", "lateral", "having", "intersect", "except", "minus")
        for word in rest
    ):
        return None
    found: dict[str, str] = {}
    makes_more = False
    lowered = {name.lower(): name for name in columns}
    for item in _items(tokens[1:end]):
        if item[:1] == ["*"]:
            gone = {_name(each).lower() for each in item[1:] if each not in "(,)"}
            found |= {name: field for name, field in columns.items() if name.lower() not in gone}
            continue
        plain = _plain_item(item)
        if plain is None:
            makes_more = True
            continue
        name, alias = plain
        if name.lower() in lowered:
            found[alias] = columns[lowered[name.lower()]]
        elif not alias.startswith("_"):
            makes_more = True
    return found, makes_more


def _plain_item(item: list[str]) -> tuple[str, str] | None:
    """A name and what it is called then."""
    words = item[2:] if [each.lower() for each in item[:2]] == ["input", "."] else item
    match [word if word.lower() != "as" else "as" for word in words]:
        case [name] if _is_name(name):
            return _name(name), _name(name)
        case [name, "as", alias] | [name, alias] if _is_name(name) and _is_name(alias):
            return _name(name), _name(alias)
    return None


def _position(tokens: list[str], word: str) -> int | None:
    """Of a word outside of parentheses."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token == "(") - (token == ")")
        if depth == 0 and token.lower() == word:
            return at
    return None


def _items(tokens: list[str]) -> list[list[str]]:
    """The parts of a list, at the commas outside of parentheses."""
    found: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token == "(") - (token == ")")
        if depth == 0 and token == ",":
            found.append([])
        else:
            found[-1].append(token)
    return found


def _is_name(token: str) -> bool:
    return token[:1] == "`" or token.isidentifier()


def _name(token: str) -> str:
    return token[1:-1].replace("``", "`") if token[:1] == "`" else token
