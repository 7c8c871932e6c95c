"""Storms over our own clients: processes killed, stopped and added, while the broker is killed, frozen and cut off.

`ClientStorm` decides by its seed, and ends when it has killed so many clients. `Shore` is what it rages over: a broker
behind a link, and the swarm of clients.

What must hold of our clients afterwards, as functions of what was seen. Each raises `Violation` with the rule.

- `check_spooled`: what producers were told is stored arrived, in order, and once, by `hf-id` or by itself.
- `check_never_ahead`: no position of a group was ever seen beyond work that is not finished.
- `check_copied`: a topic that was written in transactions holds every message of another once, in order.
- `check_rows`: so does a table, whatever the order.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from tests.support.chaos import BROKER_SETTINGS, SPARE, STOPPED_SECONDS_MAX, Storm, Swarm
from tests.support.history import Violation

from holdfast.client.spool.marks import parse_mark
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import Engine, read_log
from holdfast.testing.flaky_link import Link

MODULE: Final = "tests.support.client_chaos_member"
ACTIONS: Final = ("kill", "kill", "kill", "stop", "add", "broker", "freeze", "cut", "silence")
APART_SECONDS_MAX: Final = 4.0
"""How long broker and clients may be apart: beyond a request's time-out, and beyond a session."""
READ_SECONDS_MAX: Final = 60.0


class Crashing(Protocol):
    """Something else that can be killed and started again: a database."""

    def crash(self) -> None: ...

    def start(self) -> Any: ...


class Shore:
    """A broker behind a link."""

    def __init__(self, directory: Path) -> None:
        self.link = Link()
        settings = {**BROKER_SETTINGS, "advertised.listeners": f"PLAINTEXT://{self.link.address}"}
        self.broker = BrokerProcess(str(directory / "data"), settings=settings)
        self.broker.start()
        self.link.lead_to(self.broker.bootstrap_servers)
        self.engine = Engine("holdfast", self.link.address)

    @property
    def bootstrap_servers(self) -> str:
        """Where clients find it that feel the weather; `broker.bootstrap_servers` is for whoever does not."""
        return self.link.address

    def close(self) -> None:
        self.broker.crash()
        self.link.close()


