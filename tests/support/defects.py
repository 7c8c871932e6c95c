"""An exception that nobody expects, out of any function the broker calls while it does something.

A broker of which much is due at once, and a defect somewhere in what it does about it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from holdfast.testing.bare_clients import DESCRIBE_GROUPS, BareMember, TransactionalProducer, described
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.wire.batch import make_batch

BROKER = (
    "/holdfast/broker/node/",
    "/holdfast/broker/groups/",
    "/holdfast/broker/transactions/",
    "/holdfast/broker/partition/",
    "/holdfast/broker/log/",
)
PLUMBING = tuple(
    f"/holdfast/broker/node/{name}.py"
    for name in ("timers", "context", "connection", "troubles", "wall_clock")
)
"""What calls the others and catches what they raise, and what tells the time."""
GUARDS = frozenset(
    {
        "ProvenSchedule.at",
        "Production._resolve",
        "Sessions._look_at",
        "Sessions._watch",
        "TransactionCoordinator._abort_timed_out",
    }
)
"""Functions that set a timer, or catch what is raised below them, and do nothing else that could fail."""
DEPTH_MIN = 3
"""Below what runs timers: a timer, what it does, and what that calls."""


class Injected(RuntimeError):
    """No error that anybody has thought of."""


class Injection:
    def __init__(self, call: int) -> None:
        self.left = call
        self.where = ""
        """The function that raised instead of being called; empty while none has."""

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or path.endswith(PLUMBING) or not any(part in path for part in BROKER):
            return
        if frame.f_code.co_qualname in GUARDS or self._depth(frame) < DEPTH_MIN:
            return
        self.left -= 1
        if self.left < 0:
            self.where = f"{path.rpartition('/holdfast/')[2]}:{frame.f_code.co_qualname}"
            raise Injected(self.where)

    @staticmethod
    def _depth(frame: FrameType | None) -> int:
        """How many calls below `Timers.run_due`; 0 elsewhere, and where a defect is being told."""
        depth = 0
        while frame is not None and frame.f_code.co_name != "_timer_failed":
            if frame.f_code.co_qualname == "Timers.run_due":
                return depth
            depth += 1
            frame = frame.f_back
        return 0


@contextmanager
def raising_at(call: int) -> Iterator[Injection]:
    """The `call`th function of the broker that is called within raises `Injected` instead."""
    injection = Injection(call)
    before = sys.gettrace()
    sys.settrace(injection.trace)
    try:
        yield injection
    finally:
        sys.settrace(before)


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
