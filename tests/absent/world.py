"""A small broker with everything docs/FORMAT.md knows on its disk, and what a client can see of it.

`world()` builds it once: two log directories, a topic with transactions, a compacted one, committed offsets, a metadata
log that goes on from a snapshot, and a clean stop. Trials work on copies of its disk.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node import metadata_log
from holdfast.testing.bare_clients import BareMember, TransactionalProducer
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.committed_reader import read_answer
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import ManualClock
from holdfast.wire.batch import Record, build_batch

SETTINGS: Final = {
    "log.dirs": "/a,/b",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "log.cleaner.min.cleanable.ratio": "0",
    "log.cleaner.backoff.ms": "1000",
}
PARTITIONS: Final = (("orders", 0), ("orders", 1), ("totals", 0))
GROUP, TRANSACTIONAL_ID = "billing", "copy"
ALLOWED: Final = frozenset(
    {
        "kafka_storage_error",
        "coordinator_not_available",
        "not_coordinator",
        "coordinator_load_in_progress",
    }
)
"""What a client may be told of something that cannot be served. Any other difference is a wrong answer."""


class Seen(NamedTuple):
    """What clients see: values, or the name of the error they are told."""

    cluster_id: str
    records: dict[tuple[str, int], Any]
    """By partition: the log start, and every record with its offset."""
    committed: Any
    transaction: Any
    """Producer id and epoch of the transactional id."""


class World(NamedTuple):
    disk: SimulatedDisk
    earlier: SimulatedDisk
    """The same broker after an earlier clean stop."""
    seen: Seen
    clock: ManualClock


@cache
def world(cluster: int = 0) -> World:
    """Another number is another cluster with topics of the same names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata_log, "HISTORY_RECORDS_MIN", 0)
        patch.setattr(metadata_log, "HISTORY_FACTOR", 0)
        return _built(cluster)


def _built(cluster: int) -> World:
    clock = ManualClock()
    disk = SimulatedDisk(clock=clock)
    disk.generation = 100 * cluster  # seeds the ids
    disk.prepare("/a")
    disk.prepare("/b")
    node = BareNode(SETTINGS, disk=disk, clock=clock)
    client = node.connect()
    client.create_topic("orders", 2, internal_segment_bytes="500")
    client.create_topic("totals", cleanup_policy="compact", internal_segment_bytes="500")
    _write(node, cluster, first_offset=0)
    node.node.stop(clock.now())
    earlier = disk.copy()
    node = BareNode(SETTINGS, disk=disk, clock=clock)
    _write(node, cluster, first_offset=10)
    _compact(node)
    seen = look(node)
    node.node.stop(clock.now())
    disk.flush_all("/")
    return World(disk, earlier, seen, clock)


def _write(node: BareNode, cluster: int, *, first_offset: int) -> None:
    client = node.connect()
    for number in range(8):
        for topic, index in PARTITIONS:
            key = b"key %d" % (number % 3)
            record = Record(0, 0, key, b"%s of cluster %d: %d" % (topic.encode(), cluster, number))
            time_ms = node.clock.now().wall_ms
            assert not client.produce(topic, build_batch([record], base_timestamp=time_ms), index).error_code
    for is_commit in (False, True):
        producer = TransactionalProducer(node.connect(), TRANSACTIONAL_ID)
        assert producer.init() is ErrorCode.none
        for index in (0, 1):
            value = b"committed" if is_commit else b"aborted"
            assert producer.produce("orders", index, value, value) is ErrorCode.none
        assert producer.end(is_commit=is_commit) is ErrorCode.none
    for offset in range(first_offset, first_offset + 4):
        member = BareMember(node, GROUP)
        assert not any(member.commit({("orders", 0): offset, ("orders", 1): offset}))


def _compact(node: BareNode) -> None:
    """Let the cleaner pass over everything that is due."""
    for _ in range(30):
        node.advance(1000)
        node.settle()
        node.worker.run_all()
        node.settle()
    held = node.hosted("totals").log
    assert len(list(held.batches_from(0))) < held.end_offset, "nothing was compacted"


# What a client sees


def look(node: BareNode) -> Seen:
    client = node.connect()
    return Seen(
        node.node.identity.cluster_id,
        {partition: _records(client, *partition) for partition in PARTITIONS},
        _committed(client),
        _transaction(client),
    )


def _records(client: BareClient, topic: str, index: int) -> Any:
    wanted = {"partition_index": index, "timestamp": -2, "current_leader_epoch": -1}
    asked = [{"name": topic, "partitions": [wanted]}]
    (found,) = client.ask(2, 7, isolation_level=0, topics=asked).topics[0].partitions
    if found.error_code:
        return ErrorCode(found.error_code).name
    shown = []
    offset = found.offset
    while True:
        part = {"partition": index, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        answer = client.ask(
            1,
            12,
            isolation_level=1,
            max_wait=0,
            min_bytes=0,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[{"topic": topic, "partitions": [part]}],
        )
        (fetched,) = answer.responses[0].partitions
        if fetched.error_code:
            return ErrorCode(fetched.error_code).name
        aborted = [(entry.producer_id, entry.first_offset) for entry in fetched.aborted_transactions or ()]
        result = read_answer(bytes(fetched.records or b""), offset, aborted)
        shown += result.records
        if result.next_offset == offset:
            return found.offset, offset, tuple(shown)
        offset = result.next_offset


def _committed(client: BareClient) -> Any:
    asked = {"group_id": GROUP, "topics": None}
    (group,) = client.ask(9, 9, groups=[asked], require_stable=False).groups
    if group.error_code:
        return ErrorCode(group.error_code).name
    return {
        (topic.name, partition.partition_index): partition.committed_offset
        for topic in group.topics
        for partition in topic.partitions
    }


def _transaction(client: BareClient) -> Any:
    (state,) = client.ask(65, 0, transactional_ids=[TRANSACTIONAL_ID]).transaction_states
    if state.error_code:
        return ErrorCode(state.error_code).name
    return state.producer_id, state.producer_epoch, state.transaction_state
