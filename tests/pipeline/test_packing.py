"""Packing a batch's range into tasks."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.packing import pack
from holdfast.pipeline.positions import BatchRange, Place, Span

TOPIC = uuid.UUID(int=1)

ranges = st.dictionaries(
    st.integers(0, 50), st.tuples(st.integers(0, 1_000), st.integers(0, 200)), max_size=30
).map(
    lambda spans: BatchRange(
        {Place("orders", TOPIC, number): Span(at, at + size) for number, (at, size) in spans.items()}
    )
)


@given(ranges, st.integers(1, 8), st.integers(1, 20), st.integers(1, 500))
def test_every_offset_is_in_exactly_one_task(
    batch: BatchRange, cores: int, at_least: int, worth: int
) -> None:
    tasks = pack(batch, cores, at_least=at_least, worth=worth)
    packed = [
        (piece.partition, offset)
        for task in tasks
        for piece in task
        for offset in range(piece.start, piece.end)
    ]
    assert packed == [
        (place.partition, offset)
        for place, span in sorted(batch.spans.items())
        for offset in range(span.start, span.end)
    ]
    assert all(task for task in tasks)


@given(ranges, st.integers(1, 8), st.integers(1, 20), st.integers(1, 500))
def test_tasks_are_of_equal_size_within_one(batch: BatchRange, cores: int, at_least: int, worth: int) -> None:
    sizes = [
        sum(piece.end - piece.start for piece in task)
        for task in pack(batch, cores, at_least=at_least, worth=worth)
    ]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_many_small_partitions_share_few_tasks() -> None:
    batch = BatchRange({Place("orders", TOPIC, number): Span(0, 5) for number in range(200)})
    assert len(pack(batch, cores=2)) == 1


def test_one_large_partition_is_cut_for_all_cores() -> None:
    batch = BatchRange({Place("orders", TOPIC, 0): Span(0, 1_000_000)})
    assert len(pack(batch, cores=4)) == 4


def test_more_tasks_than_cores_where_they_are_asked_for() -> None:
    batch = BatchRange({Place("orders", TOPIC, 0): Span(0, 100)})
    assert len(pack(batch, cores=2, at_least=7)) == 7


def test_where_cores_are_not_known_a_task_has_no_more_than_it_is_worth() -> None:
    batch = BatchRange({Place("orders", TOPIC, number): Span(0, 100_000) for number in range(3)})
    tasks = pack(batch, None, worth=40_000)
    assert [sum(piece.end - piece.start for piece in task) for task in tasks] == [37_500] * 8
