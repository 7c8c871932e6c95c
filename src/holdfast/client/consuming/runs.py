"""What is handed to a worker: a run of messages of one partition, to be handled one after the other.

A run belongs to the assignment it was read under, through its tracker. The worker counts up what it has finished, and
the poll loop reads the count: nothing is handed back message by message. Only a finished message is counted, and a run
ends early when its partition is about to go, when its consumer stops, or on an error that stops the consumer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.messages import KEY, OFFSET, Fields, Message, as_message

Order: TypeAlias = Literal["partition", "key", "none"]


class Run:
    __slots__ = ("counted", "error", "fields", "finished", "size_bytes", "tracker")

    def __init__(self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int = 0) -> None:
        self.fields = messages
        self.tracker = tracker
        self.size_bytes = size_bytes
        self.finished = 0
        """How many, from the front, were handled or set aside. Written by the worker alone."""
        self.counted = 0
        """How many of those the tracker knows of. Written by the poll loop alone."""
        self.error: BaseException | None = None
        """Why the consumer must stop."""

    @property
    def messages(self) -> Iterator[Message]:
        """Each made when it is asked for."""
        return map(as_message, self.fields)

    def count(self) -> int:
        """Tell the tracker what was finished since the last time; returns how many of those count."""
        finished = self.finished
        if finished == self.counted:
            return 0
        offsets = list(map(OFFSET, self.fields[self.counted : finished]))
        self.counted = finished
        return len(offsets) if self.tracker.finish_all(offsets) else 0


class Reports:
    """Where workers tell the poll loop that they are through with a run."""

    def __init__(self) -> None:
        self._over: deque[Run] = deque()
        self._news = threading.Event()

    def add(self, run: Run) -> None:
        self._over.append(run)
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Until a run is over, or so long."""
        self._news.wait(seconds)

    def take(self) -> list[Run]:
        self._news.clear()
        over = []
        while self._over:
            over.append(self._over.popleft())
        return over


class Pool(Protocol):
    """Workers of one handler."""

    def give(self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int) -> None:
        """Hand messages of one partition over, in order."""

    def at_work(self) -> Iterable[Run]:
        """The runs that workers are at now.

        A run is here before its worker looks whether the partition is about to go, and until it has been reported: when
        a draining partition has no run here, none will begin and all have been reported.
        """

    def close(self, seconds: float) -> bool:
        """End, waiting so long for what is under way; false when something still is."""


def split(
    messages: Sequence[Fields], order: Order, lanes: int, run_max: int
) -> list[tuple[int, Sequence[Fields]]]:
    """Messages of one partition as runs, each with the lane that must take it.

    What belongs together goes to one lane, in order: the partition, or the messages of a key; those without a key
    follow their partition. Without an order there is one lane that every worker takes from.
    """
    if lanes == 1 or not messages:
        return [(0, piece) for piece in _pieces(messages, run_max)]
    home = hash(messages[0][:2]) % lanes
    if order != "key":
        return [(home, piece) for piece in _pieces(messages, run_max)]
    by_lane: dict[int, list[Fields]] = {}
    for message in messages:
        key = KEY(message)
        lane = home if key is None else hash(key) % lanes
        by_lane.setdefault(lane, []).append(message)
    return [(lane, piece) for lane, together in by_lane.items() for piece in _pieces(together, run_max)]


def _pieces(messages: Sequence[Fields], most: int) -> list[Sequence[Fields]]:
    if len(messages) <= most:
        return [messages] if messages else []
    return [messages[at : at + most] for at in range(0, len(messages), most)]
