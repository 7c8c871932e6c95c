"""What the cluster is: topics, partitions, settings, brokers, features, producer ids.

The image is a fold over the metadata log. Every change is first a list of records (`changes`), the
records are appended to the log, and only then applied here; at start the same records are read back, so
the image after a restart is the image before it. Applying a record decides nothing: validation happened
when the record was made, and a record that does not fit is damage (`CorruptLog`), never a request error.

Rules kept:

- The image is changed in place, but what it hands out (`TopicImage`, `PartitionImage`, `BrokerImage`, a
  resource's settings) is immutable and replaced whole. A response built from such an object never shows a
  half-applied change. `apply_all` replaces each touched topic once, after the last record.
- A topic's partitions are numbered from zero without gaps: `topic.partitions[n].index == n`.
- A record that names a leader starts a new leader epoch, even when the leader is the one before: that is
  how a restart makes its epochs rise. Any change of a partition raises its partition epoch.
- Removing a topic removes its settings.
- What this broker does not act on, such as access control entries, is kept as the records that say it, and goes into
  snapshots as it came. Whether such a cluster may be served is for the start to decide (`unenforced`).
- Records of a transaction count when it ends (`CountedRecords`).
- Two images are equal when they describe the same cluster; the position in the log is not part of it,
  because a snapshot and the log it replaces reach the same image by different ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, NamedTuple
from uuid import UUID

from holdfast.broker.metadata.names import folded, has_collision_characters
from holdfast.errors import CorruptLog
from holdfast.wire.metadata_records import (
    LEADER_UNCHANGED,
    AbortTransaction,
    AccessControlEntry,
    BeginTransaction,
    BrokerRegistrationChange,
    ClearElr,
    ClientQuota,
    Config,
    DelegationToken,
    EndTransaction,
    FeatureLevel,
    FenceBroker,
    MetadataRecord,
    NoOp,
    Partition,
    PartitionChange,
    ProducerIds,
    RegisterBroker,
    RegisterController,
    RemoveAccessControlEntry,
    RemoveDelegationToken,
    RemoveTopic,
    RemoveUserScramCredential,
    Topic,
    UnfenceBroker,
    UnregisterBroker,
    UserScramCredential,
    ZkMigrationState,
)

NO_LEADER: Final = -1

UNKNOWN_DIRECTORY: Final = UUID(int=0)
"""The record is older than directories' ids."""
UNASSIGNED_DIRECTORY: Final = UUID(int=1)
"""The replica's broker chooses the directory."""
LOST_DIRECTORY: Final = UUID(int=2)
"""A replica's directory is missing, and nobody knows which one it was."""
RESERVED_DIRECTORIES: Final = frozenset((UNKNOWN_DIRECTORY, UNASSIGNED_DIRECTORY, LOST_DIRECTORY))


class UnknownMetadata(CorruptLog):
    """A record of a kind or version that this version does not know: what it says must not be dropped."""


class ResourceType(IntEnum):
    """What settings can belong to, by the protocol's numbers."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class Resource(NamedTuple):
    """The owner of settings. The broker named "" stands for all brokers."""

    type: ResourceType
    name: str


@dataclass(frozen=True, slots=True)
class PartitionImage:
    index: int
    leader: int
    """The leading broker's id, or `NO_LEADER`."""
    leader_epoch: int
    """Rises with every election; what a client or follower says is checked against it."""
    partition_epoch: int
    """Rises with every change of this partition."""
    replicas: tuple[int, ...]
    """In order of preference: the first is the preferred leader."""
    isr: tuple[int, ...]
    directories: tuple[UUID, ...]
    """The log directory of each replica, in the order of `replicas`."""
    removing_replicas: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    leader_recovery_state: int = 0
    eligible_leader_replicas: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()

    @property
    def preferred_leader(self) -> int:
        return self.replicas[0]

    def directory_of(self, broker_id: int) -> UUID:
        return self.directories[self.replicas.index(broker_id)]


@dataclass(frozen=True, slots=True)
class TopicImage:
    name: str
    topic_id: UUID
    partitions: tuple[PartitionImage, ...] = ()


_NO_SETTINGS: Final[Mapping[str, str]] = {}


UNENFORCED: Final[Mapping[type[MetadataRecord], str]] = {
    AccessControlEntry: "acls",
    UserScramCredential: "scram",
    ClientQuota: "quotas",
    DelegationToken: "tokens",
}
"""What a cluster may ask for and this broker does not do, by the names that `--serve-unenforced` has for it."""


