"""An image as the records that rebuild it.

Applying `records(image)` to an empty image gives an equal image, and so does any snapshot followed by the
rest of the log. The order is fixed, so that equal images give equal snapshots whatever way they came about:
the feature levels first, because Kafka's readers want to know the metadata version before anything else,
then brokers and controllers, topics with their partitions, settings, the next producer id, and what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.broker.metadata.changes import set_feature_levels
from holdfast.broker.metadata.image import ClusterImage, PartitionImage, TopicImage
from holdfast.wire.metadata_records import (
    Config,
    MetadataRecord,
    Partition,
    ProducerIds,
    Topic,
)


def records(image: ClusterImage) -> Iterator[MetadataRecord]:
    yield from set_feature_levels(ClusterImage(), image.features)
    for broker_id in sorted(image.brokers):
        yield image.brokers[broker_id]
    for controller_id in sorted(image.controllers):
        yield image.controllers[controller_id]
    for topic_name in sorted(image.topics):
        yield from _topic_records(image.topics[topic_name])
    for resource in sorted(image.configs):
        for name, value in sorted(image.configs[resource].items()):
            yield Config(resource_type=resource.type, resource_name=resource.name, name=name, value=value)
    if image.next_producer_id > 0:
        yield ProducerIds(broker_id=-1, broker_epoch=-1, next_producer_id=image.next_producer_id)
    yield from sorted(image.kept.values(), key=lambda record: (record.api_key, record.encode()))


def _topic_records(topic: TopicImage) -> Iterator[MetadataRecord]:
    yield Topic(name=topic.name, topic_id=topic.topic_id)
    for partition in topic.partitions:
        yield _partition_record(topic, partition)


def _partition_record(topic: TopicImage, partition: PartitionImage) -> Partition:
    return Partition(
        partition_id=partition.index,
        topic_id=topic.topic_id,
        replicas=partition.replicas,
        isr=partition.isr,
        removing_replicas=partition.removing_replicas,
        adding_replicas=partition.adding_replicas,
        leader=partition.leader,
        leader_recovery_state=partition.leader_recovery_state,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        directories=partition.directories,
        eligible_leader_replicas=partition.eligible_leader_replicas or None,
        last_known_elr=partition.last_known_elr or None,
    )
