"""Many seeds over several processes: a seed that fails is explained at once, and the other seeds go on.

Processes that are spawned import what they run by name, and nothing of a `__main__`: so this is a module of its own.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator

from tests.support.simulator import Report, SeedFailed, run_seed
from tests.support.simulator.mutants import HEALTHY, MUTANTS

CHUNK = 50
"""Seeds a process takes at a time: some seconds of work, so that no process waits long for the last one."""

PROGRESS_S = 30.0


def run_chunk(chunk: tuple[range, str | None]) -> tuple[Report, list[str]]:
    """Run some seeds: what they did, and what went wrong."""
    seeds, mutant_name = chunk
    mutant = MUTANTS[mutant_name] if mutant_name else HEALTHY
    report, failures = Report(), []
    for seed in seeds:
        try:
            report.add(run_seed(seed, mutant))
        except SeedFailed as failure:
            failures.append(failure.explain())
    return report, failures


def _prepare() -> None:
    # Modules and schemas live as long as the process: the collector need not walk them for every seed.
    gc.collect()
    gc.freeze()


def _finished(chunks: list[tuple[range, str | None]], jobs: int) -> Iterator[tuple[Report, list[str]]]:
    if jobs == 1:
        yield from map(run_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare) as pool:
        yield from pool.imap_unordered(run_chunk, chunks)


def run(first: int, seeds: int, mutant_name: str | None = None, jobs: int = 1) -> int:
    """Run the seeds and print what happened; 1 when a seed failed, else 0."""
    chunks = [
        (range(start, min(start + CHUNK, first + seeds)), mutant_name)
        for start in range(first, first + seeds, CHUNK)
    ]
    total, failed, done = Report(), 0, 0
    begun = said = time.monotonic()
    for report, failures in _finished(chunks, jobs):
        total.add(report)
        failed += len(failures)
        done += report.seeds + len(failures)
        for failure in failures:
            print(failure, end="\n\n", flush=True)
        if time.monotonic() - said >= PROGRESS_S:
            said = time.monotonic()
            minutes = (said - begun) / done * (seeds - done) / 60
            print(
                f"{done:,} of {seeds:,} seeds, {failed} failed, about {minutes:.0f} min to go",
                file=sys.stderr,
            )
    print(total.table())
    print(f"\n{failed} of {done:,} seeds failed")
    return 1 if failed else 0
