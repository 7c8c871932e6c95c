"""Keys go where Java's client sends them; messages without one are spread evenly."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from holdfast.client.partitioner import StickyPartitioner, murmur2
from holdfast.testing.fakes import SeededRandomness


@pytest.mark.parametrize(
    ("data", "signed"),
    [
        # Values of org.apache.kafka.common.utils.Utils.murmur2 for these bytes.
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_hash_is_that_of_the_java_client(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed & 0xFFFFFFFF


def test_messages_without_key_stay_until_a_batch_is_full_and_then_move() -> None:
    partitioner = StickyPartitioner(SeededRandomness(1), sticky_bytes=1000)
    chosen = [partitioner.choose("orders", 100, 6) for _ in range(6000)]
    runs = [chosen[at : at + 10] for at in range(0, len(chosen), 10)]
    assert all(len(set(run)) == 1 for run in runs)
    assert all(first[0] != second[0] for first, second in itertools.pairwise(runs))
    counts = Counter(chosen)
    assert set(counts) == set(range(6))
    assert max(counts.values()) < 2 * min(counts.values())


def test_a_single_partition_takes_everything() -> None:
    partitioner = StickyPartitioner(SeededRandomness(1), sticky_bytes=10)
    assert {partitioner.choose("orders", 100, 1) for _ in range(10)} == {0}


def test_partitions_taken_away_are_not_used_any_more() -> None:
    partitioner = StickyPartitioner(SeededRandomness(3), sticky_bytes=1 << 30)
    partitioner.choose("orders", 1, 50)
    assert partitioner.choose("orders", 1, 1) == 0
