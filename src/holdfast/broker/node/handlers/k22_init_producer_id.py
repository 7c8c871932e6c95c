"""InitProducerId (22), versions 0 to 5: an id for an idempotent producer, or the next epoch for a transactional one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.services import TransactionServices
from holdfast.broker.node.transaction_service import Gate
from holdfast.broker.transactions.coordinator import check_transactional_id
from holdfast.broker.transactions.model import Initialised, InitProducer, ProducerIdentity
from holdfast.errors import ApiError
from holdfast.seams import Now

RENEWAL_VERSION: Final = 3
"""From here on a producer may name the id and epoch it has; both or neither."""
FENCED_VERSION: Final = 4
"""From here on clients know PRODUCER_FENCED; older ones are told INVALID_PRODUCER_EPOCH."""
NONE: Final = -1


def handle(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    had = ProducerIdentity(NONE, NONE)
    if context.version >= RENEWAL_VERSION:
        had = ProducerIdentity(request.producer_id, request.producer_epoch)
    if (had.producer_id == NONE) != (had.epoch == NONE):
        return _refused(ErrorCode.invalid_request)
    transactional_id = request.transactional_id
    try:
        if transactional_id is None:
            # An idempotent producer that has used its epochs up asks again and simply gets a new id.
            return _fields(Initialised(ErrorCode.none, node.producer_ids.take(now), 0))
        check_transactional_id(transactional_id)
        found = node.transactions.find(transactional_id, now)
    except ApiError as error:
        return _refused(error.code)
    gate = Gate(found.journal, _refused)
    asked = InitProducer(
        transactional_id,
        request.transaction_timeout // timedelta(milliseconds=1),
        None if had.producer_id == NONE else had,
    )
    found.machine.init_producer(
        asked,
        now,
        gate.later.step(lambda reply: gate.reply(_fields(_for_version(context.version, reply)))),
    )
    return gate.later


def _for_version(version: int, reply: Initialised) -> Initialised:
    if reply.error is ErrorCode.producer_fenced and version < FENCED_VERSION:
        return Initialised(ErrorCode.invalid_producer_epoch)
    return reply


def _fields(reply: Initialised) -> Fields:
    return {
        "error_code": reply.error,
        "producer_id": reply.producer_id,
        "producer_epoch": reply.producer_epoch,
    }


def _refused(code: ErrorCode) -> Fields:
    return _fields(Initialised(code))
