"""OffsetCommit (8), versions 2 to 10: commit offsets; from version 10 on topics are named by id.

Versions 2 to 4 may carry a retention time of their own.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import CommitReply, CommitRequest, append_error
from holdfast.broker.groups.offsets import DEFAULT_RETENTION
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.handlers.groups import commit_fields, known_topics
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

TOPIC_IDS_FROM: Final = 10


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    known, refused = known_topics(node, request.topics, by_id=context.version >= TOPIC_IDS_FROM)

    def fields(reply: CommitReply | ErrorCode) -> Fields:
        return commit_fields(node, request, refused, reply)

    if not known:
        return fields({})
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return fields(error.code)
    reply: CommitReply | ErrorCode
    try:
        reply = machine.commit(
            CommitRequest(
                request.group_id,
                request.member_id,
                getattr(request, "group_instance_id", None),
                request.generation_id_or_member_epoch,
                known,
                getattr(request, "retention_time", DEFAULT_RETENTION),
                context.version,
            ),
            now,
        )
    except ApiError as error:
        reply = append_error(error)
    return journal.answer(fields(reply), fields)
