"""Incremental fetch sessions (KIP-227): the broker remembers what a client fetches and answers with changes.

    request (session, epoch)      meaning
    (0, -1)  or no session        full fetch, no session
    (0, 0)                        full fetch, and a session is made when there is room
    (id, 0)                       the session is closed and a new one made
    (id, -1)                      full fetch, and the session is closed
    (id, n)                       incremental: partitions named are added or changed, forgotten ones removed

An epoch that is not the next one is refused; the client then begins anew. A session that has forgotten its last
partition ends. Sessions are bounded, in number and in what they remember together; when there is no room, the one
idle longest gives way if it has been idle for two minutes. One that outgrows the room ends. Without a session a
client names all its partitions each time, and is served all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.names import TOPIC_NAME_LENGTH_MAX
from holdfast.errors import ApiError
from holdfast.seams import Now, Randomness
from holdfast.wire.hot import Fetched

EVICTION_MS: Final = 120_000
REMEMBERED_MAX: Final = 200_000
"""Partitions of all sessions together, a hundred megabytes or so. They need not exist: a session repeats the
error."""
FINAL_EPOCH: Final = -1
INITIAL_EPOCH: Final = 0
NO_SESSION: Final = 0

TopicKey = str | UUID
PartitionKey = tuple[TopicKey, int]


class WantedPartition(NamedTuple):
    """One partition a client wants, as its request says."""

    fetch_offset: int
    partition_max_bytes: int
    current_leader_epoch: int
    last_fetched_epoch: int
    log_start_offset: int


def weight(key: PartitionKey) -> int:
    """How many partitions of a name as long as names may be would take as much memory as this one."""
    topic = key[0]
    return 1 + len(topic) // (TOPIC_NAME_LENGTH_MAX + 1) if isinstance(topic, str) else 1


class FetchSession:
    __slots__ = ("_sent", "epoch", "id", "last_used_ms", "partitions", "weight")

    def __init__(self, session_id: int, now_ms: int) -> None:
        self.id = session_id
        self.epoch = 1
        self.last_used_ms = now_ms
        self.weight = 0
        self.partitions: OrderedDict[PartitionKey, WantedPartition] = OrderedDict()
        """In the order they are served; one that returned data moves to the end, so none starves. The full
        response that begins the session leaves the client's order as it is."""
        self._sent: dict[PartitionKey, tuple[int, int, int]] = {}

    def update(self, wanted: dict[PartitionKey, WantedPartition], forgotten: list[PartitionKey]) -> None:
        for key, want in wanted.items():
            if key not in self.partitions:
                self.weight += weight(key)
            self.partitions[key] = want
        for key in forgotten:
            if self.partitions.pop(key, None) is not None:
                self.weight -= weight(key)
            self._sent.pop(key, None)

    def is_news(self, key: PartitionKey, fetched: Fetched) -> bool:
        """Whether an incremental response must carry this partition."""
        seen = (fetched.error_code, fetched.high_watermark, fetched.log_start_offset)
        return bool(
            fetched.records_length
            or fetched.error_code
            or fetched.diverging is not None
            or self._sent.get(key) != seen
        )

    def sent(self, key: PartitionKey, fetched: Fetched, *, is_full: bool = False) -> None:
        if fetched.error_code:
            # Repeated until it is gone, so it is not remembered as known to the client.
            self._sent.pop(key, None)
        else:
            self._sent[key] = (0, fetched.high_watermark, fetched.log_start_offset)
        if fetched.records_length and not is_full and key in self.partitions:
            self.partitions.move_to_end(key)


class FetchPlan(NamedTuple):
    partitions: list[tuple[PartitionKey, WantedPartition]]
    session: FetchSession | None
    is_full: bool
    """A full response names every partition; an incremental one only what changed."""

    @property
    def session_id(self) -> int:
        return self.session.id if self.session is not None else NO_SESSION


class FetchSessions:
    def __init__(self, slots_max: int, randomness: Randomness) -> None:
        self._slots_max = slots_max
        self._randomness = randomness
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def plan(
        self,
        request: Any,
        wanted: dict[PartitionKey, WantedPartition],
        forgotten: list[PartitionKey],
        now: Now,
    ) -> FetchPlan:
        session_id = getattr(request, "session_id", NO_SESSION)
        epoch = getattr(request, "session_epoch", FINAL_EPOCH)
        if epoch == FINAL_EPOCH:
            self._sessions.pop(session_id, None)
            return FetchPlan(list(wanted.items()), None, True)
        if epoch == INITIAL_EPOCH:
            self._sessions.pop(session_id, None)
            session = self._create(sum(map(weight, wanted)), now)
            if session is not None:
                session.update(wanted, [])
            return FetchPlan(list(wanted.items()), session, True)
        session = self._sessions.get(session_id)
        if session is None:
            raise ApiError(ErrorCode.fetch_session_id_not_found, f"no fetch session has the id {session_id}")
        if epoch != session.epoch:
            raise ApiError(
                ErrorCode.invalid_fetch_session_epoch, f"epoch {epoch} where {session.epoch} is expected"
            )
        by_name = next((isinstance(key[0], str) for key in session.partitions), None)
        for key in wanted:
            if by_name is not None and isinstance(key[0], str) != by_name:
                raise ApiError(
                    ErrorCode.fetch_session_topic_id_error,
                    "the session began with the other kind of topic key",
                )
        session.epoch = 1 if epoch == 2**31 - 1 else epoch + 1
        session.last_used_ms = now.monotonic_ms
        self._sessions.move_to_end(session_id)
        before = session.weight
        session.update(wanted, forgotten)
        if session.weight > before and not self._has_room(0):
            del self._sessions[session_id]
            raise ApiError(ErrorCode.fetch_session_id_not_found, "there is no room for a session that large")
        if not session.partitions:
            # Nothing is left to remember: what was asked is answered in full, and the slot is free.
            del self._sessions[session_id]
            return FetchPlan(list(wanted.items()), None, True)
        return FetchPlan(list(session.partitions.items()), session, False)

    def _has_room(self, more: int) -> bool:
        return more + sum(session.weight for session in self._sessions.values()) <= REMEMBERED_MAX

    def _create(self, weight: int, now: Now) -> FetchSession | None:
        if self._slots_max <= 0 or weight > REMEMBERED_MAX:
            return None
        while len(self._sessions) >= self._slots_max or not self._has_room(weight):
            oldest = next(iter(self._sessions.values()))
            if now.monotonic_ms - oldest.last_used_ms < EVICTION_MS:
                return None
            del self._sessions[oldest.id]
        session_id = 0
        while session_id == 0 or session_id in self._sessions:
            session_id = 1 + self._randomness.below(2**31 - 2)
        session = self._sessions[session_id] = FetchSession(session_id, now.monotonic_ms)
        return session
