"""`python -m tests.support.simulator --seeds N --first K [--mutant NAME]`"""

from __future__ import annotations

import argparse
import sys

from tests.support.simulator import Report, SeedFailed, run_seed
from tests.support.simulator.mutants import HEALTHY, MUTANTS


def run(first: int, seeds: int, mutant_name: str | None = None) -> int:
    """Run seeds in order and print what happened; 1 when a seed failed, else 0."""
    mutant = MUTANTS[mutant_name] if mutant_name else HEALTHY
    report = Report()
    for seed in range(first, first + seeds):
        try:
            report.add(run_seed(seed, mutant))
        except SeedFailed as failure:
            print(report.table())
            print()
            print(failure.explain())
            return 1
    print(report.table())
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.support.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug, which must be caught")
    arguments = parser.parse_args()
    sys.exit(run(arguments.first, arguments.seeds, arguments.mutant))


if __name__ == "__main__":
    main()
