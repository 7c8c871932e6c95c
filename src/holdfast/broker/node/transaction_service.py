"""Transactions of this node: the coordinators of `__transaction_state`, and their reach into the rest of it.

A coordinator is pure. What it needs of the node is given to it here: producer ids that no crash can give out again,
and markers in the partitions of a transaction. What the node needs of it goes through `TransactionService`.

Producer ids are given once, never again, not even after power loss. Ids come from blocks. The record that takes a
block is in the metadata log before the first id of it is handed out, and the response with that id waits behind the
metadata barrier until the record is durable. A restart begins with a new block; what was left of the old one is
never used.

Ending a transaction in one partition appends its marker and tells everybody who keeps account. The log's producer
state and transaction index follow the append. The last stable offset follows when the marker is below the high
watermark, with the flush that is asked for here. A partition that holds groups' committed offsets has a coordinator
beside its log, which learns at once what becomes of the pending ones: its answers wait for the flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kio.schema.errors import ErrorCode

from holdfast.broker.log.end_markers import build_end_marker
from holdfast.broker.metadata import changes
from holdfast.broker.metadata.changes import ProducerIdBlock
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.coordination import (
    Coordination,
    CoordinatorPartition,
    InternalTopic,
    ProvenSchedule,
)
from holdfast.broker.node.group_service import GroupService
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.loggers import TRANSACTIONS
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.services import CoordinatorServices
from holdfast.broker.transactions.coordinator import Refusals, TransactionCoordinator
from holdfast.broker.transactions.model import AddPartitions, Decision, TopicPartition
from holdfast.errors import ApiError
from holdfast.saying import named
from holdfast.seams import Now
from holdfast.wire.batch import read_header, with_log_append_time
from holdfast.wire.control_records import EndTransactionMarker


class ProducerIdSource:
    def __init__(self, metadata: MetadataLog, node_id: int) -> None:
        self._metadata = metadata
        self._node_id = node_id
        self._block = ProducerIdBlock(0, 0)
        self._next = 0

    def take(self, now: Now) -> int:
        if self._next >= self._block.end:
            block, records = changes.allocate_producer_ids(self._metadata.image, self._node_id)
            self._metadata.append(records, now)
            self._block = block
            self._next = block.first
        producer_id = self._next
        self._next += 1
        return producer_id


def ends_hanging(
    transactions: TransactionService,
    hosted: HostedPartition,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
) -> bool:
    """Whether a marker that none of our coordinators sent ends a transaction that hangs; False for one that has
    ended.

    Anybody can send one. In a transaction that a coordinator knows of, it would decide about part of what the
    coordinator decides about as a whole; and epochs nobody has reached would fence those who have not yet.
    """
    producers = hosted.log.producers
    known_epoch = max(transactions.epoch, producers.coordinator_epoch(producer_id))
    if coordinator_epoch > known_epoch:
        raise ApiError(
            ErrorCode.invalid_request,
            f"no coordinator has reached epoch {coordinator_epoch}: the latest is {known_epoch}",
        )
    if not producers.has_transaction(producer_id):
        return False
    if not any(producers.has_transaction(producer_id, producer_epoch - above) for above in (0, 1)):
        raise ApiError(
            ErrorCode.invalid_producer_epoch,
            f"the transaction of producer {producer_id} in {hosted.name} has another epoch than {producer_epoch}",
        )
    owner = transactions.owner_of(producer_id, (hosted.topic, hosted.index))
    if owner is not None:
        raise ApiError(
            ErrorCode.invalid_txn_state,
            f"the coordinator of transactional id {owner!r} ends this transaction",
        )
    if untold := transactions.untold():
        # A coordinator that is away is not one that knows nothing: it decides when it is back.
        raise ApiError(
            ErrorCode.coordinator_not_available,
            f"{', '.join(untold)} cannot be read: whether a coordinator is to end this transaction is not known",
        )
    return True


class Markers:
    def __init__(self, commit: GroupCommit, groups: GroupService) -> None:
        self._commit = commit
        self._groups = groups

    def append(
        self,
        hosted: HostedPartition,
        producer_id: int,
        producer_epoch: int,
        is_commit: bool,
        coordinator_epoch: int,
        transaction_version: int,
        now: Now,
    ) -> int:
        """Append the marker; returns the end offset that must be committed before its transaction has ended here.

        Raises `ApiError` when producer or coordinator are fenced, or the log cannot be written: nothing has changed.
        """
        log = hosted.log
        if hosted.offline or hosted.is_deleted or hosted.offsets.failure is not None:
            raise ApiError(ErrorCode.kafka_storage_error, f"{hosted.name} is offline")
        log.producers.check_marker(
            producer_id, producer_epoch, coordinator_epoch, transaction_version=transaction_version
        )
        batch = build_end_marker(
            producer_id, producer_epoch, EndTransactionMarker(is_commit, coordinator_epoch), now.wall_ms
        )
        header = read_header(batch)
        if log.config.message_timestamp_type == "LogAppendTime":
            batch = with_log_append_time(header, batch, now.wall_ms)
            header = read_header(batch)
        hosted.append(header, batch, now)
        end_offset = log.end_offset
        if hosted.topic == self._groups.topic:
            coordinator = self._groups.known_at(hosted.index)
            if coordinator is not None:
                coordinator.machine.end_transaction(producer_id, is_commit, now)
        self._commit.appended(hosted)
        return end_offset


TRANSACTIONS_TOPIC: Final = "__transaction_state"


class DurableProducerIds:
    """A transaction's record must not name a producer id whose block a crash could give out once more."""

    def __init__(self, producer_ids: ProducerIdSource, metadata: MetadataLog) -> None:
        self._producer_ids = producer_ids
        self._metadata = metadata

    def take(self, now: Now, done: Callable[[int | ApiError], None]) -> None:
        try:
            producer_id = self._producer_ids.take(now)
        except ApiError as error:
            done(error)
            return

        def hand_over(error: Exception | None) -> None:
            if error is None:
                done(producer_id)
            else:
                done(ApiError(ErrorCode.coordinator_not_available, f"the metadata log failed: {error}"))

        self._metadata.when_durable(hand_over)


