"""The next process: delivers what the spools of others hold.

python -m tests.endings.draining BOOTSTRAP HOME…
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from holdfast.client import Producer


def main() -> None:
    bootstrap, *homes = sys.argv[1:]

    def drain(home: str) -> None:
        with Producer(bootstrap, spool=home) as producer:
            producer.flush(30)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drain, homes))


if __name__ == "__main__":
    main()
