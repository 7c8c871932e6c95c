"""What is appended to the metadata log, so that Apache Kafka starts at once and keeps what was promised.

- The registration is fenced: Kafka does not wait for the session of a broker that is gone. Its partitions have no
  leader, as Kafka leaves them at its own stops: otherwise Kafka leads them at its start, gives them up when the broker
  registers, and loads every coordinator twice.
- KRaftVersion(1) and Voters in one control batch: who votes stands in the log from here on (a dynamic quorum), so that
  controllers can be added and removed while it runs.
- Settings that Kafka does not know, `holdfast.*`, are taken out; the journal keeps them for the way back.
- Until every topic has replicas enough, Kafka flushes before it acknowledges, as holdfast does:
  `log.flush.interval.messages=1` for the whole cluster, so that brokers that join have it too and one command removes
  it. Settings that would say otherwise are taken out. A topic with `holdfast.flush=os` chose not to wait for the disk;
  it gets `flush.messages` so that Kafka does not either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from holdfast.broker.metadata.image import NO_LEADER, ClusterImage, Resource, ResourceType
from holdfast.broker.node.metadata_log import RECORDS_PER_BATCH
from holdfast.config.broker import BrokerConfig
from holdfast.wire.batch import Record, build_batch
from holdfast.wire.control_records import KRaftVersion, VoterDescription, VoterEndPoint, Voters
from holdfast.wire.metadata_records import BrokerRegistrationChange, Config, MetadataRecord, PartitionChange

CONTROLLER_LISTENER: Final = "CONTROLLER"
FLUSH_DEFAULT: Final = "log.flush.interval.messages"
FLUSH_OF_TOPIC: Final = "flush.messages"
OUR_FLUSH: Final = "holdfast.flush"
NEVER: Final = str(2**63 - 1)
OURS: Final = "holdfast."
ALL_BROKERS: Final = Resource(ResourceType.BROKER, "")


class Changes(NamedTuple):
    records: list[MetadataRecord]
    taken: list[dict[str, str]]
    """Settings taken out: resource, name, value."""
    unflushed_topics: list[str]
    """Topics that chose not to wait for the disk."""


def changes(image: ClusterImage, node_id: int, config: BrokerConfig) -> Changes:
    made = Changes([], [], [])
    broker = image.brokers.get(node_id)
    if broker is not None and not broker.fenced:
        made.records.append(
            BrokerRegistrationChange(broker_id=node_id, broker_epoch=broker.broker_epoch, fenced=1)
        )
    made.records.extend(
        PartitionChange(partition_id=partition.index, topic_id=topic.topic_id, leader=NO_LEADER)
        for topic in image.topics.values()
        for partition in topic.partitions
        if partition.leader == node_id
    )
    flushes = _default_flush(image, node_id, config) == "group"
    for resource, settings in sorted(image.configs.items()):
        chosen = settings.get(OUR_FLUSH, "group" if flushes else "os")
        for name, value in sorted(settings.items()):
            is_in_the_way = (name == FLUSH_OF_TOPIC and chosen == "group") or (
                name == FLUSH_DEFAULT and flushes and (resource, value) != (ALL_BROKERS, "1")
            )
            if name.startswith(OURS) or is_in_the_way:
                made.taken.append({"resource": _name_of(resource), "name": name, "value": value})
                made.records.append(_setting(resource, name, None))
    if flushes:
        made.records.append(_setting(ALL_BROKERS, FLUSH_DEFAULT, "1"))
    for topic in sorted(image.topics):
        resource = Resource(ResourceType.TOPIC, topic)
        settings = image.settings(resource)
        chosen = settings.get(OUR_FLUSH, "group" if flushes else "os")
        if chosen == "os":
            made.unflushed_topics.append(topic)
        if chosen == "os" and flushes and FLUSH_OF_TOPIC not in settings:
            made.records.append(_setting(resource, FLUSH_OF_TOPIC, NEVER))
        elif chosen == "group" and not flushes:
            made.records.append(_setting(resource, FLUSH_OF_TOPIC, "1"))
    return made


def _default_flush(image: ClusterImage, node_id: int, config: BrokerConfig) -> str:
    return str(
        image.settings(Resource(ResourceType.BROKER, str(node_id))).get(
            OUR_FLUSH, image.settings(ALL_BROKERS).get(OUR_FLUSH, config.topic_defaults.holdfast_flush)
        )
    )


def _setting(resource: Resource, name: str, value: str | None) -> Config:
    return Config(resource_type=resource.type, resource_name=resource.name, name=name, value=value)


def _name_of(resource: Resource) -> str:
    if resource == ALL_BROKERS:
        return "all brokers"
    return f"{resource.type.name.lower().replace('_', ' ')} {resource.name}"


def batches(
    image: ClusterImage,
    records: list[MetadataRecord],
    voter: tuple[int, UUID],
    controller: tuple[str, int],
    now_ms: int,
) -> bytes:
    """The bytes to append behind the image's end: the records, and who votes."""
    offset, epoch = image.last_offset + 1, image.last_epoch
    parts = []
    for first in range(0, len(records), RECORDS_PER_BATCH):
        some = records[first : first + RECORDS_PER_BATCH]
        parts.append(
            build_batch(
                [Record(index, 0, None, each.encode()) for index, each in enumerate(some)],
                base_offset=offset,
                leader_epoch=epoch,
                base_timestamp=now_ms,
            )
        )
        offset += len(some)
    host, port = controller
    described = VoterDescription(*voter, (VoterEndPoint(CONTROLLER_LISTENER, host, port),))
    control = (KRaftVersion(kraft_version=1), Voters(voters=(described,)))
    parts.append(
        build_batch(
            [Record(index, 0, each.encode_key(), each.encode_value()) for index, each in enumerate(control)],
            base_offset=offset,
            leader_epoch=epoch,
            base_timestamp=now_ms,
            is_control=True,
        )
    )
    return b"".join(parts)


def commands_back(taken: Sequence[Mapping[str, str]]) -> list[str]:
    """What sets the settings again that were taken out, once holdfast serves the directory."""
    lines = []
    for each in taken:
        kind, _, name = each["resource"].partition(" ")
        entity = (
            "--entity-type brokers --entity-default"
            if each["resource"] == "all brokers"
            else f"--entity-type {kind}s --entity-name {name}"
        )
        lines.append(f"holdfast configs alter {entity} --add-config {each['name']}={each['value']}")
    return lines