class ClientStorm(Storm):
    def __init__(
        self, seed: int, swarm: Swarm, shore: Shore, members: int, database: Crashing | None = None
    ) -> None:
        super().__init__(seed, swarm, shore.broker, members)
        self._link = shore.link
        self._database = database
        self._calms: list[tuple[float, Callable[[], None]]] = []
        """When something that was done to the broker ends, and how."""
        self.killed = 0

    def rage_until(self, kills: int) -> None:
        """Until so many clients were killed."""
        while self.killed < kills:
            time.sleep(self._chance.uniform(0.05, 0.6))
            self._swarm.resume()
            self._calm()
            self._swarm.require_alive()
            self._act()
        self._calm(at_once=True)
        self._swarm.resume(everybody=True)

    def _calm(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        over = [end for until, end in self._calms if at_once or until <= now]
        self._calms = [] if at_once else [each for each in self._calms if each[0] > now]
        for end in over:
            end()

    def _act(self) -> None:
        swarm, chance = self._swarm, self._chance
        # Whoever is killed before it has begun proves nothing.
        running = sorted(name for name in swarm.alive.keys() - swarm.stopped.keys() if swarm.has_begun(name))
        actions = ACTIONS if self._database is None else (*ACTIONS, "database")
        action = chance.choice(actions)
        seconds = chance.uniform(0.1, APART_SECONDS_MAX)
        if action == "kill" and len(running) > 1:
            self.killed += 1
            self._killed(chance.choice(running))
        elif action == "stop" and len(running) > 1:
            name, seconds = chance.choice(running), chance.uniform(0.1, STOPPED_SECONDS_MAX)
            self._say(f"{name} stopped for {seconds:.1f} s")
            swarm.stop_for(name, seconds)
        elif action == "add" and len(swarm.alive) < self._members + SPARE:
            self._say(f"{swarm.add()} added")
        elif action == "broker":
            self._say("broker killed")
            self._broker.crash()
            time.sleep(chance.random() * 0.5)
            self._broker.start()
        elif action == "database":
            assert self._database is not None
            self._say("database killed")
            self._database.crash()
            self._database.start()
        elif not self._calms and action in ("freeze", "cut", "silence"):
            self._say(f"broker: {action} for {seconds:.1f} s")
            self._calms.append((time.monotonic() + seconds, self._apart(action)))

    def _apart(self, action: str) -> Callable[[], None]:
        """Put something between broker and clients; returns what takes it away."""
        if action == "freeze":
            pid = self._broker.pid
            os.kill(pid, signal.SIGSTOP)

            def go_on() -> None:
                # It may have been killed meanwhile, and another started in its place.
                if self._broker.pid == pid:
                    os.kill(pid, signal.SIGCONT)

            return go_on
        (self._link.cut if action == "cut" else self._link.silence)()
        return self._link.mend


def clients(directory: Path, options: Mapping[str, Any]) -> Swarm:
    return Swarm(directory, options, module=MODULE)


def await_stored(swarm: Swarm, count: int) -> None:
    """Until producers were told of so many messages that they are stored."""
    deadline = time.monotonic() + READ_SECONDS_MAX
    while sum(stored_by(swarm).values()) < count:
        swarm.require_alive()
        assert time.monotonic() < deadline, f"{count} messages were not stored"
        time.sleep(0.05)


def unclean(codes: Mapping[str, int], swarm: Swarm) -> list[str]:
    """What those said that did not end cleanly when they were told to; too young to be told is clean."""
    return [
        f"{name} ended with {code}:\n{swarm.said(name)}"
        for name, code in codes.items()
        if code not in (0, -signal.SIGTERM)
    ]


def stored_by(swarm: Swarm) -> dict[str, int]:
    """How many messages each producer was told are stored."""
    counts: dict[str, int] = {}
    for event in swarm.events():
        if event.what["kind"] == "stored":
            counts[Path(event.place).name.split(".")[0]] = event.what["end"]
    return counts


def finished_by(swarm: Swarm) -> list[Finished]:
    return [
        Finished(event.at, event.what["p"], event.what["o"])
        for event in swarm.events()
        if event.what["kind"] == "processed"
    ]


def read_spooled(bootstrap_servers: str, topic: str, partitions: int) -> dict[int, Sequence[Arrived]]:
    """All that a reader sees who reads committed, with the ids of spools."""
    found: dict[int, list[Arrived]] = {index: [] for index in range(partitions)}
    for message in read_log(bootstrap_servers, topic, seconds=READ_SECONDS_MAX):
        mark = parse_mark(dict(message.headers())["hf-id"])
        assert mark is not None
        assert not mark.is_undecided, "the topic is known from the beginning"
        found[message.partition()].append(
            Arrived(mark.spool, mark.partition, mark.sequence, message.value().decode())
        )
    return dict(found)


class Arrived(NamedTuple):
    """A message of a spool in its topic: `hf-id` and value, which is `producer:number`."""

    spool: str
    partition: int
    sequence: int
    value: str


class Row(NamedTuple):
    partition: int
    offset: int
    value: str


class Finished(NamedTuple):
    """The work on a message was over at a moment, as noted at a place."""

    at: int
    partition: int
    offset: int


def deduplicated(partition: int, messages: Sequence[Arrived]) -> list[str]:
    """What a reader keeps that remembers one number per spool. Sequences have no gaps: one that is missing is lost."""
    following: Counter[str] = Counter()
    kept: list[str] = []
    for place, message in enumerate(messages):
        if message.partition != partition:
            raise Violation("partition", f"{message} is in partition {partition}")
        expected = following[message.spool]
        if message.sequence > expected:
            raise Violation(
                "order", f"message {place} of partition {partition} is {message}, before {expected}"
            )
        if message.sequence == expected:
            following[message.spool] += 1
            kept.append(message.value)
    return kept


def check_spooled(
    stored: Mapping[str, int], arrived: Mapping[int, Sequence[Arrived]], *, exactly_once: bool
) -> None:
    """`stored` is how many messages each producer was told are stored; it numbered them from 0."""
    everything: set[str] = set()
    for partition, messages in arrived.items():
        values = deduplicated(partition, messages)
        if exactly_once and len(values) < len(messages):
            twice = len(messages) - len(values)
            raise Violation("twice", f"partition {partition} holds {twice} messages of a spool again")
        last: dict[str, int] = {}
        for value in values:
            name, _, number = value.partition(":")
            if int(number) <= last.get(name, -1):
                raise Violation("order", f"partition {partition}: {value} comes behind {name}:{last[name]}")
            last[name] = int(number)
        if again := everything & set(values):
            raise Violation("twice", f"{min(again)} and {len(again) - 1} more are in two partitions")
        everything |= set(values)
    for name, count in stored.items():
        missing = [number for number in range(count) if f"{name}:{number}" not in everything]
        if missing:
            raise Violation(
                "lost", f"{name}:{missing[0]} and {len(missing) - 1} more were stored and never arrived"
            )


def check_never_ahead(
    finished: Iterable[Finished], seen: Iterable[tuple[int, Mapping[int, int]]], starts: int = 0
) -> None:
    """`seen` are the positions of a group as of the moments their answers came."""
    work = sorted(finished)
    done: dict[int, set[int]] = {}
    below: dict[int, int] = {}
    """Everything of a partition below this is finished."""
    taken = 0
    for answered_at, positions in seen:
        while taken < len(work) and work[taken].at <= answered_at:
            _, partition, offset = work[taken]
            done.setdefault(partition, set()).add(offset)
            taken += 1
        for partition, position in positions.items():
            finished_below = below.get(partition, starts)
            mine = done.setdefault(partition, set())
            while finished_below in mine:
                finished_below += 1
            below[partition] = finished_below
            if position > finished_below:
                raise Violation(
                    "ahead",
                    f"answered at {answered_at}: partition {partition} is committed up to {position}, and "
                    f"{finished_below} is not finished",
                )


def check_copied(source: Mapping[int, Sequence[str]], target: Mapping[int, Sequence[str]]) -> None:
    for partition, values in source.items():
        copies = target.get(partition, ())
        _once("copied", f"partition {partition}", Counter(values), Counter(copies))
        if list(copies) != list(values):
            at = next(
                place for place, pair in enumerate(zip(values, copies, strict=True)) if pair[0] != pair[1]
            )
            raise Violation(
                "order", f"partition {partition}: {copies[at]!r} stands where {values[at]!r} belongs"
            )


def check_rows(written: Mapping[int, Mapping[int, str]], rows: Iterable[Row]) -> None:
    """`written` is what was acknowledged, by partition and offset."""
    wanted = Counter(
        Row(partition, offset, value) for partition, some in written.items() for offset, value in some.items()
    )
    _once("stored", "the table", wanted, Counter(rows))


def _once(
    done: str, where: str, wanted: Counter[Row] | Counter[str], found: Counter[Row] | Counter[str]
) -> None:
    for each, count in found.items():
        if each not in wanted:
            raise Violation("invented", f"{where}: {each!r} was never written")
        if count > wanted[each]:  # type: ignore[index]
            raise Violation("twice", f"{where}: {each!r} was {done} {count} times")
    missing = [each for each in wanted if each not in found]
    if missing:
        raise Violation("lost", f"{where}: {missing[0]!r} and {len(missing) - 1} more were not {done}")
