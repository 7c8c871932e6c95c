"""Exceptions that nobody expects, wherever one event serves many: whatever raises, everybody else is served.

A script has a dozen clients wait for the same flushes and timers. It is run once for each place and each of its first
calls, which then raises. Afterwards every request has an answer or its connection is closed, whatever was
acknowledged survives a power failure, and the broker serves on, or has said that a log directory is offline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.log import Log
from holdfast.broker.node import connection, production, usual_produce
from holdfast.broker.node.checkpoints import Checkpoints
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.connection import Exchange
from holdfast.broker.node.coordination import CoordinatorPartition
from holdfast.broker.node.handlers import fetch, group_members, produce, transactions
from holdfast.broker.node.handlers.fetch import Reading
from holdfast.broker.node.handlers.transactions import Describing
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.intake import Intake
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.node import Node
from holdfast.broker.node.production import Production, TransactionalBatches
from holdfast.broker.node.usual_produce import ParkedProduce
from holdfast.broker.partition.offsets import PartitionOffsets
from holdfast.testing.bare_clients import BareMember, TransactionalProducer
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.testing.disk_files import SimulatedFile
from holdfast.wire.batch import make_batch

PLACES: list[tuple[Any, str]] = [
    (BareClient, "_transmit"),
    (Describing, "add"),
    (TransactionalBatches, "check"),
    (Exchange, "_encode"),
    (GroupCommit, "_flush"),
    (GroupCommit, "_settle"),
    (GroupCommit, "appended"),
    (GroupCommit, "go_on"),
    (HostedPartition, "became_durable"),
    (Log, "append"),
    (Log, "begin_flush"),
    (Log, "advance_recovery_point"),
    (Log, "read"),
    (Node, "_note_flush"),
    (MetadataLog, "_committed"),
    (Intake, "accept_batch"),
    (Checkpoints, "write_due"),
    (Checkpoints, "write_recovery_points"),
    (ParkedProduce, "_tell"),
    (PartitionOffsets, "advance_durable_end"),
    (Production, "response"),
    (Production, "time_out"),
    (Reading, "_answer"),
    (Reading, "read"),
    (Reading, "response"),
    (CoordinatorPartition, "release"),
    (CoordinatorPartition, "when_durable"),
    (connection, "encode_response"),
    (produce.Producing, "produce_one"),
    (production, "failure"),
    (fetch, "pack_fetch_response"),
    (group_members, "_join_fields"),
    (group_members, "_sync_fields"),
    (transactions, "_initialised"),
    (usual_produce, "pack_answer"),
    (SimulatedDisk, "flush_directory"),
    (SimulatedDisk, "open"),
    (SimulatedDisk, "rename"),
    (SimulatedFile, "flush"),
    (SimulatedFile, "pread"),
    (SimulatedFile, "pwritev"),
    (SimulatedFile, "truncate"),
]
CALLS = (0, 2)
"""The calls of a place that raise, each in a run of its own: the first ones are made by different requests."""
DEFECTS = (KeyError, MemoryError, RecursionError)


@dataclass
class Trap:
    """Raises at one call of a function, and leaves the others as they are."""

    skip: int
    defect: Exception
    is_armed: bool = False
    has_sprung: bool = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*arguments: Any, **named: Any) -> Any:
            if self.is_armed:
                self.skip -= 1
                if self.skip < 0:
                    self.is_armed = False
                    self.has_sprung = True
                    raise self.defect
            return function(*arguments, **named)

        return trapped


class World:
    def __init__(self, trap: Trap) -> None:
        self.trap = trap
        self.node = BareNode({"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "1"})
        first = self.node.connect()
        first.create_topic("t", partitions=2)
        self.producer = TransactionalProducer(self.node.connect())
        self.producer.init()
        self.member = BareMember(self.node, "group")
        self.member.join()
        self.told: list[str] = []
        """What the shell would tell of."""
        self.sent: list[tuple[BareClient, int, bytes]] = []
        self.clients = [first, self.producer.client, self.member.client]

    def connect(self) -> BareClient:
        client = self.node.connect()
        self.clients.append(client)
        return client

    def produce(self, *partitions: int, version: int = 9) -> None:
        client = self.connect()
        value = b"%d to %r" % (len(self.sent), partitions)
        batches = dict.fromkeys(partitions, make_batch([value], timestamp=self.node.clock.now().wall_ms))
        self.sent.append((client, client.begin(0, version, **client.produce_fields("t", batches)), value))

    def begin(self) -> None:
        """Requests of all kinds, none of which can be answered yet."""
        node = self.node
        for _ in range(2):
            self.connect().begin_fetch("t", 0, max_wait_ms=500)
            self.connect().begin_fetch("t", 0, index=1, max_wait_ms=40_000)
            self.produce(0)
            self.produce(0, 1, version=8)
        self.producer.begin_produce({("t", 0): self.producer.batch("t", 0, b"one")})
        self.member.client.begin(14, 5, **self.member.sync_fields({self.member.member_id: b"work"}))
        TransactionalProducer(self.connect(), "other").begin_init()
        BareMember(node, "group")  # a connection that asks nothing
        self.connect().begin(11, 9, **BareMember(node, "second").join_fields())
        topic = {
            "name": "new",
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": [],
        }
        self.connect().begin(19, 5, topics=[topic], timeout=5000)
        self.connect().begin(3, 9, topics=None)
        self.connect().begin(61, 0, topics=[{"name": "t", "partition_indexes": [0, 1]}])
        self.produce(1)

    def pass_time(self) -> None:
        """Everything comes to pass. The shell tells of what its callbacks raise, and goes on."""
        for ms in (600, 60_000):
            self.settle()
            self.node.node.tick(self.node.clock.advance(ms))
        self.settle()

    def be_slow(self) -> None:
        """Time is over before anything is flushed."""
        for version in (9, 8, 9):
            self.produce(0, version=version)
        self.node.node.tick(self.node.clock.advance(60_000))
        self.settle()
        self.produce(1)
        self.settle()

    def fail(self) -> None:
        """The disk breaks, and whoever waits is told."""
        for version in (9, 8, 9):
            self.produce(0, version=version)
        self.connect().begin_fetch("t", self.node.hosted("t", 1).log.end_offset, index=1, max_wait_ms=500)
        self.node.disk.plan(Fault("flush", path_contains="/t-0"))
        self.settle()
        self.node.disk.clear_faults()

    def settle(self) -> None:
        node = self.node
        while node.has_turn or node.flusher.jobs:
            for happen in (node.turn, node.flusher.run_one):
                try:
                    happen()
                except DEFECTS as error:
                    self.told.append(repr(error))

    # What must hold

    def check_answered(self) -> None:
        waiting = [client for client in self.clients if client.connection.requests_under_way]
        assert not waiting, self.node.said

    def check_served(self) -> None:
        """One connection has ended at most, and the broker is in order; or it has said that it cannot go on."""
        node = self.node
        if node.node.directories[0].offline:
            return
        closed = [client.closed[0] for client in self.clients if client.closed]
        assert len(closed) <= 1, closed
        if self.trap.has_sprung:
            self.produce(0)
            for _ in range(3):
                self.settle()
                node.node.tick(node.clock.advance(1_000))
            hosted = node.hosted("t")
            assert hosted.offsets.durable_end.offset == hosted.log.end_offset
            assert node.node.checkpoints.persisted_recovery_point(hosted) == hosted.log.end_offset

    def check_kept(self) -> None:
        """What was acknowledged survives a power failure, and the next start serves."""
        node = self.node.lose_power()
        client = node.connect()
        survived = [client.fetch("t", 0, index).records or b"" for index in (0, 1)]
        for asking, asked, value in self.sent:
            if asked in asking.correlation_ids:
                (topic,) = asking.answer(asked).responses
                for outcome in topic.partition_responses:
                    assert outcome.error_code is not ErrorCode.none or value in survived[outcome.index]
        after = make_batch([b"after"], timestamp=1)
        assert client.produce("t", after).error_code is ErrorCode.none


@pytest.mark.parametrize(
    "at", range(len(PLACES)), ids=[f"{owner.__name__.rpartition('.')[2]}.{name}" for owner, name in PLACES]
)
def test_a_defect_anywhere_costs_one_connection_at_most_and_nobody_waits_for_ever(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = PLACES[at]
    for skip in CALLS:
        trap = Trap(skip, DEFECTS[(at + skip) % len(DEFECTS)]("injected"))
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, trap.around(getattr(owner, name)))
            world = World(trap)
            trap.is_armed = True
            world.begin()
            world.pass_time()
            world.be_slow()
            world.check_served()
            world.fail()
        assert skip or trap.has_sprung, "the script never comes there"
        if not trap.has_sprung:
            break
        world.check_answered()
        assert any("injected" in line for line in (*world.node.said, *world.told)), "nobody was told"
        world.check_kept()
