"""From a request to the records that carry it out.

Each function takes the image as it is and what is asked, and returns the records that make it so, or raises
`ApiError` with the protocol's code. Nothing here changes the image: records count once they are in the
metadata log, and a refusal leaves no trace. The records of one call belong together: append them as one
batch, so that after a crash all of them are there or none.

Bounds: one call makes at most `RECORDS_PER_CHANGE_MAX` records, which keeps a batch of the metadata log
near a megabyte and one request from filling the disk with empty partitions.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.image import (
    NO_LEADER,
    UNASSIGNED_DIRECTORY,
    ClusterImage,
    ResourceType,
    TopicImage,
)
from holdfast.broker.metadata.names import (
    METADATA_TOPIC,
    check_topic_name,
    has_collision_characters,
    refuse_internal,
)
from holdfast.broker.metadata.settings import new_topic_settings
from holdfast.config.broker import BrokerConfig
from holdfast.errors import ApiError
from holdfast.seams import Randomness
from holdfast.wire.metadata_records import (
    Config,
    FeatureLevel,
    MetadataRecord,
    Partition,
    PartitionChange,
    ProducerIds,
    RegisterBroker,
    RemoveTopic,
    Topic,
)

RECORDS_PER_CHANGE_MAX: Final = 10_000
PRODUCER_IDS_PER_BLOCK: Final = 1000
"""Ids a crash may waste, against one durable record per so many producers."""
PRODUCER_ID_MAX: Final = 2**63 - 1
TAKE_DEFAULT: Final = -1
METADATA_VERSION: Final = "metadata.version"


@dataclass(frozen=True, slots=True)
class NewTopic:
    name: str
    num_partitions: int = TAKE_DEFAULT
    replication_factor: int = TAKE_DEFAULT
    assignments: Sequence[tuple[int, Sequence[int]]] = ()
    """Partition index and its brokers; empty when the placement is ours to choose."""
    configs: Sequence[tuple[str, str | None]] = ()


class ProducerIdBlock(NamedTuple):
    first: int
    end: int
    """One past the last id of the block."""


def create_topic(
    image: ClusterImage, topic: NewTopic, config: BrokerConfig, randomness: Randomness
) -> list[MetadataRecord]:
    _check_new_name(image, topic.name)
    settings = new_topic_settings(topic.name, topic.configs, config)
    assignments = _new_topic_assignments(image, topic, config, randomness)
    topic_id = random_topic_id(image, randomness)
    directories = _DirectoryChoice(image)
    records: list[MetadataRecord] = [Topic(name=topic.name, topic_id=topic_id)]
    records += [
        Config(resource_type=ResourceType.TOPIC, resource_name=topic.name, name=name, value=value)
        for name, value in settings.items()
    ]
    records += [
        _new_partition(image, topic_id, index, replicas, directories)
        for index, replicas in enumerate(assignments)
    ]
    return records


def delete_topic(image: ClusterImage, topic_id: UUID) -> list[MetadataRecord]:
    topic = image.topics_by_id.get(topic_id)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_id, f"no topic has the id {topic_id}")
    refuse_internal(
        topic.name,
        "is not deleted: it holds the committed offsets of all groups, or the state of all transactions. "
        "`holdfast groups delete` deletes single groups",
    )
    return [RemoveTopic(topic_id=topic_id)]


def add_partitions(
    image: ClusterImage,
    name: str,
    count: int,
    assignments: Sequence[Sequence[int]] | None,
    randomness: Randomness,
) -> list[MetadataRecord]:
    """Raise a topic to `count` partitions; `assignments`, when given, are the new partitions' brokers."""
    topic = existing_topic(image, name)
    refuse_internal(
        name, "keeps its number of partitions: by it the state of each group and transaction is found"
    )
    present = len(topic.partitions)
    if count == present:
        raise ApiError(ErrorCode.invalid_partitions, f"topic {name!r} already has {present} partition(s)")
    if count < present:
        raise ApiError(
            ErrorCode.invalid_partitions,
            f"topic {name!r} has {present} partition(s): {count} would not be an increase, "
            "and partitions cannot be taken away",
        )
    additional = count - present
    _check_change_size(additional)
    replication_factor = len(topic.partitions[0].replicas)
    if assignments is None:
        placed = _place(image, additional, replication_factor, randomness)
    else:
        if len(assignments) != additional:
            raise ApiError(
                ErrorCode.invalid_replica_assignment,
                f"{additional} partition(s) to add to topic {name!r}, "
                f"but {len(assignments)} assignment(s) given",
            )
        placed = [checked_replicas(image, replicas, replication_factor) for replicas in assignments]
    directories = _DirectoryChoice(image)
    return [
        _new_partition(image, topic.topic_id, present + number, replicas, directories)
        for number, replicas in enumerate(placed)
    ]


