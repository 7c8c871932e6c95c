"""When a closed-loop generator counts: agreed with the driver while the load already runs.

Interpreters and clients take their time to start, more on a busy machine. So a generator loads from the beginning,
prints `ready` once each of its clients has had an answer, and then reads lines from standard input, each a JSON
object that sets `begin_at`, `end_at` or both. What was asked and answered between the two counts; the load goes on
until `end_at` has passed.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from typing import Any


class Window:
    """The span that counts, open-ended until the driver has said otherwise."""

    def __init__(self, clients: int) -> None:
        self.begin_at = math.inf
        self.end_at = math.inf
        self._not_ready = clients
        self._lock = threading.Lock()
        self._cpu_at_begin = math.nan

    def client_is_ready(self) -> None:
        """To be called once by each client, after its first answer."""
        with self._lock:
            self._not_ready -= 1
            if self._not_ready == 0:
                print("ready", flush=True)
                threading.Thread(target=self._listen, daemon=True).start()

    def is_over(self) -> bool:
        """Whether the load can end."""
        return time.monotonic() > self.end_at

    def holds(self, asked_at: float, answered_at: float) -> bool:
        """Whether a message counts."""
        return self.begin_at <= asked_at and answered_at <= self.end_at

    @property
    def seconds(self) -> float:
        """Its length, once it is over."""
        return self.end_at - self.begin_at

    def outcome(self, latencies_us: list[int]) -> dict[str, Any]:
        """What a generator answers with at the end of its only window."""
        return {
            "latencies_us": latencies_us,
            "window_s": self.seconds,
            "cpu_s": time.process_time() - self._cpu_at_begin,
        }

    def _listen(self) -> None:
        for line in sys.stdin:
            said = json.loads(line)
            # The end first: a window must not seem open-ended between the two.
            self.end_at = said.get("end_at", self.end_at)
            self.begin_at = said.get("begin_at", self.begin_at)
            if "begin_at" in said:
                time.sleep(max(0.0, self.begin_at - time.monotonic()))
                self._cpu_at_begin = time.process_time()
