"""Requests of transactional and idempotent producers, and about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import regex
from holdfast.broker.node.context import Answer, Fields, Later, RequestContext
from holdfast.broker.node.coordination import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.handlers.administration import code_of
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.intake import INTERNAL_TOPICS
from holdfast.broker.node.services import DataServices, TransactionServices
from holdfast.broker.node.transaction_service import ends_hanging
from holdfast.broker.transactions import model
from holdfast.broker.transactions.coordinator import check_transactional_id
from holdfast.errors import ApiError
from holdfast.seams import Now

RENEWAL_VERSION: Final = 3
"""From here on a producer may name the id and epoch it has; both or neither."""
INIT_FENCED_VERSION: Final = 4
FENCED_VERSION: Final = 2
"""From here on clients know PRODUCER_FENCED, of InitProducerId and of the others; older ones are told
INVALID_PRODUCER_EPOCH."""
NONE: Final = -1


def init_producer_id(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """InitProducerId (22), versions 0 to 5: an id for an idempotent producer, or the next epoch for a transactional
    one."""
    had = model.ProducerIdentity(NONE, NONE)
    if context.version >= RENEWAL_VERSION:
        had = model.ProducerIdentity(request.producer_id, request.producer_epoch)
    if (had.producer_id == NONE) != (had.epoch == NONE):
        return _not_initialised(ErrorCode.invalid_request)
    transactional_id = request.transactional_id
    try:
        if transactional_id is None:
            # An idempotent producer that has used its epochs up asks again and simply gets a new id.
            return _initialised(model.Initialised(ErrorCode.none, node.producer_ids.take(now), 0))
        check_transactional_id(transactional_id)
        found = node.transactions.find(transactional_id, now)
    except ApiError as error:
        return _not_initialised(error.code)
    later = Later()
    asked = model.InitProducer(
        transactional_id,
        request.transaction_timeout // timedelta(milliseconds=1),
        None if had.producer_id == NONE else had,
    )
    found.machine.init_producer(
        asked,
        now,
        later.step(
            lambda reply: found.journal.release(
                later, _initialised(_init_reply(context.version, reply)), _not_initialised
            )
        ),
    )
    return later


def _init_reply(version: int, reply: model.Initialised) -> model.Initialised:
    if reply.error is ErrorCode.producer_fenced and version < INIT_FENCED_VERSION:
        return model.Initialised(ErrorCode.invalid_producer_epoch)
    return reply


def _initialised(reply: model.Initialised) -> Fields:
    return {
        "error_code": reply.error,
        "producer_id": reply.producer_id,
        "producer_epoch": reply.producer_epoch,
    }


def _not_initialised(code: ErrorCode) -> Fields:
    return _initialised(model.Initialised(code))


BATCHED_VERSION: Final = 4

Codes = dict[model.TopicPartition, ErrorCode]


def add_partitions_to_txn(
    node: TransactionServices, context: RequestContext, request: Any, now: Now
) -> Answer:
    """AddPartitionsToTxn (24), versions 0 to 5: partitions become part of a transaction.

    Versions 0 to 3 come from clients of the older protocol: one transaction. Versions 4 and 5 are what Kafka's
    brokers say to each other: several transactions, each to be extended or, with `verify_only`, only looked at. As
    with Kafka, a client that may act on the cluster may send them too. One partition that cannot be added keeps all
    the others out.
    """
    is_batched = context.version >= BATCHED_VERSION
    asked = request.transactions if is_batched else (_Transaction(request),)
    journals: dict[CoordinatorPartition, None] = {}
    results = [
        (transaction.transactional_id, _add(node, context.version, transaction, now, journals))
        for transaction in asked
    ]

    def refused(code: ErrorCode) -> Fields:
        return _added(context.version, [(name, dict.fromkeys(codes, code)) for name, codes in results])

    return answer_all(journals, _added(context.version, results), refused)


class _Transaction:
    """A request of the older shape, read as one of the newer."""

    def __init__(self, request: Any) -> None:
        self.transactional_id = request.v3_and_below_transactional_id
        self.producer_id = request.v3_and_below_producer_id
        self.producer_epoch = request.v3_and_below_producer_epoch
        self.topics = request.v3_and_below_topics
        self.verify_only = False


def _add(
    node: TransactionServices,
    version: int,
    transaction: Any,
    now: Now,
    journals: dict[CoordinatorPartition, None],
) -> Codes:
    partitions = [(topic.name, index) for topic in transaction.topics for index in topic.partitions]
    refused = _unwritable(node, version, partitions)
    if refused:
        return {
            partition: refused.get(partition, ErrorCode.operation_not_attempted) for partition in partitions
        }
    try:
        check_transactional_id(transaction.transactional_id)
        found = node.transactions.known(transaction.transactional_id, now)
    except ApiError as error:
        return dict.fromkeys(partitions, error.code)
    journals[found.journal] = None
    addition = model.AddPartitions(
        transaction.transactional_id,
        model.ProducerIdentity(transaction.producer_id, transaction.producer_epoch),
        frozenset(partitions),
        model.NEWER_PROTOCOL if version >= BATCHED_VERSION else model.OLDER_PROTOCOL,
    )
    if transaction.verify_only:
        outside = found.machine.partitions_outside(addition)
        return {partition: outside.get(partition, ErrorCode.none) for partition in partitions}
    code = found.machine.add_partitions(addition, now)
    if code is ErrorCode.producer_fenced and version < FENCED_VERSION:
        code = ErrorCode.invalid_producer_epoch
    return dict.fromkeys(partitions, code)


def _unwritable(
    node: TransactionServices, version: int, partitions: list[model.TopicPartition]
) -> Mapping[model.TopicPartition, ErrorCode]:
    refused: Codes = {}
    for topic, index in partitions:
        if version < BATCHED_VERSION and topic in INTERNAL_TOPICS:
            refused[topic, index] = ErrorCode.topic_authorization_failed
        elif node.metadata.image.partition(topic, index) is None:
            refused[topic, index] = ErrorCode.unknown_topic_or_partition
    return refused


def _added(version: int, results: list[tuple[str, Codes]]) -> Fields:
    if version < BATCHED_VERSION:
        return {"results_by_topic_v3_and_below": _added_topics(results[0][1])}
    return {
        "error_code": ErrorCode.none,
        "results_by_transaction": [
            {"transactional_id": transactional_id, "topic_results": _added_topics(codes)}
            for transactional_id, codes in results
        ],
    }


def _added_topics(codes: Codes) -> list[Fields]:
    by_topic: dict[str, list[Fields]] = {}
    for (topic, index), code in codes.items():
        by_topic.setdefault(topic, []).append({"partition_index": index, "partition_error_code": code})
    return [{"name": topic, "results_by_partition": partitions} for topic, partitions in by_topic.items()]


def add_offsets_to_txn(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """AddOffsetsToTxn (25), versions 0 to 4: a group's offsets become part of a transaction (older protocol)."""
    try:
        check_transactional_id(request.transactional_id)
        found = node.transactions.known(request.transactional_id, now)
        offsets_partition = node.groups.find(request.group_id, now).journal.hosted
    except ApiError as error:
        return _error_fields(error.code)
    code = found.machine.add_partitions(
        model.AddPartitions(
            request.transactional_id,
            model.ProducerIdentity(request.producer_id, request.producer_epoch),
            frozenset(((offsets_partition.topic, offsets_partition.index),)),
            model.OLDER_PROTOCOL,
        ),
        now,
    )
    if code is ErrorCode.producer_fenced and context.version < FENCED_VERSION:
        code = ErrorCode.invalid_producer_epoch
    return found.journal.answer(_error_fields(code), _error_fields)


