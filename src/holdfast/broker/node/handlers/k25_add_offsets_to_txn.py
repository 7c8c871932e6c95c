"""AddOffsetsToTxn (25), versions 0 to 4: a group's offsets become part of a transaction (older protocol)."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.services import TransactionServices
from holdfast.broker.transactions.coordinator import check_transactional_id
from holdfast.broker.transactions.model import OLDER_PROTOCOL, AddPartitions, ProducerIdentity
from holdfast.errors import ApiError
from holdfast.seams import Now

FENCED_VERSION: Final = 2


def handle(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    try:
        check_transactional_id(request.transactional_id)
        found = node.transactions.known(request.transactional_id, now)
        offsets_partition = node.groups.find(request.group_id, now).journal.hosted
    except ApiError as error:
        return _refused(error.code)
    code = found.machine.add_partitions(
        AddPartitions(
            request.transactional_id,
            ProducerIdentity(request.producer_id, request.producer_epoch),
            frozenset(((offsets_partition.topic, offsets_partition.index),)),
            OLDER_PROTOCOL,
        ),
        now,
    )
    if code is ErrorCode.producer_fenced and context.version < FENCED_VERSION:
        code = ErrorCode.invalid_producer_epoch
    return found.journal.answer(_refused(code), _refused)


def _refused(code: ErrorCode) -> Fields:
    return {"error_code": code}
