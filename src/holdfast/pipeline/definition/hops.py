"""One hop of a pipeline and what it promises: the words that explanations are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final


class Strength(IntEnum):
    """What a hop promises; a smaller one is weaker."""

    MAY_LOSE = 0
    SOME_LEFT_OUT = 1
    CONDITIONAL = 2
    FIELDS_LEFT_OUT = 3
    EXACTLY_ONCE = 4

    @property
    def words(self) -> str:
        return WORDS[self]


WORDS: Final = {
    Strength.MAY_LOSE: "may lose acknowledged records",
    Strength.SOME_LEFT_OUT: "exactly once, some records left out",
    Strength.CONDITIONAL: "exactly once, on a condition",
    Strength.FIELDS_LEFT_OUT: "exactly once, some fields left out",
    Strength.EXACTLY_ONCE: "exactly once",
}


@dataclass(frozen=True)
class Hop:
    name: str
    kind: str
    what: str
    strength: Strength
    why: str
    remedy: str | None = None
    """The setting that would make it stronger; nothing when there is none."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "what": self.what,
            "guarantee": self.strength.words,
            "strength": int(self.strength),
            "why": self.why,
            "raise": self.remedy,
        }


def without_password(address: str) -> str:
    """An address without the password in it; a reference stays, since it shows nothing."""
    hidden = re.sub(r"(://[^/@:]*):(?!\$\{)[^/@]*@", r"\1:***@", address)
    return re.sub(r"(?i)(password|secret|token)=(?!\$\{)[^&\s]+", r"\1=***", hidden)


def short(sql: str, most: int = 100) -> str:
    line = " ".join(sql.split())
    return line if len(line) <= most else line[: most - 1] + "…"
