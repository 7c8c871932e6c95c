"""What clients did and saw, as events: the input of `tests.support.checkers`.

A history is a sequence of these events in the order in which one observer outside the broker saw them. A
simulator writes it, and so can any test that kills real processes. The observer sees requests leave and
answers arrive, never what happens in between, so what an answer must reflect is fixed when its request
leaves: `ReadBegun` and `MetadataBegun` come before the request, the event with the answer after it, and
whatever was acknowledged before the first must show in the second.

A partition is named by its topic's identity and its index; the identity is the topic id where topics are
deleted and recreated, or simply the name where they are not. Every record value of a history is unique.

`Checker` and `Violation` are how a checker takes events and says that a history breaks a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

Partition: TypeAlias = tuple[str, int]
Event: TypeAlias = NamedTuple
"""Any of those below; a checker takes those it knows by their type."""


class BatchSent(NamedTuple):
    """Records that stand or fall together, handed to the broker for the first time.

    `number` rises with every batch of one `producer`; that is the order in which they must be stored.
    A batch sent again (same values, same sequence) makes no second event.
    """

    partition: Partition
    producer: str
    number: int
    values: tuple[bytes, ...]
    keys: tuple[bytes, ...] = ()
    """One per value, in a compacted topic."""
    timestamp: int = -1
    """The time of every record, if the topic keeps the producer's."""
    transaction: str | None = None


class BatchAcknowledged(NamedTuple):
    partition: Partition
    producer: str
    number: int
    base_offset: int
    durable: bool
    """The acknowledgement promises durability: acks=all, flushed in groups (or, where `LossAllowed`, not at all)."""


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


class Marker(NamedTuple):
    """The end of a transaction, in the log."""

    producer_id: int
    kind: Literal["commit", "abort"]


class StoredBatch(NamedTuple):
    base_offset: int
    values: tuple[bytes, ...]
    leader_epoch: int = -1
    offsets: tuple[int, ...] = ()
    """Of each value, where compaction may have left gaps; otherwise they follow each other."""
    end_offset: int = -1
    """The offset after the batch, if not simply that of its last value."""
    marker: Marker | None = None

    @property
    def next_offset(self) -> int:
        return self.end_offset if self.end_offset >= 0 else self.base_offset + len(self.values)

    @property
    def record_offsets(self) -> tuple[int, ...]:
        return self.offsets or tuple(range(self.base_offset, self.base_offset + len(self.values)))


class BatchesRead(NamedTuple):
    reader: str
    partition: Partition
    position: int
    batches: tuple[StoredBatch, ...]
    high_watermark: int
    log_start: int = -1
    limited: bool = False
    """The request's own byte limits may have kept the answer short or empty."""
    last_stable: int = -1
    committed_only: bool = False
    """The reader asked for committed records only: nothing at or above the last stable offset."""
    hidden: frozenset[int] = frozenset()
    """First offsets of the batches it did not show its application, since the answer said they are aborted."""


class ReadOutOfRange(NamedTuple):
    """The broker said that it has no record at `position`."""

    reader: str
    partition: Partition
    position: int


class OffsetsListed(NamedTuple):
    """The first offset, the end, or the last stable offset, as the broker told; -1 for those not asked for."""

    reader: str
    partition: Partition
    start: int = -1
    end: int = -1
    stable: int = -1


class TimeLookedUp(NamedTuple):
    """The first offset of at least this time, as the broker told, and its time; -1 for none.

    `timestamp` -3 asks for the record with the largest time.
    """

    reader: str
    partition: Partition
    timestamp: int
    offset: int
    found_timestamp: int
    committed_only: bool = False


class PartitionScanned(NamedTuple):
    """A reader of committed records has read the partition from its start to its end."""

    reader: str
    partition: Partition
    records: tuple[tuple[int, bytes], ...]
    """(offset, value) of everything it showed."""


class ScanBegun(NamedTuple):
    reader: str
    partition: Partition


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


class CompactionAllowed(NamedTuple):
    """Records with a later one of the same key may go from now on."""

    partition: Partition


