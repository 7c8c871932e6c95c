"""A node that dies between any two steps of a transaction: killed, or with the power.

One transaction writes to two partitions and moves a group's position, and is ended. The node dies after each flush,
and after each turn between two flushes. Whatever the next start finds:

- the transaction shows everywhere or nowhere, and what its producer was told about it is so;
- before the decision was durable it goes on: its producer can still end it;
- after, it is carried out without anybody asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kio.schema.errors import ErrorCode
from tests.support.tiers import by_tier

from holdfast.testing.bare_clients import (
    TransactionalProducer,
    committed_offset_of,
    committed_values,
    described,
)
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import ManualClock

SETTINGS = {"transaction.state.log.num.partitions": "1", "offsets.topic.num.partitions": "1"}
SEEDS = range(by_tier(quick=1, check=1, long=3))
"""What survives a power failure differs between them."""


class Died(Exception):
    """The node has taken as many steps as it was given."""


class Script:
    """The transaction, one step of the node at a time."""

    def __init__(self, node: BareNode, *, is_newer: bool, is_commit: bool, is_reversed: bool = False) -> None:
        self.node = node
        self.is_reversed = is_reversed
        """Whether of several flushes under way the last returns first."""
        self.is_newer = is_newer
        self.is_commit = is_commit
        self.producer = TransactionalProducer(node.connect(), is_newer=is_newer)
        self.acknowledged: set[str] = set()
        """What the producer was told has been done."""
        self.steps = 0

    def run(self, steps: int | None = None) -> None:
        """Raises `Died` after so many steps."""
        producer = self.producer
        for name, begin in self._requests():
            correlation_id = begin()
            self._until_answered(correlation_id, steps)
            if name == "end":
                assert producer.ended(correlation_id) is ErrorCode.none
            else:
                producer.client.answer(correlation_id)
            self.acknowledged.add(name)

    def _requests(self) -> Iterator[tuple[str, Callable[[], int]]]:
        producer = self.producer
        if not self.is_newer:
            yield "add", lambda: producer.begin_add_partitions(("a", 0), ("b", 0))
        batches = {("a", 0): producer.batch("a", 0, b"1", b"2"), ("b", 0): producer.batch("b", 0, b"3")}
        yield "data", lambda: producer.begin_produce(batches)
        if not self.is_newer:
            yield (
                "add positions",
                lambda: producer.client.begin(
                    25,
                    4,
                    transactional_id=producer.transactional_id,
                    producer_id=producer.producer_id,
                    producer_epoch=producer.epoch,
                    group_id="readers",
                ),
            )
        yield "position", lambda: producer.begin_commit_offset("readers", "input", 0, 7)
        for topic in ("a", "b"):
            # As the system does with a topic that is not flushed, when it pleases.
            self.node.node.commit.request(self.node.hosted(topic))
        yield "end", lambda: producer.begin_end(is_commit=self.is_commit)

    def _until_answered(self, correlation_id: int, steps: int | None) -> None:
        while correlation_id not in self.producer.client.correlation_ids:
            if steps is not None and self.steps >= steps:
                raise Died
            self.steps += 1
            if self.node.has_turn:
                self.node.turn()
            else:
                assert self.flush_one(), "nothing leads to an answer any more"

    def flush_one(self) -> bool:
        flusher = self.node.flusher
        return flusher.run_one(max(len(flusher.jobs) - 1, 0) if self.is_reversed else 0)


def prepared_node(seed: int, broker: str = "group", topics: tuple[str, str] = ("group", "group")) -> BareNode:
    """A node on which one transaction was committed; how the broker and the topics a and b are flushed."""
    clock = ManualClock()
    settings = {**SETTINGS, "holdfast.flush": broker}
    node = BareNode(settings, disk=SimulatedDisk(seed, clock=clock), clock=clock)
    client = node.connect()
    for topic, flush in zip(("a", "b", "input"), (*topics, broker), strict=True):
        client.create_topic(topic, holdfast_flush=flush)
    producer = TransactionalProducer(client)
    assert producer.init() is ErrorCode.none
    for topic in ("a", "b"):
        assert producer.produce(topic, 0, b"before") is ErrorCode.none
    assert producer.commit_offset("readers", "input", 0, 1) is ErrorCode.none
    assert producer.end(is_commit=True) is ErrorCode.none
    return node


def script_on(node: BareNode, *, is_newer: bool, is_commit: bool, is_reversed: bool = False) -> Script:
    script = Script(node, is_newer=is_newer, is_commit=is_commit, is_reversed=is_reversed)
    assert script.producer.init() is ErrorCode.none
    return script


def steps_of(*, is_newer: bool, is_commit: bool) -> int:
    script = script_on(prepared_node(0), is_newer=is_newer, is_commit=is_commit)
    script.run()
    return script.steps


def shown(node: BareNode) -> tuple[list[bytes | None], list[bytes | None], int]:
    client = node.connect()
    return (
        committed_values(client, "a"),
        committed_values(client, "b"),
        committed_offset_of(client, "readers", "input"),
    )


NOTHING = ([b"before"], [b"before"], 1)
EVERYTHING = ([b"before", b"1", b"2"], [b"before", b"3"], 7)


def check_after(script: Script, node: BareNode) -> None:
    node.settle()
    outcome = EVERYTHING if script.is_commit else NOTHING
    state = described(node.connect(), "copy").transaction_state
    if "end" in script.acknowledged:
        assert shown(node) == outcome
        assert state in ("CompleteCommit", "CompleteAbort")
    elif state == "Ongoing":
        assert shown(node) == NOTHING
        assert "data" not in script.acknowledged or retried_end(script, node) is ErrorCode.none
        if "position" in script.acknowledged:
            assert shown(node) == outcome
    elif state == "Empty":
        assert "data" not in script.acknowledged
        assert shown(node) == NOTHING
    else:
        assert state == ("CompleteCommit" if script.is_commit else "CompleteAbort")
        assert shown(node) == outcome
        assert retried_end(script, node) is ErrorCode.none, "the retry of a client that got no answer"
    if described(node.connect(), "copy").transaction_state != "Ongoing":
        check_nothing_open(node)
    check_nothing_hangs(node)


def retried_end(script: Script, node: BareNode) -> ErrorCode:
    again = TransactionalProducer(node.connect(), is_newer=script.is_newer)
    again.producer_id, again.epoch = script.producer.producer_id, script.producer.epoch
    return again.end(is_commit=script.is_commit)


def check_nothing_open(node: BareNode) -> None:
    for hosted in node.node.partitions:
        assert not hosted.log.producers.ongoing_transactions, hosted.name


def check_nothing_hangs(node: BareNode) -> None:
    """A producer that comes now can write, and readers get to the end of the log."""
    fresh = TransactionalProducer(node.connect())
    assert fresh.init() is ErrorCode.none
    for topic in ("a", "b"):
        assert fresh.produce(topic, 0, b"after") is ErrorCode.none
    assert fresh.commit_offset("readers", "input", 0, 9) is ErrorCode.none
    assert fresh.end(is_commit=True) is ErrorCode.none
    a, b, position = shown(node)
    assert a[-1] == b[-1] == b"after"
    assert position == 9
    for topic in ("a", "b"):
        hosted = node.hosted(topic)
        assert hosted.offsets.last_stable_offset == hosted.log.end_offset


REVERSED = pytest.param(True, id="flushes reversed", marks=pytest.mark.check)


@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize(
    "is_newer", [True, pytest.param(False, marks=pytest.mark.check)], ids=["newer", "older"]
)
@pytest.mark.parametrize("is_reversed", [False, REVERSED])
@pytest.mark.parametrize("death", ["kill", "lose_power", pytest.param("stop", marks=pytest.mark.check)])
def test_a_transaction_is_whole_after_a_death_at_any_step(
    is_newer: bool, is_commit: bool, death: str, is_reversed: bool
) -> None:
    total = steps_of(is_newer=is_newer, is_commit=is_commit)
    assert total > 5
    for steps in range(total + 2):
        for seed in SEEDS if death == "lose_power" else (0,):
            node = prepared_node(seed)
            script = script_on(node, is_newer=is_newer, is_commit=is_commit, is_reversed=is_reversed)
            try:
                script.run(steps)
            except Died:
                assert "end" not in script.acknowledged
            else:
                # The answer has left, and what it led to is under way.
                for _ in range(2):
                    node.turn()
                    script.flush_one()
            check_after(script, getattr(node, death)())


@pytest.mark.check
@pytest.mark.parametrize(
    ("broker", "topics"),
    [("group", ("group", "os")), ("os", ("group", "group")), ("os", ("os", "group"))],
    ids=["one topic unflushed", "coordinator unflushed", "coordinator and one topic unflushed"],
)
@pytest.mark.parametrize("is_reversed", [False, REVERSED])
def test_where_not_everything_is_flushed_no_transaction_hangs_and_none_is_torn(
    broker: str, topics: tuple[str, str], is_reversed: bool
) -> None:
    """A record that is flushed never outlives the one it was written because of."""
    total = 40
    for steps in range(total):
        for seed in range(len(SEEDS)):
            node = prepared_node(seed, broker, topics)
            script = script_on(node, is_newer=True, is_commit=True, is_reversed=is_reversed)
            try:
                script.run(steps)
            except Died:
                pass
            else:
                # Somebody else's record takes the completion to the disk with it.
                TransactionalProducer(node.connect(), "other").begin_init()
                for _ in range(steps - script.steps):
                    node.turn()
                    script.flush_one()
            again = node.lose_power()
            again.settle()
            for _ in range(8):
                again.advance(10_000)
                again.settle()
            seen = [shown(again)[at] == EVERYTHING[at] for at in (0, 1) if topics[at] == "group"]
            assert len({*seen}) == 1, "the topics that are flushed agree"
            if "end" in script.acknowledged and broker == "group":
                assert seen[0]
            check_nothing_open(again)
            check_nothing_hangs(again)
        if script.steps < steps - 6:
            return
    raise AssertionError(f"not done after {total} steps")


def test_a_topic_whose_deletion_is_undone_by_a_crash_has_no_transaction_open() -> None:
    for flushes in range(10):
        for is_reversed in (False, True):
            node = prepared_node(1)
            producer = TransactionalProducer(node.connect())
            producer.init()
            producer.produce("a", 0, b"1")
            producer.produce("b", 0, b"2")
            node.connect().begin(20, 4, topic_names=["b"], timeout=1000)
            asked = producer.begin_end(is_commit=True)
            script = Script(node, is_newer=True, is_commit=True, is_reversed=is_reversed)
            for flushed in range(flushes):
                if flushed == flushes // 2:
                    TransactionalProducer(node.connect(), "other").begin_init()
                node.turn()
                script.flush_one()
            is_told = asked in producer.client.correlation_ids
            again = node.lose_power()
            again.settle()
            is_back = again.node.metadata.image.topic("b") is not None
            for _ in range(8):
                again.advance(10_000)
                again.settle()
            if is_told:
                assert b"1" in committed_values(again.connect(), "a")
            if is_back:
                hosted = again.hosted("b")
                assert not hosted.log.producers.ongoing_transactions
                assert hosted.offsets.last_stable_offset == hosted.log.end_offset


def test_two_deaths_in_a_row_change_nothing_of_a_decision() -> None:
    """The start that carries a decision out dies itself, after each of its flushes."""
    total = steps_of(is_newer=True, is_commit=True)
    for steps in range(total - 5, total):
        node = prepared_node(0)
        script = script_on(node, is_newer=True, is_commit=True)
        with pytest.raises(Died):
            script.run(steps)
        for flushes in range(5):
            disk = node.disk.copy(flushes)
            disk.crash()
            first = BareNode(SETTINGS, disk=disk, clock=node.clock, boot_id="second", settles=False)
            for _ in range(flushes):
                first.turn()
                first.flusher.run_one()
            check_after(script, first.lose_power())
