"""What brokers leave out without a word, since whoever asks may not see it.

A list of topics, groups or transactions holds what the asker may describe, and does not say that there is more. Two
things tell. The cluster says what may be done with it: who may not describe it is told only of groups that may be
described each by itself. And who may describe it may ask each broker what its log directories hold, which leaves
nothing out: a name that no list had is then asked for by itself, and the refusal tells it from a topic that has just
been made or deleted.

Who may do what brokers do among themselves (CLUSTER_ACTION: a broker, a super user, anybody where nothing is
authorised) sees everything, and the directories are not asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from kio.schema.errors import ErrorCode

from holdfast.admin.errors import ClusterError
from holdfast.doctor.live_ask import DENIED, Asker, chunks
from holdfast.wire.api_keys import DESCRIBE_LOG_DIRS

DESCRIBE_BIT: Final = 1 << 8
CLUSTER_ACTION_BIT: Final = 1 << 9
NAMES_PER_REQUEST: Final = 500
UNSEEN: Final = "those that may not be seen"
WITHOUT_DESCRIBE: Final = (
    "without DESCRIBE on the cluster, brokers list only what may be described one by one"
)


def may_describe(operations: int) -> bool:
    return bool(operations & DESCRIBE_BIT)


def hidden_topics(
    asker: Asker, operations: int, brokers: Iterable[int], known: Collection[str]
) -> Iterator[tuple[str, ErrorCode]]:
    """Topics that the list of topics left out, and why; for one who may describe the cluster."""
    if not may_describe(operations) or operations & CLUSTER_ACTION_BIT:
        return
    names: set[str] = set()
    for broker_id in brokers:
        try:
            answer = asker.ask_broker(broker_id, DESCRIBE_LOG_DIRS, {"topics": None})
        except ClusterError:
            continue  # what it does not tell now is missed by the questions that follow
        names.update(topic.name for result in answer.results for topic in result.topics)
    for some in chunks(sorted(names.difference(known)), NAMES_PER_REQUEST):
        try:
            answer = asker.metadata(some, lowest=4)
        except ClusterError:
            return
        yield from ((str(each.name), each.error_code) for each in answer.topics if each.error_code in DENIED)
