"""How a run of messages is carried out: the handler, its retries, and what becomes of what it cannot handle.

A message is finished when the handler returned, or when it was set aside in the dead-letter topic and is safe there.
Nothing else finishes it. An error is judged by the `RetryPolicy`: the message is handed over again after a wait, or
it is given up on and handed to whoever sets it aside; what that raises stops the consumer.

A batch is handled whole or fails whole. When it is given up on, it is handed over again in two halves, and so on down
to single messages: those that fail alone are judged alone, so one bad message does not take its neighbours with it.

Threads and coroutines go the same way (`_Way`): what follows on a failure is written once, as coroutines. In a thread
none of their awaits ever suspends, so that they are run to their end by one step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Run
from holdfast.client.messages import Message, check_outcome
from holdfast.client.metrics import UNWATCHED, Tally
from holdfast.client.process import end_if_forked
from holdfast.client.retries import Again, RetryPolicy

Handler: TypeAlias = Callable[[Message], Any]
BatchHandler: TypeAlias = Callable[[list[Message]], Any]
SetAside: TypeAlias = Callable[[Message, str, BaseException, int], None]
"""Takes a message that was given up on, why, its last error and how many attempts were made; returns when the message
is safe elsewhere, raises when it cannot be made so."""
STOP_LOOK_SECONDS: Final = 0.2
"""How often a wait for the next attempt looks whether anybody still wants it."""
_ONCE: Final = RetryPolicy(attempts=1)


class _Unwanted(Exception):
    """The partition goes away: the message is left undone for whoever gets it next."""


class _Way(NamedTuple):
    """How a handler is called, time passes, and a message is set aside: in a thread, or by coroutines."""

    call: Callable[[Any], Awaitable[Any]]
    sleep: Callable[[float], Awaitable[None]]
    set_aside: Callable[[Message, str, BaseException, int], Awaitable[None]]


class _GivenUp(NamedTuple):
    reason: str
    error: Exception
    attempts: int


class Handling:
    """A handler with its policy."""

    def __init__(self, policy: RetryPolicy, set_aside: SetAside, tally: Tally = UNWATCHED) -> None:
        self._policy = policy
        self._tally = tally
        self._set_aside = set_aside
        self._pid = os.getpid()

    # In a thread

    def one_by_one(self, handler: Handler) -> Callable[[Run], None]:
        is_timed = self._policy.within_seconds is not None
        way = self._in_thread(handler)

        def carry_out(run: Run) -> None:
            tracker = run.tracker
            for message in run.messages:
                if tracker.is_draining:
                    return
                began = time.monotonic() if is_timed else 0.0
                try:
                    outcome = handler(message)
                    if outcome is not None:
                        check_outcome(outcome)
                except Exception as error:  # noqa: BLE001 - the policy judges it
                    try:
                        _at_once(self._one(way, message, tracker, began, error))
                    except _Unwanted:
                        return
                run.finished += 1

        return carry_out

    def in_batches(self, handler: BatchHandler) -> Callable[[Run], None]:
        way = self._in_thread(handler)

        def carry_out(run: Run) -> None:
            with suppress(_Unwanted):
                _at_once(self._batch(way, run, list(run.messages), self._policy))

        return carry_out

    def _in_thread(self, handler: Callable[[Any], Any]) -> _Way:
        async def call(given: Any) -> Any:
            return handler(given)

        async def sleep(seconds: float) -> None:
            time.sleep(seconds)

        async def set_aside(*given_up: Any) -> None:
            self._set_aside(*given_up)

        return _Way(call, sleep, set_aside)

    # Coroutines

    def awaiting(self, handler: Callable[[Message], Awaitable[Any]]) -> Callable[[Run], Awaitable[None]]:
        way = self._awaited(handler)

        async def carry_out(run: Run) -> None:
            for message in run.messages:
                if run.tracker.is_draining:
                    return
                try:
                    await self._one(way, message, run.tracker, time.monotonic())
                except _Unwanted:
                    return
                run.finished += 1

        return carry_out

    def awaiting_batches(
        self, handler: Callable[[list[Message]], Awaitable[Any]]
    ) -> Callable[[Run], Awaitable[None]]:
        way = self._awaited(handler)

        async def carry_out(run: Run) -> None:
            with suppress(_Unwanted):
                await self._batch(way, run, list(run.messages), self._policy)

        return carry_out

    def _awaited(self, handler: Callable[[Any], Awaitable[Any]]) -> _Way:
        async def set_aside(*given_up: Any) -> None:
            # It waits for the broker: in a thread, so that the other coroutines go on.
            await asyncio.to_thread(self._set_aside, *given_up)

        return _Way(handler, asyncio.sleep, set_aside)

    # What follows on a failure

    async def _one(
        self,
        way: _Way,
        message: Message,
        tracker: PartitionTracker,
        began: float,
        error: Exception | None = None,
    ) -> None:
        """Until a message is handled or set aside; `error` is that of a first attempt, which began then."""
        given_up = await self._attempts(way, message, tracker, self._policy, began, error)
        if given_up is not None:
            await way.set_aside(message, *given_up)

    async def _batch(self, way: _Way, run: Run, batch: list[Message], policy: RetryPolicy) -> None:
        if run.tracker.is_draining:
            raise _Unwanted
        given_up = await self._attempts(way, batch, run.tracker, policy, time.monotonic())
        if given_up is None:
            run.finished += len(batch)
        elif len(batch) == 1:
            await way.set_aside(batch[0], *given_up)
            run.finished += 1
        else:
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                # A half that fails is split at once; a message that fails alone has every attempt of its own.
                await self._batch(way, run, half, self._policy if len(half) == 1 else _ONCE)

    async def _attempts(
        self,
        way: _Way,
        given: Message | list[Message],
        tracker: PartitionTracker,
        policy: RetryPolicy,
        began: float,
        error: Exception | None = None,
    ) -> _GivenUp | None:
        """Call the handler until it returns, or the policy says that it is enough."""
        for attempts in count(1):
            if error is None:
                try:
                    check_outcome(await way.call(given))
                except Exception as raised:  # noqa: BLE001 - the policy judges it
                    error = raised
                else:
                    return None
            end_if_forked(self._pid, error)
            verdict = policy.judge(error, attempts, time.monotonic() - began)
            if not isinstance(verdict, Again):
                return _GivenUp(verdict.reason, error, attempts)
            self._tally.add("holdfast_consumer_retries_total")
            await _wait(way, verdict.seconds, tracker)
            error = None
        raise AssertionError("there is no end to the attempts")


async def _wait(way: _Way, seconds: float, tracker: PartitionTracker) -> None:
    """Wait for the next attempt, unless nobody wants it any more."""
    deadline = time.monotonic() + seconds
    while True:
        if tracker.is_draining:
            raise _Unwanted
        left = deadline - time.monotonic()
        if left <= 0:
            return
        await way.sleep(min(left, STOP_LOOK_SECONDS))


def _at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends."""
    with suppress(StopIteration):
        work.send(None)
        raise AssertionError("nothing here may wait for an event loop")
