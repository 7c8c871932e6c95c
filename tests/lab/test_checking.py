"""The checker: each kind of violation planted and caught, and its clean twin left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lab.checking import (
    ABORTED_READ,
    DUPLICATED,
    INCONSISTENT,
    LOST,
    MOVED_BACK,
    REORDERED,
    RULES,
    SKIPPED,
    TORN,
    UNSEEN,
    ZOMBIE,
    Judgement,
    judge,
)
from holdfast.lab.history import KINDS, Event, History, Recorder

Line = tuple[str, str, dict[str, Any]]
T = {"topic": "t", "partition": 0}


def history(*lines: Line) -> History:
    ticks = iter(range(10**6))
    recorder = Recorder(now_ns=lambda: next(ticks))
    for kind, actor, fields in lines:
        recorder.add(kind, actor, **fields)
    return recorder.history()


def send(message: str, actor: str = "p", **more: Any) -> Line:
    return "send", actor, {"id": message, "topic": "t", **more}


def ack(message: str, offset: int, actor: str = "p", **more: Any) -> Line:
    return "ack", actor, {"id": message, **T, "offset": offset, **more}


def stored(message: str, offset: int) -> Line:
    return "stored", "log", {"id": message, **T, "offset": offset}


def deliver(message: str, offset: int, actor: str = "c") -> Line:
    return "deliver", actor, {"id": message, "group": "g", **T, "offset": offset}


def handle(message: str, actor: str = "c") -> Line:
    return "handle", actor, {"id": message, "group": "g"}


def commit(offset: int, actor: str = "c", **more: Any) -> Line:
    return "commit", actor, {"group": "g", **T, "offset": offset, **more}


def line(kind: str, **fields: Any) -> Line:
    return kind, "x", fields


LOG_END = line("log-end", topic="t")
READ_END = line("read-end", group="g", topic="t")
TWO = (send("a"), ack("a", 0), send("b"), ack("b", 1))
BOTH = (stored("a", 0), stored("b", 1), LOG_END)

PLANTED: dict[str, tuple[str, tuple[Line, ...], tuple[Line, ...], set[str]]] = {
    # what: (kind, the violation, its clean twin, whose it is)
    "acknowledged and gone": (LOST, (*TWO, stored("a", 0), LOG_END), (*TWO, *BOTH), {"b"}),
    "without the log nothing can be said": (
        LOST,
        (*TWO, stored("a", 0), LOG_END),
        (*TWO, stored("a", 0)),
        {"b"},
    ),
    "unknown is not lost": (
        LOST,
        (send("a"), ack("a", 0), LOG_END),
        (*TWO, send("u"), line("unknown", id="u"), *BOTH),
        {"a"},
    ),
    "let go": (
        LOST,
        (*TWO, send("u"), line("unknown", id="u"), line("drop", id="u", why="tired"), *BOTH),
        (*TWO, send("u"), line("unknown", id="u"), line("drop", id="u", why="x"), *BOTH, stored("u", 2)),
        {"u"},
    ),
    "let go and kept": (
        LOST,
        (*TWO, send("u"), line("fail", id="u", error="e"), line("drop", id="u", why="tired"), *BOTH),
        (*TWO, send("u"), line("drop", id="u", why="x"), line("keep", id="u", where="spool"), *BOTH),
        {"u"},
    ),
    "passed by a position": (
        LOST,
        (*TWO, handle("a"), commit(2), *BOTH),
        (*TWO, handle("a"), commit(1), *BOTH),
        {"b"},
    ),
    "passed, and a dead letter": (
        LOST,
        (*TWO, handle("b"), commit(2), *BOTH),
        (*TWO, handle("b"), commit(2), line("keep", id="a", where="dlt"), *BOTH),
        {"a"},
    ),
    "removed before it was handled": (
        LOST,
        (*TWO, handle("b"), line("log-end", topic="t", partition=0, start=1), stored("b", 1)),
        (*TWO, handle("a"), handle("b"), line("log-end", topic="t", partition=0, start=1), stored("b", 1)),
        {"a"},
    ),
    "compacted before it was handled": (
        LOST,
        (*TWO, handle("b"), stored("b", 1), line("log-end", topic="t", compacted=True)),
        (*TWO, handle("a"), handle("b"), stored("b", 1), line("log-end", topic="t", compacted=True)),
        {"a"},
    ),
    "never given to who read all": (
        UNSEEN,
        (*TWO, deliver("a", 0), READ_END, *BOTH),
        (*TWO, deliver("a", 0), deliver("b", 1), READ_END, *BOTH),
        {"b"},
    ),
    "read up to an offset only": (
        UNSEEN,
        (*TWO, line("read-end", group="g", **T, offset=2), deliver("a", 0), *BOTH),
        (*TWO, line("read-end", group="g", **T, offset=1), deliver("a", 0), *BOTH),
        {"b"},
    ),
    "in a topic that nobody reads": (
        UNSEEN,
        (
            *TWO,
            deliver("a", 0),
            deliver("b", 1),
            READ_END,
            *BOTH,
            send("o"),
            ("ack", "p", {"id": "o", "topic": "other"}),
            ("stored", "log", {"id": "o", "topic": "other", "partition": 0, "offset": 0}),
        ),
        (*TWO, deliver("a", 0), deliver("b", 1), READ_END, *BOTH, send("o"), line("fail", id="o", error="e")),
        {"o"},
    ),
    "stored twice": (
        DUPLICATED,
        (*TWO, *BOTH, send("a"), stored("a", 2)),
        (*TWO, *BOTH, send("c"), stored("c", 2)),
        {"a"},
    ),
    "handled twice": (
        DUPLICATED,
        (*TWO, handle("a"), handle("b"), handle("a"), *BOTH),
        (*TWO, handle("a"), handle("b"), ("handle", "c", {"id": "a", "group": "other"}), *BOTH),
        {"a"},
    ),
    "given twice is not handled twice": (
        DUPLICATED,
        (*TWO, handle("a", "c"), handle("a", "d"), *BOTH),
        (*TWO, deliver("a", 0, "c"), deliver("a", 0, "d"), handle("a", "d"), *BOTH),
        {"a"},
    ),
    "one offset, two messages": (
        INCONSISTENT,
        (*TWO, *BOTH, deliver("a", 1)),
        (*TWO, *BOTH, deliver("b", 1)),
        {"a", "b"},
    ),
    "elsewhere than acknowledged": (
        INCONSISTENT,
        (send("a"), ack("a", 7), stored("a", 0), LOG_END),
        (send("a"), ack("a", 0), stored("a", 0), LOG_END),
        {"a"},
    ),
    "behind what was sent later": (
        REORDERED,
        (send("a"), send("b"), stored("b", 0), stored("a", 1), LOG_END),
        (send("a"), send("b", "q"), stored("b", 0), stored("a", 1), LOG_END),
        {"a"},
    ),
    "sent again on purpose": (
        REORDERED,
        (send("a"), send("b"), stored("a", 0), stored("b", 1), stored("a", 2), LOG_END),
        (send("a"), send("b"), send("a"), stored("b", 0), stored("a", 1), LOG_END),
        {"a"},
    ),
    "handed out in another order": (
        REORDERED,
        (*TWO, deliver("b", 1), deliver("a", 0), *BOTH),
        (*TWO, deliver("b", 1), ("assign", "c", {"group": "g", **T}), deliver("a", 0), *BOTH),
        {"a"},
    ),
    "rolled back and read": (
        ABORTED_READ,
        (line("begin", txn="x", ids=["a"]), *TWO, line("end", txn="x", outcome="aborted"), deliver("a", 0)),
        (line("begin", txn="x", ids=["a"]), *TWO, line("end", txn="x", outcome="committed"), deliver("a", 0)),
        {"a"},
    ),
    "undecided and read": (
        ABORTED_READ,
        (send("a", txn="x"), ack("a", 0, txn="x"), send("b"), ack("b", 1), deliver("a", 0)),
        (
            send("a", txn="x"),
            line("end", txn="x", outcome="unknown"),
            send("b"),
            ack("b", 1),
            deliver("a", 0),
        ),
        {"a"},
    ),
    "half of a transaction": (
        TORN,
        (line("begin", txn="x", ids=["a", "b"]), send("a"), stored("a", 0), LOG_END),
        (line("begin", txn="x", ids=["a", "b"]), send("a"), send("b"), *BOTH),
        {"x"},
    ),
    "rolled back and visible": (
        TORN,
        (
            line("begin", txn="x", ids=["a"]),
            send("a"),
            line("end", txn="x", outcome="aborted"),
            stored("a", 0),
            LOG_END,
        ),
        (
            line("begin", txn="x", ids=["a"]),
            send("a"),
            line("end", txn="x", outcome="aborted"),
            line("begin", txn="y", ids=["a"]),
            line("end", txn="y", outcome="committed"),
            stored("a", 0),
            LOG_END,
        ),
        {"x"},
    ),
    "passed over by a reader": (
        SKIPPED,
        (*TWO, send("c"), ack("c", 2), deliver("a", 0), deliver("c", 2), stored("c", 2), *BOTH),
        (
            *TWO,
            send("c"),
            ack("c", 5),
            deliver("a", 0),
            deliver("b", 1),
            deliver("c", 5),
            stored("c", 5),
            *BOTH,
        ),
        {"b"},
    ),
    "passed over at the beginning": (
        SKIPPED,
        (*TWO, line("assign", group="g", **T, offset=0), ("deliver", "x", deliver("b", 1)[2]), *BOTH),
        (*TWO, line("assign", group="g", **T, offset=1), ("deliver", "x", deliver("b", 1)[2]), *BOTH),
        {"a"},
    ),
    "a position that went back": (
        MOVED_BACK,
        (*TWO, handle("a"), handle("b"), commit(2), commit(1), *BOTH),
        (*TWO, handle("a"), handle("b"), commit(2), line("reset", group="g", **T), commit(1), *BOTH),
        {"g t-0"},
    ),
    "a position that vanished": (
        MOVED_BACK,
        (*TWO, handle("a"), commit(1), line("position", group="g", **T, offset=-1), *BOTH),
        (*TWO, handle("a"), line("position", group="g", **T, offset=-1), commit(1), *BOTH),
        {"g t-0"},
    ),
    "a replaced writer": (
        ZOMBIE,
        (
            line("takeover", role="r", epoch=1),
            line("takeover", role="r", epoch=2),
            send("a", role="r", epoch=1),
            ack("a", 0),
            stored("a", 0),
        ),
        (
            line("takeover", role="r", epoch=1),
            send("a", role="r", epoch=1),
            line("takeover", role="r", epoch=2),
            ack("a", 0),
            stored("a", 0),
        ),
        {"a"},
    ),
    "a replaced writer that was refused": (
        ZOMBIE,
        (
            line("takeover", role="r", epoch=2),
            *TWO,
            send("z", role="r", epoch=1),
            ack("z", 2),
            stored("z", 2),
            *BOTH,
        ),
        (
            line("takeover", role="r", epoch=2),
            *TWO,
            send("z", role="r", epoch=1),
            line("fail", id="z", error="f"),
            *BOTH,
        ),
        {"z"},
    ),
    "a replaced reader's commit": (
        ZOMBIE,
        (line("takeover", role="r", epoch=2), *TWO, handle("a"), commit(1, role="r", epoch=1), *BOTH),
        (line("takeover", role="r", epoch=2), *TWO, handle("a"), commit(1, role="r", epoch=2), *BOTH),
        {"g t-0"},
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_caught_and_its_twin_is_clean(what: str) -> None:
    kind, violated, clean, whose = PLANTED[what]
    found = judge(history(*violated))
    assert set(found.ids(kind)) == whose
    assert found.verdict == "violated"
    assert judge(history(*clean)).violations == ()
    assert judge(history(*clean)).verdict == "clean"


def test_every_kind_is_planted() -> None:
    assert {kind for kind, *_ in PLANTED.values()} == set(RULES)


# ---------------------------------------------------------------- void, partial


def test_a_fault_that_did_not_fire_makes_it_void_whatever_was_found() -> None:
    plan = line("plan", fault="the power fails")
    found = judge(history(plan, *TWO, stored("a", 0), LOG_END))
    assert found.verdict == "void"
    assert found.ids(LOST) == ["b"]
    fired = judge(history(plan, line("fault", what="the power fails"), *TWO, *BOTH))
    assert fired.verdict == "clean"


def test_too_few_successes_make_it_void() -> None:
    assert judge(history(line("plan", successes=3), *TWO, *BOTH)).void == ("too few successes: 2 of 3",)
    assert judge(history(line("plan", successes=2), *TWO, *BOTH)).verdict == "clean"
    assert judge(History(())).verdict == "void"


def test_counts_are_of_messages() -> None:
    lines = (*TWO, send("c"), send("d"), line("fail", id="d", error="e"), handle("a"), handle("a"), *BOTH)
    counts = judge(history(*lines)).counts
    assert counts["sent"] == 4
    assert (counts["acknowledged"], counts["failed"], counts["unknown"]) == (2, 1, 1)
    assert (counts["stored"], counts["handled"]) == (2, 1)


def test_a_judgement_is_the_same_after_json() -> None:
    found = judge(history(*TWO, stored("a", 0), LOG_END))
    again = Judgement.from_json(found.as_json())
    assert again.as_json() == found.as_json()
    assert again.verdict == "violated"


# ---------------------------------------------------------------- any world in order is clean; one change is caught


class World:
    """Messages that were sent, stored and handled as they should be."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.partitions = self.chance.randint(1, 3)
        self.lines: list[Line] = []
        self.log: dict[int, list[str]] = {partition: [] for partition in range(self.partitions)}
        self.acked: list[str] = []
        for number in range(self.chance.randint(4, 15)):
            self._send(f"m{number}")
        self.readers = self._read()

    def _send(self, message: str) -> None:
        partition = self.chance.randrange(self.partitions)
        self.lines.append(("send", f"p{self.chance.randrange(2)}", {"id": message, "topic": "t"}))
        fate = self.chance.choice(
            ["ack", "ack", "ack", "fail", "unknown", "unknown and stored", "said nothing"]
        )
        if fate in ("ack", "unknown and stored"):
            self.log[partition].append(message)
        if fate == "ack":
            place = {"topic": "t", "partition": partition, "offset": len(self.log[partition]) - 1}
            self.lines.append(("ack", "p", {"id": message, **place}))
            self.acked.append(message)
        elif fate == "fail":
            self.lines.append(("fail", "p", {"id": message, "error": "e"}))
        elif fate == "unknown":
            self.lines.append(("unknown", "p", {"id": message}))

    def _read(self) -> list[Line]:
        lines: list[Line] = []
        for partition, log in self.log.items():
            end = self.chance.randint(0, len(log))
            where = {"group": "g", "topic": "t", "partition": partition}
            lines.append(("assign", "c", {**where, "offset": 0}))
            for offset, message in enumerate(log[:end]):
                lines.append(("deliver", "c", {"id": message, **where, "offset": offset}))
                lines.append(("handle", "c", {"id": message, **where, "offset": offset}))
                if self.chance.random() < 0.5:
                    lines.append(("commit", "c", {**where, "offset": offset + 1}))
        return lines

    def stored(self) -> list[Line]:
        return [
            ("stored", "log", {"id": message, "topic": "t", "partition": partition, "offset": offset})
            for partition, log in self.log.items()
            for offset, message in enumerate(log)
        ]

    def history(
        self,
        *,
        stored: list[Line] | None = None,
        more: tuple[Line, ...] = (),
        readers: list[Line] | None = None,
    ) -> History:
        kept = self.stored() if stored is None else stored
        return history(*self.lines, *(self.readers if readers is None else readers), *more, *kept, LOG_END)


