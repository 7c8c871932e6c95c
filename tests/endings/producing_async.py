"""Programs that send with `AsyncProducer`, one per way to end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from tests.endings.producing import (
    CHILD,
    LARGE,
    SENT_MAX,
    TIMEOUT_MS,
    is_stored,
    replace,
    run_other,
    settings,
    value_of,
)
from tests.endings.scene import (
    MESSAGES,
    SIGNAL_SECONDS,
    WAIT_SECONDS_MAX,
    Job,
    Meant,
    Notes,
    in_child,
    keep,
    signal_soon,
    until,
)

from holdfast.client import AsyncProducer, ClientError, ProducerClosed


class Use:
    """A producer and what it is used for; the methods mirror those of its synchronous brother."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._accepted = Notes(job.path("accepted"))
        self._next = 0
        self._is_over = False
        self._client: Any = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        bootstrap, config, options = settings(self.job)
        if self.job.under_way == "in-flight":
            # What is behind these waits in line for room.
            config["queue.buffering.max.messages"] = MESSAGES - 2
            options["send_timeout"] = TIMEOUT_MS / 1000
        self._client = AsyncProducer(bootstrap, config=config, **options)
        keep(self._client)
        await self._client.start()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def close(self) -> None:
        await self._client.close()

    def send(self, number: int | None = None, rest: bytes = b"") -> Any:
        if number is None:
            number, self._next = self._next, self._next + 1
        delivery = self._client.send(self.job.topic, value_of(number) + rest, key=b"%d" % number)
        self._accepted.add(number)
        return delivery

    async def begin(self) -> None:
        match self.job.under_way:
            case "nothing":
                await self.send()
            case "failed":
                await self.send()
                refused = self.send(rest=LARGE)
                # Looked at from outside: to await it is to be told.
                await asyncio.to_thread(until, lambda: refused.is_settled)
            case _:
                for _ in range(MESSAGES):
                    self.send()
        if self.job.under_way == "in-flight":
            await asyncio.to_thread(until, lambda: os.path.exists(self.job.path("in-flight")))
        if self.job.under_way == "spooled":
            await asyncio.to_thread(until, lambda: is_stored(self.job, MESSAGES - 1))

    async def wait(self) -> None:
        """What the event loop is at when a signal comes."""
        if self.job.under_way == "buffered":
            with suppress(ProducerClosed):
                while not self._is_over and self._next < SENT_MAX:
                    self.send()
                    await asyncio.sleep(0)
        else:
            await self._client.flush(WAIT_SECONDS_MAX)
        while not self._is_over:
            await asyncio.sleep(0.01)
        if self._closing is not None:
            await self._closing

    def close_by_signal(self) -> None:
        self._is_over = True
        self._closing = asyncio.get_running_loop().create_task(self.close())


async def ends_in_block(use: Use, end: Callable[[], None]) -> None:
    async with use:
        await use.begin()
        end()


async def _signalled(use: Use, number: int) -> None:
    async with use:
        await use.begin()
        signal_soon(number)
        await use.wait()


def _raise() -> None:
    raise Meant("the program's own error")


def _exit() -> None:
    sys.exit(0)


def exception_swallowed(use: Use) -> None:
    with suppress(Meant):
        asyncio.run(ends_in_block(use, _raise))


async def open_and_end(use: Use, end: Callable[[], None]) -> None:
    await use.open()
    await use.begin()
    end()


def sigint_swallowed(use: Use) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_signalled(use, signal.SIGINT))


def sigint_while_closing(use: Use) -> None:
    async def main() -> None:
        async with use:
            await use.begin()
            signal_soon(signal.SIGINT)
        await asyncio.sleep(2 * SIGNAL_SECONDS)  # it comes now, if there was nothing to wait for

    with suppress(KeyboardInterrupt):
        asyncio.run(main())


# Handlers of signals are the event loop's: an exception out of any other may be raised within the loop itself, where
# it can cost a task its next step, and the program then waits for that task for ever.


async def exits_by(use: Use, number: int) -> None:
    asyncio.get_running_loop().add_signal_handler(number, sys.exit, 0)
    await _signalled(use, number)


async def _until_given_up(use: Use, number: int) -> None:
    work = asyncio.create_task(use.wait())
    asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    signal_soon(number)
    try:
        await work
    except asyncio.CancelledError as given_up:
        raise Meant("told to end") from given_up


async def raises_by(use: Use, number: int) -> None:
    async with use:
        await use.begin()
        await _until_given_up(use, number)