class LossAllowed(NamedTuple):
    """Records are acknowledged before they are flushed: they survive the process, not the page cache."""

    partition: Partition


class PageCacheLost(NamedTuple):
    """The machine lost its power, or its disk lost what it was told to flush."""


class ExpiryForgotten(NamedTuple):
    """The disk was full when records expired, so that a new start may know nothing of it."""


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


class TopicMentioned(NamedTuple):
    """The broker named a topic by its id, in an assignment perhaps: it exists, whether or not anybody can name it."""

    topic_id: str


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


class TransactionalIdTaken(NamedTuple):
    """A session of a transactional id was begun: earlier ones are fenced, and what they left open is decided."""

    transactional_id: str
    session: str
    producer_id: int
    epoch: int


class TransactionBegun(NamedTuple):
    transaction: str
    transactional_id: str
    session: str


class TransactionEndRequested(NamedTuple):
    """A request to commit, or abort, leaves."""

    transaction: str
    commit: bool


class TransactionEnded(NamedTuple):
    """The end was acknowledged."""

    transaction: str
    commit: bool
    complete: bool = True
    """Every partition can be read up to the end of the transaction, as far as it is concerned."""


class OffsetsCommitSent(NamedTuple):
    """A group's committed offsets leave for the broker; `commit` is unique and travels with each as its metadata."""

    group: str
    commit: str
    positions: Mapping[Partition, int]
    member: str = ""
    generation: int = -1
    transaction: str | None = None


class OffsetsCommitAnswered(NamedTuple):
    """Of some positions the broker says that it has taken them, of others that it has not and never will."""

    group: str
    commit: str
    accepted: tuple[Partition, ...] = ()
    refused: tuple[Partition, ...] = ()


class OffsetsDeletionRequested(NamedTuple):
    group: str
    deletion: str
    partitions: tuple[Partition, ...]


class OffsetsDeleted(NamedTuple):
    """The deletion was acknowledged."""

    group: str
    deletion: str


class OffsetsFetchBegun(NamedTuple):
    reader: str
    group: str


class OffsetsFetched(NamedTuple):
    """Positions with the commit each came with, as the broker told; None where there is none."""

    reader: str
    group: str
    positions: Mapping[Partition, tuple[int, str] | None]


class EverythingSettled(NamedTuple):
    """No request is under way, no transaction is open, and whatever was decided has been carried out."""


class GroupDeletionRequested(NamedTuple):
    """The group's generations and epochs may begin anew."""

    group: str


class GenerationAssigned(NamedTuple):
    """A member of a classic group was told its partitions."""

    group: str
    generation: int
    member: str
    instance: str | None
    assignment: str
    """Names the leader's whole assignment, of which each member is told its part."""
    partitions: frozenset[Partition]


class MemberAlive(NamedTuple):
    """The broker took a heartbeat that left at `sent_at_ms`: for `patience_ms` from then it may not drop the member."""

    group: str
    member: str
    sent_at_ms: int
    patience_ms: int


class MemberDropped(NamedTuple):
    """The broker does not know the member, or not in this generation or epoch."""

    group: str
    member: str
    at_ms: int
    error: str


class MemberLeaving(NamedTuple):
    """A request to leave leaves, or the member begins anew: from now on it holds nothing."""

    group: str
    member: str


class PartitionsHeld(NamedTuple):
    """A member of a KIP-848 group tells what it holds: whatever is not named is released from now on."""

    group: str
    member: str
    partitions: frozenset[Partition]


class PartitionsGiven(NamedTuple):
    """A member of a KIP-848 group was told its partitions, in answer to a heartbeat with `sent_epoch`."""

    group: str
    member: str
    sent_epoch: int
    epoch: int
    partitions: frozenset[Partition] | None
    """None: as before."""
    at_ms: int


class Violation(AssertionError):
    """A history that breaks a rule."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def broken(rule: str, message: str) -> NoReturn:
    raise Violation(rule, message)


class Checker:
    """Hands each event to the method that is there for its type."""

    handlers: dict[type[Any], Callable[[Any], None]]

    def observe(self, event: Event) -> None:
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(event)
