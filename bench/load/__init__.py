"""The load generators, each run in a process of its own so that the driver costs the measured nothing.

A generator takes one specification (a JSON object with `kind`) on standard input and answers with one
JSON object on standard output. Times are `time.monotonic()`, which all processes of a machine share: a
generator starts loading at once, and counts what is both asked and answered between `begin_at` and
`end_at`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from holdfast.testing.apache import die_with_parent

Spec: TypeAlias = Mapping[str, Any]
ROOT: Final = Path(__file__).resolve().parents[2]
LOAD_TIMEOUT_S: Final = 900.0


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
            cwd=ROOT,
            preexec_fn=die_with_parent(),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(spec)).encode())
        self._process.stdin.close()
        self._process.stdin = None

    def result(self) -> dict[str, Any]:
        """Wait for its end and return what it found."""
        try:
            out, err = self._process.communicate(timeout=LOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise LoadFailed("a load generator did not end") from error
        if self._process.returncode != 0:
            raise LoadFailed(err.decode(errors="replace")[-4000:])
        found: dict[str, Any] = json.loads(out)
        return found

    def kill(self) -> None:
        """End it now."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def run_loads(specs: Sequence[Spec]) -> list[dict[str, Any]]:
    """Run generators side by side and return their results in order."""
    running: list[RunningLoad] = []
    try:
        running.extend(RunningLoad(spec) for spec in specs)
        return [each.result() for each in running]
    finally:
        for each in running:
            each.kill()


def run_load(spec: Spec) -> dict[str, Any]:
    """Run one generator."""
    return run_loads([spec])[0]
