"""What is under way: nothing counts as arrived before it has, whatever the order of confirmations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.spool.format import Entry, Message
from holdfast.client.spool.window import Window


def entries(partitions: list[int]) -> list[Entry]:
    counters: dict[int, int] = {}
    made = []
    for at, partition in enumerate(partitions):
        sequence = counters.get(partition, 0)
        counters[partition] = sequence + 1
        made.append(Entry(at * 10, at * 10 + 10, sequence, Message("orders", partition, None, b"x", (), -1)))
    return made


def test_the_prefix_waits_for_the_first_message_that_is_not_done() -> None:
    first, second, third = entries([0, 1, 0])
    window = Window(0, {})
    for entry in (first, second, third):
        window.begin(entry)
    window.done(second)
    assert window.prefix == 0
    window.done(first)
    assert window.prefix == 20


def test_a_message_set_aside_early_confirms_nothing_in_front_of_it() -> None:
    first, refused = entries([0, 0])
    window = Window(0, {})
    window.begin(first)
    window.begin(refused)
    window.done(refused)
    assert window.confirmed == {}
    window.restart()
    assert not window.is_done(first)
    assert window.is_done(refused)


@given(
    partitions=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    order=st.randoms(use_true_random=False),
    rounds=st.lists(st.integers(0, 30), max_size=5),
)
def test_after_any_restarts_exactly_what_is_not_confirmed_is_sent_again(
    partitions: list[int], order: object, rounds: list[int]
) -> None:
    spool = entries(partitions)
    arrived: set[int] = set()
    window = Window(0, {})
    for confirmations in [*rounds, len(spool)]:
        start = window.restart()
        under_way = []
        for entry in spool:
            if entry.position < start:
                assert entry.position in arrived
                continue
            window.begin(entry)
            if window.is_done(entry):
                assert entry.position in arrived
                window.done(entry)
            else:
                assert entry.position not in arrived
                under_way.append(entry)
        order.shuffle(under_way)  # type: ignore[attr-defined]
        for entry in under_way[:confirmations]:
            arrived.add(entry.position)
            window.done(entry)
        # Another process knows the prefix and what is confirmed of each partition, and nothing else.
        taken_over = Window(window.prefix, window.confirmed)
        for entry in spool:
            if taken_over.is_done(entry):
                assert entry.position in arrived
    assert window.prefix == spool[-1].end
    assert window.bytes == 0
