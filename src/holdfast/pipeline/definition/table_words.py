"""Words that several parts of the table share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from holdfast.pipeline.definition.documents import Findings
from holdfast.pipeline.definition.errors import Path
from holdfast.pipeline.definition.shapes import Either, Key, ListOf, MapOf, Text, Truth

UNNAMED: Final = ""
"""The name of a step until it gets one from its place."""


def make_columns(values: Mapping[str, str], path: Path, findings: Findings) -> str:
    """Columns given as a mapping, in Spark's one-line form."""
    columns = {name: text.strip().removesuffix("?").strip() for name, text in values.items()}
    return ", ".join(f"{_quoted(name)} {text}" for name, text in columns.items())


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) else f"`{name}`"


SETTINGS: Final = MapOf(Text(loose=True))
SQL: Final = Text("an SQL expression")
COLUMN_NAMES: Final = ListOf(Text("a column"), lone=True)
COLUMNS: Final = Either(Text("columns"), MapOf(Text("a type"), make_columns))
UNORDERED: Final = Key(
    "unordered",
    Truth(),
    "Rows of one key may lie in several partitions, and whichever is read first (dedupe) or last (upsert, compacted "
    "topic) may count.",
    default=False,
)
NAME: Final = Key(
    "name",
    Text("a name"),
    "Letters and digits, with '.', '_' or '-' between them; rows are counted under it.",
    absent=UNNAMED,
)
