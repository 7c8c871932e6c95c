"""What must hold of every history, however the broker was killed, cut off or starved of disk.

Each checker takes events (`holdfast.testing.history`) one at a time, raises `Violation` at the first that
breaks its rule, and never looks at the broker. The rules:

RecordsChecker
    acknowledged-lost    acknowledged as durable and not deleted: read by every later reader, at its offset
    offset-reused        an offset once acknowledged as durable or shown never holds anything else
    stored-twice         a batch has one offset, in one partition
    changed              what is read is what was sent, whole batches only
    out-of-order         batches of one producer lie in the order they were sent
    refused-but-stored   what the broker refused is never read
    watermark-moved-back the end shown to clients never moves back, and no record is shown beyond it
    start-moved-back     the start shown to clients never moves back, nor forward unasked
    gap                  readers see every offset from where they ask
    sequence-lost        a batch that follows a producer's last acknowledged one is never out of sequence
ProducerIdsChecker
    producer-id-reused   no (producer id, epoch) is given twice
TopicsChecker
    topic-lost, topic-back, topic-id-reused, partitions-lost, config-lost: an acknowledged change of the
    cluster's metadata stays, and nothing appears unasked
    leader-epoch         rises at every start, never falls

An outcome the client never learnt may be either; both, or half of it, breaks one of the rules above.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from holdfast.testing import history
from holdfast.testing.history import Event, Partition


class Violation(AssertionError):
    """A history that breaks a rule."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def _broken(rule: str, message: str) -> NoReturn:
    raise Violation(rule, message)


class _Batch(NamedTuple):
    partition: Partition
    producer: str
    number: int
    values: tuple[bytes, ...]

    def __str__(self) -> str:
        return f"batch {self.number} of {self.producer} ({len(self.values)} records)"


@dataclass(slots=True)
class _PartitionHistory:
    owner: dict[int, _Batch] = field(default_factory=dict)
    """The batch at each offset that was acknowledged as durable or shown; it may never change."""
    base_of: dict[tuple[str, int], int] = field(default_factory=dict)
    """Where each of those batches lies, by (producer, number)."""
    order: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """(number, base offset) of each producer's batches, by number."""
    epochs: dict[int, int] = field(default_factory=dict)
    """Leader epoch of batches shown, by base offset."""
    end_floor: int = 0
    """Every later reader must be shown an end at least here."""
    start_floor: int = 0
    """The log start that was shown or acknowledged."""
    start_ceiling: int = 0
    """How far deletions that were asked for may have moved the log start."""
    may_expire: bool = False


class _Floor(NamedTuple):
    end: int
    start: int


