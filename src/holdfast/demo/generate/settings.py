"""What sample data is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from holdfast.errors import UsageError

DEFAULT_START_MS: Final = 1_767_225_600_000
"""2026-01-01T00:00:00Z: a time that does not change from run to run."""


@dataclass(frozen=True)
class GenerateSettings:
    kind: str
    seed: int = 0
    count: int = 10_000
    """Messages in all: copies and malformed ones included."""
    keys: int | None = None
    """How many customers, services, rows or cards there are, or users at a time; nothing: the kind's own number."""
    start_ms: int = DEFAULT_START_MS
    spacing_ms: int = 100
    """Between two events, on average."""
    disorder_ms: int = 0
    """How far behind the newest an event may be that is not late."""
    malformed: float = 0.0
    """What part of the messages cannot be parsed."""
    duplicates: float = 0.0
    """What part is a copy of one shortly before."""
    late: float = 0.0
    """What part happened long before it came."""
    late_by_ms: int = 3_600_000
    """A late event is this much behind at least, and twice this at most."""

    def __post_init__(self) -> None:
        parts = {"malformed": self.malformed, "duplicates": self.duplicates, "late": self.late}
        for name, part in parts.items():
            if not 0 <= part <= 1:
                raise UsageError(f"{name} is a part of the messages, from 0 to 1, not {part}")
        if sum(parts.values()) > 1:
            raise UsageError(f"{', '.join(parts)} are parts of the messages; together they are more than all")
        if self.keys is not None and self.keys < 1:
            raise UsageError("there must be one key at least")
