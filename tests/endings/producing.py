"""Programs that send with `Producer` or `wrap()`, one per way to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from tests.endings.scene import (
    MESSAGES,
    SIGNAL_SECONDS,
    WAIT_SECONDS_MAX,
    Job,
    Meant,
    Notes,
    in_child,
    keep,
    raising,
    signal_soon,
    until,
)

from holdfast.client import ClientError, Producer, ProducerClosed, wrap

TIMEOUT_MS: Final = 1500
"""How long a message may take that no broker answers for."""
LARGE: Final = b"x" * 200_000
"""More than the topics here take."""
SENT_MAX: Final = 500
"""By a program that sends until a signal comes."""
CHILD: Final = 100_000
"""The number of the message that a forked child sends."""


def settings(job: Job) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Where a producer connects to, its dotted settings, and its other arguments."""
    config: dict[str, Any] = {"client.id": job.topic, "log_level": 0}
    if job.under_way in ("spooled", "transaction"):
        guarantee = "exactly-once" if job.under_way == "transaction" else "at-least-once"
        if job.under_way == "spooled":
            # The right address, and nobody there understands a word.
            config["security.protocol"] = "ssl"
        return job.bootstrap, config, {"spool": job.path("spool"), "delivery": guarantee}
    if job.under_way == "in-flight":
        config |= {"message.timeout.ms": TIMEOUT_MS, "socket.timeout.ms": TIMEOUT_MS}
        return job.silent, config, {"unsafe": ("message.timeout.ms",)}
    if job.under_way == "buffered":
        config["linger.ms"] = 50_000
    return job.bootstrap, config, {}


def is_stored(job: Job, number: int) -> bool:
    """Whether the spool's files hold a message."""
    sought = value_of(number)
    for directory, _, names in os.walk(job.path("spool")):
        for name in names:
            with open(f"{directory}/{name}", "rb") as file:
                if sought in file.read():
                    return True
    return False


def value_of(number: int) -> bytes:
    return b"<%d>" % number