async def alarm_swallowed(use: Use) -> None:
    async with use:
        await use.begin()
        with suppress(Meant):
            await _until_given_up(use, signal.SIGALRM)
        use.send()


async def closed_by(use: Use, number: int) -> None:
    asyncio.get_running_loop().add_signal_handler(number, use.close_by_signal)
    await _signalled(use, number)


async def cancelled(use: Use) -> None:
    async def work() -> None:
        async with use:
            await use.begin()
            is_ready.set()
            await asyncio.sleep(WAIT_SECONDS_MAX)

    is_ready = asyncio.Event()
    task = asyncio.create_task(work())
    await is_ready.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _generator(use: Use) -> AsyncGenerator[None, None]:
    async with use:
        await use.begin()
        yield
        use.send()


async def generator_closed(use: Use) -> None:
    generator = _generator(use)
    await anext(generator)
    await generator.aclose()


async def generator_dropped(use: Use) -> None:
    generator = _generator(use)
    await anext(generator)
    del generator


async def generator_left(use: Use) -> None:
    generator = _generator(use)
    await anext(generator)
    keep(generator)


def daemon_use(use: Use) -> None:
    is_ready = threading.Event()

    async def work() -> None:
        async with use:
            await use.begin()
            is_ready.set()
            await asyncio.sleep(WAIT_SECONDS_MAX)

    threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start()
    is_ready.wait(WAIT_SECONDS_MAX)


def daemon_close(use: Use) -> None:
    is_ready = threading.Event()

    async def work() -> None:
        await use.open()
        await use.begin()
        is_ready.set()
        await use.close()

    threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start()
    is_ready.wait(WAIT_SECONDS_MAX)


# A child must not go on with the event loop of its parent: what it unregisters there is gone for both.


async def fork_idle(use: Use) -> None:
    async with use:
        await use.begin()
        in_child(use.job, lambda: None, os._exit)


async def fork_use(use: Use) -> None:
    def work() -> None:
        try:
            use.send(CHILD)
        except ClientError as refused:
            print(f"the child was told: {refused}", file=sys.stderr)

    async with use:
        await use.begin()
        in_child(use.job, work, os._exit)


def _in_loop(way: Callable[[Use], Any]) -> Callable[[Use], None]:
    return lambda use: asyncio.run(way(use))


PROGRAMS: Final[dict[str, Callable[[Use], None]]] = {
    "return": _in_loop(lambda use: ends_in_block(use, lambda: None)),
    "exception": _in_loop(lambda use: ends_in_block(use, _raise)),
    "exception-swallowed": exception_swallowed,
    "exit-inside": _in_loop(lambda use: ends_in_block(use, _exit)),
    "exit-open": _in_loop(lambda use: open_and_end(use, _exit)),
    "never-closed": _in_loop(lambda use: open_and_end(use, lambda: None)),
    "sigint": _in_loop(lambda use: _signalled(use, signal.SIGINT)),
    "sigint-swallowed": sigint_swallowed,
    "sigint-while-closing": sigint_while_closing,
    "sigterm": _in_loop(lambda use: _signalled(use, signal.SIGTERM)),
    "sigint-exits": _in_loop(lambda use: exits_by(use, signal.SIGINT)),
    "sigterm-exits": _in_loop(lambda use: exits_by(use, signal.SIGTERM)),
    "sigterm-raises": _in_loop(lambda use: raises_by(use, signal.SIGTERM)),
    "alarm-swallowed": _in_loop(alarm_swallowed),
    "sigint-closes": _in_loop(lambda use: closed_by(use, signal.SIGINT)),
    "sigterm-closes": _in_loop(lambda use: closed_by(use, signal.SIGTERM)),
    "cancelled": _in_loop(cancelled),
    "generator-closed": _in_loop(generator_closed),
    "generator-dropped": _in_loop(generator_dropped),
    "generator-left": _in_loop(generator_left),
    "daemon-use": daemon_use,
    "daemon-close": daemon_close,
    "fork-idle": _in_loop(fork_idle),
    "fork-use": _in_loop(fork_use),
    "subprocess": _in_loop(lambda use: ends_in_block(use, run_other)),
    "exec": _in_loop(lambda use: ends_in_block(use, replace)),
    "stderr-closed": _in_loop(lambda use: ends_in_block(use, lambda: None)),
    "stderr-broken": _in_loop(lambda use: ends_in_block(use, _exit)),
    "stdout-broken": _in_loop(lambda use: ends_in_block(use, _exit)),
}


def run(job: Job) -> None:
    PROGRAMS[job.way](Use(job))
