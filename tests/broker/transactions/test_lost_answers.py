"""The answer to EndTxn is lost, at every step on its way, with and without the broker: its producer is not fenced.

Under the newer protocol the epoch rises with the end of a transaction, so that a producer that did not hear of it
speaks with an epoch that has passed. It may repeat the request, any number of times, or say who it was and begin anew.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.transactions.model import EPOCH_USABLE_MAX
from holdfast.testing.bare_clients import (
    TransactionalProducer,
    committed_offset_of,
    committed_values,
)
from holdfast.testing.bare_node import BareNode

SETTINGS = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
STEPS_MAX = 12
"""Flushes and turns until nothing is under way; more than there are."""
ENDINGS: dict[str, Callable[[BareNode], BareNode]] = {
    "nothing": lambda node: node,
    "kill": lambda node: node.kill(),
    "lose power": lambda node: node.lose_power(),
}
Continue = Callable[[TransactionalProducer, bool], ErrorCode]


def again(producer: TransactionalProducer, is_commit: bool) -> ErrorCode:
    """As clients do: as long as they are told to come again."""
    for _ in range(3):
        code = producer.end(is_commit=is_commit)
        if code is not ErrorCode.concurrent_transactions:
            break
    return code


def anew(producer: TransactionalProducer, is_commit: bool) -> ErrorCode:
    """A client that has given up on the answer says who it was, and goes on with the next epoch (KIP-360)."""
    return producer.init(producer_id=producer.producer_id, producer_epoch=producer.epoch)


def use_up_epochs(node: BareNode, producer: TransactionalProducer, epoch: int) -> None:
    (coordinator,) = node.node.transactions
    used = coordinator.machine.transactions["copy"].metadata._replace(producer_epoch=epoch)
    coordinator.machine.transactions["copy"].metadata = used
    producer.epoch = epoch


def step(node: BareNode) -> bool:
    """One turn or one flush; false when nothing is left to do."""
    if node.has_turn:
        node.turn()
    elif node.flusher.jobs:
        node.flusher.run_one()
    else:
        return False
    return True


def lose_answer(
    producer: TransactionalProducer, node: BareNode, *, is_commit: bool, steps: int, ending: str
) -> BareNode | None:
    """Ask for the end, let it come so far, and never hear of it; None when it does not take so many steps."""
    producer.begin_end(is_commit=is_commit)
    for _ in range(steps):
        if not step(node):
            return None
    node = ENDINGS[ending](node)
    producer.client = node.connect()
    return node


@pytest.mark.parametrize("go_on", [again, anew])
@pytest.mark.parametrize(
    ("is_newer", "epoch", "is_commit"),
    [(True, 0, True), (True, 0, False), (True, EPOCH_USABLE_MAX, True), (False, 0, True)],
)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_producer_that_did_not_hear_of_the_end_goes_on(
    ending: str, is_newer: bool, epoch: int, is_commit: bool, go_on: Continue
) -> None:
    tried = 0
    for steps in range(STEPS_MAX):
        node: BareNode | None = BareNode(SETTINGS)
        assert node is not None
        node.connect().create_topic("t")
        producer = TransactionalProducer(node.connect(), is_newer=is_newer)
        assert producer.init() is ErrorCode.none
        use_up_epochs(node, producer, epoch)
        assert producer.produce("t", 0, b"first") is ErrorCode.none
        assert producer.commit_offset("group", "t", 0, 1) is ErrorCode.none
        node = lose_answer(producer, node, is_commit=is_commit, steps=steps, ending=ending)
        if node is None:
            break
        tried += 1
        assert go_on(producer, is_commit) is ErrorCode.none, steps
        client = node.connect()
        first = committed_values(client, "t")
        assert producer.produce("t", 0, b"second") is ErrorCode.none
        assert producer.commit_offset("group", "t", 0, 2) is ErrorCode.none
        assert producer.end(is_commit=True) is ErrorCode.none
        assert committed_values(client, "t") == [*first, b"second"]
        assert committed_offset_of(client, "group", "t") == 2
        if go_on is again:
            assert first == ([b"first"] if is_commit else [])
    assert tried > 3
