"""What is handed to a worker: a run of messages of one partition, to be handled one after the other.

A run belongs to the assignment it was read under, through its tracker. The worker counts up what it has finished, and
the poll loop reads the count: nothing is handed back message by message. Only a finished message is counted, and a run
ends early when its partition is about to go, when its consumer stops, or on an error that stops the consumer.

Workers handle messages, each in the order it gets them. Order is kept by giving what belongs together to one worker:
the messages of a partition, or those with the same key. Without an order any free worker takes the next message. What a
worker has not begun when its partition goes to another member, it does not begin any more.

Workers are threads, or coroutines where handlers are awaited. A lane of coroutines is a task that awaits one message
after the other, so the order rules are those of threads. The poll loop talks to it through thread-safe queues only.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Literal, Protocol, TypeAlias

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.errors import HandlerFailed
from holdfast.client.messages import KEY, OFFSET, Fields, Message, as_message
from holdfast.client.process import end_if_forked

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


class _Lanes:
    """What threads and coroutines have in common: lanes, and what each worker is at."""

    def __init__(self, count: int, order: Order, run_max: int, reports: Reports) -> None:
        self._order = order
        self._run_max = run_max
        self._reports = reports
        self._pid = os.getpid()
        self._lanes = 1 if order == "none" else count
        self._current: list[Run | None] = [None] * count

    def _runs(
        self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int
    ) -> list[tuple[int, Run]]:
        """Messages of one partition as runs, each with its lane."""
        each = size_bytes // max(1, len(messages))
        return [
            (lane, Run(piece, tracker, each * len(piece)))
            for lane, piece in split(messages, self._order, self._lanes, self._run_max)
        ]

    def at_work(self) -> Iterable[Run]:
        return [run for run in self._current if run is not None]

    def _through(self, at: int, run: Run, error: BaseException | None) -> None:
        """A worker is through with a run; what it raised, the consumer must hear of, and stop."""
        end_if_forked(self._pid, error)
        run.error = error
        self._reports.add(run)
        self._current[at] = None


class Workers(_Lanes):
    """Threads that handle messages, each in the order it gets them."""

    def __init__(
        self, count: int, order: Order, run_max: int, carry_out: Callable[[Run], None], reports: Reports
    ) -> None:
        """`carry_out` handles the messages of a run and counts them up in `finished`; it ends early when the tracker is
        draining."""
        super().__init__(count, order, run_max, reports)
        self._carry_out = carry_out
        self._queues: list[SimpleQueue[Run | None]] = [SimpleQueue() for _ in range(self._lanes)]
        self._threads = [
            threading.Thread(target=self._work, args=(at,), name=f"holdfast-worker-{at}", daemon=True)
            for at in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int) -> None:
        for lane, run in self._runs(messages, tracker, size_bytes):
            self._queues[lane].put(run)

    def close(self, seconds: float) -> bool:
        for at in range(len(self._threads)):
            self._queues[at % self._lanes].put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, at: int) -> None:
        queue = self._queues[at % self._lanes]
        while (run := queue.get()) is not None:
            self._current[at] = run
            error: BaseException | None = None
            try:
                self._carry_out(run)
            except BaseException as raised:  # noqa: BLE001 - whatever it is
                error = raised
            self._through(at, run, error)


class Coroutines(_Lanes):
    """Coroutines that handle messages: one event loop on a thread of its own, and as many lanes as work may go on at
    once."""

    def __init__(
        self,
        count: int,
        order: Order,
        run_max: int,
        carry_out: Callable[[Run], Awaitable[None]],
        reports: Reports,
    ) -> None:
        super().__init__(count, order, run_max, reports)
        self._carry_out = carry_out
        self._queues: list[asyncio.Queue[Run | None]] = [asyncio.Queue() for _ in range(self._lanes)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="holdfast-coroutines", daemon=True)
        self._thread.start()

    def give(self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int) -> None:
        self._loop.call_soon_threadsafe(self._put, self._runs(messages, tracker, size_bytes))

    def _put(self, runs: Sequence[tuple[int, Run | None]]) -> None:
        for lane, run in runs:
            self._queues[lane].put_nowait(run)

    def close(self, seconds: float) -> bool:
        """What is not through in time is cancelled, which finishes nothing."""
        deadline = time.monotonic() + seconds
        ends = [(at % self._lanes, None) for at in range(len(self._current))]
        self._loop.call_soon_threadsafe(self._put, ends)
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(max(1.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._all_lanes())
        except asyncio.CancelledError:
            # Closed with work under way: it counts as undone.
            return
        finally:
            self._loop.close()

    async def _all_lanes(self) -> None:
        await asyncio.gather(*(self._lane(at) for at in range(len(self._current))))

    async def _lane(self, at: int) -> None:
        queue = self._queues[at % self._lanes]
        while (run := await queue.get()) is not None:
            self._current[at] = run
            error: BaseException | None = None
            try:
                await self._carry_out(run)
            except asyncio.CancelledError:
                error = HandlerFailed(f"{run.tracker!r}: the handler was cancelled, which finishes nothing")
            except BaseException as raised:  # noqa: BLE001 - whatever it is
                error = raised
            self._through(at, run, error)
