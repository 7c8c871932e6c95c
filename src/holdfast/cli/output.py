"""What commands print: tables for people, JSON with stable keys for programs.

A table is cut to the terminal's width only when there is a terminal. Piped, it has no frame and every cell is
whole, so that grep and awk find what they look for.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


def print_json(document: Any) -> None:
    """One document, readable: for commands that answer once."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def json_line(document: Any) -> str:
    """One document on one line: for commands that stream."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def print_result(
    output: Output, document: Any, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """The same twice: the document for programs, or the table for people."""
    if output is Output.JSON:
        print_json(document)
    else:
        print_table(columns, rows)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None
) -> None:
    cells = [tuple(map(str, row)) for row in rows]
    if not sys.stdout.isatty():
        _print_plain(columns, cells, title)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        *columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for row in cells:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None) -> None:
    if title:
        print(title)
    lines = [tuple(columns), *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def bytes_as_json(data: bytes | None) -> tuple[str | None, str | None]:
    """Text and its encoding: as it stands when it is UTF-8, base64 when not, and (None, None) for null."""
    if data is None:
        return None, None
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode("ascii"), "base64"


def content_as_json(
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str, bytes | None]],
    header_name: str = "key",
) -> dict[str, Any]:
    """What a message holds, as every command's JSON has it."""
    key_text, key_encoding = bytes_as_json(key)
    value_text, value_encoding = bytes_as_json(value)
    pairs = [(name, *bytes_as_json(data)) for name, data in headers]
    return {
        "key": key_text,
        "key_encoding": key_encoding,
        "value": value_text,
        "value_encoding": value_encoding,
        "headers": [
            {header_name: name, "value": text, "value_encoding": encoding} for name, text, encoding in pairs
        ],
    }