@given(st.integers(0, 10**9))
def test_a_world_in_order_is_clean(seed: int) -> None:
    assert judge(World(seed).history()).violations == ()


def _loses(world: World) -> tuple[str, History] | None:
    if not world.acked:
        return None
    gone = world.chance.choice(world.acked)
    return gone, world.history(stored=[each for each in world.stored() if each[2]["id"] != gone])


def _stores_twice(world: World) -> tuple[str, History] | None:
    stored = world.stored()
    if not stored:
        return None
    again = world.chance.choice(stored)[2]
    copy = ("stored", "log", {**again, "offset": 1000})
    return again["id"], world.history(stored=[*stored, copy])


def _handles_twice(world: World) -> tuple[str, History] | None:
    handled = [each for each in world.readers if each[0] == "handle"]
    if not handled:
        return None
    again = world.chance.choice(handled)
    return again[2]["id"], world.history(more=(again,))


def _commits_past(world: World) -> tuple[str, History] | None:
    handled = {each[2]["id"] for each in world.readers if each[0] == "handle"}
    left = [each[2] for each in world.stored() if each[2]["id"] not in handled]
    if not left:
        return None
    passed = world.chance.choice(left)
    beyond = {"group": "g", "topic": "t", "partition": passed["partition"], "offset": passed["offset"] + 1}
    return passed["id"], world.history(more=(("commit", "c", beyond),))


