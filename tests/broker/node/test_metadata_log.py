"""The metadata log is shortened by snapshots, and nothing of the cluster is lost by it, whenever the power fails."""

from __future__ import annotations

import pytest

from holdfast.broker.metadata import changes
from holdfast.broker.metadata.image import ClusterImage
from holdfast.broker.node import metadata_log
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import NodeSeams
from holdfast.config.broker import BrokerConfig
from holdfast.errors import CorruptLog
from holdfast.seams import Now
from holdfast.testing.disk import PowerLost, SimulatedDisk
from holdfast.testing.fakes import InlineWorker, ManualClock, ManualFlusher, SeededRandomness
from holdfast.wire.metadata_records import EndPoint

ENDPOINTS = [EndPoint("PLAINTEXT", "127.0.0.1", 9092, 0)]


@pytest.fixture(autouse=True)
def little_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_log, "HISTORY_RECORDS_MIN", 20)
    monkeypatch.setattr(metadata_log, "HISTORY_FACTOR", 2)


def start(disk: SimulatedDisk, said: list[str] | None = None, boot_id: str = "boot") -> Node:
    config, _ = BrokerConfig.load({}, {"log.dirs": "/data"})
    flusher = ManualFlusher(disk)
    seams = NodeSeams(
        fs=disk,
        randomness=SeededRandomness(1),
        flusher=flusher,
        worker=InlineWorker(disk),
        clock=ManualClock(1_000_000),
        call_soon=lambda action: None,
        boot_id=boot_id,
        say=(said if said is not None else []).append,
    )
    node = Node(config, seams)
    node.start(ENDPOINTS, Now(1_000_000, 0))
    return node


def stop(node: Node) -> None:
    node.stop(Now(1_000_000, 0))


def with_history(disk: SimulatedDisk, starts: int = 12) -> Node:
    disk.make_directory("/")
    node = start(disk)
    topic = changes.NewTopic("orders", 3, 1, configs=[("retention.ms", "1000")])
    node.metadata.append(
        changes.create_topic(node.metadata.image, topic, node.settings.broker, node.seams.randomness),
        Now(1_000_000, 0),
    )
    for _ in range(starts):
        stop(node)
        node = start(disk)
    return node


def checkpoints(disk: SimulatedDisk) -> list[str]:
    return [name for name in disk.list("/data/__cluster_metadata-0") if name.endswith(".checkpoint")]


def timeless(image: ClusterImage) -> object:
    """What must survive a start: all but the broker's registration and the leader epochs, which rise."""
    return (
        {(t.name, t.topic_id, len(t.partitions)) for t in image.topics.values()},
        dict(image.configs),
        image.features,
        image.next_producer_id,
    )


def test_a_log_of_history_is_replaced_by_a_snapshot() -> None:
    disk = SimulatedDisk(1)
    node = with_history(disk)
    assert len(checkpoints(disk)) == 1
    assert node.metadata.hosted.log.start_offset > 0
    stop(node)
    again = start(disk)
    assert timeless(again.metadata.image) == timeless(node.metadata.image)
    epoch = node.metadata.image.topics["orders"].partitions[0].leader_epoch
    assert again.metadata.image.topics["orders"].partitions[0].leader_epoch == epoch + 1


@pytest.mark.parametrize("operations", range(1, 120, 2))
def test_power_failing_while_a_snapshot_is_made_loses_nothing(operations: int) -> None:
    disk = SimulatedDisk(operations)
    node = with_history(disk, starts=4)
    expected = timeless(node.metadata.image)
    stop(node)
    disk.lose_power_after(operations)
    try:
        node = start(disk)
        stop(node)
    except PowerLost:
        pass
    disk.crash()
    assert timeless(start(disk, boot_id="another").metadata.image) == expected


def test_a_snapshot_without_its_end_is_not_used_and_a_gap_is_an_error() -> None:
    disk = SimulatedDisk(1)
    stop(with_history(disk))
    (name,) = checkpoints(disk)
    file = disk.open(f"/data/__cluster_metadata-0/{name}", "write")
    file.truncate(file.size() - 1)
    with pytest.raises(CorruptLog, match="no whole snapshot"):
        start(disk)


def test_damage_in_the_metadata_log_names_the_file_and_what_to_do() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/")
    node = start(disk)
    path, size = node.metadata.hosted.log.active.path(), node.metadata.hosted.log.active.size
    stop(node)
    file = disk.open(path, "write")
    file.pwritev([bytes([file.pread(1, size // 2)[0] ^ 1])], size // 2)
    with pytest.raises(CorruptLog, match=r"00000000000000000000\.log: .* damaged.*restore"):
        start(disk)
