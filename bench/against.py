"""`python -m bench.against CHECKOUT`: the same measures on another checkout of holdfast and on this one, in turn.

CHECKOUT is a work tree of an earlier or later commit after `make setup`. Each round runs each checkout's own
bench once, with its own Python, broker and clients; even rounds begin with the other checkout, odd ones with this
one. A line says by how much this checkout's figure differs: the median of the rounds' ratios, the least and the
greatest. Nothing is stored.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.measures import ALL
from bench.model import MeasureResult, Results, Row

HERE: Final = Path(__file__).resolve().parents[1]
USUAL: Final = (
    "latency-raw",
    "clients16-raw",
    "bulk",
    "clients-producer",
    "clients-consumer",
    "spark-pipeline",
)
"""Broker, clients and pipeline, in half an hour for three rounds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when every measure has run on both sides."""
    options = _parse(arguments)
    other: Path = options.checkout.resolve()
    names = options.only or USUAL
    found: dict[Path, list[Results]] = {other: [], HERE: []}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as scratch:
        for number in range(options.rounds):
            sides = (other, HERE) if number % 2 == 0 else (HERE, other)
            for side in sides:
                print(f"round {number + 1} of {options.rounds}: {side}", file=sys.stderr, flush=True)
                found[side].append(_measured(side, names, Path(scratch)))
    complete = True
    for measure in (each for each in ALL if each.name in names):
        print(f"{measure.name}: {measure.title}")
        for row in measure.rows:
            line = line_of(
                row, *([each.measures.get(measure.name) for each in found[side]] for side in (other, HERE))
            )
            complete &= line is not None
            print(f"  {line or f'{row.title}: not measured on both sides'}")
    return 0 if complete else 1


def _measured(checkout: Path, names: Sequence[str], scratch: Path) -> Results:
    output = Path(tempfile.mkdtemp(dir=scratch))
    command = [str(checkout / ".venv/bin/python"), "-m", "bench", "--rounds", "1", "--output", str(output)]
    for name in names:
        command += ["--only", name]
    subprocess.run(command, cwd=checkout, check=False)  # a measure that failed has no figures, and says why
    return Results.load(output / "results" / "latest.json")


def line_of(
    row: Row, theirs: Sequence[MeasureResult | None], ours: Sequence[MeasureResult | None]
) -> str | None:
    """The row's own side on both checkouts; nothing where one of them lacks it."""
    pairs = [
        (before, after)
        for old, new in zip(theirs, ours, strict=True)
        if old is not None and new is not None
        for before, after in zip(old.values(row.ours), new.values(row.ours), strict=False)
        if before
    ]
    if not pairs:
        return None
    ratios = sorted(after / before for before, after in pairs)
    figures = " -> ".join(f"{median(side):,.4g}" for side in zip(*pairs, strict=True))
    return f"{row.title}: {figures} {row.unit}, {median(ratios):.3f}× ({ratios[0]:.3f} to {ratios[-1]:.3f})"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the other work tree, after `make setup`")
    parser.add_argument("--rounds", type=int, default=3, help="in turn on both (3)")
    parser.add_argument(
        "--only", action="append", choices=[each.name for each in ALL], help="this measure; may be repeated"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
