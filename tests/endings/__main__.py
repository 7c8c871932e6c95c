"""Every combination, or those whose names hold all of some words, and what came of them:

python -m tests.endings [--keep DIRECTORY] [--times N] [WORD…]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.endings.axes import every, sample
from tests.endings.judging import World, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.endings")
    parser.add_argument("words", nargs="*", help="run the combinations whose names hold all of these")
    parser.add_argument("--sample", action="store_true", help="only what `make test` runs")
    parser.add_argument("--keep", type=Path, help="leave what the programs wrote in this directory")
    parser.add_argument("--at-a-time", type=int, default=16)
    parser.add_argument("--times", type=int, default=1, help="run each so often")
    given = parser.parse_args()
    chosen = [
        each for each in (sample() if given.sample else every()) if all(word in each for word in given.words)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        root = given.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with World(root) as world:
            results = world.run(chosen, given.at_a_time, given.times)
    print(table(results))
    print(f"{time.monotonic() - began:.1f} s")
    sys.exit(any(results.values()))


if __name__ == "__main__":
    main()
