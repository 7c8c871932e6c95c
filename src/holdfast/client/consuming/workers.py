"""Workers: threads that handle messages, each in the order it gets them.

Order is kept by giving what belongs together to one worker: the messages of a partition, or those with the same key.
Without an order any free worker takes the next message. A worker reports every message it is done with; one that was
taken away meanwhile, because its partition went to another member, is not begun any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Literal, NamedTuple, TypeAlias

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.messages import Message
from holdfast.client.partitioner import murmur2

Order: TypeAlias = Literal["partition", "key", "none"]


class Work(NamedTuple):
    """A message with the assignment it was read under."""

    message: Message
    tracker: PartitionTracker


class Finished(NamedTuple):
    """What became of a piece of work."""

    work: Work
    is_done: bool
    """Handled or set aside; otherwise it was left as it is."""
    error: BaseException | None = None
    """Why the consumer must stop."""


Handle: TypeAlias = Callable[[Work], bool]
"""Carry work out; false when it was left undone because nobody wants it any more."""
_END: Final = None


class Workers:
    def __init__(self, count: int, order: Order, handle: Handle) -> None:
        self._order = order
        self._handle = handle
        queues = 1 if order == "none" else count
        self._queues: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(queues)]
        self._finished: deque[Finished] = deque()
        self.news = threading.Event()
        """Set when something was finished."""
        self._threads = [
            threading.Thread(
                target=self._run, args=(self._queues[at % queues],), name=f"holdfast-worker-{at}", daemon=True
            )
            for at in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, work: Work) -> None:
        self._queues[self._queue_of(work.message)].put(work)

    def _queue_of(self, message: Message) -> int:
        count = len(self._queues)
        if count == 1:
            return 0
        if self._order == "key" and message.key is not None:
            return murmur2(message.key) % count
        return hash((message.topic, message.partition)) % count

    def take_finished(self) -> list[Finished]:
        """What was finished since the last call."""
        self.news.clear()
        finished = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def close(self) -> None:
        """End every worker after what it holds; begun work is waited for."""
        for at in range(len(self._threads)):
            self._queues[at % len(self._queues)].put(_END)
        for thread in self._threads:
            thread.join()

    def _run(self, queue: SimpleQueue[Work | None]) -> None:
        while (work := queue.get()) is not None:
            is_done, failed = False, None
            tracker = work.tracker
            try:
                is_done = not (tracker.is_closed or tracker.is_draining) and self._handle(work)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it and stop
                failed = error
            self._finished.append(Finished(work, is_done, failed))
            self.news.set()
