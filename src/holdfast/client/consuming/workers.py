"""Workers: threads that handle messages, each in the order it gets them.

Order is kept by giving what belongs together to one worker: the messages of a partition, or those with the same key.
Without an order any free worker takes the next message. What a worker has not begun when its partition goes to another
member, it does not begin any more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from holdfast.client.consuming.runs import Order, Reports, Run, split
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.forks import end_if_forked
from holdfast.client.messages import Fields

CarryOut: TypeAlias = Callable[[Run], None]
"""Handle the messages of a run and count them up in `finished`; ends early when the tracker is draining."""


class Workers:
    def __init__(self, count: int, order: Order, run_max: int, carry_out: CarryOut, reports: Reports) -> None:
        self._order = order
        self._carry_out = carry_out
        self._reports = reports
        self._pid = os.getpid()
        lanes = 1 if order == "none" else count
        self._run_max = run_max
        self._queues: list[SimpleQueue[Run | None]] = [SimpleQueue() for _ in range(lanes)]
        self._current: list[Run | None] = [None] * count
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(at, self._queues[at % lanes]),
                name=f"holdfast-worker-{at}",
                daemon=True,
            )
            for at in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int) -> None:
        each = size_bytes // max(1, len(messages))
        for lane, piece in split(messages, self._order, len(self._queues), self._run_max):
            self._queues[lane].put(Run(piece, tracker, each * len(piece)))

    def at_work(self) -> Iterable[Run]:
        return [run for run in self._current if run is not None]

    def close(self, seconds: float) -> bool:
        for at in range(len(self._threads)):
            self._queues[at % len(self._queues)].put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, at: int, queue: SimpleQueue[Run | None]) -> None:
        while (run := queue.get()) is not None:
            self._current[at] = run
            try:
                self._carry_out(run)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it and stop
                end_if_forked(self._pid, error)
                run.error = error
            else:
                end_if_forked(self._pid)
            self._reports.add(run)
            self._current[at] = None
