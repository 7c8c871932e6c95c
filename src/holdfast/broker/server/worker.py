"""Background work in a child process: compaction and deep scans must not share the broker's interpreter.

The child is started for the first task and kept while tasks come; when none has come for a while it is let go,
with the memory it took. It runs `holdfast.broker.server.worker_main`, reads one JSON task per line from its standard
input and answers one JSON line each, in order. It never outlives the broker.

A child that dies, or answers what makes no sense, fails the task it had; the next task gets a new child. What it
wrote to its standard error is read as it comes, so that it never waits for the reader of the broker's own, and the end
of it is told with the failure. A task may take as long as it needs: the broker does not wait for it. What a report
raises is told, and costs no other task its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

Done = Callable[[Mapping[str, Any] | None, str | None], None]

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""An answer names the segments of one partition; this many bytes name more than a disk can hold."""
IDLE_SECONDS: Final = 30.0
LAST_WORDS_BYTES: Final = 4096
"""Kept of a child's standard error: a trace back tells most at its end."""
END_SECONDS: Final = 5.0
"""How long a child may take to end once its input has."""


class ProcessWorker:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        report: Callable[[str, Exception], None],
        *,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`report` is told what those raise who are told how a task went."""
        self._loop = loop
        self._report = report
        self._idle_seconds = idle_seconds
        self._queue: deque[tuple[str, Mapping[str, Any], Done]] = deque()
        self._submitted = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._last_words: asyncio.Task[str] | None = None
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._process.pid if self._process is not None else None

    def submit(self, task: str, arguments: Mapping[str, Any], done: Done) -> None:
        self._queue.append((task, arguments, done))
        self._submitted.set()
        if not self._closing and (self._runner is None or self._runner.done()):
            self._runner = self._loop.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while await self._work_comes():
                await self._carry_out(*self._queue.popleft())
            await self._let_go()
            if not self._queue:
                return

    async def _carry_out(self, task: str, arguments: Mapping[str, Any], done: Done) -> None:
        result: dict[str, Any] | None = None
        problem: str | None = None
        try:
            answer = await self._ask(task, arguments)
            if "error" in answer:
                problem = str(answer["error"])
            else:
                result = dict(answer["result"])
        except Exception as error:  # noqa: BLE001 - the node waits to be told, and the next task for its turn
            last_words = await self._kill()
            problem = f"the background process failed: {error!r}{last_words and ': '}{last_words}"
        try:
            done(result, problem)
        except Exception as defect:  # noqa: BLE001 - see above
            self._report(f"what follows the task {task}", defect)

    async def _work_comes(self) -> bool:
        """Wait for a task; false when none came in time."""
        self._submitted.clear()
        if not self._queue:
            alarm = self._loop.call_later(self._idle_seconds, self._submitted.set)
            try:
                await self._submitted.wait()
            finally:
                alarm.cancel()
        return bool(self._queue)

    async def _ask(self, task: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"task": task, "arguments": arguments}).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("it ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "holdfast.broker.server.worker_main",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=ANSWER_BYTES_MAX,
        )
        assert process.stderr is not None
        self._last_words = self._loop.create_task(_last_words(process.stderr))
        return process

    async def _let_go(self) -> None:
        """End an idle child through the end of its input."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
        await self._kill()

    async def _kill(self) -> str:
        """End the child; returns what it said last."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        last_words, self._last_words = self._last_words, None
        return await last_words if last_words is not None else ""

    async def close(self) -> None:
        """End the child; what it was doing is given up and never reported."""
        self._closing = True
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        await self._kill()


async def _last_words(stream: asyncio.StreamReader) -> str:
    """Read to the end, which is the child's, and return the end of it."""
    last = b""
    while data := await stream.read(LAST_WORDS_BYTES):
        last = (last + data)[-LAST_WORDS_BYTES:]
    return last.decode("utf-8", "replace").strip()
