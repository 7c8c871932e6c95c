"""Applying records: what they do, and records no change could have made."""

from __future__ import annotations

from uuid import UUID

import pytest

from holdfast.broker.metadata.image import ClusterImage, Resource, ResourceType
from holdfast.errors import CorruptLog
from holdfast.wire.metadata_records import (
    BrokerRegistrationChange,
    Config,
    MetadataRecord,
    NoOp,
    Partition,
    PartitionChange,
    ProducerIds,
    RemoveTopic,
    Topic,
)

ORDERS = UUID(int=0xA1)
DIRECTORY = UUID(int=0xD1)


def partition(index: int, topic_id: UUID = ORDERS) -> Partition:
    return Partition(
        partition_id=index,
        topic_id=topic_id,
        replicas=(1,),
        isr=(1,),
        leader=1,
        leader_epoch=0,
        partition_epoch=0,
        directories=(DIRECTORY,),
    )


@pytest.fixture
def image() -> ClusterImage:
    image = ClusterImage()
    image.apply_all([Topic(name="orders", topic_id=ORDERS), partition(0), partition(1)])
    return image


def test_naming_a_leader_starts_an_epoch_even_when_it_stays(image: ClusterImage) -> None:
    image.apply(PartitionChange(partition_id=1, topic_id=ORDERS, leader=1))
    first, second = image.topics["orders"].partitions
    assert (first.leader_epoch, first.partition_epoch) == (0, 0)
    assert (second.leader_epoch, second.partition_epoch) == (1, 1)


def test_a_change_without_a_leader_keeps_the_epoch(image: ClusterImage) -> None:
    image.apply(
        PartitionChange(
            partition_id=0, topic_id=ORDERS, isr=(), replicas=(1, 2), directories=(DIRECTORY,) * 2
        )
    )
    changed = image.topics["orders"].partitions[0]
    assert (changed.leader, changed.leader_epoch, changed.partition_epoch) == (1, 0, 1)
    assert (changed.isr, changed.replicas, changed.directories) == ((), (1, 2), (DIRECTORY,) * 2)


def test_a_partition_can_lose_its_leader(image: ClusterImage) -> None:
    image.apply(PartitionChange(partition_id=0, topic_id=ORDERS, leader=-1))
    assert image.topics["orders"].partitions[0].leader == -1
    assert image.topics["orders"].partitions[0].leader_epoch == 1


def test_handed_out_topics_do_not_change(image: ClusterImage) -> None:
    before = image.topics["orders"]
    image.apply_all([PartitionChange(partition_id=0, topic_id=ORDERS, leader=1), partition(2)])
    assert len(before.partitions) == 2
    assert before.partitions[0].leader_epoch == 0
    assert len(image.topics["orders"].partitions) == 3


def test_handed_out_settings_do_not_change(image: ClusterImage) -> None:
    resource = Resource(ResourceType.TOPIC, "orders")
    image.apply(Config(resource_type=2, resource_name="orders", name="retention.ms", value="1"))
    before = image.settings(resource)
    image.apply(Config(resource_type=2, resource_name="orders", name="retention.ms", value="2"))
    assert before == {"retention.ms": "1"}
    assert image.settings(resource) == {"retention.ms": "2"}


def test_partitions_are_found_by_number(image: ClusterImage) -> None:
    found = image.partition("orders", 1)
    assert found is not None
    assert found.index == 1
    assert found.preferred_leader == 1
    assert image.partition("orders", 2) is None
    assert image.partition("orders", -1) is None
    assert image.partition("unknown", 0) is None


def test_a_topic_created_and_removed_in_one_list_is_gone(image: ClusterImage) -> None:
    other = UUID(int=0xB1)
    image.apply_all(
        [
            Topic(name="gone.soon", topic_id=other),
            partition(0, other),
            RemoveTopic(topic_id=other),
        ]
    )
    assert "gone.soon" not in image.topics
    assert other not in image.topics_by_id
    assert not image.colliding_topics("gone_soon")


def test_the_position_in_the_log_is_kept_and_is_not_the_cluster(image: ClusterImage) -> None:
    same = ClusterImage()
    same.apply_all(
        [Topic(name="orders", topic_id=ORDERS), partition(0), partition(1), NoOp()],
        last_offset=9,
        last_epoch=3,
    )
    assert (same.last_offset, same.last_epoch) == (9, 3)
    assert same == image


@pytest.mark.parametrize(
    "record",
    [
        Topic(name="orders", topic_id=UUID(int=0xB1)),
        Topic(name="other", topic_id=ORDERS),
        partition(3),
        partition(1),
        partition(0, UUID(int=0xB1)),
        PartitionChange(partition_id=2, topic_id=ORDERS, leader=1),
        PartitionChange(partition_id=0, topic_id=UUID(int=0xB1), leader=1),
        RemoveTopic(topic_id=UUID(int=0xB1)),
        BrokerRegistrationChange(broker_id=1, broker_epoch=1, fenced=1),
        Config(resource_type=99, resource_name="orders", name="retention.ms", value="1"),
    ],
)
def test_a_record_no_change_could_have_made_is_damage(image: ClusterImage, record: MetadataRecord) -> None:
    with pytest.raises(CorruptLog):
        image.apply(record)


def test_producer_ids_never_move_back(image: ClusterImage) -> None:
    image.apply(ProducerIds(broker_id=1, broker_epoch=1, next_producer_id=2000))
    with pytest.raises(CorruptLog):
        image.apply(ProducerIds(broker_id=1, broker_epoch=1, next_producer_id=1000))
    assert image.next_producer_id == 2000
