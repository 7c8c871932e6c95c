"""Starting: identity, epochs, what earlier runs left behind, and what others did to the directory meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node.node import CHECKPOINT_INTERVAL_MS
from holdfast.errors import CorruptLog, DataDirectoryError, DataDirectoryLocked, MissingOffsets
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, PowerLost, SimulatedDisk
from holdfast.wire.batch import make_batch, read_header

SMALL_SEGMENTS = {"internal_segment_bytes": "400"}


def batch(value: bytes) -> bytes:
    return make_batch([value], timestamp=1_700_000_000_000)


def fill(client: BareClient, topic: str, count: int, index: int = 0) -> None:
    for number in range(count):
        done = client.produce(topic, batch(b"%s %d" % (topic.encode(), number)), index)
        assert done.error_code is ErrorCode.none


def values(node: BareNode, topic: str, index: int = 0) -> int:
    return node.hosted(topic, index).log.end_offset


def delete(client: BareClient, topic: str) -> int:
    return client.begin(20, 5, topic_names=[topic], timeout=5000)


def create(client: BareClient, topic: str) -> int:
    fields = {"name": topic, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    return client.begin(19, 5, topics=[fields], timeout=5000)


@pytest.fixture
def client(node: BareNode) -> BareClient:
    client = node.connect()
    client.create_topic("t", partitions=2, **SMALL_SEGMENTS)
    fill(client, "t", 20)
    return client


# Identity and epochs


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_topics_messages_and_identity_survive_any_end(node: BareNode, client: BareClient, end: str) -> None:
    topic_id = node.hosted("t").topic_id
    cluster_id = node.node.identity.cluster_id
    again: BareNode = getattr(node, end)()
    assert values(again, "t") == 20
    assert again.hosted("t").topic_id == topic_id
    assert again.node.identity.cluster_id == cluster_id
    assert again.connect().fetch("t", 19).high_watermark == 20


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_leader_epochs_rise_at_every_start(node: BareNode, client: BareClient, end: str) -> None:
    epochs = [node.hosted("t").leader_epoch]
    for _ in range(3):
        node = getattr(node, end)()
        epochs.append(node.hosted("t").leader_epoch)
    assert epochs == sorted(set(epochs))


def test_the_risen_epochs_are_durable_before_anything_is_appended(node: BareNode, client: BareClient) -> None:
    node = node.kill()
    epoch = node.hosted("t").leader_epoch
    node = node.lose_power()
    assert node.hosted("t").leader_epoch > epoch


def test_broker_epochs_rise_and_producer_ids_are_never_given_twice(
    node: BareNode, client: BareClient
) -> None:
    given: list[int] = []
    broker_epochs: list[int] = []
    for end in ("kill", "lose_power", "stop", "lose_power"):
        asking = node.connect()
        for _ in range(3):
            answer = asking.ask(22, 4, transactional_id=None, transaction_timeout=60_000)
            given.append(answer.producer_id)
        broker_epochs.append(node.node.identity.broker_epoch)
        node = getattr(node, end)()
    assert len(set(given)) == len(given)
    assert broker_epochs == sorted(set(broker_epochs))


def test_a_directory_of_another_node_or_cluster_is_refused(node: BareNode) -> None:
    node.node.stop(node.clock.now())
    with pytest.raises(DataDirectoryError, match="belongs to node 1"):
        BareNode({"node.id": "2"}, disk=node.disk)
    node.disk.kill()  # chance begins anew
    stranger = BareNode({"log.dirs": "/other"}, disk=node.disk)
    stranger.node.stop(stranger.clock.now())
    with pytest.raises(DataDirectoryError, match="different clusters"):
        BareNode({"log.dirs": "/data,/other"}, disk=node.disk)


def test_a_directory_in_use_is_refused(node: BareNode) -> None:
    with pytest.raises(DataDirectoryLocked, match="in use"):
        BareNode(disk=node.disk)


def test_a_file_in_place_of_the_directory_is_refused() -> None:
    disk = SimulatedDisk()
    disk.open("/data", "create")
    with pytest.raises(DataDirectoryError, match="not a directory"):
        BareNode(disk=disk)


def test_a_second_directory_that_cannot_be_used_is_offline_and_the_first_serves() -> None:
    disk = SimulatedDisk()
    disk.plan(Fault("create", path_contains="/second", times=1000))
    node = BareNode({"log.dirs": "/data,/second"}, disk=disk)
    client = node.connect()
    client.create_topic("t", partitions=3)
    fill(client, "t", 3)
    assert {hosted.directory.path for hosted in node.node.partitions} == {"/data"}
    assert any("/second is offline" in line for line in node.said)


# What others did to the directory meanwhile


def damage_middle(node: BareNode, topic: str = "t", index: int = 0) -> str:
    """Flip a bit in the middle of a partition's last segment, durably."""
    segment = node.hosted(topic, index).log.active
    path = segment.path()
    assert segment.size > 150
    node.disk.flip_bit(path, 75, 3)
    return path


