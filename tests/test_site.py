"""The site of the documents builds strictly: every link resolves, every page is in the navigation, nothing is fetched.

`docs/index.md` is its front page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


@pytest.mark.check
def test_the_site_builds_strictly_has_a_search_and_fetches_nothing(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert built.returncode == 0, built.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # and the page for what is not found
    for page in pages:
        assert (found := ELSEWHERE.search(page.read_text())) is None, f"{page.name}: {found and found[0]}"
    for source in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", source.read_text(), flags=re.DOTALL | re.MULTILINE)
        name = source.relative_to(ROOT / "docs").with_suffix(".html")
        shown = (tmp_path / "site" / name.with_stem(name.stem.replace("README", "index"))).read_text()
        assert shown.count("<table>") == len(re.findall(r"^\|[ :|-]+\|$", text, re.MULTILINE)), name
        assert ("<li>" in shown.partition("<article")[2]) >= bool(re.search(r"^[-*] ", text, re.MULTILINE)), (
            name
        )
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    assert any("holdfast.flush" in each["text"] for each in index["docs"])
    assert all((tmp_path / "site" / "pictures" / name).exists() for name in ("message.svg", "batch.svg"))
