"""TxnOffsetCommit (28), versions 0 to 5: offsets of a group that count once the transaction is committed.

The partition of `__consumer_offsets` that holds the group is part of the transaction like any other. From version 5 on
it is added to the transaction here (KIP-890); older clients have added it with AddOffsetsToTxn, which is verified.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import CommitReply, TransactionalCommit
from holdfast.broker.node.context import Answer, Fields, Later, RequestContext
from holdfast.broker.node.handlers.groups import commit_fields, known_topics
from holdfast.broker.node.services import GroupServices
from holdfast.broker.transactions.coordinator import Refusals
from holdfast.broker.transactions.model import NEWER_PROTOCOL, OLDER_PROTOCOL, AddPartitions, ProducerIdentity
from holdfast.errors import ApiError
from holdfast.seams import Now

ABORTABLE_VERSION: Final = 4
"""Clients from here on know TRANSACTION_ABORTABLE."""
ADDING_VERSION: Final = 5


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    topics = known_topics(node, request.topics, by_id=False)

    def fields(reply: CommitReply | ErrorCode) -> Fields:
        return commit_fields(node, request, topics.refused, reply)

    if not topics.topics:
        return fields({})
    if not request.group_id:
        return fields(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return fields(error.code)
    hosted = journal.hosted
    offsets_partition = (hosted.topic, hosted.index)
    producer = ProducerIdentity(request.producer_id, request.producer_epoch)
    later = Later()

    def commit() -> CommitReply:
        return machine.commit_in_transaction(
            TransactionalCommit(
                request.group_id,
                getattr(request, "member_id", ""),
                getattr(request, "group_instance_id", None),
                getattr(request, "generation_id", -1),
                topics.topics,
                *producer,
                context.version,
            ),
            now,
        )

    def added(refusals: Refusals) -> None:
        # Meanwhile topics may have gone, or been recreated.
        nonlocal topics
        topics = known_topics(node, request.topics, by_id=False)
        go_on(refusals)

    def go_on(refusals: Refusals) -> None:
        try:
            if offsets_partition in refusals:
                raise ApiError(_for_version(refusals[offsets_partition], context.version))
            reply: CommitReply | ErrorCode = commit()
        except ApiError as error:
            reply = error.code
        journal.release(later, fields(reply), fields)

    if hosted.log.producers.has_transaction(*producer):
        go_on({})
        return later
    is_newer = context.version >= ADDING_VERSION
    addition = AddPartitions(
        request.transactional_id,
        producer,
        frozenset((offsets_partition,)),
        NEWER_PROTOCOL if is_newer else OLDER_PROTOCOL,
    )
    if is_newer:
        node.transactions.add_before_write(addition, now, later.step(added))
    else:
        node.transactions.verify(addition, now, later.step(added))
    return later


def _for_version(code: ErrorCode, version: int) -> ErrorCode:
    if code is ErrorCode.producer_fenced:
        return ErrorCode.invalid_producer_epoch
    if code is ErrorCode.transaction_abortable and version < ABORTABLE_VERSION:
        return ErrorCode.invalid_txn_state
    return code
