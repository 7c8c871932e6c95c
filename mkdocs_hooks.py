"""What the site does beyond MkDocs: patterns in the navigation, links out of `docs`, lists as GitHub has them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s#]*)(?:#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """A pattern in the navigation stands for the pages it matches, in the order of their names."""
    docs = Path(config.docs_dir)

    def filled(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {title: filled(inside) for title, inside in entry.items()}
        if isinstance(entry, list):
            return [filled(each) for each in entry]
        if "*" in entry:
            return [str(path.relative_to(docs)) for path in sorted(docs.glob(entry))]
        return entry

    config.nav = filled(config.nav)
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file of the repository that the site does not have becomes the file's name; lists and tables that
    follow a line of text at once, which only GitHub takes for such, get the empty line that they need here."""

    def named(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[2]))
        return match[0] if place.startswith("docs/") else f"{match[1]} (`{place}`)"

    return "\n".join(_spaced(LINK.sub(named, markdown).split("\n")))


BEGINS = re.compile(r"(?:[-*]|\d+\.) |\|")
GOES_ON = re.compile(r"\s|(?:[-*]|\d+\.) |\||#|$")
"""A line before a list or table that does not keep it from being one."""


def _spaced(lines: list[str]) -> Iterator[str]:
    before, is_code = "", False
    for line in lines:
        is_code ^= line.startswith("```")
        if not is_code and BEGINS.match(line) and not GOES_ON.match(before):
            yield ""
        yield line
        before = line
