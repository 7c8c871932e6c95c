"""ListTransactions (66), versions 0 to 2: the transactional ids of this node that pass every filter given.

Filters are states, producer ids, how long the transaction runs (version 1 on) and a regular expression over the whole
transactional id (version 2 on).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import regex
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.services import TransactionServices
from holdfast.broker.transactions.model import STATES_BY_LABEL, TransactionMetadata
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    try:
        passes = _filter(request, now)
    except ApiError as error:
        return _refused(error.code)
    coordinators = list(node.transactions)
    fields = {
        "error_code": ErrorCode.none,
        "unknown_state_filters": [name for name in request.state_filters if name not in STATES_BY_LABEL],
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
    return answer_all((coordinator.journal for coordinator in coordinators), fields, _refused)


def _filter(request: Any, now: Now) -> Callable[[str, TransactionMetadata], bool]:
    states = {STATES_BY_LABEL.get(name) for name in request.state_filters}
    producer_ids = set(request.producer_id_filters)
    duration_ms = getattr(request, "duration_filter", -1)
    pattern = getattr(request, "transactional_id_pattern", None)
    if pattern:
        regex.check(pattern)

    def passes(transactional_id: str, metadata: TransactionMetadata) -> bool:
        return (
            (not states or metadata.state in states)
            and (not producer_ids or metadata.producer_id in producer_ids)
            and (duration_ms < 0 or now.wall_ms - metadata.start_ms > duration_ms)
            and (not pattern or bool(regex.matching(pattern, (transactional_id,))))
        )

    return passes


def _refused(code: ErrorCode) -> Fields:
    return {"error_code": code}