def _skips(world: World) -> tuple[str, History] | None:
    deliveries = [each[2] for each in world.readers if each[0] == "deliver"]
    last = {each["partition"]: each["offset"] for each in deliveries}
    inner = [each for each in deliveries if each["offset"] < last[each["partition"]]]
    if not inner:
        return None
    gone = world.chance.choice(inner)["id"]
    readers = [each for each in world.readers if not (each[0] == "deliver" and each[2]["id"] == gone)]
    return gone, world.history(readers=readers)


def _swaps(world: World) -> tuple[str, History] | None:
    by_sender = {each[2]["id"]: each[1] for each in world.lines if each[0] == "send"}
    for partition, log in world.log.items():
        for at in range(len(log) - 1):
            if by_sender[log[at]] == by_sender[log[at + 1]]:
                earlier = log[at]
                world.log[partition][at : at + 2] = [log[at + 1], log[at]]
                return earlier, world.history(readers=[])
    return None


CHANGES: dict[str, tuple[str, Callable[[World], tuple[str, History] | None]]] = {
    "loses": (LOST, _loses),
    "stores twice": (DUPLICATED, _stores_twice),
    "handles twice": (DUPLICATED, _handles_twice),
    "commits past": (LOST, _commits_past),
    "skips": (SKIPPED, _skips),
    "swaps": (REORDERED, _swaps),
}


