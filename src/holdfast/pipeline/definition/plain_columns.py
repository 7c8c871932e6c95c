"""Which columns of a sink are fields of the record, unchanged: what is known of them without running a step.

Rules, filters, deduplication and taps let rows pass as they are. A lookup adds columns. A query is followed where it
selects from `input` by plain words: `*`, `* EXCEPT (…)`, names, names under another name; whatever else it selects is
computed, and so unknown here. Behind a Python step nothing is known: it may have changed anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.pipeline.definition.model import Lookup, PipelineDefinition, Python, Sql
from holdfast.pipeline.definition.sql_words import tokens as sql_tokens
from holdfast.pipeline.definition.streams import Stream

_ENDS: Final = frozenset({"where"})
"""What may follow `FROM input` and leaves the columns of rows as they are."""


@dataclass(frozen=True)
class PlainColumns:
    """Columns of rows by their name there, each with the source's name for it, and why there are not more."""

    columns: Mapping[str, str]
    computed: tuple[str, ...] = field(default=())
    """Steps that made columns of their own, or may have."""


def plain_columns(definition: PipelineDefinition, source: Iterable[str], rows: str = "") -> PlainColumns:
    """Of the rows that a sink with this `rows` gets; `source` are the columns that decoding gives."""
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
        elif not name.startswith("_"):
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