@dataclass(slots=True)
class ClusterImage:
    topics: dict[str, TopicImage] = field(default_factory=dict)
    topics_by_id: dict[UUID, TopicImage] = field(default_factory=dict)
    configs: dict[Resource, Mapping[str, str]] = field(default_factory=dict)
    """Settings changed while running, by owner; an owner without any has no entry."""
    brokers: dict[int, RegisterBroker] = field(default_factory=dict)
    controllers: dict[int, RegisterController] = field(default_factory=dict)
    kept: dict[Hashable, MetadataRecord] = field(default_factory=dict)
    """Records that are kept and not acted on, by what a later record of their kind replaces or removes them with."""
    features: dict[str, int] = field(default_factory=dict)
    """Finalized feature levels; a feature at level zero has no entry."""
    next_producer_id: int = 0
    """The first producer id of the next block; all below have been given out."""
    offline_directories: set[UUID] = field(default_factory=set, compare=False)
    """Log directories of this broker that are out of service: nothing new goes there."""
    folds_case: bool = field(default=False, compare=False)
    """A log directory cannot tell names apart that differ in case alone: neither may topics."""
    last_offset: int = field(default=-1, compare=False)
    """Offset of the last applied record in the metadata log."""
    last_epoch: int = field(default=0, compare=False)
    """Leader epoch of the metadata log at that record."""
    _names_by_folded: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)
    """Topics whose names hold '.' or '_', by the name with '.' turned into '_'."""

    def topic(self, name: str) -> TopicImage | None:
        return self.topics.get(name)

    def topic_by_id(self, topic_id: UUID) -> TopicImage | None:
        return self.topics_by_id.get(topic_id)

    def partition(self, name: str, index: int) -> PartitionImage | None:
        topic = self.topics.get(name)
        if topic is None or not 0 <= index < len(topic.partitions):
            return None
        return topic.partitions[index]

    def settings(self, resource: Resource) -> Mapping[str, str]:
        return self.configs.get(resource, _NO_SETTINGS)

    def colliding_topics(self, name: str) -> frozenset[str]:
        """Existing topics whose metric names could not be told from `name`'s, `name` itself included."""
        return self._names_by_folded.get(folded(name), frozenset())

    def unenforced(self) -> Mapping[str, int]:
        """What the cluster asks for that this broker does not do, by kind, and how much of it."""
        kinds = (UNENFORCED[type(record)] for record in self.kept.values() if type(record) in UNENFORCED)
        return Counter(kinds)

    def active_brokers(self) -> list[int]:
        return sorted(broker.broker_id for broker in self.brokers.values() if broker.active)

    def apply(self, record: MetadataRecord) -> None:
        self.apply_all((record,))

    def apply_all(
        self,
        records: Iterable[MetadataRecord],
        *,
        last_offset: int | None = None,
        last_epoch: int | None = None,
    ) -> None:
        """Apply records in order; with their log position, when they have one."""
        drafts = _TopicDrafts(self)
        for record in records:
            self._apply_one(record, drafts)
        drafts.publish()
        if last_offset is not None:
            self.last_offset = last_offset
        if last_epoch is not None:
            self.last_epoch = last_epoch

    def _apply_one(self, record: MetadataRecord, drafts: _TopicDrafts) -> None:
        match record:
            case Topic():
                drafts.create(record)
            case Partition():
                drafts.add_partition(record)
            case PartitionChange():
                drafts.change_partition(record)
            case RemoveTopic():
                drafts.remove(record.topic_id)
            case Config():
                self._apply_config(record)
            case FeatureLevel():
                self._apply_feature(record)
            case ProducerIds():
                self._apply_producer_ids(record)
            case RegisterBroker():
                self.brokers[record.broker_id] = record
            case BrokerRegistrationChange():
                self._apply_registration_change(record)
            case FenceBroker() | UnfenceBroker():
                fenced = 1 if isinstance(record, FenceBroker) else -1
                self._apply_registration_change(
                    BrokerRegistrationChange(broker_id=record.id, broker_epoch=record.epoch, fenced=fenced)
                )
            case UnregisterBroker():
                self._registered(record.broker_id, record.broker_epoch)
                del self.brokers[record.broker_id]
            case RegisterController():
                self.controllers[record.controller_id] = record
            case ClearElr():
                drafts.clear_elr(record.topic_name)
            case NoOp() | AbortTransaction():  # of a transaction that nothing was applied of
                pass
            case _:
                self._apply_kept(record)

    def _apply_kept(self, record: MetadataRecord) -> None:
        match record:
            case AccessControlEntry():
                self.kept["acls", record.id] = record
            case RemoveAccessControlEntry():
                self.kept.pop(("acls", record.id), None)
            case UserScramCredential():
                self.kept["scram", record.name, record.mechanism] = record
            case RemoveUserScramCredential():
                self.kept.pop(("scram", record.name, record.mechanism), None)
            case ClientQuota():
                key = ("quotas", record.entity, record.key)
                self.kept[key] = record
                if record.remove:
                    del self.kept[key]
            case DelegationToken():
                self.kept["tokens", record.token_id] = record
            case RemoveDelegationToken():
                self.kept.pop(("tokens", record.token_id), None)
            case ZkMigrationState():
                self.kept["zk",] = record
            case _:
                raise UnknownMetadata(f"metadata record {record!r} is of a kind this version does not know")

    def _apply_config(self, record: Config) -> None:
        try:
            resource = Resource(ResourceType(record.resource_type), record.resource_name)
        except ValueError:
            raise CorruptLog(f"metadata log has settings of resource type {record.resource_type}") from None
        settings = dict(self.settings(resource))
        if record.value is None:
            settings.pop(record.name, None)
        else:
            settings[record.name] = record.value
        if settings:
            self.configs[resource] = settings
        else:
            self.configs.pop(resource, None)

    def _apply_feature(self, record: FeatureLevel) -> None:
        if record.feature_level == 0:
            self.features.pop(record.name, None)
        else:
            self.features[record.name] = record.feature_level

    def _apply_producer_ids(self, record: ProducerIds) -> None:
        if record.next_producer_id < self.next_producer_id:
            raise CorruptLog(
                f"metadata log moves the next producer id back from {self.next_producer_id} "
                f"to {record.next_producer_id}: ids would be given twice"
            )
        self.next_producer_id = record.next_producer_id

    def _apply_registration_change(self, record: BrokerRegistrationChange) -> None:
        broker = self._registered(record.broker_id, record.broker_epoch)
        cordoned = record.cordoned_log_dirs
        shutdown = record.in_controlled_shutdown
        self.brokers[record.broker_id] = replace(
            broker,
            version=-1,  # the newest, which has room for all of it
            fenced=record.fenced > 0 if record.fenced else broker.fenced,
            in_controlled_shutdown=shutdown > 0 if shutdown else broker.in_controlled_shutdown,
            log_dirs=record.log_dirs or broker.log_dirs,
            cordoned_log_dirs=broker.cordoned_log_dirs if cordoned is None else cordoned,
        )

    def _registered(self, broker_id: int, broker_epoch: int) -> RegisterBroker:
        broker = self.brokers.get(broker_id)
        if broker is None or broker.broker_epoch != broker_epoch:
            raise CorruptLog(
                f"metadata log changes broker {broker_id} of epoch {broker_epoch}, which is not registered"
            )
        return broker

    def _publish_topic(self, topic: TopicImage) -> None:
        if topic.name not in self.topics and has_collision_characters(topic.name):
            key = folded(topic.name)
            self._names_by_folded[key] = self._names_by_folded.get(key, frozenset()) | {topic.name}
        self.topics[topic.name] = topic
        self.topics_by_id[topic.topic_id] = topic

    def _withdraw_topic(self, topic: TopicImage) -> None:
        del self.topics[topic.name]
        del self.topics_by_id[topic.topic_id]
        if has_collision_characters(topic.name):
            key = folded(topic.name)
            remaining = self._names_by_folded[key] - {topic.name}
            if remaining:
                self._names_by_folded[key] = remaining
            else:
                del self._names_by_folded[key]


