"""How a run of messages is carried out: the handler, its retries, and what becomes of what it cannot handle.

A message is finished when the handler returned, or when it was set aside in the dead-letter topic and is safe there.
Nothing else finishes it. An error is judged by the `RetryPolicy`: the message is handed over again after a wait, or
it is given up on and handed to whoever sets it aside; what that raises stops the consumer.

A batch is handled whole or fails whole. When it is given up on, it is handed over again in two halves, and so on down
to single messages: those that fail alone are judged alone, so one bad message does not take its neighbours with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeAlias

from holdfast.client.consuming.runs import Run
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.errors import ClientError
from holdfast.client.forks import end_if_forked
from holdfast.client.handlers import check_outcome
from holdfast.client.messages import Message
from holdfast.client.retries import Again, RetryPolicy

Handler: TypeAlias = Callable[[Message], Any]
BatchHandler: TypeAlias = Callable[[list[Message]], Any]
STOP_LOOK_SECONDS: Final = 0.2
"""How often a wait for the next attempt looks whether anybody still wants it."""


class SetAside(Protocol):
    """Takes a message that was given up on; returns when it is safe elsewhere, raises when it cannot be made so."""

    def __call__(self, message: Message, reason: str, error: BaseException, attempts: int) -> None: ...


class HandlerFailed(ClientError):
    """A message could not be handled, and the policy says to stop. Its position was not moved."""


class _Unwanted(Exception):
    """The partition goes away: the message is left undone for whoever gets it next."""


class _Judge:
    """What follows on the failures of one message, or of one batch."""

    def __init__(self, policy: RetryPolicy, began: float) -> None:
        self._policy = policy
        self._began = began
        self.attempts = 0

    def failed(self, error: Exception) -> float | str:
        """Seconds until the next attempt, or the reason that there is none."""
        self.attempts += 1
        verdict = self._policy.judge(error, self.attempts, time.monotonic() - self._began)
        return verdict.seconds if isinstance(verdict, Again) else verdict.reason


class Handling:
    """A handler with its policy."""

    def __init__(self, policy: RetryPolicy, set_aside: SetAside) -> None:
        self._policy = policy
        self._set_aside = set_aside
        self._pid = os.getpid()

    # One message at a time

    def one_by_one(self, handler: Handler) -> Callable[[Run], None]:
        is_timed = self._policy.within_seconds is not None

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
                    end_if_forked(self._pid, error)
                    try:
                        self._again(handler, message, tracker, error, began)
                    except _Unwanted:
                        return
                run.finished += 1

        return carry_out

    def _again(
        self, handler: Handler, message: Message, tracker: PartitionTracker, error: Exception, began: float
    ) -> None:
        """After a first failure of an attempt that began then: until it is handled or set aside."""
        judge = _Judge(self._policy, began)
        while isinstance(following := judge.failed(error), float | int):
            _wait(following, tracker)
            try:
                check_outcome(handler(message))
            except Exception as failed:  # noqa: BLE001 - the policy judges it
                end_if_forked(self._pid, failed)
                error = failed
            else:
                return
        self._set_aside(message, following, error, judge.attempts)

    # Batches

    def in_batches(self, handler: BatchHandler) -> Callable[[Run], None]:
        def carry_out(run: Run) -> None:
            if not run.tracker.is_draining:
                try:
                    self._batch(handler, run, list(run.messages), self._policy)
                except _Unwanted:
                    return

        return carry_out

    def _batch(self, handler: BatchHandler, run: Run, batch: list[Message], policy: RetryPolicy) -> None:
        judge = _Judge(policy, time.monotonic())
        while True:
            try:
                check_outcome(handler(batch))
            except Exception as error:  # noqa: BLE001 - the policy judges it
                end_if_forked(self._pid, error)
                following = judge.failed(error)
                if isinstance(following, str):
                    failure = error
                    break
                _wait(following, run.tracker)
            else:
                run.finished += len(batch)
                return
        if len(batch) == 1:
            self._set_aside(batch[0], following, failure, judge.attempts)
            run.finished += 1
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            if run.tracker.is_draining:
                raise _Unwanted
            # A half that fails is split at once; a message that fails alone has every attempt of its own.
            self._batch(handler, run, half, self._policy if len(half) == 1 else _ONCE)

    # Coroutines

    def awaiting(self, handler: Callable[[Message], Awaitable[Any]]) -> Callable[[Run], Awaitable[None]]:
        async def carry_out(run: Run) -> None:
            for message in run.messages:
                if run.tracker.is_draining:
                    return
                try:
                    await self._awaited(handler, message, run.tracker)
                except _Unwanted:
                    return
                run.finished += 1

        return carry_out

    def awaiting_batches(
        self, handler: Callable[[list[Message]], Awaitable[Any]]
    ) -> Callable[[Run], Awaitable[None]]:
        async def carry_out(run: Run) -> None:
            try:
                await self._awaited_batch(handler, run, list(run.messages), self._policy)
            except _Unwanted:
                return

        return carry_out

    async def _awaited(
        self, handler: Callable[[Message], Awaitable[Any]], message: Message, tracker: PartitionTracker
    ) -> None:
        judge = _Judge(self._policy, time.monotonic())
        while True:
            try:
                check_outcome(await handler(message))
            except Exception as error:  # noqa: BLE001 - the policy judges it
                following = judge.failed(error)
                if isinstance(following, str):
                    # It waits for the broker: in a thread, so that the other coroutines go on.
                    await asyncio.to_thread(self._set_aside, message, following, error, judge.attempts)
                    return
                await _wait_async(following, tracker)
            else:
                return

    async def _awaited_batch(
        self,
        handler: Callable[[list[Message]], Awaitable[Any]],
        run: Run,
        batch: list[Message],
        policy: RetryPolicy,
    ) -> None:
        if run.tracker.is_draining:
            raise _Unwanted
        judge = _Judge(policy, time.monotonic())
        while True:
            try:
                check_outcome(await handler(batch))
            except Exception as error:  # noqa: BLE001 - the policy judges it
                following = judge.failed(error)
                if isinstance(following, str):
                    failure = error
                    break
                await _wait_async(following, run.tracker)
            else:
                run.finished += len(batch)
                return
        if len(batch) == 1:
            await asyncio.to_thread(self._set_aside, batch[0], following, failure, judge.attempts)
            run.finished += 1
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            await self._awaited_batch(handler, run, half, self._policy if len(half) == 1 else _ONCE)


_ONCE: Final = RetryPolicy(attempts=1)


def _wait(seconds: float, tracker: PartitionTracker) -> None:
    """Wait for the next attempt, unless nobody wants it any more."""
    deadline = time.monotonic() + seconds
    while True:
        if tracker.is_draining:
            raise _Unwanted
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, STOP_LOOK_SECONDS))


async def _wait_async(seconds: float, tracker: PartitionTracker) -> None:
    deadline = time.monotonic() + seconds
    while True:
        if tracker.is_draining:
            raise _Unwanted
        left = deadline - time.monotonic()
        if left <= 0:
            return
        await asyncio.sleep(min(left, STOP_LOOK_SECONDS))
