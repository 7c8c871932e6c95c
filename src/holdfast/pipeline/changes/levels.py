"""What a change of a definition means for a pipeline that has run: the words all judges of changes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
"""A definition, or a part of one, in the plain form that its fingerprint is made of."""


class Level(Enum):
    """How bad it is; the order is that of `WORST_FIRST`."""

    SAFE = "safe"
    REBUILD = "rebuild"
    """The state was made by other rules: `holdfast pipeline rebuild` rebuilds it."""
    REFUSED = "refused"
    """Ledgers, or what sinks hold, would not fit any more."""


WORST_FIRST = (Level.REFUSED, Level.REBUILD, Level.SAFE)


@dataclass(frozen=True)
class Change:
    """One difference between the definition that ran last and the one at hand."""

    level: Level
    where: str
    """As in the YAML: `steps.totals.size`, `sinks.lake.path`."""
    what: str
    why: str
    todo: str = ""
    """Nothing for a safe change that needs nothing."""

    def __str__(self) -> str:
        todo = f" {self.todo}" if self.todo else ""
        return f"{self.where}: {self.what}. {self.why}{todo}"

    def as_json(self) -> dict[str, str]:
        return {**asdict(self), "level": self.level.value}


def safe(where: str, what: str, why: str, todo: str = "") -> Change:
    """The next run simply goes on."""
    return Change(Level.SAFE, where, what, why, todo)


def rebuild(where: str, what: str, why: str) -> Change:
    """The state has to be rebuilt."""
    return Change(Level.REBUILD, where, what, why, "Run `holdfast pipeline rebuild`.")


def refused(where: str, what: str, why: str, todo: str) -> Change:
    """The next run would not go on; `todo` is the other way there is."""
    return Change(Level.REFUSED, where, what, why, todo)


@dataclass(frozen=True)
class Facts:
    """What ledgers and the source say beside the two documents; nothing where nobody was asked."""

    topics: frozenset[str] | None = None
    """Topics that the sinks' ledgers have positions in."""
    is_same_cluster: bool | None = None
    """Whether the topics of the definition are the ones the ledgers mean, by their ids."""


def show(value: Any) -> str:
    """A value of a document, short enough for a sentence."""
    if value is None or value == "" or value == [] or value == {}:
        return "nothing"
    if isinstance(value, list):
        text = ", ".join(show(each) for each in value)
    elif isinstance(value, Mapping):
        text = ", ".join(f"{name}: {show(each)}" for name, each in value.items())
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "…"


def from_to(before: Any, after: Any) -> str:
    """`1h → 2h`."""
    return f"{show(before)} → {show(after)}"
