"""Every way a program ends, what is under way then, and which client: the combinations, and which make no sense.

A combination that makes no sense is left out by one of the sentences in `why_not`, and by nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple

PRODUCERS: Final = ("Producer", "AsyncProducer", "wrap")
MEMBERS: Final = ("Consumer", "Processor", "DatabaseSink")
CLIENTS: Final = (*PRODUCERS, *MEMBERS)

UNDER_WAY: Final = {
    "nothing": "what was sent has arrived; what was read is handled and committed",
    "buffered": "sent, and waiting for company (linger.ms); or read and handled, and not committed yet",
    "in-flight": "asked of a broker that does not answer; or a handler is at work",
    "failed": "refused by the broker, and nobody was told; or a handler failed and its message waits for a retry",
    "spooled": "stored in a spool while no broker can be reached",
    "transaction": "a spool delivers exactly once; or a transaction is open",
}


class Way(NamedTuple):
    """One way to end."""

    name: str
    meant: int
    """The exit code that the program means, when everything has arrived; negative: the signal that ends it."""
    meant_by_member: int | None = None
    """The same for a client that runs a handler, where it differs: such a client ends cleanly by a signal."""
    is_killed: bool = False
    """Whether the process is gone without an end: nothing of ours, or of the user's, runs any more."""
    is_mute: bool = False
    """Whether nobody can read what the program says."""


WAYS: Final = {
    way.name: way
    for way in (
        Way("return", 0),
        Way("exception", 1),
        Way("exception-swallowed", 0),
        Way("exit-inside", 0),
        Way("exit-open", 0),
        Way("never-closed", 0),
        Way("sigint", -2, meant_by_member=0),
        Way("sigint-swallowed", 0),
        Way("sigint-while-closing", 0),
        Way("sigterm", -15, meant_by_member=0, is_killed=True),
        Way("sigint-exits", 0),
        Way("sigterm-exits", 0),
        Way("sigterm-raises", 1),
        Way("alarm-swallowed", 0),
        Way("sigint-closes", 0),
        Way("sigterm-closes", 0),
        Way("cancelled", 0),
        Way("generator-closed", 0),
        Way("generator-dropped", 0),
        Way("generator-left", 0),
        Way("daemon-use", 0),
        Way("daemon-close", 0),
        Way("fork-idle", 0),
        Way("fork-use", 0),
        Way("subprocess", 0),
        Way("exec", 0, is_killed=True),
        Way("stderr-closed", 0, is_mute=True),
        Way("stderr-broken", 0, is_mute=True),
        Way("stdout-broken", 0),
    )
}


HANDLED_BY_RUN: Final = (
    "sigint-swallowed",
    "sigint-while-closing",
    "sigint-exits",
    "sigint-closes",
    "sigterm-exits",
)


class Combination(NamedTuple):
    client: str
    under_way: str
    way: str

    @property
    def id(self) -> str:
        return "-".join(self)

    @property
    def is_member(self) -> bool:
        return self.client in MEMBERS

    @property
    def meant(self) -> int:
        way = WAYS[self.way]
        return way.meant if not self.is_member or way.meant_by_member is None else way.meant_by_member

    @property
    def is_killed(self) -> bool:
        """A client that runs a handler ends cleanly by SIGTERM."""
        return WAYS[self.way].is_killed and not (self.is_member and self.way == "sigterm")


def why_not(each: Combination) -> str | None:
    """Why a combination is left out; None for one that makes sense."""
    if each.is_member:
        if each.under_way == "spooled":
            return "a client that reads keeps nothing in a spool"
        if each.client == "Consumer" and each.under_way == "transaction":
            return "a Consumer has no transaction"
        if each.client == "Processor" and each.under_way == "buffered":
            return "what a Processor has done and not committed is in a transaction"
        if each.way in ("exit-open", "never-closed", "daemon-close"):
            return "a client that reads is open as long as its `run` goes on, and closes before it returns"
        if each.way.startswith("generator-"):
            return "`run` is never suspended in a generator"
        if each.way in HANDLED_BY_RUN:
            return "`run` handles SIGINT and SIGTERM itself; the program's own handlers are for alarms"
        return None
    if each.way == "exec" and each.under_way not in ("nothing", "spooled"):
        return (
            "exec replaces the program at once: what was only in its memory is gone, and no code can say so"
        )
    return None


def every() -> list[Combination]:
    return [
        each for each in map(Combination._make, product(CLIENTS, UNDER_WAY, WAYS)) if why_not(each) is None
    ]


ALWAYS: Final = Combination("Producer", "in-flight", "sigint-while-closing")
"""Interrupted in its close, and nobody else hears of what it had: no other combination stands for this one."""


def sample(seed: int = 1) -> list[Combination]:
    """Few combinations with every pair that makes sense of client and way, of client and what is under way, and of what
    is under way and the kind of way; the same ones each time."""
    chance = random.Random(seed)
    left = every()
    chance.shuffle(left)
    missing = {pair for each in left for pair in _pairs(each)}
    chosen = [ALWAYS]
    left.remove(ALWAYS)
    missing.difference_update(_pairs(ALWAYS))
    while missing:
        best = max(left, key=lambda each: sum(pair in missing for pair in _pairs(each)))
        chosen.append(best)
        left.remove(best)
        missing.difference_update(_pairs(best))
    return sorted(chosen)


def _pairs(each: Combination) -> Iterator[tuple[str, str]]:
    kind = each.way.partition("-")[0]
    return iter(((each.client, each.way), (each.client, each.under_way), (each.under_way, kind)))
