"""Sizes and durations as people write them: `64MiB`, `10s`."""

from __future__ import annotations

import re
from typing import Final

SIZES: Final = {
    "": 1,
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
}
DURATIONS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

SIZE_PATTERN: Final = r"^[0-9]+(\.[0-9]+)? ?(B|[kK]B|MB|GB|KiB|MiB|GiB)?$"
DURATION_PATTERN: Final = r"^[0-9]+(\.[0-9]+)? ?(ms|s|m|h|d)$"

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes; `ValueError` says what a size looks like."""
    number, unit = _split(text, "a size such as 64MiB, 10MB or 1048576")
    if unit not in SIZES:
        raise ValueError(f"{text!r} has no unit of size; write B, kB, MB, GB, KiB, MiB or GiB")
    return int(number * SIZES[unit])


def parse_duration_ms(text: str) -> int:
    """Milliseconds; `ValueError` says what a duration looks like."""
    number, unit = _split(text, "a duration such as 500ms, 10s or 5m")
    if unit not in DURATIONS_MS:
        raise ValueError(f"{text!r} has no unit of time; write ms, s, m, h or d")
    return int(number * DURATIONS_MS[unit])


def _split(text: str, expected: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not {expected}")
    return float(match[1]), match[2]
