"""What the site does beyond MkDocs: patterns in the navigation, and links that lead out of `docs`."""

from __future__ import annotations

import posixpath
import re
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
    """A link to a file of the repository that the site does not have becomes the file's name."""

    def named(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match[2]))
        return match[0] if place.startswith("docs/") else f"{match[1]} (`{place}`)"

    return LINK.sub(named, markdown)