@pytest.mark.parametrize("end", ["kill", "lose_power"])
def test_a_partition_damaged_in_the_middle_is_offline_and_the_others_serve(
    node: BareNode, client: BareClient, end: str
) -> None:
    fill(client, "t", 5, index=1)
    node.advance(2000)
    node.settle()  # recovery points are on disk
    path = damage_middle(node)
    node = getattr(node, end)()
    client = node.connect()
    assert client.fetch("t", 0, index=0).error_code is ErrorCode.kafka_storage_error
    assert client.produce("t", batch(b"x"), 0).error_code is ErrorCode.kafka_storage_error
    assert client.produce("t", batch(b"x"), 1).base_offset == 5
    assert any("t-0 is offline" in line and path in line for line in node.said), node.said


@pytest.mark.parametrize(
    "ends", [["stop"], ["kill"], ["lose_power"], ["stop", "lose_power"], ["kill", "stop", "kill"]]
)
def test_a_damaged_partition_stays_offline_however_often_one_restarts(
    node: BareNode, client: BareClient, ends: list[str]
) -> None:
    """Nothing of what was acknowledged may be cut because somebody restarted once more."""
    node.advance(2000)
    node.settle()
    path = damage_middle(node)
    node = node.kill()
    content = node.disk.open(path, "read").pread(1 << 20, 0)
    for end in ends:
        node.advance(2000)
        node.settle()
        node = getattr(node, end)()
        assert node.connect().fetch("t", 0).error_code is ErrorCode.kafka_storage_error
        assert node.disk.open(path, "read").pread(1 << 20, 0) == content
    node.disk.flip_bit(path, 75, 3)  # the operator restored the file
    node = node.kill()
    assert values(node, "t") == 20


