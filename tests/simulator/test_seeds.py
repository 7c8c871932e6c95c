"""Seeds of the whole broker under faults, and the properties that make a seed worth running."""

from __future__ import annotations

import pytest
from tests.support.simulator import Report, SeedFailed, run_seed
from tests.support.simulator.world import EFFECTS, OPERATIONS_MIN, World
from tests.support.tiers import by_tier

CHUNKS = by_tier(quick=1, check=1, long=16)
PER_CHUNK = by_tier(quick=40, check=125, long=125)
ENOUGH_FOR_EVERYTHING = 125
"""In as many seeds every fault hits and every operation happens."""


@pytest.mark.sim
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_seed_breaks_a_rule(chunk: int) -> None:
    total = Report()
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        try:
            report = run_seed(seed)
        except SeedFailed as failure:
            pytest.fail(failure.explain())
        assert report.operations_sent >= OPERATIONS_MIN
        assert report.faults_struck >= 3
        total.add(report)
    print(total.table())
    if PER_CHUNK < ENOUGH_FOR_EVERYTHING:
        return
    for fault in EVERY_FAULT:
        assert total.faults[fault], f"{fault} never hit in {PER_CHUNK} seeds"
    for kind, outcome in EVERY_OPERATION:
        assert total.operations[kind, outcome], f"{kind}: {outcome} never happened in {PER_CHUNK} seeds"


@pytest.mark.sim
def test_a_directory_is_there_after_a_killed_start_and_a_power_loss() -> None:
    """The second start rests on a name that the killed one had left in memory alone."""
    run_seed(8164)


EVERY_FAULT = (
    "power loss",
    "process kill",
    "clean restart",
    "flush failed",
    "flush directory failed",
    "write failed",
    "write cut short",
    "disk full",
    "read-only",
    "connection cut",
    "slow flush",
    "disk stalled",
    "clock stepped back",
    "second start",
    "member died",
    "member stalled",
    "zombie member",
    "zombie producer",
    *EFFECTS,
)
EVERY_OPERATION = (
    ("produce transactional", "none"),
    ("produce transactional", "invalid_producer_epoch"),
    ("add partitions to txn", "none"),
    ("add offsets to txn", "none"),
    ("send offsets to txn", "none"),
    ("end txn: commit", "none"),
    ("end txn: commit", "unknown"),
    ("end txn: abort", "none"),
    ("read committed", "hidden"),
    ("commit offsets", "none"),
    ("commit offsets", "unknown_member_id"),
    ("fetch offsets", "none"),
    ("fetch offsets", "unstable"),
    ("join group", "none"),
    ("sync group", "none"),
    ("heartbeat", "rebalance_in_progress"),
    ("consumer join", "none"),
    ("consumer heartbeat", "none"),
    ("look up a time", "none"),
    ("background", "compact"),
    ("stranger: 27", "answered"),
    ("stranger: 37", "answered"),
)


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace(seed: int) -> list[str]:
        world = World(seed)
        world.run()
        return world.trace

    assert trace(11) == trace(11)
    assert trace(11) != trace(12)
