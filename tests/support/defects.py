"""A broker of which much is due at once, and a defect somewhere in what it does about it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.support.injecting import raising_at

from holdfast.testing.bare_groups import DESCRIBE_GROUPS, BareMember
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.transactional_producer import TransactionalProducer, described
from holdfast.wire.batch import make_batch

SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "log.retention.check.interval.ms": "20000",
    "log.segment.delete.delay.ms": "1000",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
}
GROUPS = ("one", "two")
TRANSACTIONS = ("x", "y")


class Scene:
    """A broker of which much is due at once: two of each, so that the second shows what the first has done to it."""

    def __init__(self) -> None:
        self.node = node = BareNode(SETTINGS)
        self.client = client = node.connect()
        client.create_topic("old", 2, retention_ms="30000", internal_segment_bytes="200")
        client.create_topic("new")
        for _ in range(6):
            self.produce()
        for group in GROUPS:
            BareMember(node, group).settle_alone()
        for transactional_id in TRANSACTIONS:
            producer = TransactionalProducer(node.connect(), transactional_id)
            producer.init(transaction_timeout=20_000)
            producer.produce("new", 0, b"undecided")
        self.parked: list[tuple[BareClient, int]] = []
        for index in range(2):
            reader = node.connect()
            end = node.hosted("old", index).log.end_offset
            self.parked.append((reader, reader.begin_fetch("old", end, index, max_wait_ms=30_000)))
        node.settle()
        writer = node.connect()
        self.parked.append((writer, writer.begin_produce("new", make_batch([b"never flushed"]))))

    def produce(self) -> None:
        self.client.produce("old", make_batch([b"old"], timestamp=self.node.clock.now().wall_ms))

    def run(self, call: int) -> str:
        """Let everything be due, with a defect in it; then let time pass. Where the defect was."""
        now = self.node.clock.advance(61_000)
        with raising_at(call) as injection:
            self.node.node.tick(now)
        self.produce()
        for _ in range(30):
            self.node.node.tick(self.node.clock.advance(31_000))
            self.node.settle()
            self.node.worker.run_all()
        return injection.where

    def wrongs(self) -> Iterator[str]:
        for client, correlation_id in self.parked:
            if correlation_id not in client.correlation_ids and not client.closed:
                yield "a request waits for ever"
        if self.node.hosted("old").log.start_offset < 6:
            yield "retention has ended"
        for group in GROUPS:
            (answer,) = self.client.ask(DESCRIBE_GROUPS, 5, groups=[group]).groups
            if answer.members:
                yield f"the silent member of {group} is still there"
        for transactional_id in TRANSACTIONS:
            state = described(self.client, transactional_id).transaction_state
            if state == "PrepareAbort":
                # Decided, and a defect came before anybody was told: the next start does.
                self.node = self.node.kill()
                self.client = self.node.connect()
                state = described(self.client, transactional_id).transaction_state
            if state != "CompleteAbort":
                yield f"the transaction of {transactional_id} is {state}"


def check_call(call: int) -> str:
    """Let that call of a tick raise, and check what becomes of everything; where it was, empty behind the last."""
    scene = Scene()
    where = scene.run(call)
    wrongs = list(scene.wrongs())
    assert not wrongs, f"a defect in {where} (call {call}): {wrongs}"
    return where
