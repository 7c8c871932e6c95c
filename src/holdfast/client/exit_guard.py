"""No program ends quietly with messages under way: it says how many, and its exit code is not zero.

A producer is watched from its making to its closing, whether or not anybody else holds it. When the interpreter ends
with one still open, its messages get a last chance to leave, and if some do not, the process exits with
`EXIT_UNDELIVERED`, whatever it meant to exit with.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Final, Protocol

EXIT_UNDELIVERED: Final = 70
LAST_CHANCE_SECONDS: Final = 10.0


class Watched(Protocol):
    def abandon(self, timeout: float) -> int:
        """Try to deliver what is left; returns how many messages are in danger."""
        ...


_open: set[Watched] = set()
_registered: list[bool] = []


def watch(producer: Watched) -> None:
    if not _registered:
        atexit.register(_at_exit)
        _registered.append(True)
    _open.add(producer)


def unwatch(producer: Watched) -> None:
    _open.discard(producer)


def _at_exit() -> None:
    lost = 0
    for producer in list(_open):
        try:
            lost += producer.abandon(LAST_CHANCE_SECONDS)
        except Exception as error:  # noqa: BLE001  whatever it is must not look like success
            print(f"holdfast: {error or repr(error)}", file=sys.stderr, flush=True)
            lost += 1
    if not lost:
        return
    sys.stdout.flush()
    print(
        f"holdfast: {lost} message{'' if lost == 1 else 's'} had not been delivered when the program ended "
        "(close the producer, or leave its `with` block, to be told which)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_UNDELIVERED)
