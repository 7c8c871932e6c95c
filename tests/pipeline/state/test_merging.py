"""Which segments become one: few enough are kept, and little is rewritten."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from holdfast.pipeline.state.segments import (
    FAN_IN,
    TINY_BYTES,
    TINY_MAX,
    Segment,
    merged_tier,
    segments_to_merge,
    tier_of,
    with_merged,
)

MIB = 1024 * 1024


def segment(name: str, tier: int = 0, size: int = TINY_BYTES) -> Segment:
    return Segment((name,), 1, size, 0, 1, tier)


def of_tiers(*tiers: int, size: int = TINY_BYTES) -> list[Segment]:
    return [segment(str(number), tier, size) for number, tier in enumerate(tiers)]


def test_nothing_is_merged_before_a_tier_is_full() -> None:
    assert segments_to_merge([]) is None
    assert segments_to_merge(of_tiers(*[0] * (FAN_IN - 1))) is None
    assert segments_to_merge(of_tiers(*[1] * (FAN_IN - 1), *[0] * (FAN_IN - 1))) is None


def test_a_full_tier_becomes_one_of_the_next() -> None:
    segments = of_tiers(1, *[0] * FAN_IN)
    merging = segments_to_merge(segments)
    assert merging == segments[1:]
    assert merged_tier(merging) == 1
    result = segment("new", 1)
    assert with_merged(segments, merging, result) == (segments[0], result)


def test_a_merge_that_fills_the_next_tier_takes_it_along() -> None:
    segments = of_tiers(*[1] * (FAN_IN - 1), *[0] * FAN_IN)
    merging = segments_to_merge(segments)
    assert merging == segments
    assert merged_tier(merging) == 2


def test_copies_of_all_that_is_alive_do_not_pile_up() -> None:
    segments = [segment("old", 3, 10 * MIB), *of_tiers(2, 2, 2, size=7 * MIB), segment("new", 0)]
    merging = segments_to_merge(segments)
    assert merging == segments
    assert merged_tier(merging) == 3


def test_a_large_batch_is_not_rewritten_with_small_ones() -> None:
    large = [segment(f"large {number}", 0, 20 * MIB) for number in range(3)]
    assert {tier_of(each) for each in large} == {3}
    small = of_tiers(*[0] * FAN_IN, size=MIB)
    merging = segments_to_merge([*large, *small])
    assert merging == small
    assert merged_tier(merging) == tier_of(small[0]) + 1 == 3


def test_many_tiny_segments_become_one_whatever_their_tiers() -> None:
    big = segment("big", 4, 100 * MIB)
    tiny = of_tiers(*[2] * 6, *[1] * 6, *[0] * (TINY_MAX - 11), size=TINY_BYTES // 100)
    assert segments_to_merge([big, *tiny[1:]]) is None
    assert segments_to_merge([big, *tiny]) == tiny
    assert merged_tier(tiny) == 2


def test_a_merge_that_leaves_no_row_leaves_no_segment() -> None:
    segments = of_tiers(1, *[0] * FAN_IN, 0)
    assert with_merged(segments, segments[1:], None) == (segments[0],)


@dataclass
class Simulated:
    """A state of keys, each batch of which writes some anew."""

    row_bytes: int = 60
    segments: tuple[Segment, ...] = ()
    keys: dict[Segment, frozenset[int]] = field(default_factory=dict)
    made: int = 0

    def add(self, keys: frozenset[int], tier: int = 0) -> Segment:
        self.made += 1
        made = Segment((f"{self.made}",), len(keys), len(keys) * self.row_bytes, 0, 1, tier)
        self.keys[made] = keys
        return made

    def batch(self, keys: frozenset[int]) -> int:
        """The bytes that merging wrote."""
        self.segments = (*self.segments, self.add(keys))
        written = 0
        while merging := segments_to_merge(self.segments):
            union = frozenset[int]().union(*(self.keys.pop(each) for each in merging))
            result = self.add(union, merged_tier(merging))
            self.segments = with_merged(self.segments, merging, result)
            written += result.bytes
        return written

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.segments)


@pytest.mark.parametrize("loads", [1, 4, 20])
@pytest.mark.parametrize(("key_count", "row_bytes"), [(1_000, 60), (20_000, 60), (20_000, 6_000)])
def test_a_batch_that_touches_one_key_in_a_hundred_rewrites_little_of_the_state(
    key_count: int, row_bytes: int, loads: int
) -> None:
    chance = random.Random(7)
    state = Simulated(row_bytes)
    each = key_count // loads
    for load in range(loads):
        state.batch(frozenset(range(load * each, load * each + each)))
    live_bytes = key_count * state.row_bytes
    shares, counts, sizes = [], [], []
    for _ in range(500):
        touched = frozenset(chance.sample(range(key_count), key_count // 100))
        shares.append((state.batch(touched) + len(touched) * state.row_bytes) / live_bytes)
        counts.append(len(state.segments))
        sizes.append(state.bytes / live_bytes)
    mean = sum(shares) / len(shares)
    print(
        f"{key_count} keys: written per batch {mean:.1%} of the state on average, {max(shares):.0%} at most"
    )
    print(f"{max(counts)} segments at most, {max(sizes):.1f} times what is alive at most")
    assert mean < 0.1
    assert max(counts) <= 3 * FAN_IN
    assert max(sizes) < 4


def test_a_state_that_only_grows_is_rewritten_little() -> None:
    state = Simulated()
    shares = []
    for number in range(500):
        written = state.batch(frozenset(range(number * 100, number * 100 + 100)))
        shares.append(written / state.bytes)
    print(f"rewritten per batch: {sum(shares) / 500:.1%} on average")
    assert sum(shares) / 500 < 0.1
    assert len(state.segments) <= 3 * FAN_IN
