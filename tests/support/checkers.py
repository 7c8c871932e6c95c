"""What must hold of every history, however the broker was killed, cut off or starved of disk.

Each checker takes events (`tests.support.history`) one at a time, raises `Violation` at the first that
breaks its rule, and never looks at the broker. Their rules stand in their modules:

    checkers_records        records: none lost, none twice, none changed; compacted topics keep the last value of each
                            key; lookups by time
    checkers_coordinators   all of a transaction or none; members and what they own; committed offsets
    here                    the cluster's metadata: producer ids are given once, acknowledged changes of topics stay

An outcome the client never learnt may be either; both, or half of it, breaks one of the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.support import history
from tests.support.checkers_coordinators import MembershipChecker, OffsetsChecker, TransactionsChecker
from tests.support.checkers_records import CompactionChecker, LookupsChecker, RecordsChecker
from tests.support.history import Checker, Event, Partition, Violation, broken


class ProducerIdsChecker:
    """No producer id is given twice with one epoch, not even after power loss."""

    def __init__(self) -> None:
        self._given: set[tuple[int, int]] = set()

    def observe(self, event: Event) -> None:
        if isinstance(event, history.ProducerIdGiven):
            if event in self._given:
                broken(
                    "producer-id-reused",
                    f"producer id {event.producer_id}, epoch {event.epoch}, was given before",
                )
            self._given.add((event.producer_id, event.epoch))


@dataclass(slots=True)
class _Topic:
    name: str
    topic_id: str
    partitions_floor: int
    partitions_ceiling: int
    deletion_requested: bool = False
    deleted: bool = False
    acknowledged: bool = False


class TopicsChecker(Checker):
    """The cluster's metadata: acknowledged changes stay, leader epochs rise."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Topic] = {}
        self._current: dict[str, _Topic] = {}
        self._requested: dict[str, int] = {}
        """Creations asked for, with the partitions asked for."""
        self._epochs: dict[Partition, int] = {}
        self._epochs_before_start: dict[Partition, int] = {}
        self._expected: dict[str, list[tuple[_Topic, int]]] = {}
        self._mentioned: set[str] = set()
        self._mentioned_before: dict[str, frozenset[str]] = {}
        """Ids that were mentioned when each reader's request left."""
        self._configs: dict[tuple[str, str], set[str | None]] = {}
        """Values a setting may have; None stands for whatever it was before the first alteration."""
        self.handlers = {
            history.BrokerStarted: self._started,
            history.TopicCreationRequested: self._creation_requested,
            history.TopicCreated: self._created,
            history.PartitionsRequested: self._partitions_requested,
            history.PartitionsCreated: self._partitions_created,
            history.TopicDeletionRequested: self._deletion_requested,
            history.TopicDeleted: self._topic_deleted,
            history.TopicMentioned: self._topic_mentioned,
            history.MetadataBegun: self._begun,
            history.MetadataRead: self._metadata_read,
            history.PartitionMissing: self._missing,
            history.ConfigRequested: self._config_requested,
            history.ConfigAltered: self._config_altered,
            history.ConfigRead: self._config_read,
        }

    def _started(self, _: history.BrokerStarted) -> None:
        self._epochs_before_start = dict(self._epochs)

    def _creation_requested(self, event: history.TopicCreationRequested) -> None:
        self._requested[event.name] = event.partitions

    def _topic(self, name: str, topic_id: str) -> _Topic:
        """The topic of this id, met for the first time perhaps."""
        known = self._by_id.get(topic_id)
        if known is not None:
            if known.name != name:
                broken("topic-id-reused", f"{topic_id} was {known.name} and is {name}")
            return known
        current = self._current.get(name)
        if current is not None and not current.deletion_requested:
            broken("topic-lost", f"{name} was {current.topic_id} and is {topic_id}; nobody deleted it")
        if name not in self._requested:
            broken("topic-back", f"{name} ({topic_id}) exists, and nobody created it")
        topic = _Topic(name, topic_id, self._requested[name], self._requested[name])
        if current is not None:
            self._configs = {key: value for key, value in self._configs.items() if key[0] != name}
        self._by_id[topic_id] = self._current[name] = topic
        return topic

    def _created(self, event: history.TopicCreated) -> None:
        topic = self._topic(event.name, event.topic_id)
        topic.acknowledged = True

    def _partitions_requested(self, event: history.PartitionsRequested) -> None:
        topic = self._current[event.name]
        topic.partitions_ceiling = max(topic.partitions_ceiling, event.partitions)

    def _partitions_created(self, event: history.PartitionsCreated) -> None:
        topic = self._current[event.name]
        topic.partitions_floor = max(topic.partitions_floor, event.partitions)

    def _deletion_requested(self, event: history.TopicDeletionRequested) -> None:
        topic = self._current.get(event.name)
        if topic is not None:
            topic.deletion_requested = True

    def _topic_deleted(self, event: history.TopicDeleted) -> None:
        topic = self._current.get(event.name)
        if topic is not None:
            topic.deleted = True

    def _topic_mentioned(self, event: history.TopicMentioned) -> None:
        self._mentioned.add(event.topic_id)

    def _begun(self, event: history.MetadataBegun) -> None:
        self._mentioned_before[event.reader] = frozenset(self._mentioned)
        self._expected[event.reader] = [
            (topic, topic.partitions_floor)
            for topic in self._by_id.values()
            if topic.acknowledged and not topic.deletion_requested
        ]

    def _metadata_read(self, event: history.MetadataRead) -> None:
        for topic, partitions in self._expected.get(event.reader, ()):
            seen = event.topics.get(topic.name)
            if not topic.deletion_requested and (seen is None or seen.topic_id != topic.topic_id):
                broken("topic-lost", f"{topic.name} ({topic.topic_id}) is gone; nobody deleted it")
            if seen is not None and seen.topic_id == topic.topic_id and len(seen.leader_epochs) < partitions:
                broken(
                    "partitions-lost",
                    f"{topic.name}: {len(seen.leader_epochs)} partitions, were {partitions}",
                )
        ids = {seen.topic_id for seen in event.topics.values()}
        for topic_id in self._mentioned_before.get(event.reader, frozenset()) - ids:
            known = self._by_id.get(topic_id)
            if known is None or not known.deletion_requested:
                broken("topic-lost", f"topic {topic_id} was mentioned and is gone; nobody deleted it")
        for name, seen in event.topics.items():
            topic = self._topic(name, seen.topic_id)
            topic.acknowledged = True
            if topic.deleted:
                broken("topic-back", f"{name} ({seen.topic_id}) was deleted and is back")
            count = len(seen.leader_epochs)
            if count > topic.partitions_ceiling:
                broken(
                    "partitions-lost",
                    f"{name}: {count} partitions; {topic.partitions_ceiling} were asked for",
                )
            topic.partitions_floor = max(topic.partitions_floor, count)
            for index, epoch in enumerate(seen.leader_epochs):
                if epoch >= 0:
                    self._check_epoch((seen.topic_id, index), epoch)

    def _check_epoch(self, partition: Partition, epoch: int) -> None:
        before_start = self._epochs_before_start.get(partition, -1)
        last = self._epochs.get(partition, -1)
        if epoch < last or epoch <= before_start:
            broken(
                "leader-epoch",
                f"{partition}: epoch {epoch}; {last} was seen, {before_start} before this start",
            )
        self._epochs[partition] = epoch

    def _missing(self, event: history.PartitionMissing) -> None:
        topic = self._by_id.get(event.partition[0])
        if topic is None or topic.deletion_requested or not topic.acknowledged:
            return
        if event.partition[1] < topic.partitions_floor:
            broken("topic-lost", f"{event.reader}: {event.partition} is unknown; nobody deleted {topic.name}")

    def _config_requested(self, event: history.ConfigRequested) -> None:
        self._configs.setdefault((event.name, event.key), {None}).add(event.value)

    def _config_altered(self, event: history.ConfigAltered) -> None:
        self._configs[event.name, event.key] = {event.value}

    def _config_read(self, event: history.ConfigRead) -> None:
        """One writer at a time: the value is the acknowledged one, or one asked for since."""
        allowed = self._configs.get((event.name, event.key))
        if allowed is not None and None not in allowed and event.value not in allowed:
            broken("config-lost", f"{event.key} of {event.name} is {event.value}; expected one of {allowed}")
        self._configs[event.name, event.key] = {event.value}


__all__ = ["Checkers", "Violation", "check"]


class Checkers:
    """All checkers over one history."""

    def __init__(self) -> None:
        self.records = RecordsChecker()
        self.transactions = TransactionsChecker()
        self.membership = MembershipChecker()
        self.positions = OffsetsChecker(self.transactions, self.membership)
        self._all = (
            self.records,
            self.transactions,
            self.membership,
            self.positions,
            CompactionChecker(self.transactions),
            LookupsChecker(self.records),
            ProducerIdsChecker(),
            TopicsChecker(),
        )

    def observe(self, event: Event) -> None:
        for checker in self._all:
            checker.observe(event)


def check(events: Iterable[Event]) -> None:
    """Raise `Violation` when the history breaks a rule."""
    checkers = Checkers()
    for event in events:
        checkers.observe(event)
