"""The tables of docs/ABSENT-PIPELINES.md, made by trying: `python -m tests.pipeline.absent.matrix` writes them anew."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from tests.absent.matrix import write, written
from tests.pipeline.absent.trials import MOMENTS, NOT_NOTICED, THINGS, WAYS, Thing, try_out
from tests.pipeline.absent.world import Worlds

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "ABSENT-PIPELINES.md"


def cell(worlds: Worlds, thing: Thing, way: str, moment: str) -> str:
    outcome = try_out(worlds, thing, way, moment)
    if outcome is None:
        return ""
    assert outcome.word != "LOSS", f"{thing.name} {way}, {moment}: {outcome.detail}"
    return f"**{NOT_NOTICED}**" if outcome.word == NOT_NOTICED else outcome.word


def table(worlds: Worlds, moment: str) -> list[str]:
    rows = [f"| | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for thing in THINGS:
        cells = (cell(worlds, thing, way, moment) for way in WAYS)
        rows.append(f"| {thing.name} | {' | '.join(cells)} |")
    return rows


def written_cell(thing: Thing, way: str, moment: str) -> str:
    """As the document has it."""
    row = next(row for row in written(moment, DOCUMENT) if row.startswith(f"| {thing.name} |"))
    return row.split("|")[2 + WAYS.index(way)].strip()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, Worlds(Path(directory)) as worlds:
        write(DOCUMENT, MOMENTS, lambda moment: table(worlds, moment))
