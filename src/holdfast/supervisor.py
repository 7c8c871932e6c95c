"""What systemd, or whoever speaks its protocol, is told of a process that it has started: ready, alive, stopping.

The protocol is that of `sd_notify(3)`: the supervisor names a datagram socket in `NOTIFY_SOCKET`, and each datagram
holds lines of `NAME=VALUE`. `WATCHDOG_USEC` says how long a process may be silent before it counts as stuck.

A process that nobody supervises tells nothing, and one whose supervisor does not listen says so once and goes on: what
the process does never depends on it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

PATIENCE_SECONDS: Final = 5.0
"""How long a word that is said once may wait for a supervisor that is behind with reading. One that is said again and
again does not wait at all: it is sent from the loop that it speaks for."""
USEC_PER_SECOND: Final = 1_000_000
STATUS_CHARACTERS_MAX: Final = 200
"""A status is one line for a person to read."""

log = logging.getLogger(__name__)


class Supervisor:
    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # An abstract socket's name begins with a zero byte, which no variable can hold.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._was_unheard = False
        self.alive_every_s = _watchdog_seconds(environment) / 2 if address else 0.0
        """How often `alive` is wanted; 0 where nobody watches."""

    def starting(self, status: str) -> None:
        self._tell(_status(status))

    def ready(self, status: str) -> None:
        self._tell("READY=1", _status(status))

    def alive(self, status: str = "") -> None:
        self._tell("WATCHDOG=1", *([_status(status)] if status else []), patience_s=0.0)

    def stopping(self) -> None:
        self._tell("STOPPING=1", _status("stopping"))

    def _tell(self, *lines: str, patience_s: float = PATIENCE_SECONDS) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
                sending.settimeout(patience_s)
                sending.connect(self._address)
                sending.send("\n".join(lines).encode())
        except OSError as error:
            if not self._was_unheard:
                log.warning("the supervisor at NOTIFY_SOCKET does not hear %s: %s", lines[0], error)
            self._was_unheard = True


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:STATUS_CHARACTERS_MAX]}"


def _watchdog_seconds(environment: Mapping[str, str]) -> float:
    """0 where no watchdog is set, or where it is another process that is watched."""
    try:
        pid = int(environment.get("WATCHDOG_PID") or os.getpid())
        return int(environment.get("WATCHDOG_USEC", "0")) / USEC_PER_SECOND if pid == os.getpid() else 0.0
    except ValueError:
        log.warning(
            "WATCHDOG_USEC and WATCHDOG_PID are not numbers: nobody is told that this process is alive"
        )
        return 0.0
