"""`python -m bench`: run the measures, keep their figures, write the report."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.driver import Bench, Measure
from bench.machine import facts
from bench.measures import ALL
from bench.model import MeasureResult, Results
from bench.plot import draw
from bench.report import evaluate, render

HERE: Final = Path(__file__).resolve().parent
QUICK_SCALE: Final = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when everything asked for was measured, 1 when some measure failed."""
    options = _parse(arguments)
    names = options.only or [each.name for each in ALL]
    chosen = [each for each in ALL if each.name in names]
    work_dir: Path = options.work_dir
    output = _output(options, work_dir)
    if options.report:
        write_report(Results.load(output / "results" / "latest.json"), output)
        return 0
    work_dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        work_dir=work_dir / "brokers",
        rounds=options.rounds or (1 if options.quick else 9),
        scale=QUICK_SCALE if options.quick else 1.0,
        stand_in=options.stand_in,
    )
    machine = facts(work_dir)
    failed = False
    try:
        for number, measure in enumerate(chosen, start=1):
            bench.say(f"{measure.name} ({number} of {len(chosen)}): {measure.title}")
            measured = _attempt(bench, measure)
            if measured is None:
                failed = True
                continue
            # After every measure, so that an interrupted run keeps what it has.
            results = Results.load(output / "results" / "latest.json")
            results.merge([measured], machine)
            results.save(output / "results" / "latest.json")
            write_report(results, output)
    finally:
        bench.close_pair()
        shutil.rmtree(bench.work_dir, ignore_errors=True)
    bench.say(f"written: {output / 'RESULTS.md'}")
    return 1 if failed else 0


def _attempt(bench: Bench, measure: Measure) -> MeasureResult | None:
    """One measure; what goes wrong in it is told and spoils no other."""
    if not measure.shares_brokers:
        bench.close_pair()
    try:
        return measure.run(bench)
    except Exception as error:  # noqa: BLE001 - an hour of other figures is worth keeping
        bench.say(f"{measure.name} FAILED: {type(error).__name__}: {error}")
        bench.close_pair()
        return None


def write_report(results: Results, output: Path) -> None:
    """RESULTS.md and its plot from stored figures."""
    rows = {each.name: each.rows for each in ALL}
    titles = {each.name: each.title for each in ALL}
    lines = [evaluate(row, results.measures.get(name)) for name in rows for row in rows[name]]
    draw(lines, output / "ratios.svg")
    (output / "RESULTS.md").write_text(render(rows, results, titles), encoding="utf-8")


def _output(options: argparse.Namespace, work_dir: Path) -> Path:
    """Only full-sized runs of both brokers may touch the committed report."""
    if options.output is not None:
        return Path(options.output)
    if options.stand_in:
        return work_dir / "stand-in"
    return work_dir / "quick" if options.quick else HERE


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, help="alternating rounds (9)")
    parser.add_argument(
        "--only",
        action="append",
        choices=[each.name for each in ALL],
        help="only this measure, its figures replacing the last ones; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="one small round of each: does it work at all")
    parser.add_argument("--report", action="store_true", help="rebuild the report from the stored figures")
    parser.add_argument(
        "--stand-in", action="store_true", help="Apache Kafka on both sides: how far from 1 does noise go"
    )
    parser.add_argument("--work-dir", type=Path, default=HERE / ".work", help="where brokers keep their data")
    parser.add_argument("--output", type=Path, help="where RESULTS.md, its plot and results/ go (bench/)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
