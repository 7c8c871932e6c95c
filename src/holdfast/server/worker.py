"""Background work in a child process: compaction and deep scans must not share the broker's interpreter.

The child is started for the first task and kept. It runs `python -m holdfast.log.tasks`, reads one JSON task per
line from its standard input and answers one JSON line each; it ends when its input does, so it never outlives
the broker.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

Done = Callable[[Mapping[str, Any] | None, str | None], None]


class ProcessWorker:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[str, Mapping[str, Any], Done]] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False

    def submit(self, task: str, arguments: Mapping[str, Any], done: Done) -> None:
        self._queue.append((task, arguments, done))
        if self._runner is None or self._runner.done():
            self._runner = self._loop.create_task(self._run())

    async def _run(self) -> None:
        while self._queue and not self._closing:
            task, arguments, done = self._queue.popleft()
            try:
                result = await self._ask(task, arguments)
            except (OSError, ConnectionError, ValueError) as error:
                await self._end()
                done(None, f"the background process failed: {error}")
                continue
            if "error" in result:
                done(None, str(result["error"]))
            else:
                done(result["result"], None)

    async def _ask(self, task: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "holdfast.server.worker_main",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=64 * 1024 * 1024,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"task": task, "arguments": arguments}).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise ConnectionError("it ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def close(self) -> None:
        self._closing = True
        if self._runner is not None:
            self._runner.cancel()
        await self._end()
