"""Coroutines as workers: one event loop on a thread of its own, and as many lanes as work may go on at once.

A lane is a task that awaits one message after the other, so the order rules are those of threads. The poll loop talks
to it through thread-safe queues only.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from holdfast.client.consuming.handling import HandlerFailed
from holdfast.client.consuming.runs import Order, Reports, Run, split
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.forks import end_if_forked
from holdfast.client.messages import Fields


class Coroutines:
    def __init__(
        self,
        count: int,
        order: Order,
        run_max: int,
        carry_out: Callable[[Run], Awaitable[None]],
        reports: Reports,
    ) -> None:
        self._order = order
        self._run_max = run_max
        self._carry_out = carry_out
        self._reports = reports
        self._pid = os.getpid()
        self._queues: list[asyncio.Queue[Run | None]] = [
            asyncio.Queue() for _ in range(1 if order == "none" else count)
        ]
        self._current: list[Run | None] = [None] * count
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="holdfast-coroutines", daemon=True)
        self._thread.start()

    def give(self, messages: Sequence[Fields], tracker: PartitionTracker, size_bytes: int) -> None:
        each = size_bytes // max(1, len(messages))
        runs = [
            (lane, Run(piece, tracker, each * len(piece)))
            for lane, piece in split(messages, self._order, len(self._queues), self._run_max)
        ]
        self._loop.call_soon_threadsafe(self._put, runs)

    def _put(self, runs: Sequence[tuple[int, Run | None]]) -> None:
        for lane, run in runs:
            self._queues[lane].put_nowait(run)

    def at_work(self) -> Iterable[Run]:
        return [run for run in self._current if run is not None]

    def close(self, seconds: float) -> bool:
        """What is not through in time is cancelled, which finishes nothing."""
        deadline = time.monotonic() + seconds
        count, lanes = len(self._current), len(self._queues)
        self._loop.call_soon_threadsafe(self._put, [(at % lanes, None) for at in range(count)])
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
            self._loop.run_until_complete(self._lanes())
        except asyncio.CancelledError:
            # Closed with work under way: it counts as undone.
            return
        finally:
            self._loop.close()

    async def _lanes(self) -> None:
        await asyncio.gather(
            *(self._lane(at, self._queues[at % len(self._queues)]) for at in range(len(self._current)))
        )

    async def _lane(self, at: int, queue: asyncio.Queue[Run | None]) -> None:
        while (run := await queue.get()) is not None:
            self._current[at] = run
            try:
                await self._carry_out(run)
            except asyncio.CancelledError:
                run.error = HandlerFailed(
                    f"{run.tracker!r}: the handler was cancelled, which finishes nothing"
                )
            except BaseException as error:  # noqa: BLE001 - whatever it is, the consumer must hear of it and stop
                end_if_forked(self._pid, error)
                run.error = error
            else:
                end_if_forked(self._pid)
            self._reports.add(run)
            self._current[at] = None
