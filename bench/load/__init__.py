"""The load generators, each run in a process of its own so that the driver costs the measured nothing.

A generator takes one specification, a JSON object with `kind`, as the first line of standard input and answers
with one JSON object as the last line of standard output. Closed-loop generators agree with the driver in
between on the time that counts (`bench.load.window`). Times are `time.monotonic()`, which all processes of a
machine share.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from holdfast.testing.processes import die_with_parent

Spec: TypeAlias = Mapping[str, Any]
ROOT: Final = Path(__file__).resolve().parents[2]
LOAD_TIMEOUT_S: Final = 900.0
"""No load runs longer; a generator that hangs must not hang the bench."""
SETTLE_S: Final = 0.2
"""From the moment every client has had an answer to the window that counts."""


def kafka_load(
    kind: str, bootstrap_servers: str, topic: str, *, partitions: int = 1, size: int, **more: Any
) -> dict[str, Any]:
    """The specification of a load on a topic; `size` is that of a record's value in bytes."""
    spec = {"kind": kind, "bootstrap_servers": bootstrap_servers, "topic": topic}
    return {**spec, "partitions": partitions, "size": size, **more}


class LoadFailed(Exception):
    """A load generator ended with an error; the message quotes it."""


class RunningLoad:
    """A generator at work."""

    def __init__(self, spec: Spec) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=die_with_parent(),
        )
        self._deadline = threading.Timer(LOAD_TIMEOUT_S, self._process.kill)
        self._deadline.daemon = True
        self._deadline.start()
        self._send(spec)

    def wait_until_ready(self) -> None:
        """Return when every client of a closed loop has had its first answer."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.result()
            raise LoadFailed("a load generator ended before it was ready")

    def set_window(self, **times: float) -> None:
        """Tell a closed loop when it begins or ends to count."""
        self._send(times)

    def answer(self) -> dict[str, Any]:
        """The line a generator of several windows answers one with."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.result()
            raise LoadFailed("a load generator ended before its last window")
        found: dict[str, Any] = json.loads(line)
        return found

    def result(self) -> dict[str, Any]:
        """Wait for its end and return what it found."""
        out, err = self._process.communicate()
        self._deadline.cancel()
        if self._process.returncode != 0:
            raise LoadFailed(f"a load generator exited with {self._process.returncode}: {err[-4000:]}")
        found: dict[str, Any] = json.loads(out)
        return found

    def kill(self) -> None:
        """End it now."""
        self._deadline.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _send(self, said: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dict(said)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.result()
            raise


def run_load(spec: Spec) -> dict[str, Any]:
    """Run a generator that ends by itself."""
    running = RunningLoad(spec)
    try:
        return running.result()
    finally:
        running.kill()


def run_closed_loops(specs: Sequence[Spec], seconds: float) -> list[dict[str, Any]]:
    """Run closed loops side by side over the same window and return their results in order."""
    running: list[RunningLoad] = []
    try:
        running.extend(RunningLoad(spec) for spec in specs)
        for each in running:
            each.wait_until_ready()
        begin_at = time.monotonic() + SETTLE_S
        for each in running:
            each.set_window(begin_at=begin_at, end_at=begin_at + seconds)
        return [each.result() for each in running]
    finally:
        for each in running:
            each.kill()
