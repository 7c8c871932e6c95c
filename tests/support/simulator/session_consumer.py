"""A consumer with an incremental fetch session: it names a partition once, and again only when something changed.

What the broker leaves out of an answer is a statement too: nothing new there, and the end is where it was. The
consumer hands it to the checkers as such, so that a session that forgets a partition shows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support.simulator.consumers import FETCH, Consumer, asking

from holdfast.testing import history
from holdfast.testing.history import Partition

if TYPE_CHECKING:
    from tests.support.simulator.world import KnownPartition, World

VERSION = 17
NAME_AGAIN = -1
"""No position: the partition is still in the session, and the next request names it whatever its position."""
_SESSION_ERRORS = frozenset(
    {
        ErrorCode.fetch_session_id_not_found,
        ErrorCode.invalid_fetch_session_epoch,
        ErrorCode.fetch_session_topic_id_error,
    }
)


class SessionConsumer(Consumer):
    def __init__(self, world: World, name: str, committed_only: bool = False) -> None:
        super().__init__(world, name, committed_only)
        self._session_id = 0
        self._epoch = 0
        self._asked: dict[Partition, int] = {}
        """The position each partition of the session was last named with."""

    def act(self) -> bool:
        if self._waiting:
            return False
        every = self.world.all_partitions()
        if not every:
            return False
        rng = self.world.rng
        if rng.random() < 0.05:
            self._rewind(rng.sample(every, 1))
        elif rng.random() < 0.05:
            self.list_offsets(rng.sample(every, 1), self._some_time())
            return True
        self.fetch(every, max_wait_ms=rng.choice((0, 0, 20, 500)))
        return True

    def _reset(self) -> None:
        self._session_id = self._epoch = 0
        self._asked.clear()

    def fetch(self, chosen: list[KnownPartition], max_wait_ms: int = 0, limit_bytes: int = 1 << 20) -> None:
        wanted = {known.partition: known for known in chosen}
        forgotten = [partition for partition in self._asked if partition not in wanted]
        for partition in forgotten:
            del self._asked[partition]
        topics: dict[str, dict[str, Any]] = {}
        for partition, known in wanted.items():
            position = self.positions.get(partition, 0)
            if self._asked.get(partition) != position:
                self._asked[partition] = position
                topic = topics.setdefault(partition[0], {"topic_id": known.topic.uuid, "partitions": []})
                topic["partitions"].append(asking(known.index, position, limit_bytes))
            self.world.observe(history.ReadBegun(self.name, partition))
        fields = {
            "max_wait": max_wait_ms,
            "min_bytes": self.world.rng.choice((0, 1, 1, 1000)),
            "max_bytes": 1 << 24,
            "isolation_level": int(self.committed_only),
            "session_id": self._session_id,
            "session_epoch": self._epoch,
            "topics": list(topics.values()),
            "forgotten_topics_data": [
                {"topic_id": bytes.fromhex(topic_id), "partitions": [index]} for topic_id, index in forgotten
            ],
        }
        self._waiting = True
        self.link.request(FETCH, VERSION, fields, partial(self._answered, wanted))

    def _answered(self, wanted: dict[Partition, KnownPartition], response: Any | None) -> None:
        self._waiting = False
        kind = "fetch in a session"
        if response is None:
            self.world.count(kind, "unknown")
            self._reset()
            return
        self.world.count(kind, "answered" if not response.error_code else response.error_code.name)
        if response.error_code in _SESSION_ERRORS:
            self._reset()
            return
        if self._epoch == 0:
            self._session_id = response.session_id
        self._epoch += 1
        left_out = dict(wanted)
        for topic in response.responses:
            for answer in topic.partitions:
                key = (topic.topic_id.hex, answer.partition_index)
                known = left_out.pop(key)
                self._fetched_partition(known, self._asked[key], answer, limited=False)
                if answer.error_code != ErrorCode.none:
                    self._asked[key] = NAME_AGAIN
        for key in left_out:
            self._unchanged(key)
        if not self._session_id:
            self._reset()

    def _unchanged(self, key: Partition) -> None:
        if key in self.ends:
            self.world.observe(
                history.BatchesRead(
                    self.name,
                    key,
                    self._asked[key],
                    (),
                    self.ends[key],
                    last_stable=self.stable_ends.get(key, -1),
                    committed_only=self.committed_only,
                )
            )
