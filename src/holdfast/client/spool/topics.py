"""Where messages can be sent now: how many partitions topics have, and which topics and partitions take none.

A message whose topic nobody could be asked about is stored *undecided*. It gets its partition when it is sent, from
where it stands, and the same one whenever it is sent again: by its key, or by its sequence when it has none.

What may pass with time is not final: brokers that do not know a topic or a partition, that do not let us write, or that
refuse timestamps for their own clock's sake. Such a topic, or partition of one, is *held*: its messages stay stored, in
their order, those of others go on, and it is tried again, after a second at first and every half minute in the end.
Whoever looks is told why: a line in the log at the beginning, every few minutes, and at the end.

A topic is held and released only by whoever has the deliverer's `_sending`: so nobody takes messages meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, Final, TypeAlias

from holdfast.atomic import read_whole, write_atomically
from holdfast.client.partitioner import Partitioner
from holdfast.client.spool.groups import SpooledDelivery
from holdfast.seams import FileSystem

ASK_SECONDS: Final = 1.0
"""How long the first message for an unknown topic waits for a broker that can say where it goes."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0
"""Between two attempts, at first and at most."""
SAY_SECONDS: Final = 300.0
"""Between two lines about the same trouble."""
RUN_MESSAGES: Final = 256
"""So many undecided messages without a key go to one partition before the next one's turn comes: batches fill."""

Place: TypeAlias = tuple[str, int | None]
"""A topic, and a partition of it; None for all of them."""


class _Trouble:
    """Why a place takes no messages; kept for a while after it does again, since it may not last."""

    __slots__ = ("due", "is_held", "pause", "reason", "said_at", "since_ms")

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.is_held = True
        self.pause = PAUSE_SECONDS
        self.due = 0.0
        """When it is looked at again; once it is released, until when it is not forgotten."""
        self.said_at = float("-inf")
        self.since_ms = time.time_ns() // 1_000_000


