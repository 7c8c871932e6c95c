"""Lines of a file descriptor, with bounded memory and without sleeping through a signal.

Waiting for a keyboard and keeping a producer alive exclude each other with `readline`. Here the wait is a
`select` of at most 100 ms at a time, and between two of them the caller gets its turn.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import NamedTuple

CHUNK_BYTES = 64 * 1024
WAIT_S = 0.1


class Line(NamedTuple):
    number: int
    content: bytes | None
    """None when the line was longer than the bound; its bytes are gone."""


def read_lines(descriptor: int, line_bytes_max: int, turn: Callable[[], bool]) -> Iterator[Line]:
    """Lines without their ends (\\n or \\r\\n), the last one even without an end.

    `turn` is called while waiting and before each read; when it says False, reading ends.
    """
    pending = bytearray()
    too_long = False
    number = 0
    while turn():
        if not select.select([descriptor], [], [], WAIT_S)[0]:
            continue
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            if pending or too_long:
                yield Line(number + 1, None if too_long else bytes(pending))
            return
        first, *others = chunk.split(b"\n")
        pending += first
        for other in others:
            number += 1
            fits = not too_long and len(pending) <= line_bytes_max
            yield Line(number, bytes(pending).removesuffix(b"\r") if fits else None)
            pending = bytearray(other)
            too_long = False
        if len(pending) > line_bytes_max:
            too_long = True
            pending.clear()