def existing_topic(image: ClusterImage, name: str) -> TopicImage:
    topic = image.topic(name)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"topic {name!r} does not exist")
    return topic


def allocate_producer_ids(
    image: ClusterImage, broker_id: int, block_size: int = PRODUCER_IDS_PER_BLOCK
) -> tuple[ProducerIdBlock, list[MetadataRecord]]:
    """The next block of producer ids. None of it may be handed out before the record is durable."""
    first = image.next_producer_id
    if first > PRODUCER_ID_MAX - block_size:
        raise ApiError(ErrorCode.unknown_server_error, "all producer ids have been given out")
    broker = image.brokers.get(broker_id)
    record = ProducerIds(
        broker_id=broker_id,
        broker_epoch=-1 if broker is None else broker.broker_epoch,
        next_producer_id=first + block_size,
    )
    return ProducerIdBlock(first, first + block_size), [record]


def elect_leader(image: ClusterImage, name: str, index: int, *, unclean: bool) -> list[MetadataRecord]:
    """Give leadership back to the preferred replica or, `unclean`, to any replica when there is no leader."""
    topic = existing_topic(image, name)
    if not 0 <= index < len(topic.partitions):
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"topic {name!r} has no partition {index}")
    partition = topic.partitions[index]
    if partition.leader != NO_LEADER if unclean else partition.leader == partition.preferred_leader:
        raise ApiError(
            ErrorCode.election_not_needed, f"partition {name}-{index} has the leader it should have"
        )
    active = set(image.active_brokers())
    if unclean:
        candidates = [broker_id for broker_id in partition.replicas if broker_id in active]
        if not candidates:
            raise ApiError(ErrorCode.eligible_leaders_not_available, f"no replica of {name}-{index} is alive")
        chosen = candidates[0]
        change = PartitionChange(
            partition_id=index, topic_id=topic.topic_id, leader=chosen, isr=(chosen,), leader_recovery_state=1
        )
        return [change]
    preferred = partition.preferred_leader
    if preferred not in active or preferred not in partition.isr:
        raise ApiError(
            ErrorCode.preferred_leader_not_available,
            f"broker {preferred}, the preferred leader of {name}-{index}, is not alive and in sync",
        )
    return [PartitionChange(partition_id=index, topic_id=topic.topic_id, leader=preferred)]


def raise_leader_epochs(image: ClusterImage, node_id: int) -> list[MetadataRecord]:
    """A new leader epoch for every partition the node leads, or alone may lead: made at every start.

    Whatever a crash cut from a log was written under an older epoch, so that a client can see the cut. A controlled
    shutdown of Apache Kafka leaves its partitions without a leader and an ISR; a lone replica is eligible to lead and
    in sync with itself.
    """
    return [
        PartitionChange(
            partition_id=partition.index,
            topic_id=topic.topic_id,
            leader=node_id,
            isr=(node_id,) if node_id not in partition.isr else None,
            eligible_leader_replicas=() if partition.eligible_leader_replicas else None,
            last_known_elr=() if partition.last_known_elr else None,
            leader_recovery_state=0 if partition.leader_recovery_state else -1,
        )
        for topic in image.topics.values()
        for partition in topic.partitions
        if partition.leader == node_id or partition.isr == (node_id,) or partition.replicas == (node_id,)
    ]


