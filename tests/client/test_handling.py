"""What becomes of a run: handled, tried again, set aside, or left for whoever comes next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.consuming.handling import Handling
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Run, split
from holdfast.client.messages import KEY, OFFSET, DeadLetter, Fields, Message, Retry
from holdfast.client.retries import RetryPolicy

AT_ONCE = RetryPolicy(attempts=3, first_seconds=0)


def message(offset: int, key: bytes | None = None) -> Message:
    return Message("orders", 0, offset, 0, key, b"%d" % offset)


class World:
    """A run of messages, and where those go that nobody can handle."""

    def __init__(self, count: int, policy: RetryPolicy = AT_ONCE) -> None:
        self.tracker = PartitionTracker("orders", 0, 0)
        fields: list[Fields] = [("orders", 0, offset, 0, None, b"%d" % offset, ()) for offset in range(count)]
        self.run = Run(fields, self.tracker)
        self.tracker.begin_all(range(count))
        self.aside: list[tuple[int, str, int]] = []
        self.handling = Handling(policy, self.set_aside)

    def set_aside(self, message: Message, reason: str, error: BaseException, attempts: int) -> None:
        self.aside.append((message.offset, type(error).__name__, attempts))

    def carry_out(self, handler: Callable[[Any], Any], kind: str) -> None:
        async def awaited(argument: Any) -> Any:
            return handler(argument)

        async def whole(carry_out: Any) -> None:
            await carry_out(self.run)

        if kind == "one":
            self.handling.one_by_one(handler)(self.run)
        elif kind == "batch":
            self.handling.in_batches(handler)(self.run)
        elif kind == "async one":
            asyncio.run(whole(self.handling.awaiting(awaited)))
        else:
            asyncio.run(whole(self.handling.awaiting_batches(awaited)))


@pytest.mark.parametrize("kind", ["one", "async one"])
def test_a_message_that_fails_for_good_is_set_aside_and_the_next_is_handled(kind: str) -> None:
    world = World(3)
    handled: list[int] = []

    def handle(message: Message) -> None:
        if message.offset == 1:
            raise ValueError
        handled.append(message.offset)

    world.carry_out(handle, kind)
    assert (world.run.finished, handled, world.aside) == (3, [0, 2], [(1, "ValueError", 3)])


@pytest.mark.parametrize("kind", ["one", "async one"])
def test_outcomes_count_whether_returned_or_raised(kind: str) -> None:
    world = World(2)
    answers: dict[int, list[Any]] = {0: [Retry("not yet"), None], 1: [DeadLetter("never")]}
    world.carry_out(lambda message: answers[message.offset].pop(0), kind)
    assert (world.run.finished, world.aside, answers) == (2, [(1, "DeadLetter", 1)], {0: [], 1: []})


@pytest.mark.parametrize("kind", ["one", "async one", "batch", "async batch"])
def test_a_message_whose_partition_goes_is_left_undone(kind: str) -> None:
    world = World(4, RetryPolicy(attempts=100, first_seconds=60))

    def handle(argument: Any) -> None:
        world.tracker.is_draining = True
        raise ValueError

    world.carry_out(handle, kind)
    assert (world.run.finished, world.aside) == (0, [])
    world.carry_out(pytest.fail, kind)
    assert world.run.finished == 0


@pytest.mark.parametrize("kind", ["batch", "async batch"])
@given(count=st.integers(1, 20), bad=st.sets(st.integers(0, 19)))
def test_only_those_that_fail_alone_are_set_aside(kind: str, count: int, bad: set[int]) -> None:
    world = World(count)
    handled: list[int] = []

    def handle(batch: list[Message]) -> None:
        if any(message.offset in bad for message in batch):
            raise ValueError
        handled.extend(message.offset for message in batch)

    world.carry_out(handle, kind)
    present = [offset for offset in range(count) if offset in bad]
    assert [offset for offset, _, _ in world.aside] == present
    assert handled == [offset for offset in range(count) if offset not in bad]
    assert world.run.finished == count


@pytest.mark.parametrize("kind", ["batch", "async batch"])
def test_a_batch_that_fails_in_passing_is_handed_over_whole_again(kind: str) -> None:
    world = World(5)
    sizes: list[int] = []

    def handle(batch: list[Message]) -> None:
        sizes.append(len(batch))
        if len(sizes) < 3:
            raise OSError("away")

    world.carry_out(handle, kind)
    assert (sizes, world.run.finished, world.aside) == ([5, 5, 5], 5, [])


@pytest.mark.parametrize("kind", ["one", "async one", "batch", "async batch"])
def test_what_cannot_be_set_aside_finishes_nothing(kind: str) -> None:
    world = World(1)

    def refuse(message: Message, reason: str, error: BaseException, attempts: int) -> None:
        raise ConnectionError("no dead letters today")

    world.handling = Handling(AT_ONCE, refuse)

    def handle(argument: Any) -> None:
        raise ValueError

    with pytest.raises(ConnectionError):
        world.carry_out(handle, kind)
    assert world.run.finished == 0


@given(
    keys=st.lists(st.one_of(st.none(), st.binary(max_size=2)), max_size=60),
    order=st.sampled_from(["partition", "key"]),
    lanes=st.integers(1, 8),
    run_max=st.integers(1, 10),
)
def test_what_belongs_together_stays_in_order_in_one_lane(
    keys: list[bytes | None], order: Any, lanes: int, run_max: int
) -> None:
    messages = [message(offset, key) for offset, key in enumerate(keys)]
    runs = split(messages, order, lanes, run_max)
    assert sorted(OFFSET(each) for _, run in runs for each in run) == list(range(len(keys)))
    assert all(0 < len(run) <= run_max and 0 <= lane < lanes for lane, run in runs)
    places: dict[object, list[tuple[int, int]]] = {}
    for lane, run in runs:
        for each in run:
            places.setdefault(KEY(each) if order == "key" else "all", []).append((lane, OFFSET(each)))
    for found in places.values():
        assert len({lane for lane, _ in found}) == 1
        assert found == sorted(found)