class HostedParticipants:
    """The partitions of the transactions of one coordinator partition."""

    def __init__(self, node: CoordinatorServices, markers: Markers, journal: CoordinatorPartition) -> None:
        self._node = node
        self._markers = markers
        self._journal = journal
        self._is_flushed_at_times = False
        """Whether flushes take records to the disk, completions among them, that are left to the system by
        setting."""

    def when_recorded(
        self, partitions: Iterable[TopicPartition], done: Callable[[Exception | None], None]
    ) -> None:
        """Where the settings leave flushing the coordinator partition to the system but partitions are flushed, so is
        the coordinator partition.

        Otherwise a power failure could take the record and leave what was written because of it.
        """
        hosted = self._journal.hosted
        if hosted.flushes_in_groups or not any(map(self._is_flushed, partitions)):
            self._journal.when_durable(done)
        else:
            self._is_flushed_at_times = True
            self._node.commit.when_flushed(hosted, hosted.log.end_offset, done)

    def _is_flushed(self, partition: TopicPartition) -> bool:
        hosted = self._node.partitions.get(*partition)
        return hosted is not None and hosted.flushes_in_groups

    def write_markers(
        self,
        decision: Decision,
        partitions: Sequence[TopicPartition],
        now: Now,
        done: Callable[[Sequence[TopicPartition]], None],
    ) -> None:
        left: list[TopicPartition] = []
        # One more than there are partitions, so that `done` comes after the last was begun.
        waiting = 1 + len(partitions)

        def settle(partition: TopicPartition | None, error: Exception | None) -> None:
            nonlocal waiting
            if partition is not None and error is not None:
                left.append(partition)
            waiting -= 1
            if not waiting:
                done(left)

        if not self._journal.hosted.flushes_in_groups and any(map(self._is_flushed, partitions)):
            self._is_flushed_at_times = True
        for partition in partitions:
            self._write_one(decision, partition, now, settle)
        settle(None, None)

    def _write_one(
        self,
        decision: Decision,
        partition: TopicPartition,
        now: Now,
        settle: Callable[[TopicPartition, Exception | None], None],
    ) -> None:
        node = self._node

        def settle_or_skip(error: Exception | None) -> None:
            if error is not None and node.metadata.image.partition(*partition) is None:
                # Until the deletion is durable, a crash may bring the topic back, with the transaction open in it.
                node.metadata.when_durable(lambda failure: settle(partition, failure))
            else:
                settle(partition, error)

        try:
            hosted = node.partitions.leader_of(*partition)
            producer_id = decision.producer.producer_id
            # Nobody else coordinates: a later epoch that the partition knows is made up, and must not keep the
            # transaction open for ever.
            end_offset = self._markers.append(
                hosted,
                producer_id,
                decision.producer.epoch,
                decision.is_commit,
                max(self._journal.hosted.leader_epoch, hosted.log.producers.coordinator_epoch(producer_id)),
                decision.client_version,
                now,
            )
        except ApiError as error:
            # A partition that knows of a later epoch of the producer has seen the end of this transaction.
            settle_or_skip(None if error.code is ErrorCode.invalid_producer_epoch else error)
            return
        is_flushed = self._journal.hosted.flushes_in_groups or self._is_flushed_at_times
        if is_flushed and not hosted.flushes_in_groups:
            # A completion that is flushed must not outlive the marker, whatever the topic promises for its data.
            node.commit.when_flushed(hosted, end_offset, settle_or_skip)
        else:
            hosted.offsets.when_committed(end_offset, settle_or_skip)


