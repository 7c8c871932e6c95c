"""Messages for topics of which nobody knows how many partitions they have: stored first, moved when it is known.

With the broker away, a topic that this home has never seen cannot be asked about. Its messages are stored without a
partition, and that is a promise like any other. When the number of partitions is learnt, they are written again, in
their order, each with its partition and sequence, and only then do the first copies count as done. Each write says how
far the moving has come, so that a crash in the middle of it continues there, and no message gets two ids.

New messages of such a topic stay undecided until the moving has caught up: none overtakes. When brokers say for long
enough that there is no such topic, or that it takes no messages from us, they are set aside as refused.

Everything here is called by the thread that writes, but for `learn`, `give_up` and `asked`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, NamedTuple, Protocol

from holdfast.client.delivery import Waiting
from holdfast.client.partitioner import Partitioner
from holdfast.client.spool.format import MOVED, UNDECIDED, Message, Moved
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup, make_item
from holdfast.client.spool.layout import TopicLayout
from holdfast.client.spool.refused import Refused
from holdfast.client.spool.store import READ_BYTES, SpoolStore, Written
from holdfast.errors import StorageError

MOVE_BYTES: Final = 4 * 1024 * 1024
"""About what one step moves: between two steps, what was sent meanwhile is stored."""
ASK_SECONDS: Final = 1.0
"""How long the first message for an unknown topic waits for a broker that can say where it goes."""
NO_TOPIC: Final = "UNKNOWN_TOPIC_OR_PART"


class Delivering(Protocol):
    """What moving needs from whoever delivers."""

    @property
    def prefix(self) -> int: ...

    def claim(self, place: int) -> SpooledDelivery | None: ...

    def moved(self) -> None: ...

    def refuse_undecided(self, refused: Sequence[tuple[SpooledDelivery, Refused]]) -> None: ...

    def settle_undecided(self, refused: Sequence[tuple[SpooledDelivery, Refused]]) -> None: ...


class _Step(NamedTuple):
    """The next undecided messages of a topic."""

    found: list[tuple[SpooledDelivery, Message]]
    through: int
    cursor: int


class Mover:
    def __init__(
        self,
        store: SpoolStore,
        layout: TopicLayout,
        partitioner: Partitioner,
        waiting: Waiting,
        deliverer: Delivering,
        ask: Callable[[str, float], int | None],
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`ask` answers within so many seconds how many partitions a topic has; None when it cannot be said."""
        self._store = store
        self._layout = layout
        self._partitioner = partitioner
        self._waiting = waiting
        self._deliverer = deliverer
        self._ask = ask
        self._say = say
        self._lock = Lock()
        self._decided: dict[str, int] = {}
        """Partitions of topics whose messages get one when they are stored."""
        self._unknown: set[str] = set()
        """Topics that somebody must be asked about."""
        self._known: dict[str, int] = {}
        """Partitions of topics whose undecided messages are to be moved."""
        self._given_up: dict[str, tuple[str, str]] = {}
        """Topics whose undecided messages are to be set aside, and why: the reason and its code."""
        self._cursors: dict[str, int] = {}
        """Where to go on reading, by topic."""
        self._is_reachable = True
        self._retry_due = 0.0
        self._last_problem = ""
        for topic, partition in list(store.counters):
            if partition == UNDECIDED and self._left(topic):
                count = layout.known(topic)
                if count is None:
                    self._unknown.add(topic)
                else:
                    self._known[topic] = count

    def _left(self, topic: str) -> int:
        """How many undecided messages of a topic are not moved."""
        counters = self._store.counters
        return counters.get((topic, UNDECIDED), 0) - counters.get((topic, MOVED), 0)

    # Storing

    def partitions_of(self, topic: str) -> int | None:
        """How many partitions to choose from; None when the message has to be stored undecided."""
        count = self._decided.get(topic)
        return count if count is not None else self._find_out(topic)

    def _find_out(self, topic: str) -> int | None:
        if topic in self._known or topic in self._given_up:
            return None
        count = self._layout.known(topic)
        if count is None and self._is_reachable and topic not in self._unknown:
            count = self._ask(topic, ASK_SECONDS)
            # With the broker away, one message waits for it, and not the first of every topic.
            self._is_reachable = count is not None
        with self._lock:
            if count is None:
                self._unknown.add(topic)
                return None
            if self._left(topic):
                self._known[topic] = count
                return None
            self._unknown.discard(topic)
            self._decided[topic] = count
            return count

    # From whoever asks

    def asked(self) -> set[str]:
        """The topics that somebody must be asked about."""
        with self._lock:
            return set(self._unknown)

    def learn(self, topic: str, count: int) -> bool:
        """A topic has so many partitions; whether there is something to move now."""
        with self._lock:
            self._is_reachable = True
            if topic in self._decided:
                self._decided[topic] = count
                return False
            if topic not in self._unknown:
                return False
            self._unknown.discard(topic)
            self._known[topic] = count
            return True

    def give_up(self, topic: str, reason: str, code: str) -> None:
        """There is no such topic, or it takes no messages: those that wait for it are refused."""
        with self._lock:
            self._is_reachable = True
            if topic in self._unknown:
                self._unknown.discard(topic)
                self._given_up[topic] = reason, code

    # Moving

    @property
    def has_work(self) -> bool:
        return bool(self._known or self._given_up) and time.monotonic() >= self._retry_due

    @property
    def is_waiting(self) -> bool:
        """Whether there is work that could not be done, and will be tried again."""
        return bool(self._known or self._given_up)

    def move_some(self, send: Callable[[StoredGroup], None]) -> None:
        """Take one step for every topic that can be moved."""
        if not self.has_work:
            return
        try:
            for topic, count in list(self._known.items()):
                self._move(topic, count, send)
            for topic, (reason, code) in list(self._given_up.items()):
                self._set_aside(topic, reason, code, send)
        except (StorageError, OSError) as error:
            # Most likely there is no room for the second copies; delivering makes some.
            self._retry_due = time.monotonic() + ASK_SECONDS
            if str(error) != self._last_problem:
                self._last_problem = str(error)
                self._say(f"messages without a partition could not be moved; it is tried again: {error}")

    def _move(self, topic: str, count: int, send: Callable[[StoredGroup], None]) -> None:
        step = self._read(topic)
        items = [item for item, _ in step.found]
        if items:
            try:
                for item, message in step.found:
                    item.refill(message)
                    item.partition = self._partitioner.choose(topic, item.key, len(item.value or b""), count)
                written = self._store.write(items, Moved(topic, step.through))
            except BaseException:
                for item in items:
                    item.partition = None
                    item.spill()
                raise
            self._cursors[topic] = step.cursor
            send(_stored(items, written))
            self._deliverer.moved()
        if self._is_over(topic, step):
            with self._lock:
                self._known.pop(topic, None)
                self._decided[topic] = count

    def _set_aside(self, topic: str, reason: str, code: str, send: Callable[[StoredGroup], None]) -> None:
        step = self._read(topic)
        if step.found:
            now_ms = time.time_ns() // 1_000_000
            refused = [(item, Refused(message, code, reason, now_ms)) for item, message in step.found]
            self._deliverer.refuse_undecided(refused)
            written = self._store.write([], Moved(topic, step.through))
            self._cursors[topic] = step.cursor
            self._deliverer.settle_undecided(refused)
            send(_stored([], written))
            self._deliverer.moved()
        if self._is_over(topic, step):
            with self._lock:
                self._given_up.pop(topic, None)

    def _is_over(self, topic: str, step: _Step) -> bool:
        """Whether the topic has no undecided messages left."""
        if self._left(topic):
            if not step.found:
                raise StorageError(
                    f"messages of {topic} that were stored without a partition cannot be found"
                )
            return False
        self._cursors.pop(topic, None)
        return True

    def _read(self, topic: str) -> _Step:
        """The next undecided messages of a topic, about as many as one step moves."""
        through = self._store.counters.get((topic, MOVED), 0)
        end = self._store.counters.get((topic, UNDECIDED), 0)
        cursor = max(self._cursors.get(topic, 0), self._deliverer.prefix)
        found: list[tuple[SpooledDelivery, Message]] = []
        size = 0
        while through < end and size < MOVE_BYTES:
            groups, following = self._store.read(cursor, max_bytes=min(READ_BYTES, MOVE_BYTES))
            if following == cursor:
                break
            for group in groups:
                for number, message in enumerate(group.messages):
                    if (
                        message.partition == UNDECIDED
                        and message.topic == topic
                        and message.sequence >= through
                    ):
                        item = self._deliverer.claim(group.position + number)
                        found.append((item or make_item(message, self._waiting), message))
                        through = message.sequence + 1
                        size += len(message.value or b"") + len(message.key or b"")
            cursor = following
        return _Step(found, through, cursor)


def _stored(items: list[SpooledDelivery], written: Written) -> StoredGroup:
    group = StoredGroup()
    group.items = items
    group.bytes = written.end - written.start
    group.start, group.position, group.end = written.start, written.position, written.end
    group.following = {where: after for where, after in written.following.items() if where[1] >= 0}
    group.is_stored = True
    for item in items:
        item.group = group
    return group
