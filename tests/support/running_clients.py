"""Clients that run until they are stopped, in a thread, for as long as a test needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.testing.engines import wait_until


class Stoppable(Protocol):
    def stop(self) -> None: ...


def run_until(runs: Stoppable, run: Callable[[], None], is_done: Callable[[], bool]) -> None:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        wait_until(is_done, "the client has done its part", 60)
    finally:
        runs.stop()
        thread.join(60)