class TransactionService(Coordination[TransactionCoordinator]):
    def __init__(
        self, node: CoordinatorServices, groups: GroupService, producer_ids: ProducerIdSource
    ) -> None:
        super().__init__(node, self._internal_topic, self._machine)
        self._schedule = ProvenSchedule(node)
        self._producer_ids = DurableProducerIds(producer_ids, node.metadata)
        self.markers = Markers(node.commit, groups)

    def _internal_topic(self) -> InternalTopic:
        config = self._node.metadata.settings.broker
        return InternalTopic(
            TRANSACTIONS_TOPIC,
            config.transaction_state_log_num_partitions,
            config.transaction_state_log_segment_bytes,
            (
                ("cleanup.policy", "compact"),
                ("compression.type", "uncompressed"),
                ("min.insync.replicas", "1"),
                ("unclean.leader.election.enable", "false"),
            ),
        )

    def _machine(self, journal: CoordinatorPartition) -> TransactionCoordinator:
        node = self._node
        return TransactionCoordinator(
            journal,
            self._schedule,
            lambda: node.metadata.settings.broker,
            self._producer_ids,
            HostedParticipants(node, self.markers, journal),
            named(node.say, TRANSACTIONS),
        )

    # Markers from outside

    @property
    def epoch(self) -> int:
        """The latest epoch that a coordinator of this cluster has."""
        topic = self._node.metadata.image.topic(TRANSACTIONS_TOPIC)
        return max(partition.leader_epoch for partition in topic.partitions) if topic is not None else 0

    def owner_of(self, producer_id: int, partition: TopicPartition) -> str | None:
        """The transactional id whose coordinator will end the transaction that a producer has in a partition."""
        for coordinator in self:
            for transactional_id, metadata in coordinator.machine:
                if metadata.producer_id == producer_id and partition in metadata.partitions:
                    return transactional_id
        return None

    # Data

    def add_before_write(self, request: AddPartitions, now: Now, done: Callable[[Refusals], None]) -> None:
        """Make partitions part of a transaction before they are written to (KIP-890); `done` comes in order."""
        try:
            machine = self.known(request.transactional_id, now).machine
        except ApiError as error:
            done(dict.fromkeys(request.partitions, error.code))
        else:
            machine.add_before_write(request, now, done)

    def verify(self, request: AddPartitions, now: Now, done: Callable[[Refusals], None]) -> None:
        """Check that a client of the older protocol has added the partitions it writes to; `done` comes in order."""
        if not self._node.metadata.settings.broker.transaction_partition_verification_enable:
            done({})
            return
        try:
            machine = self.known(request.transactional_id, now).machine
        except ApiError as error:
            done(dict.fromkeys(request.partitions, error.code))
        else:
            machine.verify(request, done)