def register_broker(image: ClusterImage, broker: RegisterBroker) -> list[MetadataRecord]:
    """Announce a broker, anew at each of its starts; its epoch must rise."""
    known = image.brokers.get(broker.broker_id)
    if known is not None and broker.broker_epoch <= known.broker_epoch:
        raise ApiError(
            ErrorCode.stale_broker_epoch,
            f"broker {broker.broker_id} is registered with epoch {known.broker_epoch}: "
            f"{broker.broker_epoch} is not newer",
        )
    return [broker]


def set_feature_levels(image: ClusterImage, levels: Mapping[str, int]) -> list[MetadataRecord]:
    """The metadata version comes first: Kafka's readers want to know it before anything else."""
    return [
        FeatureLevel(name=name, feature_level=levels[name])
        for name in sorted(levels, key=lambda feature: (feature != METADATA_VERSION, feature))
        if image.features.get(name, 0) != levels[name]
    ]


def random_topic_id(image: ClusterImage, randomness: Randomness) -> UUID:
    """An id no topic has. Kafka's tools take the id's text as an argument, so it never begins with a dash."""
    while True:
        candidate = UUID(bytes=randomness.uuid_bytes())
        if candidate not in image.topics_by_id and not urlsafe_b64encode(candidate.bytes).startswith(b"-"):
            return candidate


def _check_new_name(image: ClusterImage, name: str) -> None:
    check_topic_name(name)
    if name == METADATA_TOPIC:
        raise ApiError(ErrorCode.invalid_request, f"{METADATA_TOPIC} is the cluster's own log, not a topic")
    if name in image.topics:
        raise ApiError(ErrorCode.topic_already_exists, f"topic {name!r} already exists")
    if has_collision_characters(name):
        colliding = image.colliding_topics(name)
        if colliding:
            raise ApiError(
                ErrorCode.invalid_topic_exception,
                f"topic name {name!r} collides with existing topic {min(colliding)!r}: "
                "'.' and '_' look the same in metric names",
            )
    if image.folds_case:
        for other in image.topics:
            if other.lower() == name.lower():
                raise ApiError(
                    ErrorCode.invalid_topic_exception,
                    f"topic name {name!r} collides with existing topic {other!r}: "
                    "the file system of the log directories takes their names for one",
                )


def _new_topic_assignments(
    image: ClusterImage, topic: NewTopic, config: BrokerConfig, randomness: Randomness
) -> list[tuple[int, ...]]:
    if topic.assignments:
        return _manual_assignments(image, topic)
    if topic.replication_factor < TAKE_DEFAULT or topic.replication_factor == 0:
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"replication factor {topic.replication_factor} for topic {topic.name!r}: "
            "it must be positive, or -1 for the default",
        )
    if topic.num_partitions < TAKE_DEFAULT or topic.num_partitions == 0:
        raise ApiError(
            ErrorCode.invalid_partitions,
            f"{topic.num_partitions} partitions for topic {topic.name!r}: "
            "the number must be positive, or -1 for the default",
        )
    wants_default_count = topic.num_partitions == TAKE_DEFAULT
    wants_default_factor = topic.replication_factor == TAKE_DEFAULT
    count = config.num_partitions if wants_default_count else topic.num_partitions
    factor = config.default_replication_factor if wants_default_factor else topic.replication_factor
    _check_change_size(count)
    return _place(image, count, factor, randomness)


def _manual_assignments(image: ClusterImage, topic: NewTopic) -> list[tuple[int, ...]]:
    if topic.replication_factor != TAKE_DEFAULT or topic.num_partitions != TAKE_DEFAULT:
        raise ApiError(
            ErrorCode.invalid_request,
            f"topic {topic.name!r} has manual assignments, so number of partitions and replication factor "
            f"must be -1, not {topic.num_partitions} and {topic.replication_factor}",
        )
    _check_change_size(len(topic.assignments))
    by_index: dict[int, tuple[int, ...]] = {}
    factor: int | None = None
    for index, replicas in topic.assignments:
        if index in by_index:
            raise ApiError(
                ErrorCode.invalid_replica_assignment, f"partition {index} is assigned more than once"
            )
        by_index[index] = checked_replicas(image, replicas, factor)
        factor = len(by_index[index])
    if sorted(by_index) != list(range(len(by_index))):
        raise ApiError(
            ErrorCode.invalid_replica_assignment,
            f"partitions {sorted(by_index)} are assigned: they must be numbered from 0 without gaps",
        )
    return [by_index[index] for index in range(len(by_index))]