@pytest.mark.parametrize("change", CHANGES)
@given(seed=st.integers(0, 10**9))
def test_one_change_to_a_world_in_order_is_caught(change: str, seed: int) -> None:
    kind, apply = CHANGES[change]
    changed = apply(World(seed))
    if changed is None:
        return
    whose, changed_history = changed
    assert whose in judge(changed_history).ids(kind)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_possible_in_most_worlds(change: str) -> None:
    assert sum(CHANGES[change][1](World(seed)) is not None for seed in range(40)) > 20


# ---------------------------------------------------------------- any events at all

VALUES = {
    "id": st.sampled_from(["a", "b", "c"]),
    "topic": st.sampled_from(["t", "u"]),
    "group": st.sampled_from(["g", "h"]),
    "txn": st.sampled_from(["x", "y"]),
    "role": st.sampled_from(["r"]),
    "outcome": st.sampled_from(["committed", "aborted", "unknown"]),
    "ids": st.lists(st.sampled_from(["a", "b", "c"]), max_size=3),
    "partition": st.integers(0, 1),
    "offset": st.integers(-1, 4),
    "epoch": st.integers(0, 3),
}


@st.composite
def any_event(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    fields = {name: draw(VALUES.get(name, st.just("w"))) for name in KINDS[kind]}
    for name in draw(st.sets(st.sampled_from(["topic", "partition", "offset", "epoch", "role", "txn"]))):
        fields.setdefault(name, draw(VALUES[name]))
    return kind, draw(st.sampled_from(["p", "c"])), fields


@given(st.lists(any_event(), max_size=40))
def test_any_history_is_judged_without_an_error_and_the_same_each_time(lines: list[Line]) -> None:
    events: tuple[Event, ...] = history(*lines).events
    found = judge(History(events))
    assert found == judge(History(events))
    assert set(found.counts.values()) <= set(range(4))
    assert all(each.kind in RULES for each in found.violations)
