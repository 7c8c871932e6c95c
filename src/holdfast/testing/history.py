"""What clients did and saw, as events: the input of `holdfast.testing.checkers`.

A history is a sequence of these events in the order in which one observer outside the broker saw them. A
simulator writes it, and so can any test that kills real processes. The observer sees requests leave and
answers arrive, never what happens in between, so what an answer must reflect is fixed when its request
leaves: `ReadBegun` and `MetadataBegun` come before the request, the event with the answer after it, and
whatever was acknowledged before the first must show in the second.

A partition is named by its topic's identity and its index; the identity is the topic id where topics are
deleted and made anew, or simply the name where they are not. Every record value of a history is unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Partition: TypeAlias = tuple[str, int]


class BatchSent(NamedTuple):
    """Records that stand or fall together, handed to the broker for the first time.

    `number` rises with every batch of one `producer`; that is the order in which they must be stored.
    A batch sent again (same values, same sequence) makes no second event.
    """

    partition: Partition
    producer: str
    number: int
    values: tuple[bytes, ...]


class BatchAcknowledged(NamedTuple):
    partition: Partition
    producer: str
    number: int
    base_offset: int
    durable: bool
    """The acknowledgement promises durability: acks=all, flushed in groups."""


class BatchRefused(NamedTuple):
    """The broker said that it did not store the batch, and every sending of it was answered so."""

    partition: Partition
    producer: str
    number: int


class SequenceRefused(NamedTuple):
    """The broker found the sequence of a batch wrong, although every earlier one was acknowledged."""

    partition: Partition
    producer: str
    number: int
    error: str


class ReadBegun(NamedTuple):
    """A reader's request for records or offsets leaves."""

    reader: str
    partition: Partition


class StoredBatch(NamedTuple):
    base_offset: int
    values: tuple[bytes, ...]
    leader_epoch: int = -1


class BatchesRead(NamedTuple):
    reader: str
    partition: Partition
    position: int
    batches: tuple[StoredBatch, ...]
    high_watermark: int
    log_start: int = -1
    limited: bool = False
    """The request's own byte limits may have kept the answer short or empty."""


class ReadOutOfRange(NamedTuple):
    """The broker said that it has no record at `position`."""

    reader: str
    partition: Partition
    position: int


class OffsetsListed(NamedTuple):
    """The first offset, or the end, as the broker told; -1 for the one not asked for."""

    reader: str
    partition: Partition
    start: int = -1
    end: int = -1


class PartitionMissing(NamedTuple):
    """The broker said that it knows no such partition."""

    reader: str
    partition: Partition


class DeletionRequested(NamedTuple):
    """Records before the offset may go from now on."""

    partition: Partition
    before_offset: int


class DeletionAcknowledged(NamedTuple):
    partition: Partition
    log_start: int


class ExpiryAllowed(NamedTuple):
    """Retention may remove records of the partition from now on."""

    partition: Partition


class ProducerIdGiven(NamedTuple):
    producer_id: int
    epoch: int


class BrokerStarted(NamedTuple):
    """A new life of the broker begins to serve."""


class TopicCreationRequested(NamedTuple):
    name: str
    partitions: int


class TopicCreated(NamedTuple):
    """The creation was acknowledged."""

    name: str
    topic_id: str
    partitions: int


class PartitionsRequested(NamedTuple):
    name: str
    partitions: int


class PartitionsCreated(NamedTuple):
    name: str
    partitions: int


class TopicDeletionRequested(NamedTuple):
    name: str


class TopicDeleted(NamedTuple):
    """The deletion was acknowledged."""

    name: str


class ConfigRequested(NamedTuple):
    name: str
    key: str
    value: str


class ConfigAltered(NamedTuple):
    """The alteration was acknowledged."""

    name: str
    key: str
    value: str


class ConfigRead(NamedTuple):
    name: str
    key: str
    value: str


class MetadataBegun(NamedTuple):
    reader: str


class TopicSeen(NamedTuple):
    topic_id: str
    leader_epochs: tuple[int, ...]
    """One per partition; -1 for a partition that has no leader at the moment."""


class MetadataRead(NamedTuple):
    """All topics as the broker told, by name."""

    reader: str
    topics: Mapping[str, TopicSeen]


Event: TypeAlias = (
    BatchSent
    | BatchAcknowledged
    | BatchRefused
    | SequenceRefused
    | ReadBegun
    | BatchesRead
    | ReadOutOfRange
    | OffsetsListed
    | PartitionMissing
    | DeletionRequested
    | DeletionAcknowledged
    | ExpiryAllowed
    | ProducerIdGiven
    | BrokerStarted
    | TopicCreationRequested
    | TopicCreated
    | PartitionsRequested
    | PartitionsCreated
    | TopicDeletionRequested
    | TopicDeleted
    | ConfigRequested
    | ConfigAltered
    | ConfigRead
    | MetadataBegun
    | MetadataRead
)