def checked_replicas(image: ClusterImage, replicas: Sequence[int], factor: int | None) -> tuple[int, ...]:
    """The brokers of a manual assignment; `factor` is their number when other partitions set it."""
    if not replicas:
        raise ApiError(ErrorCode.invalid_replica_assignment, "an assignment without any broker")
    for broker_id in replicas:
        if broker_id not in image.brokers:
            raise ApiError(
                ErrorCode.invalid_replica_assignment,
                f"assignment to broker {broker_id}, which is not registered",
            )
    if len(set(replicas)) != len(replicas):
        raise ApiError(
            ErrorCode.invalid_replica_assignment, f"assignment {list(replicas)} has a broker more than once"
        )
    if factor is not None and len(replicas) != factor:
        raise ApiError(
            ErrorCode.invalid_replica_assignment,
            f"assignment {list(replicas)} has {len(replicas)} replica(s), other partitions have {factor}",
        )
    if not any(image.brokers[broker_id].active for broker_id in replicas):
        raise ApiError(
            ErrorCode.invalid_replica_assignment,
            f"every broker of assignment {list(replicas)} is fenced or shutting down",
        )
    return tuple(replicas)


def _place(image: ClusterImage, count: int, factor: int, randomness: Randomness) -> list[tuple[int, ...]]:
    """Spread partitions over the active brokers, round robin from a random one."""
    brokers = image.active_brokers()
    if factor > len(image.brokers) or not brokers:
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"replication factor {factor} exceeds the number of registered brokers, {len(image.brokers)}"
            if factor > len(image.brokers)
            else "every broker is fenced or shutting down",
        )
    if factor > len(brokers):
        brokers += sorted(set(image.brokers) - set(brokers))
    start = randomness.below(len(brokers)) if len(brokers) > 1 else 0
    return [
        tuple(brokers[(start + partition + replica) % len(brokers)] for replica in range(factor))
        for partition in range(count)
    ]


class _DirectoryChoice:
    """A new replica goes to its broker's directory with the fewest replicas."""

    def __init__(self, image: ClusterImage) -> None:
        self._image = image
        self._counts: Counter[UUID] | None = None

    def choose(self, broker_id: int) -> UUID:
        offline = self._image.offline_directories
        directories = [each for each in self._image.brokers[broker_id].log_dirs if each not in offline]
        if not directories:
            return UNASSIGNED_DIRECTORY
        if len(directories) == 1:
            return directories[0]
        if self._counts is None:
            self._counts = Counter(
                directory
                for topic in self._image.topics.values()
                for partition in topic.partitions
                for directory in partition.directories
            )
        counts = self._counts
        chosen = min(directories, key=lambda directory: counts[directory])
        counts[chosen] += 1
        return chosen


def _new_partition(
    image: ClusterImage, topic_id: UUID, index: int, replicas: tuple[int, ...], directories: _DirectoryChoice
) -> Partition:
    in_sync = tuple(broker_id for broker_id in replicas if image.brokers[broker_id].active)
    if not in_sync:
        raise ApiError(
            ErrorCode.invalid_replication_factor,
            f"every broker chosen for partition {index} is fenced or shutting down",
        )
    return Partition(
        partition_id=index,
        topic_id=topic_id,
        replicas=replicas,
        isr=in_sync,
        leader=in_sync[0],
        leader_epoch=0,
        partition_epoch=0,
        directories=tuple(directories.choose(broker_id) for broker_id in replicas),
    )


def _check_change_size(partitions: int) -> None:
    if partitions > RECORDS_PER_CHANGE_MAX:
        raise ApiError(
            ErrorCode.policy_violation,
            f"{partitions} partitions in one request: at most {RECORDS_PER_CHANGE_MAX} can be made at once",
        )


def duplicates(names: Iterable[str]) -> frozenset[str]:
    """Names that occur more than once in a request: each such item is refused."""
    return frozenset(name for name, times in Counter(names).items() if times > 1)
