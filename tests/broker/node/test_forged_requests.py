"""What brokers and coordinators say to each other, said by somebody else: honest transactions commit and are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_clients import (
    TransactionalProducer,
    committed_offset_of,
    committed_values,
)
from holdfast.testing.bare_node import BareNode

FETCH, LIST_OFFSETS, OFFSET_FOR_LEADER_EPOCH, INIT_PRODUCER_ID = 1, 2, 23, 22
ADD_PARTITIONS_TO_TXN, END_TXN, WRITE_TXN_MARKERS, TXN_OFFSET_COMMIT = 24, 26, 27, 28
SETTINGS = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
OURS, NEXT, UNKNOWN, NOBODY = "ours", "next", "unknown", "nobody"
LARGEST_EPOCH, LARGEST_COORDINATOR_EPOCH = 2**15 - 1, 2**31 - 1

Forgery = Callable[["Scene"], None]


class Scene:
    """One honest producer, and somebody who knows its ids."""

    def __init__(self, *, is_newer: bool, **settings: str) -> None:
        self.node = BareNode({**SETTINGS, **settings})
        client = self.node.connect()
        client.create_topic("t", 2)
        self.stranger = self.node.connect()
        self.honest = TransactionalProducer(self.node.connect(), "copy", is_newer=is_newer)
        assert self.honest.init() is ErrorCode.none
        self.written: list[list[bytes | None]] = [[], []]
        self.position = -1

    def write(self, index: int) -> None:
        value = b"%d" % sum(map(len, self.written))
        assert self.honest.produce("t", index, value) is ErrorCode.none
        self.written[index].append(value)

    def commit_offset(self) -> None:
        self.position += 1
        assert self.honest.commit_offset("group", "t", 0, self.position) is ErrorCode.none

    def commit(self) -> None:
        assert self.honest.end(is_commit=True) is ErrorCode.none

    def restart(self) -> None:
        self.node = self.node.kill()
        self.stranger = self.node.connect()
        self.honest.client = self.node.connect()

    def check(self) -> None:
        client = self.node.connect()
        assert [committed_values(client, "t", index) for index in range(2)] == self.written
        assert committed_offset_of(client, "group", "t") == self.position

    def producer_id(self, which: str) -> int:
        ours = self.honest.producer_id
        return {OURS: ours, NEXT: ours + 1, UNKNOWN: 1 << 62, NOBODY: -1}[which]

    def epoch(self, above: int) -> int:
        return min(self.honest.epoch + above, LARGEST_EPOCH)


producers = st.sampled_from((OURS, OURS, NEXT, UNKNOWN, NOBODY))
epochs_above = st.sampled_from((0, 1, -1, 3, LARGEST_EPOCH))
"""The honest producer's."""
places = st.sampled_from(
    [("t", 0), ("t", 1), ("__consumer_offsets", 0), ("__transaction_state", 0), ("nowhere", 0), ("t", -1)]
)


@st.composite
def markers(draw: st.DrawFn) -> Forgery:
    which, above, (topic, index) = draw(producers), draw(epochs_above), draw(places)
    fields = {
        "transaction_result": draw(st.booleans()),
        "topics": [{"name": topic, "partition_indexes": [index]}],
        "coordinator_epoch": draw(st.sampled_from((0, 1, -1, 100, LARGEST_COORDINATOR_EPOCH))),
        "transaction_version": draw(st.integers(0, 3)),
    }
    version = draw(st.integers(1, 2))

    def forge(scene: Scene) -> None:
        marker = {
            "producer_id": scene.producer_id(which),
            "producer_epoch": scene.epoch(above),
            **fields,
        }
        scene.stranger.ask(WRITE_TXN_MARKERS, version, markers=[marker])

    return forge


@st.composite
def others(draw: st.DrawFn) -> Forgery:
    """The rest, under another identity than the honest producer's: who has that, is the honest producer."""
    which, above, (topic, index) = (
        draw(producers.filter(lambda which: which != OURS)),
        draw(epochs_above),
        draw(places),
    )
    name = draw(st.sampled_from(("copy", "other", "")))
    is_odd = draw(st.booleans())
    kind = draw(st.sampled_from((ADD_PARTITIONS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT, INIT_PRODUCER_ID)))

    def forge(scene: Scene) -> None:
        whose = {
            "transactional_id": name,
            "producer_id": scene.producer_id(which),
            "producer_epoch": scene.epoch(above),
        }
        topics = [{"name": topic, "partitions": [index]}]
        asked: dict[int, dict[str, Any]] = {
            ADD_PARTITIONS_TO_TXN: {"transactions": [{**whose, "verify_only": is_odd, "topics": topics}]},
            END_TXN: {**whose, "committed": is_odd},
            INIT_PRODUCER_ID: {**whose, "transaction_timeout": 1000},
            TXN_OFFSET_COMMIT: {
                **whose,
                "group_id": "group",
                "topics": [
                    {
                        "name": "t",
                        "partitions": [
                            {"partition_index": 0, "committed_offset": 77, "committed_metadata": ""}
                        ],
                    }
                ],
            },
        }
        if kind == INIT_PRODUCER_ID and which == NOBODY:
            return  # a successor, and an honest one for all that anybody can tell
        scene.stranger.ask(kind, {INIT_PRODUCER_ID: 5}.get(kind), **asked[kind])

    return forge


