"""`python -m tests.support.simulator --seeds N --first K [--jobs J] [--mutant NAME]`"""

from __future__ import annotations

import argparse
import os
import sys

from tests.support.simulator.many import run
from tests.support.simulator.mutants import MUTANTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.support.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)"
    )
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug, which must be caught")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs take whole numbers from 1 up")
    sys.exit(run(arguments.first, arguments.seeds, arguments.mutant, arguments.jobs))


if __name__ == "__main__":
    main()