def test_a_log_that_lost_its_end_is_offline_not_shorter(node: BareNode, client: BareClient) -> None:
    node.advance(2000)
    node.settle()
    segment = node.hosted("t").log.active
    file = node.disk.open(segment.path(), "write")
    file.truncate(segment.size // 2)
    file.flush()
    node = node.kill()
    assert node.connect().fetch("t", 0).error_code is ErrorCode.kafka_storage_error


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
@pytest.mark.parametrize("content", [None, b"", b"garbage", b"0\n7\nt 0 5\n", b"\xff\xfe"])
@pytest.mark.parametrize(
    "name", ["recovery-point-offset-checkpoint", "log-start-offset-checkpoint", "holdfast.session"]
)
def test_checkpoints_may_be_deleted_or_hold_garbage(
    node: BareNode, client: BareClient, name: str, content: bytes | None, end: str
) -> None:
    node.advance(2000)
    node.settle()
    path = f"/data/{name}"
    tampered = tamper(node, end, path, content)
    assert values(tampered, "t") == 20
    assert tampered.hosted("t").log.start_offset == 0
    again = tampered.kill()
    assert values(again, "t") == 20
    assert not [line for line in again.said if "line" in line], "it was rebuilt"


def tamper(node: BareNode, end: str, path: str, content: bytes | None) -> BareNode:
    """End a node, replace or remove a file, start again."""

    def replace(disk: SimulatedDisk) -> None:
        if disk.exists(path):
            disk.remove(path)
        if content is not None:
            disk.open(path, "create").pwritev([content], 0)

    again: BareNode = getattr(node, end)(replace)
    return again


def test_without_recovery_points_a_compacted_topic_keeps_its_gaps_and_everything_behind_them(
    node: BareNode,
) -> None:
    client = node.connect()
    client.create_topic(
        "c",
        cleanup_policy="compact",
        internal_segment_bytes="300",
        min_cleanable_dirty_ratio="0",
        segment_ms="1000",
    )
    for number in range(30):
        client.produce(
            "c", make_batch([(b"key%d" % (number % 2), b"%d" % number)], timestamp=1_700_000_000_000)
        )
    for _ in range(40):
        node.advance(15_000)
        node.settle()
        node.worker.run_all()
        node.settle()
    log = node.hosted("c").log
    kept = [found.header.base_offset for found in log.batches_from(0)]
    assert len(kept) < 20, "it was compacted"
    for end in ("kill", "lose_power"):
        again = tamper(node, end, "/data/recovery-point-offset-checkpoint", None)
        log = again.hosted("c").log
        assert [found.header.base_offset for found in log.batches_from(0)] == kept
        node = again


def test_garbage_in_partition_metadata_is_told_and_the_partition_serves(
    node: BareNode, client: BareClient
) -> None:
    node = tamper(node, "kill", "/data/t-0/partition.metadata", b"garbage")
    assert values(node, "t") == 20
    (line,) = [line for line in node.said if "partition.metadata" in line]
    assert line.startswith("damaged: /data/t-0/partition.metadata:")
    assert "the broker writes the file again" in line


def test_garbage_in_meta_properties_is_an_error_that_names_the_file(
    node: BareNode, client: BareClient
) -> None:
    with pytest.raises((CorruptLog, DataDirectoryError), match=r"meta\.properties"):
        tamper(node, "kill", "/data/meta.properties", b"\xff\xfe\x00")


def test_damage_in_the_metadata_log_ends_the_start_with_a_reason(node: BareNode, client: BareClient) -> None:
    for number in range(5):
        client.create_topic(f"topic-{number}")
    node.advance(2000)
    node.settle()
    node.disk.flip_bit(node.node.metadata.hosted.log.segments[0].path(), 80, 1)
    with pytest.raises(CorruptLog, match="__cluster_metadata"):
        node.kill()


def test_strange_files_and_directories_are_left_alone(node: BareNode, client: BareClient) -> None:
    for path in ("/data/notes.txt", "/data/lost+found/x", "/data/no-number-here/y"):
        node.disk.make_directory(path.rpartition("/")[0])
        node.disk.open(path, "create").pwritev([b"not ours"], 0)
    node = node.kill()
    assert values(node, "t") == 20
    for path in ("/data/notes.txt", "/data/lost+found/x", "/data/no-number-here/y"):
        assert node.disk.exists(path)


def test_a_directory_without_a_topic_is_moved_aside_with_its_data(node: BareNode, client: BareClient) -> None:
    node.disk.make_directory("/data/unknown-0")
    node.disk.open(f"/data/unknown-0/{0:020d}.log", "create").pwritev([b"data"], 0)
    node = node.kill()
    assert node.disk.exists(f"/data/unknown-0.{0:032x}-stray/{0:020d}.log")
    assert any("moved to" in line for line in node.said)


# Topics deleted and made again under the same name


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_new_topic_of_an_old_name_starts_empty_and_keeps_what_it_gets(
    node: BareNode, client: BareClient, end: str
) -> None:
    client.ask(
        21, 2, timeout=1000, topics=[{"name": "t", "partitions": [{"partition_index": 0, "offset": 15}]}]
    )
    node.advance(2000)
    node.settle()
    # Nothing is flushed between the two: the name is free at once.
    delete(client, "t")
    create(client, "t")
    node.settle()
    fill(client, "t", 3)
    node = getattr(node, end)()
    log = node.hosted("t").log
    assert (log.start_offset, log.end_offset) == (0, 3)
    assert b"t 0" in node.connect().fetch("t", 0).records


def test_power_loss_at_any_moment_of_deleting_and_making_again_leaves_the_old_or_the_new_topic() -> None:
    def prepared() -> tuple[BareNode, BareClient]:
        node = BareNode()
        client = node.connect()
        client.create_topic("t")
        fill(client, "t", 20)
        fields: dict[str, Any] = {"name": "t", "partitions": [{"partition_index": 0, "offset": 15}]}
        client.ask(21, 2, timeout=1000, topics=[fields])
        node.advance(2000)
        node.settle()
        return node, client

    def remake(node: BareNode, client: BareClient) -> None:
        delete(client, "t")
        create(client, "t")
        node.settle()
        fill(client, "t", 3)

    node, client = prepared()
    before = sum(node.disk.operations.values())
    old_id = node.hosted("t").topic_id
    remake(node, client)
    total = sum(node.disk.operations.values()) - before
    seen = set()
    for step in range(2 * total + 20):
        for seed in range(3):
            node, client = prepared()
            old_id = node.hosted("t").topic_id
            node.disk.rng.seed(seed)
            acknowledged = run_until_power_loss(node, client, step, remake)
            node = node.lose_power() if seed else node.kill()
            log = node.hosted("t").log if node.node.partitions.get("t", 0) else None
            if log is None:
                assert node.node.metadata.image.topic("t") is None, node.said
                seen.add("none")
            elif node.hosted("t").topic_id == old_id:
                assert log.end_offset == 20
                assert not acknowledged
                seen.add("old")
            else:
                assert (log.start_offset, log.end_offset) >= (0, acknowledged)
                assert log.start_offset == 0
                seen.add("new")
            assert not any("is offline" in line for line in node.said), node.said
    assert {"old", "new"} <= seen


def run_until_power_loss(node: BareNode, client: BareClient, step: int, act: Any) -> int:
    """Run `act` until the power goes after `step` changes of the disk; returns how many messages were acknowledged."""
    node.disk.lose_power_after(step)
    try:
        act(node, client)
    except PowerLost:
        pass
    finally:
        node.disk.clear_faults()
    new = node.node.partitions.get("t", 0)
    if new is None or new.log.end_offset > 3:
        return 0
    return new.offsets.durable_end.offset


def test_deleting_a_topic_with_a_damaged_partition_gives_its_name_back(
    node: BareNode, client: BareClient
) -> None:
    node.advance(2000)
    node.settle()
    damage_middle(node)
    node = node.kill()
    client = node.connect()
    (result,) = client.ask(20, 5, topic_names=["t"], timeout=5000).responses
    assert result.error_code is ErrorCode.none
    client.create_topic("t")
    fill(client, "t", 2)
    for end in ("kill", "stop"):
        node = getattr(node, end)()
        assert values(node, "t") == 2
    assert not [name for name in node.disk.list("/data") if name.endswith("-delete")]


@pytest.mark.parametrize("cleanly", [True, False])
def test_a_metadata_log_that_is_gone_is_not_begun_anew(node: BareNode, cleanly: bool) -> None:
    node.connect().create_topic("t")
    node.advance(CHECKPOINT_INTERVAL_MS)
    node.settle()
    path = f"/data/__cluster_metadata-0/{0:020d}.log"
    restart = node.stop if cleanly else node.kill
    with pytest.raises(MissingOffsets, match="__cluster_metadata-0: the offsets from 0 to"):
        restart(lambda disk: disk.remove(path))
    assert not node.disk.exists(path)


def test_the_first_append_after_a_start_flushes_nothing_by_itself(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t", 3)
    for again in range(2):
        flushes = dict(node.disk.operations)
        for index in range(3):
            client.begin_produce("t", batch(b"x"), index)
        done = {name: count - flushes.get(name, 0) for name, count in node.disk.operations.items()}
        assert (done["flush"], done["flush directory"]) == (0, 0)
        node.settle()
        assert [node.hosted("t", index).log.epochs.latest_epoch for index in range(3)] == [again] * 3
        if not again:
            node = node.stop()
            client = node.connect()


@pytest.mark.parametrize("cleanly", [True, False])
def test_a_segment_that_is_gone_is_missed_until_it_is_given_up(node: BareNode, cleanly: bool) -> None:
    client = node.connect()
    client.create_topic("t", 1, **SMALL_SEGMENTS)
    fill(client, "t", 20)
    node.advance(CHECKPOINT_INTERVAL_MS)
    node.settle()
    lost, following = (segment.base_offset for segment in node.hosted("t").log.segments[1:3])

    def lose(disk: SimulatedDisk) -> None:
        disk.remove(f"/data/t-0/{lost:020d}.log")

    node = (node.stop if cleanly else node.kill)(lose)
    assert node.connect().produce("t", batch(b"x")).error_code is ErrorCode.kafka_storage_error
    reason = str(node.node.partitions.offline_reason("t", 0))
    assert f"from {lost} to {following - 1} are missing" in reason
    assert "--accept-loss=t-0" in reason
    node.node.stop(node.clock.now())
    for accept_loss in (["t-0"], []):
        node = BareNode(disk=node.disk, clock=node.clock, accept_loss=accept_loss)
        client = node.connect()
        assert read_header(client.fetch("t", lost - 1).records).base_offset == lost - 1
        assert read_header(client.fetch("t", lost).records).base_offset == following
        done = client.produce("t", batch(b"x"))
        assert (done.error_code, done.base_offset) == (ErrorCode.none, 20 if accept_loss else 21)
        node.node.stop(node.clock.now())