def replicas(scene: Scene) -> None:
    """Reads as a follower makes them, which tell a leader how far others are."""
    client, topics = scene.stranger, [{"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}]
    client.ask(LIST_OFFSETS, 7, replica_id=1, isolation_level=0, topics=topics)
    wanted = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    client.ask(FETCH, 12, replica_id=1, max_wait=0, topics=[{"topic": "t", "partitions": [wanted]}])
    asked = [{"topic": "t", "partitions": [{"partition": 0, "leader_epoch": 0, "current_leader_epoch": -1}]}]
    client.ask(OFFSET_FOR_LEADER_EPOCH, 4, replica_id=1, topics=asked)


HONEST: dict[str, Forgery] = {
    "write": lambda scene: scene.write(0),
    "write elsewhere": lambda scene: scene.write(1),
    "position": Scene.commit_offset,
}


@settings(max_examples=20)
@given(
    is_newer=st.booleans(),
    steps=st.lists(
        st.one_of(st.sampled_from(list(HONEST.values())), markers(), markers(), others(), st.just(replicas)),
        max_size=12,
    ),
)
def test_forged_requests_cost_no_honest_transaction(is_newer: bool, steps: list[Forgery]) -> None:
    scene = Scene(is_newer=is_newer)
    for _ in range(2):
        scene.write(0)
        for step in steps:
            step(scene)
        scene.write(1)
        scene.commit_offset()
        scene.commit()
        scene.check()
        scene.restart()
        scene.check()


# What becomes of a marker from outside


def forged(scene: Scene, **fields: Any) -> ErrorCode:
    """The answer to a commit of the honest producer's transaction in t-0, by somebody else."""
    honest = scene.honest
    marker = {
        "producer_id": honest.producer_id,
        "producer_epoch": honest.epoch + honest.is_newer,
        "transaction_result": True,
        "topics": [{"name": "t", "partition_indexes": [0]}],
        "coordinator_epoch": 0,
        "transaction_version": 2 * honest.is_newer,
        **fields,
    }
    answer = scene.stranger.ask(WRITE_TXN_MARKERS, 2, markers=[marker])
    return ErrorCode(answer.markers[0].topics[0].partitions[0].error_code)


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_marker_of_a_transaction_that_a_coordinator_knows_is_refused(is_newer: bool) -> None:
    scene = Scene(is_newer=is_newer)
    scene.write(0)
    assert forged(scene) is ErrorCode.invalid_txn_state
    end_offset = scene.node.hosted("t").log.end_offset
    scene.commit()
    assert scene.node.hosted("t").log.end_offset == end_offset + 1
    epoch = scene.honest.epoch
    assert forged(scene, producer_epoch=epoch) is ErrorCode.none
    assert scene.node.hosted("t").log.end_offset == end_offset + 1, "nothing was open, and nothing is written"


def test_a_coordinator_epoch_that_nobody_has_reached_is_refused() -> None:
    scene = Scene(is_newer=True)
    assert forged(scene, coordinator_epoch=1) is ErrorCode.invalid_request
    scene.restart()
    assert forged(scene, coordinator_epoch=1) is ErrorCode.none
    assert forged(scene, coordinator_epoch=2) is ErrorCode.invalid_request


@pytest.mark.parametrize("above", [0, 1])
def test_a_transaction_that_no_coordinator_knows_is_ended(above: int) -> None:
    scene = Scene(is_newer=False)
    scene.write(0)
    (coordinator,) = scene.node.node.transactions
    del coordinator.machine.transactions["copy"]
    assert forged(scene, producer_epoch=scene.honest.epoch + 2) is ErrorCode.invalid_producer_epoch
    assert committed_values(scene.stranger, "t") == []
    assert forged(scene, producer_epoch=scene.honest.epoch + above) is ErrorCode.none
    assert committed_values(scene.stranger, "t") == [b"0"]


@pytest.mark.parametrize("is_newer", [True, False])
def test_while_a_coordinator_is_away_nobody_takes_its_transactions_for_hanging(is_newer: bool) -> None:
    settings = {"log.dirs": "/one,/two", "transaction.state.log.num.partitions": "2"}
    scene = Scene(is_newer=is_newer, **settings)  # whose coordinator is in the second directory
    (coordinator,) = scene.node.node.transactions
    away = coordinator.journal.hosted.directory.path
    (index,) = (at for at in range(2) if scene.node.hosted("t", at).directory.path != away)
    scene.write(index)
    before, topics = scene.node, [{"name": "t", "partition_indexes": [index]}]
    before.disk.kill()
    before.disk.rename(away, "/unmounted")
    scene.node = BareNode(before.settings, disk=before.disk, clock=before.clock)
    scene.stranger = scene.node.connect()
    assert forged(scene, topics=topics) is ErrorCode.coordinator_not_available
    scene.node.disk.kill()
    before.disk.rename("/unmounted", away)
    scene.node = BareNode(before.settings, disk=before.disk, clock=before.clock)
    scene.stranger, scene.honest.client = scene.node.connect(), scene.node.connect()
    assert forged(scene, topics=topics) is ErrorCode.invalid_txn_state
    assert scene.honest.end(is_commit=False) is ErrorCode.none
    assert committed_values(scene.stranger, "t", index) == []


@pytest.mark.parametrize("is_newer", [True, False])
def test_epochs_that_were_forged_before_they_were_refused_keep_no_transaction_open(is_newer: bool) -> None:
    scene = Scene(is_newer=is_newer)
    for index in range(2):
        hosted, now = scene.node.hosted("t", index), scene.node.clock.now()
        scene.node.node.transactions.markers.append(
            hosted, scene.honest.producer_id, 0, True, LARGEST_COORDINATOR_EPOCH, 0, now
        )
    for _ in range(2):
        scene.write(0)
        scene.write(1)
        scene.commit_offset()
        scene.commit()
        scene.check()
        scene.restart()
        scene.check()
