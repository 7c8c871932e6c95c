"""EndTxn (26), versions 0 to 5: commit or abort. Version 5 raises the epoch and says which one is next (KIP-890)."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.services import TransactionServices
from holdfast.broker.node.transaction_service import Gate
from holdfast.broker.transactions.coordinator import check_transactional_id
from holdfast.broker.transactions.model import (
    NEWER_PROTOCOL,
    OLDER_PROTOCOL,
    Ended,
    EndTransactionRequest,
    ProducerIdentity,
)
from holdfast.errors import ApiError
from holdfast.seams import Now

FENCED_VERSION: Final = 2
BUMP_VERSION: Final = 5


def handle(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    try:
        check_transactional_id(request.transactional_id)
        found = node.transactions.known(request.transactional_id, now)
    except ApiError as error:
        return _refused(error.code)
    gate = Gate(found.journal, _refused)
    asked = EndTransactionRequest(
        request.transactional_id,
        ProducerIdentity(request.producer_id, request.producer_epoch),
        request.committed,
        NEWER_PROTOCOL if context.version >= BUMP_VERSION else OLDER_PROTOCOL,
    )
    found.machine.end(asked, now, gate.later.step(lambda ended: gate.reply(_fields(ended, context.version))))
    return gate.later


def _fields(ended: Ended, version: int) -> Fields:
    code = ended.error
    if code is ErrorCode.producer_fenced and version < FENCED_VERSION:
        code = ErrorCode.invalid_producer_epoch
    return {"error_code": code, "producer_id": ended.producer_id, "producer_epoch": ended.producer_epoch}


def _refused(code: ErrorCode) -> Fields:
    return _fields(Ended(code), BUMP_VERSION)
