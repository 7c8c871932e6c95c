"""The checkers of storms over our clients catch clients that break their promise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
from tests.support.client_chaos import (
    Arrived,
    Finished,
    Row,
    check_copied,
    check_never_ahead,
    check_rows,
    check_spooled,
)
from tests.support.history import Violation

SPOOL, OTHER = "00000000000000aa", "00000000000000bb"
Log: TypeAlias = list[Arrived]


def sent(numbers: Iterable[int], *, producer: str = "one", spool: str = SPOOL, first: int = 0) -> Log:
    return [
        Arrived(spool, 0, sequence, f"{producer}:{number}") for sequence, number in enumerate(numbers, first)
    ]


# Spools


def test_messages_that_are_sent_again_by_a_successor_are_no_violation() -> None:
    log = sent(range(6))
    again = [*log[:4], *log[2:], *sent(range(3), producer="two", spool=OTHER)]
    check_spooled({"one": 6, "two": 3}, {0: again}, exactly_once=False)


def test_messages_that_were_never_reported_stored_may_arrive_or_not() -> None:
    check_spooled({"one": 4}, {0: sent(range(6)), 1: []}, exactly_once=True)


def lost(log: Log) -> Log:
    return log[:-1]


def left_out(log: Log) -> Log:
    """The sender gave one up and went on."""
    return log[:2] + log[3:]


def overtaken(log: Log) -> Log:
    return [log[0], log[2], log[1], *log[3:]]


def given_a_new_id_when_sent_again(log: Log) -> Log:
    """What no deduplication by id can find."""
    return [*log, log[-1]._replace(spool=OTHER, sequence=0)]


def in_the_wrong_partition(log: Log) -> Log:
    return [*log[:-1], log[-1]._replace(partition=1)]


@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        (lost, "lost"),
        (left_out, "order"),
        (overtaken, "order"),
        (given_a_new_id_when_sent_again, "order"),
        (in_the_wrong_partition, "partition"),
    ],
)
def test_a_spool_that_breaks_its_promise_is_caught(mutant: Callable[[Log], Log], rule: str) -> None:
    with pytest.raises(Violation) as caught:
        check_spooled({"one": 6}, {0: mutant(sent(range(6)))}, exactly_once=False)
    assert caught.value.rule == rule


def test_the_same_message_in_two_partitions_is_caught() -> None:
    log = sent(range(4))
    moved = [log[-1]._replace(partition=1, sequence=0)]
    with pytest.raises(Violation, match="two partitions"):
        check_spooled({"one": 4}, {0: log, 1: moved}, exactly_once=False)


def test_exactly_once_without_transactions_is_caught() -> None:
    log = sent(range(6))
    with pytest.raises(Violation, match="twice"):
        check_spooled({"one": 6}, {0: [*log, log[-1]]}, exactly_once=True)


# Consumers: a member with workers, as a model, that is killed at some moment


class Worker:
    """Handles messages out of order and commits by a rule of its own; the clock ticks with every step."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.at = 0
        self.finished: list[Finished] = []
        self.seen: list[tuple[int, dict[int, int]]] = []

    def work(self, position_of: Callable[[set[int], list[int]], int]) -> None:
        done: set[int] = set()
        waiting = list(range(20))
        taken: list[int] = []
        while waiting or taken:
            while waiting and len(taken) < 8:
                taken.append(waiting.pop(0))
            self.seen.append((self.at, {0: position_of(done, taken)}))
            self.at += 1
            offset = taken.pop(self._chance.randrange(len(taken)))
            self.finished.append(Finished(self.at, 0, offset))
            done.add(offset)
            self.at += 1
        self.seen.append((self.at, {0: position_of(done, taken)}))


def front(done: set[int], taken: list[int]) -> int:
    return min((offset for offset in range(21) if offset not in done), default=21)


def taken_is_done(done: set[int], taken: list[int]) -> int:
    """Commit before handled: what librdkafka's automatic commit does."""
    return max((*done, *taken), default=-1) + 1


def last_is_front(done: set[int], taken: list[int]) -> int:
    """Commit behind the last that finished, whatever is before it."""
    return max(done, default=-1) + 1


@pytest.mark.parametrize("seed", range(5))
def test_the_front_of_finished_work_is_never_ahead(seed: int) -> None:
    worker = Worker(seed)
    worker.work(front)
    check_never_ahead(worker.finished, worker.seen)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rule", [taken_is_done, last_is_front])
def test_a_committed_offset_ahead_of_finished_work_is_caught(
    rule: Callable[[set[int], list[int]], int], seed: int
) -> None:
    worker = Worker(seed)
    worker.work(rule)
    with pytest.raises(Violation, match="ahead"):
        check_never_ahead(worker.finished, worker.seen)


# Processors


def test_a_copy_is_whole_in_order_and_once() -> None:
    source = {0: ["a", "b", "c"], 1: []}
    check_copied(source, {0: ["a", "b", "c"], 1: []})
    for target, rule in (
        (["a", "b"], "lost"),
        (["a", "b", "b", "c"], "twice"),
        (["a", "c", "b"], "order"),
        (["a", "b", "c", "d"], "invented"),
    ):
        with pytest.raises(Violation) as caught:
            check_copied(source, {0: target, 1: []})
        assert caught.value.rule == rule


# Sinks: two members of which the first does not know that it was replaced


class Table:
    def __init__(self, log: dict[int, str]) -> None:
        self.log = log
        self.rows: list[Row] = []
        self.position = 0

    def store(self, first: int, end: int, *, compares: bool = True) -> None:
        """A transaction with the messages from `first` on; `compares` says whether it looks where the table stands."""
        if compares and self.position != first:
            return
        self.rows += [Row(0, offset, self.log[offset]) for offset in range(first, end)]
        self.position = end


def test_a_sink_with_compare_and_set_stores_once_and_one_without_is_caught() -> None:
    log = {offset: f"message {offset}" for offset in range(6)}
    table = Table(log)
    for first, end in ((0, 2), (2, 4), (2, 3), (4, 6)):
        table.store(first, end)
    check_rows({0: log}, table.rows)
    table = Table(log)
    for first, end in ((0, 2), (2, 4), (2, 3), (4, 6)):
        table.store(first, end, compares=False)
    with pytest.raises(Violation, match="twice"):
        check_rows({0: log}, table.rows)


def test_a_sink_that_moves_its_position_first_is_caught() -> None:
    log = {offset: f"message {offset}" for offset in range(6)}
    table = Table(log)
    table.store(0, 2)
    table.position = 4  # and was killed before the rows were there
    table.store(4, 6)
    with pytest.raises(Violation, match="lost"):
        check_rows({0: log}, table.rows)


def test_a_row_that_differs_from_what_was_written_is_caught() -> None:
    with pytest.raises(Violation, match="invented"):
        check_rows({0: {0: "message"}}, [Row(0, 0, "massage")])
