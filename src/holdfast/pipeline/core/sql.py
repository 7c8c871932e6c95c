"""Names and texts as Spark's SQL takes them, whatever characters they hold."""

from __future__ import annotations


def quoted(name: str) -> str:
    """The name of a column, dots and all."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text as a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def struct_of(names: list[str]) -> str:
    """A struct of these columns, which keep their names."""
    return f"named_struct({', '.join(f'{literal(name)}, {quoted(name)}' for name in names)})"