class Use:
    """A producer and what it is used for."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._accepted = Notes(job.path("accepted"))
        self._next = 0
        self._is_over = False
        self._client: Any = None

    def open(self) -> None:
        bootstrap, config, options = settings(self.job)
        if self.job.client == "wrap":
            self._client = wrap({"bootstrap.servers": bootstrap, **config}, **options)
        else:
            self._client = Producer(bootstrap, config=config, **options)
        keep(self._client)

    def __enter__(self) -> Self:
        self.open()
        self._client.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        ending: bool | None = self._client.__exit__(kind, error, trace)
        return ending

    def close(self) -> None:
        self._client.close()

    def send(self, number: int | None = None, rest: bytes = b"") -> None:
        if number is None:
            number, self._next = self._next, self._next + 1
        arguments = (self.job.topic, value_of(number) + rest)
        if self.job.client == "wrap":
            self._client.produce(*arguments, key=b"%d" % number)
        else:
            self._client.send(*arguments, key=b"%d" % number)
        self._accepted.add(number)

    @property
    def left(self) -> int:
        return len(self._client) if self.job.client == "wrap" else self._client.under_way

    def begin(self) -> None:
        """Bring under way what is to be."""
        match self.job.under_way:
            case "nothing":
                self.send()
                until(lambda: not self.left)
            case "failed":
                self.send()
                until(lambda: not self.left)
                self.send(rest=LARGE)
                until(lambda: not self.left)
            case _:
                for _ in range(MESSAGES):
                    self.send()
        if self.job.under_way == "in-flight":
            until(lambda: os.path.exists(self.job.path("in-flight")) or not self.left)
        if self.job.under_way == "spooled":
            until(lambda: is_stored(self.job, MESSAGES - 1))

    def wait(self) -> None:
        """What the main thread is at when a signal comes."""
        if self.job.under_way == "buffered":
            with suppress(ProducerClosed):
                while not self._is_over and self._next < SENT_MAX:
                    self.send()
        else:
            self._client.flush(WAIT_SECONDS_MAX)
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not self._is_over and time.monotonic() < deadline:
            time.sleep(0.01)

    def close_by_signal(self, *_: object) -> None:
        self._is_over = True
        self.close()


def ends_in_block(use: Use, end: Callable[[], None]) -> None:
    with use:
        use.begin()
        end()


def _signalled(use: Use, number: int) -> None:
    with use:
        use.begin()
        signal_soon(number)
        use.wait()


def _exit() -> None:
    sys.exit(0)


def _raise() -> None:
    raise Meant("the program's own error")


def exception_swallowed(use: Use) -> None:
    with suppress(Meant):
        ends_in_block(use, _raise)


def open_and_end(use: Use, end: Callable[[], None]) -> None:
    use.open()
    use.begin()
    end()


def sigint_swallowed(use: Use) -> None:
    with suppress(KeyboardInterrupt):
        _signalled(use, signal.SIGINT)


def sigint_while_closing(use: Use) -> None:
    with suppress(KeyboardInterrupt):
        with use:
            use.begin()
            signal_soon(signal.SIGINT)
        time.sleep(2 * SIGNAL_SECONDS)  # it comes now, if there was nothing to wait for


def handled(use: Use, number: int, handler: Callable[..., None]) -> None:
    signal.signal(number, handler)
    _signalled(use, number)


def alarm_swallowed(use: Use) -> None:
    """A soft time limit: the work is given up, the program goes on with the same producer."""
    signal.signal(signal.SIGALRM, raising(Meant("time is up")))
    with use:
        use.begin()
        signal_soon(signal.SIGALRM)
        with suppress(Meant):
            use.wait()
        use.send()


def cancelled(use: Use) -> None:
    async def work(is_ready: asyncio.Event) -> None:
        with use:
            use.begin()
            is_ready.set()
            await asyncio.sleep(WAIT_SECONDS_MAX)

    async def main() -> None:
        is_ready = asyncio.Event()
        task = asyncio.create_task(work(is_ready))
        await is_ready.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


def _generator(use: Use) -> Generator[None, None, None]:
    with use:
        use.begin()
        yield
        use.send()


def generator_closed(use: Use) -> None:
    generator = _generator(use)
    next(generator)
    generator.close()


def generator_dropped(use: Use) -> None:
    generator = _generator(use)
    next(generator)
    del generator


def generator_left(use: Use) -> None:
    generator = _generator(use)
    next(generator)
    keep(generator)


def daemon_use(use: Use) -> None:
    is_ready = threading.Event()

    def work() -> None:
        with use:
            use.begin()
            is_ready.set()
            time.sleep(WAIT_SECONDS_MAX)

    threading.Thread(target=work, daemon=True).start()
    is_ready.wait(WAIT_SECONDS_MAX)


def daemon_close(use: Use) -> None:
    use.open()
    use.begin()
    threading.Thread(target=use.close, daemon=True).start()


def fork_idle(use: Use) -> None:
    with use:
        use.begin()
        in_child(use.job, lambda: None)


def fork_use(use: Use) -> None:
    def work() -> None:
        try:
            use.send(CHILD)
        except ClientError as refused:
            print(f"the child was told: {refused}", file=sys.stderr)

    with use:
        use.begin()
        in_child(use.job, work)


def run_other() -> None:
    subprocess.run(["/bin/true"], check=True)


def replace() -> None:
    os.execv("/bin/true", ["true"])


PROGRAMS: Final[dict[str, Callable[[Use], None]]] = {
    "return": lambda use: ends_in_block(use, lambda: None),
    "exception": lambda use: ends_in_block(use, _raise),
    "exception-swallowed": exception_swallowed,
    "exit-inside": lambda use: ends_in_block(use, _exit),
    "exit-open": lambda use: open_and_end(use, _exit),
    "never-closed": lambda use: open_and_end(use, lambda: None),
    "sigint": lambda use: _signalled(use, signal.SIGINT),
    "sigint-swallowed": sigint_swallowed,
    "sigint-while-closing": sigint_while_closing,
    "sigterm": lambda use: _signalled(use, signal.SIGTERM),
    "sigint-exits": lambda use: handled(use, signal.SIGINT, raising(SystemExit(0))),
    "sigterm-exits": lambda use: handled(use, signal.SIGTERM, raising(SystemExit(0))),
    "sigterm-raises": lambda use: handled(use, signal.SIGTERM, raising(Meant("told to end"))),
    "alarm-swallowed": alarm_swallowed,
    "sigint-closes": lambda use: handled(use, signal.SIGINT, use.close_by_signal),
    "sigterm-closes": lambda use: handled(use, signal.SIGTERM, use.close_by_signal),
    "cancelled": cancelled,
    "generator-closed": generator_closed,
    "generator-dropped": generator_dropped,
    "generator-left": generator_left,
    "daemon-use": daemon_use,
    "daemon-close": daemon_close,
    "fork-idle": fork_idle,
    "fork-use": fork_use,
    "subprocess": lambda use: ends_in_block(use, run_other),
    "exec": lambda use: ends_in_block(use, replace),
    "stderr-closed": lambda use: ends_in_block(use, lambda: None),
    "stderr-broken": lambda use: ends_in_block(use, _exit),
    "stdout-broken": lambda use: ends_in_block(use, _exit),
}


def run(job: Job) -> None:
    PROGRAMS[job.way](Use(job))