def _error_fields(code: ErrorCode) -> Fields:
    return {"error_code": code}


BUMP_VERSION: Final = 5


def end_txn(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """EndTxn (26), versions 0 to 5: commit or abort. Version 5 raises the epoch and says which one is next
    (KIP-890)."""
    try:
        check_transactional_id(request.transactional_id)
        found = node.transactions.known(request.transactional_id, now)
    except ApiError as error:
        return _not_ended(error.code)
    later = Later()
    asked = model.EndTransactionRequest(
        request.transactional_id,
        model.ProducerIdentity(request.producer_id, request.producer_epoch),
        request.committed,
        model.NEWER_PROTOCOL if context.version >= BUMP_VERSION else model.OLDER_PROTOCOL,
    )
    found.machine.end(
        asked,
        now,
        later.step(lambda ended: found.journal.release(later, _ended(ended, context.version), _not_ended)),
    )
    return later


def _ended(ended: model.Ended, version: int) -> Fields:
    code = ended.error
    if code is ErrorCode.producer_fenced and version < FENCED_VERSION:
        code = ErrorCode.invalid_producer_epoch
    return {"error_code": code, "producer_id": ended.producer_id, "producer_epoch": ended.producer_epoch}


def _not_ended(code: ErrorCode) -> Fields:
    return _ended(model.Ended(code), BUMP_VERSION)


MarkerCodes = dict[int, dict[str, dict[int, int]]]
"""The answer: error code by producer id, topic and partition."""


class Writing:
    """One request under way: an error code for each marker, and how many are not committed yet."""

    def __init__(self) -> None:
        self.codes: MarkerCodes = {}
        self.waiting = 1  # for the last marker to be begun
        self.later = Later()

    def settle(self, producer_id: int, topic: str, index: int, error: Exception | None) -> None:
        if error is not None:
            code = error.code if isinstance(error, ApiError) else ErrorCode.kafka_storage_error
            self.codes[producer_id][topic][index] = code
        self.waiting -= 1
        if not self.waiting:
            self.later.resolve(self.response())

    def response(self) -> Fields:
        return {
            "markers": [
                {
                    "producer_id": producer_id,
                    "topics": [
                        {
                            "name": topic,
                            "partitions": [
                                {"partition_index": index, "error_code": code}
                                for index, code in partitions.items()
                            ],
                        }
                        for topic, partitions in topics.items()
                    ],
                }
                for producer_id, topics in self.codes.items()
            ]
        }


def write_txn_markers(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """WriteTxnMarkers (27), versions 1 and 2: a coordinator, or an operator, ends transactions in partitions.

    Each marker is answered for each partition, once it is committed there. Version 2 says by which rules the
    transaction ran, which decides how its epoch is checked. Our coordinators do not send it; an operator does, to
    end a hanging transaction: one that no coordinator knows of any more. No other is ended
    (`holdfast.broker.node.transaction_service`).
    """
    writing = Writing()
    has_nobody = any(marker.producer_id < 0 or marker.producer_epoch < 0 for marker in request.markers)
    for marker in request.markers:
        for topic in marker.topics:
            for index in topic.partition_indexes:
                codes = writing.codes.setdefault(marker.producer_id, {}).setdefault(topic.name, {})
                codes[index] = 0
                try:
                    if has_nobody:  # as Kafka: a marker of nobody's spoils the request
                        raise ApiError(ErrorCode.unknown_server_error)
                    _write_marker(node, writing, marker, topic.name, index, now)
                except ApiError as error:
                    codes[index] = error.code
    writing.waiting -= 1
    return writing.later if writing.waiting else writing.response()


def _write_marker(
    node: TransactionServices, writing: Writing, marker: Any, topic: str, index: int, now: Now
) -> None:
    hosted = node.partitions.leader_of(topic, index)
    producer_id, epoch, coordinator_epoch = (
        marker.producer_id,
        marker.producer_epoch,
        marker.coordinator_epoch,
    )
    version = getattr(marker, "transaction_version", 0)
    hosted.log.producers.check_marker(producer_id, epoch, coordinator_epoch, transaction_version=version)
    end_offset = hosted.log.end_offset
    if ends_hanging(node.transactions, hosted, producer_id, epoch, coordinator_epoch):
        is_commit = marker.transaction_result
        end_offset = node.transactions.markers.append(
            hosted, producer_id, epoch, is_commit, coordinator_epoch, version, now
        )
    if not hosted.offsets.is_committed(end_offset):
        writing.waiting += 1
        hosted.offsets.when_committed(
            end_offset,
            writing.later.step(lambda error: writing.settle(producer_id, topic, index, error)),
        )


class Describing:
    """One request under way: what is told of each partition, and how many of them are not committed yet."""

    def __init__(self, node: DataServices) -> None:
        self._node = node
        self.waiting = 1  # for the last partition to be added
        self.later = Later()
        self.fields: Fields = {"topics": []}

    def add(self, hosted: HostedPartition) -> Fields:
        partition: Fields = {
            "partition_index": hosted.index,
            "error_code": 0,
            "active_producers": [producer._asdict() for producer in hosted.log.producers.describe()],
        }

        def committed(error: Exception | None) -> None:
            self.waiting -= 1
            if error is not None:
                partition.update(_undescribed_producers(hosted.index, code_of(error), str(error)))
            if not self.waiting:
                self.later.resolve(self.fields)

        self.waiting += 1
        end_offset = hosted.log.end_offset
        if not hosted.offsets.is_committed(end_offset):
            # A coordinator's log may end with records that no flush was asked for.
            self._node.commit.request(hosted)
        hosted.offsets.when_committed(end_offset, self.later.step(committed))
        return partition


def describe_producers(node: DataServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """DescribeProducers (61), version 0: who writes to a partition, as its producer state knows them.

    The answer leaves when everything it tells is committed: a transaction that a crash could take back is nobody's
    business yet.
    """
    describing = Describing(node)
    for topic in request.topics:
        partitions = [_producers_of(node, describing, topic.name, index) for index in topic.partition_indexes]
        describing.fields["topics"].append({"name": topic.name, "partitions": partitions})
    describing.waiting -= 1
    return describing.later if describing.waiting else describing.fields


def _producers_of(node: DataServices, describing: Describing, topic: str, index: int) -> Fields:
    try:
        return describing.add(node.partitions.leader_of(topic, index))
    except ApiError as error:
        return _undescribed_producers(index, error.code, error.message)


def _undescribed_producers(index: int, code: ErrorCode, message: str | None) -> Fields:
    return {"partition_index": index, "error_code": code, "error_message": message, "active_producers": []}


def describe_transactions(
    node: TransactionServices, context: RequestContext, request: Any, now: Now
) -> Answer:
    """DescribeTransactions (65), version 0: what the coordinator knows of transactional ids."""
    journals: dict[CoordinatorPartition, None] = {}
    states = [
        _transaction(node, transactional_id, now, journals) for transactional_id in request.transactional_ids
    ]

    def refused(code: ErrorCode) -> Fields:
        return {
            "transaction_states": [_unknown_transaction(name, code) for name in request.transactional_ids]
        }

    return answer_all(journals, {"transaction_states": states}, refused)


def _transaction(
    node: TransactionServices, transactional_id: str, now: Now, journals: dict[CoordinatorPartition, None]
) -> Fields:
    try:
        check_transactional_id(transactional_id)
        journal, machine = node.transactions.known(transactional_id, now)
    except ApiError as error:
        return _unknown_transaction(transactional_id, error.code)
    journals[journal] = None
    metadata = machine.describe(transactional_id)
    if metadata is None:
        return _unknown_transaction(transactional_id, ErrorCode.transactional_id_not_found)
    by_topic: dict[str, list[int]] = {}
    for topic, index in sorted(metadata.partitions):
        by_topic.setdefault(topic, []).append(index)
    return {
        "error_code": ErrorCode.none,
        "transactional_id": transactional_id,
        "transaction_state": metadata.state.label,
        "transaction_timeout": metadata.timeout_ms,
        "transaction_start_time": metadata.start_ms,
        "producer_id": metadata.producer_id,
        "producer_epoch": metadata.producer_epoch,
        "topics": [{"topic": topic, "partitions": indexes} for topic, indexes in by_topic.items()],
    }


def _unknown_transaction(transactional_id: str, code: ErrorCode) -> Fields:
    return {"error_code": code, "transactional_id": transactional_id, "transaction_start_time": 0}


def list_transactions(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """ListTransactions (66), versions 0 to 2: the transactional ids of this node that pass every filter given.

    Filters are states, producer ids, how long the transaction runs (version 1 on) and a regular expression over the
    whole transactional id (version 2 on).
    """
    try:
        passes = _filter(request, now)
    except ApiError as error:
        return _error_fields(error.code)
    coordinators = list(node.transactions)
    fields = {
        "error_code": ErrorCode.none,
        "unknown_state_filters": [
            name for name in request.state_filters if name not in model.STATES_BY_LABEL
        ],
        "transaction_states": [
            {
                "transactional_id": transactional_id,
                "producer_id": metadata.producer_id,
                "transaction_state": metadata.state.label,
            }
            for coordinator in coordinators
            for transactional_id, metadata in coordinator.machine
            if passes(transactional_id, metadata)
        ],
    }
    return answer_all((coordinator.journal for coordinator in coordinators), fields, _error_fields)


def _filter(request: Any, now: Now) -> Callable[[str, model.TransactionMetadata], bool]:
    states = {model.STATES_BY_LABEL.get(name) for name in request.state_filters}
    producer_ids = set(request.producer_id_filters)
    duration_ms = getattr(request, "duration_filter", -1)
    pattern = getattr(request, "transactional_id_pattern", None)
    if pattern:
        regex.check(pattern)

    def passes(transactional_id: str, metadata: model.TransactionMetadata) -> bool:
        return (
            (not states or metadata.state in states)
            and (not producer_ids or metadata.producer_id in producer_ids)
            and (duration_ms < 0 or now.wall_ms - metadata.start_ms > duration_ms)
            and (not pattern or bool(regex.matching(pattern, (transactional_id,))))
        )

    return passes