class SpoolTopics:
    def __init__(
        self,
        layout: TopicLayout,
        partitioner: Partitioner,
        say: Callable[[str], None] = lambda line: None,
        ask: Callable[[str, float], int | None] = lambda topic, timeout: None,
    ) -> None:
        self._layout = layout
        self._partitioner = partitioner
        self._say = say
        self.ask = ask
        """Answers within so many seconds how many partitions a topic has; None when that cannot be said."""
        self._troubles: dict[Place, _Trouble] = {}
        self.held: dict[Place, str] = {}
        """What takes no messages now, and why."""
        self._held_topics: set[str] = set()
        """Topics of which anything is held."""
        self._unknown: set[str] = set()
        """Topics that nobody has counted the partitions of, as the thread that stores knows it."""
        self._is_reachable = True

    # Storing

    def partitions_of(self, topic: str) -> int | None:
        """How many partitions to choose from; None when the message has to be stored undecided."""
        count = self._layout.known(topic)
        if count is None and self._is_reachable and topic not in self._unknown:
            count = self.ask(topic, ASK_SECONDS)
            # With the broker away, one message waits for it, and not the first of every topic.
            self._is_reachable = count is not None
            if count is None:
                self._unknown.add(topic)
        return count

    def learn(self, topic: str, count: int) -> None:
        self._is_reachable = True
        self._unknown.discard(topic)
        self._layout.learn(topic, count)

    # Sending

    def decide(self, item: SpooledDelivery) -> bool:
        """Whether a message can be sent now; one that was stored undecided gets its partition."""
        topic = item.topic
        if item.line is None:
            return topic not in self._held_topics or not (
                (topic, None) in self.held or (topic, item.partition) in self.held
            )
        if topic in self._held_topics:
            # The progress of undecided messages is one number: none of them goes ahead.
            return False
        count = self._layout.known(topic)
        if count is None:
            self.hold((topic, None), "no broker has said yet how many partitions it has", is_known=False)
            return False
        item.partition = self._partitioner.settled(item.key, item.sequence // RUN_MESSAGES, count)
        return True

    def hold(self, place: Place, reason: str, *, is_known: bool = True) -> None:
        """Messages for this place wait from now on."""
        now = time.monotonic()
        trouble = self._troubles.get(place)
        if trouble is None:
            trouble = self._troubles[place] = _Trouble(reason)
        elif not trouble.is_held:
            trouble.is_held = True
            trouble.pause = min(PAUSE_SECONDS_MAX, trouble.pause * 2)
        trouble.reason = reason
        trouble.due = now + trouble.pause if is_known else now
        self.held[place] = reason
        self._held_topics.add(place[0])
        if is_known:
            self._tell(place, trouble)

    def _tell(self, place: Place, trouble: _Trouble) -> None:
        now = time.monotonic()
        if now - trouble.said_at >= SAY_SECONDS:
            trouble.said_at = now
            self._say(
                f"messages for {name_of(place)} wait in the spool, and are tried again: {trouble.reason}"
            )

    def due(self) -> list[Place]:
        """What is to be looked at again."""
        now = time.monotonic()
        for place, trouble in list(self._troubles.items()):
            if not trouble.is_held and now >= trouble.due:
                del self._troubles[place]
        return [place for place in self.held if now >= self._troubles[place].due]

    def postpone(self, places: Iterable[Place]) -> None:
        """Nobody could be asked about these."""
        for place in places:
            self._troubles[place].due = time.monotonic() + PAUSE_SECONDS

    def hold_on(self, place: Place, reason: str) -> None:
        """It was looked at, and still takes no messages."""
        trouble = self._troubles[place]
        trouble.pause = min(PAUSE_SECONDS_MAX, trouble.pause * 2)
        self.hold(place, reason)

    def release(self, place: Place) -> None:
        """Messages for this place are sent again; if that fails soon, the next attempt comes later."""
        trouble = self._troubles[place]
        trouble.is_held = False
        trouble.due = time.monotonic() + 2 * PAUSE_SECONDS_MAX
        del self.held[place]
        self._held_topics = {topic for topic, _ in self.held}
        if trouble.said_at > float("-inf"):
            self._say(f"sending again what waits for {name_of(place)}")

    def as_json(self) -> list[dict[str, object]]:
        """What waits, for whoever looks at the spool from outside."""
        return [
            {
                "topic": topic,
                "partition": partition,
                "reason": reason,
                "since_ms": self._troubles[topic, partition].since_ms,
            }
            for (topic, partition), reason in list(self.held.items())
        ]


def name_of(place: Place) -> str:
    topic, partition = place
    return topic if partition is None else f"{topic}-{partition}"


LAYOUT_FILE: Final = "topics.json"


class TopicLayout:
    """How many partitions topics have: asked for once, remembered in the home for when no broker can be asked.

    A home may serve producers of several clusters: each knows the topics that were asked about at its own address.

    Shared by all spools of a home that this process has open.
    """

    def __init__(
        self,
        fs: FileSystem,
        home: str,
        bootstrap_servers: str,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._fs = fs
        self._path = f"{home}/{LAYOUT_FILE}"
        self._address = f"@{bootstrap_servers}"
        """No topic can have such a name. What stands outside of all addresses was written by an earlier version."""
        self._say = say
        self._lock = Lock()
        found = self._read()
        self._counts = _counts_in(found) | _counts_in(found.get(self._address))

    def _read(self) -> dict[str, Any]:
        if not self._fs.exists(self._path):
            return {}
        try:
            known = json.loads(read_whole(self._fs, self._path))
            if not isinstance(known, dict):
                raise TypeError("an object is expected")
            return known
        except (ValueError, TypeError, OSError) as error:
            # Nothing depends on it but what is stored before a broker has been asked.
            self._say(f"{self._path} cannot be read, and is begun anew: {error}")
            return {}

    def known(self, topic: str) -> int | None:
        return self._counts.get(topic)

    def topics(self) -> list[str]:
        with self._lock:
            return list(self._counts)

    def learn(self, topic: str, count: int) -> None:
        with self._lock:
            if self._counts.get(topic) == count:
                return
            self._counts[topic] = count
            try:
                found = self._read() | {self._address: self._counts}
                write_atomically(self._fs, self._path, json.dumps(found).encode())
            except OSError as error:
                self._say(f"{self._path} could not be written: {error}")


def _counts_in(found: Any) -> dict[str, int]:
    if not isinstance(found, dict):
        return {}
    return {topic: count for topic, count in found.items() if isinstance(count, int) and count > 0}
