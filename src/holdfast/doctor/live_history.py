"""Earlier looks in a file: one JSON document a line, the oldest first; each look at the cluster adds its own.

A line that is none is a gap with its number, and the others count. Only the last lines are used: what was long ago
says nothing about the rate of today.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable
from typing import Final

from holdfast.doctor.findings import DoctorError, Gap
from holdfast.doctor.live_snapshot import Look

LOOKS_MAX: Final = 100
"""Bounds the memory: a look at ten thousand partitions and a thousand groups is about a megabyte."""


def read_looks(path: str) -> tuple[list[Look], list[Gap]]:
    """The looks of a history, the oldest first, and its lines that hold none. No file yet is no look."""
    lines: deque[tuple[int, str]] = deque(maxlen=LOOKS_MAX)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines.extend((number, line) for number, line in enumerate(file, 1) if line.strip())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise DoctorError(f"cannot read the history {path}: {error.strerror}") from error
    looks, gaps = [], []
    for number, line in lines:
        try:
            looks.append(Look.from_json(json.loads(line)))
        except ValueError as error:
            what = f"line {number} of the history {path}"
            gaps.append(Gap(what, f"{error}; it is left out", "unreadable"))
    return sorted(looks, key=lambda look: look.time_ms), gaps


def append_looks(path: str, looks: Iterable[Look]) -> None:
    """Add looks at the end, each as a whole line even where the last writer was cut off."""
    text = "".join(json.dumps(look.as_json(), separators=(",", ":")) + "\n" for look in looks)
    try:
        with open(path, "ab+") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = "\n" + text
            file.write(text.encode())
    except OSError as error:
        raise DoctorError(f"cannot write the history {path}: {error.strerror}") from error