class _TopicDrafts:
    """Topics under change while a list of records is applied: lists, turned into tuples once at the end."""

    def __init__(self, image: ClusterImage) -> None:
        self._image = image
        self._partitions: dict[UUID, list[PartitionImage]] = {}
        self._topics: dict[UUID, TopicImage] = {}

    def create(self, record: Topic) -> None:
        if record.name in self._image.topics or self._find(record.topic_id) is not None:
            raise CorruptLog(f"metadata log creates topic {record.name!r} ({record.topic_id}) twice")
        topic = TopicImage(record.name, record.topic_id)
        # Published at once, still without partitions, so that later records of this list find it; nobody
        # else looks before `publish`.
        self._image._publish_topic(topic)
        self._open(topic)

    def add_partition(self, record: Partition) -> None:
        partitions = self._partitions_of(record.topic_id)
        if record.partition_id != len(partitions):
            raise CorruptLog(
                f"metadata log adds partition {record.partition_id} to topic {record.topic_id}, "
                f"which has {len(partitions)}"
            )
        partitions.append(_created(record))

    def change_partition(self, record: PartitionChange) -> None:
        partitions = self._partitions_of(record.topic_id)
        if not 0 <= record.partition_id < len(partitions):
            raise CorruptLog(
                f"metadata log changes partition {record.partition_id} of topic {record.topic_id}, "
                f"which has {len(partitions)}"
            )
        partitions[record.partition_id] = _changed(partitions[record.partition_id], record)

    def clear_elr(self, topic_name: str) -> None:
        """Forget the eligible leader replicas of one topic or, named "", of all."""
        for topic in list(self._image.topics.values()):
            if topic_name not in ("", topic.name):
                continue
            partitions = self._partitions_of(topic.topic_id)
            for index, partition in enumerate(partitions):
                if partition.eligible_leader_replicas or partition.last_known_elr:
                    forgotten = PartitionChange(
                        partition_id=index,
                        topic_id=topic.topic_id,
                        eligible_leader_replicas=(),
                        last_known_elr=(),
                    )
                    partitions[index] = _changed(partition, forgotten)

    def remove(self, topic_id: UUID) -> None:
        topic = self._find(topic_id)
        if topic is None:
            raise CorruptLog(f"metadata log removes topic {topic_id}, which does not exist")
        self._topics.pop(topic_id, None)
        self._partitions.pop(topic_id, None)
        self._image._withdraw_topic(topic)
        self._image.configs.pop(Resource(ResourceType.TOPIC, topic.name), None)

    def publish(self) -> None:
        for topic_id, partitions in self._partitions.items():
            self._image._publish_topic(replace(self._topics[topic_id], partitions=tuple(partitions)))

    def _find(self, topic_id: UUID) -> TopicImage | None:
        return self._topics.get(topic_id) or self._image.topics_by_id.get(topic_id)

    def _open(self, topic: TopicImage) -> list[PartitionImage]:
        self._topics[topic.topic_id] = topic
        return self._partitions.setdefault(topic.topic_id, list(topic.partitions))

    def _partitions_of(self, topic_id: UUID) -> list[PartitionImage]:
        partitions = self._partitions.get(topic_id)
        if partitions is not None:
            return partitions
        topic = self._image.topics_by_id.get(topic_id)
        if topic is None:
            raise CorruptLog(f"metadata log names topic {topic_id}, which does not exist")
        return self._open(topic)


