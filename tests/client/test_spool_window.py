"""What is under way: nothing counts as arrived before it has, whatever the order of confirmations."""

from __future__ import annotations

import random
import weakref

from confluent_kafka import Message as Reported
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.delivery import Waiting
from holdfast.client.spool.format import PartitionKey, SpooledMessage
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup, Window, make_item
from holdfast.client.spool.progress import NOTHING, Progress

WAITING = Waiting()


def group_of(partitions: list[int], start: int, counters: dict[PartitionKey, int]) -> StoredGroup:
    group = StoredGroup()
    group.start, group.end = start, start + 10
    group.bytes = 10 * len(partitions)
    for partition in partitions:
        where = ("orders", partition)
        item = make_item(SpooledMessage("orders", partition, None, b"x", (), -1, -1), WAITING)
        item.sequence = counters.get(where, 0)
        counters[where] = group.following[where] = item.sequence + 1
        item.group = group
        group.items.append(item)
    group.count = group.left = len(group.items)
    return group


def confirm(item: SpooledDelivery) -> None:
    item(None, Reported("orders", item.partition, 0, timestamp=(1, 0)))


def test_the_prefix_waits_for_the_first_group_that_is_not_done() -> None:
    counters: dict[PartitionKey, int] = {}
    first, second = group_of([0], 0, counters), group_of([1], 10, counters)
    window = Window(NOTHING)
    window.add(first)
    window.add(second)
    confirm(second.items[0])
    assert not window.advance()
    assert window.progress() == Progress(0, {("orders", 1): 1})
    confirm(first.items[0])
    assert window.advance()
    assert window.progress() == Progress(20, {("orders", 0): 1, ("orders", 1): 1})
    assert (window.bytes, window.done) == (0, 2)


def test_a_message_that_is_done_early_confirms_nothing_in_front_of_it() -> None:
    group = group_of([0, 0, 0], 0, {})
    window = Window(NOTHING)
    window.add(group)
    confirm(group.items[2])
    assert window.progress().confirmed == {}
    confirm(group.items[0])
    assert window.progress().confirmed == {("orders", 0): 1}


def test_a_report_that_comes_twice_counts_once() -> None:
    group = group_of([0, 0], 0, {})
    confirm(group.items[0])
    confirm(group.items[0])
    assert group.left == 1


def test_a_group_with_messages_that_wait_for_their_topic_is_not_done() -> None:
    group = StoredGroup()
    group.start, group.end, group.held = 0, 10, 3
    window = Window(NOTHING)
    window.add(group)
    assert not window.advance()
    assert window.is_held_up()
    assert window.rewind(window.progress()) == []
    assert (len(window), window.prefix) == (0, 0)


def test_groups_with_nothing_left_to_send_take_no_room() -> None:
    window = Window(NOTHING)
    counters: dict[PartitionKey, int] = {}
    stuck = group_of([0], 0, counters)
    window.add(stuck)
    for number in range(1, 100):
        group = group_of([1], number * 10, counters)
        confirm(group.items[0])
        window.add(group)
    assert len(window) == 2
    confirm(stuck.items[0])
    window.advance()
    assert window.progress() == Progress(1000, {("orders", 0): 1, ("orders", 1): 99})
    assert window.done == 100


@given(
    groups=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
    rounds=st.lists(st.integers(0, 20), max_size=6),
)
def test_whoever_takes_over_knows_only_of_what_has_arrived(
    groups: list[list[int]], seed: int, rounds: list[int]
) -> None:
    chance = random.Random(seed)
    counters: dict[PartitionKey, int] = {}
    spool = [group_of(partitions, at * 10, counters) for at, partitions in enumerate(groups)]
    everything = [(group, item) for group in spool for item in group.items]
    window = Window(NOTHING)
    for group in spool:
        window.add(group)
    for confirmations in rounds:
        left = window.unsettled()
        assert {id(item) for item in left} == {id(item) for _, item in everything if not item.is_settled}
        chance.shuffle(left)
        for item in left[:confirmations]:
            confirm(item)
        window.advance()
        progress = window.progress()
        for group, item in everything:
            where = (item.topic, item.partition or 0)
            if group.end <= progress.prefix or item.sequence < progress.confirmed.get(where, 0):
                assert item.is_settled
    for item in window.unsettled():
        confirm(item)
    window.advance()
    assert window.progress() == Progress(spool[-1].end, counters)
    assert (window.bytes, window.done) == (0, len(everything))


def test_what_is_done_is_forgotten_as_fast_as_one_is_told_to() -> None:
    counters: dict[PartitionKey, int] = {}
    window = Window(NOTHING)
    under_way: list[weakref.ref[SpooledDelivery]] = []
    for start in (0, 10, 20):
        group = group_of([0] * 10, start, counters)
        window.add(group)
        under_way += map(weakref.ref, group.items)
        for item in group.items:
            confirm(item)
        del item, group

    def kept() -> int:
        return sum(each() is not None for each in under_way)

    assert window.advance()
    assert kept() == 30
    window.forget(4)
    assert kept() == 26
    window.forget(6)
    assert kept() == 20
    window.forget(15)
    assert kept() == 5
    window.forget()
    assert kept() == 0
    assert window.done == 30
