"""Programs that run a handler with `Consumer`, `Processor` or `DatabaseSink`, one per way to end.

The topic holds messages 0 to 4. When what is to be under way is, the program ends: from another thread (`stop`, a
signal), or in the handler (an exception, an exit, a fork), for which a last message is sent where none is at work.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from confluent_kafka import Producer as RawProducer
from tests.endings.producing import replace, run_other, value_of
from tests.endings.scene import MESSAGES, WAIT_SECONDS_MAX, Job, Meant, Notes, in_child, raising, until

from holdfast.client import Consumer, DatabaseSink, HandlerFailed, Message, Output, Processor, RetryPolicy

TROUBLE: Final = 2
"""The message that the handler is at, or has failed on, when the program ends."""
LAST: Final = MESSAGES
WORK_SECONDS: Final = 0.2
LONG_SECONDS: Final = 60.0


class Fails(Exception):
    """What a handler raises at its first attempt."""


class Member:
    """A client, and the handler it runs."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._finished = Notes(job.path("finished"))
        self._count = 0
        self._attempts = 0
        self._is_ready = threading.Event()
        self.in_handler: Callable[[], None] | None = None
        """How the program ends in its handler, if it does."""
        self.client = self._make()

    def _make(self) -> Any:
        is_buffered = self.job.under_way == "buffered"
        policy = RetryPolicy(attempts=3, first_seconds=WORK_SECONDS, final=(Meant,), give_up="stop")
        where: dict[str, Any] = {"group": self.job.topic, "topics": [self.job.topic], "retry": policy}
        if self.job.client == "Consumer":
            pause = LONG_SECONDS if is_buffered else 0.05
            return Consumer(self.job.bootstrap, commit_seconds=pause, marks_topic=None, **where)
        if self.job.client == "Processor":
            pause = 10.0 if self.job.under_way == "transaction" else 0.05
            return Processor(self.job.bootstrap, commit_seconds=pause, marks_topic=None, **where)
        return DatabaseSink(
            self.job.bootstrap,
            database=self.job.path("sink.sqlite"),
            batch_messages=MESSAGES + 1,
            batch_seconds=LONG_SECONDS if is_buffered else 0.05,
            **where,
        )

    def run(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        handlers = {"Consumer": self._handle, "Processor": self._transform, "DatabaseSink": self._store}
        self.client.run(handlers[self.job.client])

    def stop(self, *_: object) -> None:
        self.client.stop()

    # Handlers

    def _handle(self, message: Message) -> None:
        number = int((message.value or b"").strip(b"<>"))
        self._work(number)
        self._finish(number)

    def _transform(self, message: Message) -> list[Output]:
        self._handle(message)
        return [Output(self.job.outputs, message.value)]

    def _store(self, message: Message, connection: Any) -> None:
        number = int((message.value or b"").strip(b"<>"))
        if self.job.under_way == "transaction":
            connection.execute("insert into stored values (?)", (number,))
            self._work(number)
        else:
            self._work(number)
            connection.execute("insert into stored values (?)", (number,))
        self._finish(number)

    def _work(self, number: int) -> None:
        is_first = number == TROUBLE and not self._attempts
        self._attempts += number == TROUBLE
        if is_first and self.job.under_way == "failed":
            self._is_ready.set()
            raise Fails("the first attempt fails")
        if is_first and self._is_at_work:
            self._is_ready.set()
            self._end()
            time.sleep(WORK_SECONDS)
        if number == LAST or (number == TROUBLE and self.job.under_way == "failed"):
            self._end()

    @property
    def _is_at_work(self) -> bool:
        """Whether the program ends while the handler is at a message."""
        return self.job.under_way == "in-flight" or (
            self.job.under_way == "transaction" and self.job.client == "DatabaseSink"
        )

    def _end(self) -> None:
        if self.in_handler is not None:
            self.in_handler()

    def _finish(self, number: int) -> None:
        self._finished.add(number)
        self._count += 1

    # The moment

    def _watch(self) -> None:
        """Note that what is to be under way is; and have the handler called once more where it is to end things."""
        if self.job.under_way == "failed" or self._is_at_work:
            return
        until(self._is_far_enough)
        self._is_ready.set()
        if self.in_handler is not None:
            producer = RawProducer({"bootstrap.servers": self.job.bootstrap})
            producer.produce(self.job.topic, value_of(LAST))
            producer.flush()

    def _is_far_enough(self) -> bool:
        if self.job.under_way == "nothing":
            done = {"Consumer": "handled", "Processor": "committed", "DatabaseSink": "stored"}
            return bool(getattr(self.client, done[self.job.client]) == MESSAGES)
        if self.job.client == "DatabaseSink":
            running = self.client._running
            return running is not None and len(running._pending) == MESSAGES
        return self._count == MESSAGES

    def wait(self) -> None:
        if not self._is_ready.wait(WAIT_SECONDS_MAX):
            raise TimeoutError("the program waits in vain")

    def when_ready(self, do: Callable[[], object]) -> None:
        def act() -> None:
            self.wait()
            do()

        threading.Thread(target=act, daemon=True).start()


def _exit() -> None:
    sys.exit(0)


def _raise() -> None:
    raise Meant("the program's own error")


def in_handler(member: Member, end: Callable[[], None]) -> None:
    member.in_handler = end
    member.run()


def stopped(member: Member) -> None:
    member.when_ready(member.stop)
    member.run()


def signalled(member: Member, number: int) -> None:
    member.when_ready(lambda: os.kill(os.getpid(), number))
    member.run()


def exception_swallowed(member: Member) -> None:
    with suppress(Exception):
        in_handler(member, _raise)


def alarmed(member: Member, handler: Callable[..., None]) -> None:
    signal.signal(signal.SIGALRM, handler)
    signalled(member, signal.SIGALRM)


def alarm_swallowed(member: Member) -> None:
    with suppress(Meant, HandlerFailed):  # the latter where it met the handler
        alarmed(member, raising(Meant("time is up")))


def cancelled(member: Member) -> None:
    async def work() -> None:
        try:
            await asyncio.to_thread(member.run)
        except asyncio.CancelledError:
            member.stop()
            raise

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.to_thread(member.wait)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


def daemon_use(member: Member) -> None:
    threading.Thread(target=member.run, daemon=True).start()
    member.wait()


def fork_idle(member: Member) -> None:
    """A handler forks; the child ends, through whatever frames of ours it has inherited."""

    def fork() -> None:
        in_child(member.job, lambda: None)
        member.stop()

    in_handler(member, fork)


def fork_use(member: Member) -> None:
    """Made by the parent, run by the child."""
    in_child(member.job, lambda: stopped(member))


def run_other_and_stop(member: Member) -> None:
    def end() -> None:
        run_other()
        member.stop()

    in_handler(member, end)


PROGRAMS: Final[dict[str, Callable[[Member], None]]] = {
    "return": stopped,
    "exception": lambda member: in_handler(member, _raise),
    "exception-swallowed": exception_swallowed,
    "exit-inside": lambda member: in_handler(member, _exit),
    "sigint": lambda member: signalled(member, signal.SIGINT),
    "sigterm": lambda member: signalled(member, signal.SIGTERM),
    "sigterm-raises": lambda member: alarmed(member, raising(Meant("told to end"))),
    "alarm-swallowed": alarm_swallowed,
    "sigterm-closes": lambda member: alarmed(member, member.stop),
    "cancelled": cancelled,
    "daemon-use": daemon_use,
    "fork-idle": fork_idle,
    "fork-use": fork_use,
    "subprocess": run_other_and_stop,
    "exec": lambda member: in_handler(member, replace),
    "stderr-closed": stopped,
    "stderr-broken": stopped,
    "stdout-broken": lambda member: in_handler(member, _exit),
}


def run(job: Job) -> None:
    PROGRAMS[job.way](Member(job))
