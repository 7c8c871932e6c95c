"""The tables of docs/ABSENT.md, made by trying: `python -m tests.absent.matrix` writes them anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.absent.trials import MOMENTS, THINGS, WAYS, Outcome, Thing, try_out

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "ABSENT.md"
BEGIN, END = "<!-- tried: {} -->", "<!-- end -->"
NOT_NOTICED: Final = "not noticed"


def cell(thing: Thing, way: str, moment: str) -> str:
    outcome = try_out(thing, way, moment)
    if outcome is None:
        return ""
    if outcome.is_loss:
        return f"**{NOT_NOTICED}**"
    if outcome.word == "served" and _tells_of(outcome, thing):
        return "rebuilt"
    return outcome.word


def _tells_of(outcome: Outcome, thing: Thing) -> bool:
    return any(thing.path in line for line in outcome.said)


def table(moment: str) -> list[str]:
    rows = [f"| | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for thing in THINGS:
        cells = (cell(thing, way, moment) for way in WAYS)
        rows.append(f"| {thing.name} | {' | '.join(cells)} |")
    return rows


def written(moment: str, document: Path = DOCUMENT) -> list[str]:
    """The table as the document has it."""
    lines = document.read_text().splitlines()
    first = lines.index(BEGIN.format(moment)) + 1
    return lines[first : lines.index(END, first)]


def write(document: Path, moments: Sequence[str], table: Callable[[str], list[str]]) -> None:
    text = document.read_text()
    for moment in moments:
        mark = BEGIN.format(moment)
        before, _, after = text.partition(mark)
        _, _, rest = after.partition(END)
        text = "\n".join([before + mark, *table(moment), END]) + rest
    document.write_text(text)


if __name__ == "__main__":
    write(DOCUMENT, MOMENTS, table)