def _created(record: Partition) -> PartitionImage:
    return PartitionImage(
        index=record.partition_id,
        leader=record.leader,
        leader_epoch=record.leader_epoch,
        partition_epoch=record.partition_epoch,
        replicas=tuple(record.replicas),
        isr=tuple(record.isr),
        directories=tuple(record.directories) or (UNKNOWN_DIRECTORY,) * len(record.replicas),
        removing_replicas=tuple(record.removing_replicas),
        adding_replicas=tuple(record.adding_replicas),
        leader_recovery_state=record.leader_recovery_state,
        eligible_leader_replicas=tuple(record.eligible_leader_replicas or ()),
        last_known_elr=tuple(record.last_known_elr or ()),
    )


def _changed(old: PartitionImage, record: PartitionChange) -> PartitionImage:
    elected = record.leader != LEADER_UNCHANGED
    recovery = record.leader_recovery_state
    return PartitionImage(
        index=old.index,
        leader=record.leader if elected else old.leader,
        leader_epoch=old.leader_epoch + 1 if elected else old.leader_epoch,
        partition_epoch=old.partition_epoch + 1,
        replicas=_or_old(record.replicas, old.replicas),
        isr=_or_old(record.isr, old.isr),
        directories=old.directories if record.directories is None else tuple(record.directories),
        removing_replicas=_or_old(record.removing_replicas, old.removing_replicas),
        adding_replicas=_or_old(record.adding_replicas, old.adding_replicas),
        leader_recovery_state=old.leader_recovery_state if recovery < 0 else recovery,
        eligible_leader_replicas=_or_old(record.eligible_leader_replicas, old.eligible_leader_replicas),
        last_known_elr=_or_old(record.last_known_elr, old.last_known_elr),
    )


def _or_old(new: Iterable[int] | None, old: tuple[int, ...]) -> tuple[int, ...]:
    return old if new is None else tuple(new)


class CountedRecords:
    """Which records of the log count, in their order: those of a transaction when it ends, or never.

    A log may end inside a transaction, of which nothing counts then. Whoever goes on with the log writes
    `AbortTransaction` first, or what follows would be taken for a part of it.
    """

    def __init__(self) -> None:
        self._pending: list[MetadataRecord] | None = None

    @property
    def is_in_transaction(self) -> bool:
        return self._pending is not None

    def take(self, records: Iterable[MetadataRecord]) -> list[MetadataRecord]:
        """The records that count now that these have been read."""
        counted: list[MetadataRecord] = []
        for record in records:
            match record:
                case BeginTransaction() if self._pending is None:
                    self._pending = []
                case EndTransaction() if self._pending is not None:
                    counted += self._pending
                    self._pending = None
                case AbortTransaction() if self._pending is not None:
                    self._pending = None
                case BeginTransaction() | EndTransaction() | AbortTransaction():
                    raise CorruptLog(
                        f"metadata log has {type(record).__name__} "
                        f"{'inside' if self._pending is not None else 'outside'} a transaction"
                    )
                case _:
                    (counted if self._pending is None else self._pending).append(record)
        return counted