class RecordsChecker:
    """Records: none lost, none twice, none changed, in order, to every reader alike."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, _PartitionHistory] = {}
        self._batches: dict[tuple[str, int], _Batch] = {}
        self._by_first_value: dict[bytes, _Batch] = {}
        self._refused: set[tuple[str, int]] = set()
        self._floors: dict[tuple[str, Partition], _Floor] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            history.BatchSent: self._sent,
            history.BatchAcknowledged: self._acknowledged,
            history.BatchRefused: self._refuse,
            history.ReadBegun: self._begin,
            history.BatchesRead: self._read,
            history.ReadOutOfRange: self._out_of_range,
            history.OffsetsListed: self._listed,
            history.DeletionRequested: self._deletion_requested,
            history.DeletionAcknowledged: self._deleted,
            history.ExpiryAllowed: self._expiry_allowed,
            history.SequenceRefused: self._sequence_refused,
        }

    def observe(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def end_floor(self, partition: Partition) -> int:
        """The end every reader that begins now must be shown, or more."""
        return self._of(partition).end_floor

    def _of(self, partition: Partition) -> _PartitionHistory:
        found = self._partitions.get(partition)
        if found is None:
            found = self._partitions[partition] = _PartitionHistory()
        return found

    def _sent(self, event: history.BatchSent) -> None:
        batch = _Batch(*event)
        self._batches[batch.producer, batch.number] = batch
        first = batch.values[0]
        if first in self._by_first_value:
            raise ValueError(f"a history needs unique values; {first!r} was sent before")
        self._by_first_value[first] = batch

    def _acknowledged(self, event: history.BatchAcknowledged) -> None:
        batch = self._batches[event.producer, event.number]
        if event.base_offset < 0:
            _broken("changed", f"{batch} was acknowledged at offset {event.base_offset}")
        if not event.durable:
            return
        self._claim(batch, event.base_offset, "was acknowledged")
        partition = self._of(event.partition)
        partition.end_floor = max(partition.end_floor, event.base_offset + len(batch.values))

    def _refuse(self, event: history.BatchRefused) -> None:
        key = event.producer, event.number
        self._refused.add(key)
        if key in self._of(event.partition).base_of:
            _broken(
                "refused-but-stored",
                f"{self._batches[key]} was refused after it had been shown or acknowledged",
            )

    def _claim(self, batch: _Batch, base: int, how: str) -> None:
        """The batch is at `base`, for ever."""
        key = batch.producer, batch.number
        partition = self._of(batch.partition)
        known = partition.base_of.get(key)
        if known is not None:
            if known != base:
                _broken("stored-twice", f"{batch} {how} at {base} of {batch.partition}, and is at {known}")
            return
        if key in self._refused:
            _broken("refused-but-stored", f"{batch} {how} at {base} of {batch.partition}, and was refused")
        for offset in range(base, base + len(batch.values)):
            other = partition.owner.get(offset)
            if other is not None:
                _broken(
                    "offset-reused", f"{batch} {how} at {base} of {batch.partition}; {offset} holds {other}"
                )
            partition.owner[offset] = batch
        partition.base_of[key] = base
        self._place(partition, batch, base)

    def _place(self, partition: _PartitionHistory, batch: _Batch, base: int) -> None:
        order = partition.order.setdefault(batch.producer, [])
        entry = (batch.number, base)
        at = bisect_left(order, entry)
        before = order[at - 1] if at else None
        after = order[at] if at < len(order) else None
        if (before is not None and before[1] > base) or (after is not None and after[1] < base):
            neighbour = before if before is not None and before[1] > base else after
            _broken(
                "out-of-order", f"{batch} is at {base} of {batch.partition}, but (number, offset) {neighbour}"
            )
        insort(order, entry)

    def _begin(self, event: history.ReadBegun) -> None:
        partition = self._of(event.partition)
        self._floors[event.reader, event.partition] = _Floor(partition.end_floor, partition.start_floor)

    def _floor(self, reader: str, partition: Partition) -> _Floor:
        return self._floors.get((reader, partition), _Floor(0, 0))

    def _read(self, event: history.BatchesRead) -> None:
        partition = self._of(event.partition)
        floor = self._floor(event.reader, event.partition)
        name = f"{event.reader} at {event.position} of {event.partition}"
        self._check_end(partition, floor, event.high_watermark, name)
        if event.log_start >= 0:
            self._check_start(partition, floor, event.log_start, name)
        position = event.position
        for index, stored in enumerate(event.batches):
            if stored.base_offset > position or (index and stored.base_offset != position):
                _broken("gap", f"{name}: expected {position}, read a batch at {stored.base_offset}")
            end = stored.base_offset + len(stored.values)
            if end <= position:
                _broken(
                    "gap", f"{name}: expected {position}, read a batch of {stored.base_offset} to {end - 1}"
                )
            self._check_stored(event.partition, partition, stored, name)
            position = end
        if position > event.high_watermark and event.batches:
            _broken(
                "watermark-moved-back",
                f"{name}: shown up to {position}, beyond the end {event.high_watermark}",
            )
        if not event.batches and not event.limited and position < event.high_watermark:
            _broken("acknowledged-lost", f"{name}: nothing, although the end is {event.high_watermark}")

    def _check_stored(
        self, identity: Partition, partition: _PartitionHistory, stored: history.StoredBatch, name: str
    ) -> None:
        """A stored batch is one or more sent batches, whole and unchanged."""
        values, base = stored.values, stored.base_offset
        if not values:
            _broken("changed", f"{name}: an empty batch at {base}")
        known = partition.epochs.setdefault(base, stored.leader_epoch)
        if known != stored.leader_epoch:
            _broken("changed", f"{name}: leader epoch {stored.leader_epoch} at {base}, and before {known}")
        index = 0
        while index < len(values):
            batch = self._by_first_value.get(values[index])
            if batch is None or values[index : index + len(batch.values)] != batch.values:
                _broken("changed", f"{name}: {values[index][:40]!r} at {base + index} was not sent so")
            if batch.partition != identity:
                _broken("changed", f"{name}: {batch} was sent to {batch.partition}")
            self._claim(batch, base + index, "was read")
            index += len(batch.values)

    def _check_end(self, partition: _PartitionHistory, floor: _Floor, end: int, name: str) -> None:
        if end < floor.end:
            last = partition.owner.get(floor.end - 1)
            rule = "watermark-moved-back" if last is None else "acknowledged-lost"
            _broken(
                rule, f"{name}: the end is {end}, and was shown or acknowledged up to {floor.end} ({last})"
            )
        partition.end_floor = max(partition.end_floor, end)

    def _check_start(self, partition: _PartitionHistory, floor: _Floor, start: int, name: str) -> None:
        if start < floor.start:
            _broken("start-moved-back", f"{name}: the log starts at {start}, and started at {floor.start}")
        asked = partition.start_ceiling
        if start > asked and not partition.may_expire:
            _broken(
                "start-moved-back", f"{name}: the log starts at {start}; deletion was asked up to {asked}"
            )
        partition.start_floor = max(partition.start_floor, start)

    def _out_of_range(self, event: history.ReadOutOfRange) -> None:
        partition = self._of(event.partition)
        floor = self._floor(event.reader, event.partition)
        if partition.may_expire or event.position < partition.start_ceiling:
            return
        if event.position <= floor.end:
            _broken(
                "acknowledged-lost",
                f"{event.reader} at {event.position} of {event.partition}: out of range, below {floor.end}",
            )

    def _listed(self, event: history.OffsetsListed) -> None:
        partition = self._of(event.partition)
        floor = self._floor(event.reader, event.partition)
        name = f"{event.reader} listing {event.partition}"
        if event.end >= 0:
            self._check_end(partition, floor, event.end, name)
        if event.start >= 0:
            self._check_start(partition, floor, event.start, name)

    def _deletion_requested(self, event: history.DeletionRequested) -> None:
        partition = self._of(event.partition)
        partition.start_ceiling = max(partition.start_ceiling, event.before_offset)

    def _deleted(self, event: history.DeletionAcknowledged) -> None:
        partition = self._of(event.partition)
        if event.log_start > partition.start_ceiling and not partition.may_expire:
            _broken(
                "start-moved-back", f"{event.partition}: deleted up to {event.log_start}, further than asked"
            )
        partition.start_floor = max(partition.start_floor, event.log_start)

    def _sequence_refused(self, event: history.SequenceRefused) -> None:
        partition = self._of(event.partition)
        if partition.start_ceiling or partition.may_expire:
            # What a producer sent before its last batch is remembered only while the log still has it.
            return
        batch = self._batches[event.producer, event.number]
        _broken("sequence-lost", f"{batch} follows an acknowledged one and was refused as {event.error}")

    def _expiry_allowed(self, event: history.ExpiryAllowed) -> None:
        self._of(event.partition).may_expire = True


class ProducerIdsChecker:
    """No producer id is given twice with one epoch, not even after power loss."""

    def __init__(self) -> None:
        self._given: set[tuple[int, int]] = set()

    def observe(self, event: Event) -> None:
        if isinstance(event, history.ProducerIdGiven):
            if event in self._given:
                _broken(
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


class TopicsChecker:
    """The cluster's metadata: acknowledged changes stay, leader epochs rise."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Topic] = {}
        self._current: dict[str, _Topic] = {}
        self._requested: dict[str, int] = {}
        """Creations asked for, with the partitions asked for."""
        self._epochs: dict[Partition, int] = {}
        self._epochs_before_start: dict[Partition, int] = {}
        self._expected: dict[str, list[tuple[_Topic, int]]] = {}
        self._configs: dict[tuple[str, str], set[str | None]] = {}
        """Values a setting may have; None stands for whatever it was before the first alteration."""
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            history.BrokerStarted: self._started,
            history.TopicCreationRequested: self._creation_requested,
            history.TopicCreated: self._created,
            history.PartitionsRequested: self._partitions_requested,
            history.PartitionsCreated: self._partitions_created,
            history.TopicDeletionRequested: self._deletion_requested,
            history.TopicDeleted: self._topic_deleted,
            history.MetadataBegun: self._begun,
            history.MetadataRead: self._metadata_read,
            history.PartitionMissing: self._missing,
            history.ConfigRequested: self._config_requested,
            history.ConfigAltered: self._config_altered,
            history.ConfigRead: self._config_read,
        }

    def observe(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _started(self, _: history.BrokerStarted) -> None:
        self._epochs_before_start = dict(self._epochs)

    def _creation_requested(self, event: history.TopicCreationRequested) -> None:
        self._requested[event.name] = event.partitions

    def _topic(self, name: str, topic_id: str) -> _Topic:
        """The topic of this id, met for the first time perhaps."""
        known = self._by_id.get(topic_id)
        if known is not None:
            if known.name != name:
                _broken("topic-id-reused", f"{topic_id} was {known.name} and is {name}")
            return known
        current = self._current.get(name)
        if current is not None and not current.deletion_requested:
            _broken("topic-lost", f"{name} was {current.topic_id} and is {topic_id}; nobody deleted it")
        if name not in self._requested:
            _broken("topic-back", f"{name} ({topic_id}) exists, and nobody created it")
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

    def _begun(self, event: history.MetadataBegun) -> None:
        self._expected[event.reader] = [
            (topic, topic.partitions_floor)
            for topic in self._by_id.values()
            if topic.acknowledged and not topic.deletion_requested
        ]

    def _metadata_read(self, event: history.MetadataRead) -> None:
        for topic, partitions in self._expected.get(event.reader, ()):
            seen = event.topics.get(topic.name)
            if not topic.deletion_requested and (seen is None or seen.topic_id != topic.topic_id):
                _broken("topic-lost", f"{topic.name} ({topic.topic_id}) is gone; nobody deleted it")
            if seen is not None and seen.topic_id == topic.topic_id and len(seen.leader_epochs) < partitions:
                _broken(
                    "partitions-lost",
                    f"{topic.name}: {len(seen.leader_epochs)} partitions, were {partitions}",
                )
        for name, seen in event.topics.items():
            topic = self._topic(name, seen.topic_id)
            topic.acknowledged = True
            if topic.deleted:
                _broken("topic-back", f"{name} ({seen.topic_id}) was deleted and is back")
            count = len(seen.leader_epochs)
            if count > topic.partitions_ceiling:
                _broken(
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
            _broken(
                "leader-epoch",
                f"{partition}: epoch {epoch}; {last} was seen, {before_start} before this start",
            )
        self._epochs[partition] = epoch

    def _missing(self, event: history.PartitionMissing) -> None:
        topic = self._by_id.get(event.partition[0])
        if topic is None or topic.deletion_requested or not topic.acknowledged:
            return
        if event.partition[1] < topic.partitions_floor:
            _broken(
                "topic-lost", f"{event.reader}: {event.partition} is unknown; nobody deleted {topic.name}"
            )

    def _config_requested(self, event: history.ConfigRequested) -> None:
        self._configs.setdefault((event.name, event.key), {None}).add(event.value)

    def _config_altered(self, event: history.ConfigAltered) -> None:
        self._configs[event.name, event.key] = {event.value}

    def _config_read(self, event: history.ConfigRead) -> None:
        """One writer at a time: the value is the acknowledged one, or one asked for since."""
        allowed = self._configs.get((event.name, event.key))
        if allowed is not None and None not in allowed and event.value not in allowed:
            _broken("config-lost", f"{event.key} of {event.name} is {event.value}; expected one of {allowed}")
        self._configs[event.name, event.key] = {event.value}


class Checkers:
    """All checkers over one history."""

    def __init__(self) -> None:
        self.records = RecordsChecker()
        self.producer_ids = ProducerIdsChecker()
        self.topics = TopicsChecker()

    def observe(self, event: Event) -> None:
        self.records.observe(event)
        self.producer_ids.observe(event)
        self.topics.observe(event)


def check(events: Iterable[Event]) -> None:
    """Raise `Violation` when the history breaks a rule."""
    checkers = Checkers()
    for event in events:
        checkers.observe(event)
