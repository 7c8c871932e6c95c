"""Groups of real processes under chaos: members killed, stopped and added, the broker killed, by one seed.

`Swarm` keeps the processes and their histories, `Storm` decides by its seed what happens next. What must hold of
the histories is checked by `check_at_least_once` and `check_positions`, which raise `Violation` with the place:
file and line of the event that breaks the rule.

- Every message is processed, and nothing is committed that was not: when a member asks to commit an offset, every
  message below it has been processed by somebody.
- The positions of the group, as an observer sees them, never go backwards, and never stand below what a member
  was told is committed before the observer asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer
from tests.support.chaos_member import HUNG, IMPATIENT
from tests.support.forked import open_process
from tests.support.history import Violation

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.processes import die_with_parent
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import OFFSET_FETCH

BROKER_SETTINGS: Final[Mapping[str, str]] = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "2000",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.assignment.interval.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}
STOPPED_SECONDS_MAX: Final = 4.0
"""Twice a session: some are back in time, some find themselves sent away."""
END_SECONDS_MAX: Final = 90.0
QUEUED_MAX: Final = 500
SPARE: Final = 2
"""How many members there may be beyond those it began with."""


class Event(NamedTuple):
    at: int
    place: str
    what: Mapping[str, Any]


class Swarm:
    """The members, as processes, and where their histories are."""

    def __init__(
        self,
        directory: Path,
        options: Mapping[str, Any],
        transactional_ids: Sequence[str] = (),
        module: str = "tests.support.chaos_member",
    ) -> None:
        self._directory = directory
        self._module = module
        self._free_ids = list(transactional_ids)
        """The successor of one that was killed goes by its transactional id, and so ends what it left open."""
        self._ids: dict[str, str] = {}
        self._options = dict(options)
        self._count = 0
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: dict[str, float] = {}
        """Members that were stopped, and when they go on."""

    def add(self, **options: Any) -> str:
        self._count += 1
        name = f"member-{self._count}"
        if self._free_ids:
            options["transactional_id"] = self._ids[name] = self._free_ids.pop(0)
        history = str(self._directory / f"{name}.jsonl")
        wanted = {**self._options, **options, "name": name, "history": history}
        with open(self._directory / f"{name}.err", "wb") as errors:
            self.alive[name] = open_process(
                [sys.executable, "-m", self._module, json.dumps(wanted)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                preexec_fn=die_with_parent(),
            )
        return name

    def kill(self, name: str) -> None:
        process = self.alive.pop(name)
        self.stopped.pop(name, None)
        process.kill()
        process.wait()
        if name in self._ids:
            self._free_ids.insert(0, self._ids.pop(name))

    def stop_for(self, name: str, seconds: float) -> None:
        os.kill(self.alive[name].pid, signal.SIGSTOP)
        self.stopped[name] = time.monotonic() + seconds

    def resume(self, *, everybody: bool = False) -> None:
        for name, until in list(self.stopped.items()):
            if everybody or until <= time.monotonic():
                os.kill(self.alive[name].pid, signal.SIGCONT)
                del self.stopped[name]

    def require_alive(self) -> None:
        """Nobody ended by itself; one whose client library hung is replaced."""
        for name, process in list(self.alive.items()):
            if process.poll() == HUNG:
                self.kill(name)
                self.add()
            elif process.poll() is not None:
                raise AssertionError(f"{name} ended by itself with {process.returncode}:\n{self.said(name)}")

    def end(self) -> dict[str, int]:
        """Tell everybody to end; returns with which code each did, that of a killed one where it did not in time."""
        codes: dict[str, int] = {}
        self.resume(everybody=True)
        for process in self.alive.values():
            process.terminate()
        for name, process in self.alive.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS_MAX)
            process.kill()
            codes[name] = process.wait()
        self.alive.clear()
        return codes

    def has_begun(self, name: str) -> bool:
        """Whether a member has come as far as its history."""
        path = self._directory / f"{name}.jsonl"
        return path.exists() and path.stat().st_size > 0

    def said(self, name: str) -> str:
        """What a member wrote to its standard output and error."""
        return (self._directory / f"{name}.err").read_text(errors="replace")

    def resets(self) -> list[str]:
        """What clients say of positions that they gave up, other than for want of a committed offset: a broker must
        never call a position out of range, or its log cut, in a test that deletes nothing."""
        return [
            line
            for path in sorted(self._directory.glob("member-*.err"))
            for line in path.read_text(errors="replace").splitlines()
            if "offset reset" in line and "no previously committed offset" not in line
        ]

    def events(self) -> list[Event]:
        """All histories as one, in the order of the moments."""
        found = []
        for path in sorted(self._directory.glob("member-*.jsonl")):
            for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
                if line:
                    what = json.loads(line)
                    found.append(Event(what["at"], f"{path}:{number}", what))
        return sorted(found, key=lambda event: (event.at, event.place))


class Source(threading.Thread):
    """An idempotent producer that numbers its messages and goes on whatever happens to the broker."""

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int, per_second: int) -> None:
        super().__init__(name="source", daemon=True)
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "message.timeout.ms": 300_000,
                "linger.ms": 5,
                **IMPATIENT,
            }
        )
        self._topic = topic
        self._partitions = partitions
        self._pause = 10 / per_second
        self._stopping = threading.Event()
        self.failures: list[str] = []
        self.acknowledged: dict[int, dict[int, str]] = {index: {} for index in range(partitions)}
        """By partition and offset: what was written."""

    def run(self) -> None:
        number = 0
        while not self._stopping.wait(self._pause):
            if len(self._producer) < QUEUED_MAX:
                for _ in range(10):
                    number += 1
                    value = f"message {number}".encode()
                    self._producer.produce(
                        self._topic, value, partition=number % self._partitions, on_delivery=self._delivered
                    )
            self._producer.poll(0)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failures.append(str(error))
        else:
            self.acknowledged[message.partition()][message.offset()] = message.value().decode()

    def await_acknowledged(self, count: int) -> None:
        """Until there is something to lose."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while sum(map(len, self.acknowledged.values())) < count:
            assert time.monotonic() < deadline, f"{count} messages were not acknowledged"
            time.sleep(0.02)

    def finish(self) -> None:
        """Stop, and wait until everything is acknowledged."""
        self._stopping.set()
        self.join()
        left = self._producer.flush(END_SECONDS_MAX)
        assert not left, f"{left} messages were never acknowledged"
        assert not self.failures, self.failures[:3]

    def ends(self) -> dict[int, int]:
        return {index: max(some, default=-1) + 1 for index, some in self.acknowledged.items()}


class Observer(threading.Thread):
    """Asks again and again where the group stands."""

    def __init__(self, bootstrap_servers: str, group: str, topic: str, partitions: int) -> None:
        super().__init__(name="observer", daemon=True)
        self._bootstrap_servers = bootstrap_servers
        self._fields = {
            "groups": [
                {
                    "group_id": group,
                    "topics": [{"name": topic, "partition_indexes": list(range(partitions))}],
                }
            ]
        }
        self._stopping = threading.Event()
        self.seen: list[tuple[int, dict[int, int]]] = []
        """When it was asked, and what was answered."""
        self.answered: list[tuple[int, dict[int, int]]] = []
        """When the answer was there, and what it was."""

    def run(self) -> None:
        while not self._stopping.wait(0.1):
            self.look()

    def look(self) -> dict[int, int] | None:
        asked_at = time.monotonic_ns()
        try:
            with WireClient(self._bootstrap_servers, timeout_s=5) as client:
                answer = client.ask(OFFSET_FETCH, 8, self._fields)
        except OSError:
            return None
        if isinstance(answer, str) or answer.groups[0].error_code:
            return None
        (topic,) = answer.groups[0].topics
        found = {
            each.partition_index: each.committed_offset for each in topic.partitions if not each.error_code
        }
        self.seen.append((asked_at, found))
        self.answered.append((time.monotonic_ns(), found))
        return found

    def finish(self) -> None:
        self._stopping.set()
        self.join()


class Storm:
    """What happens next, by a seed."""

    def __init__(self, seed: int, swarm: Swarm, broker: BrokerProcess, members: int) -> None:
        self._chance = random.Random(seed)
        self._swarm = swarm
        self._broker = broker
        self._members = members
        self.log: list[str] = []

    def rage(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._chance.uniform(0.1, 0.7))
            self._swarm.resume()
            self._swarm.require_alive()
            self._act()
        self._swarm.resume(everybody=True)

    def _act(self) -> None:
        swarm, chance = self._swarm, self._chance
        running = sorted(swarm.alive.keys() - swarm.stopped.keys())
        action = chance.choice(("kill", "kill", "stop", "stop", "add", "broker"))
        if action == "kill" and len(running) > 1:
            self._killed(chance.choice(running))
        elif action == "stop" and len(running) > 1:
            name = chance.choice(running)
            seconds = chance.uniform(0.1, STOPPED_SECONDS_MAX)
            self._say(f"{name} stopped for {seconds:.1f} s")
            swarm.stop_for(name, seconds)
        elif action == "add" and len(swarm.alive) < self._members + SPARE:
            self._say(f"{swarm.add()} added")
        elif action == "broker":
            self._say("broker killed")
            self._broker.crash()
            time.sleep(chance.random() * 0.3)
            self._broker.start()

    def _killed(self, name: str) -> None:
        self._say(f"{name} killed")
        self._swarm.kill(name)
        if len(self._swarm.alive) < self._members:
            self._say(f"{self._swarm.add()} in its place")

    def _say(self, what: str) -> None:
        self.log.append(f"{time.monotonic_ns()}: {what}")


def await_end(observer: Observer, swarm: Swarm, ends: Mapping[int, int]) -> None:
    """Return when the group stands at the end of every partition."""
    deadline = time.monotonic() + END_SECONDS_MAX
    while observer.look() != ends:
        swarm.require_alive()
        if time.monotonic() > deadline:
            raise Violation("end", f"the group stands at {observer.seen[-1:]} and not at {ends}")
        time.sleep(0.1)


# -------------------------------------------------------------------------------- checkers


def check_at_least_once(events: list[Event], written: Mapping[int, Mapping[int, str]]) -> None:
    """Everything was processed, as it was written, and before it was committed."""
    processed: dict[int, set[int]] = {partition: set() for partition in written}
    below: dict[int, int] = dict.fromkeys(written, 0)
    """Everything below this was processed."""
    for event in events:
        if event.what["kind"] == "processed":
            partition, offset, value = (event.what[key] for key in "pov")
            expected = written[partition].get(offset)
            if value != expected:
                raise Violation(
                    "records", f"{event.place}: {partition}/{offset} is {value!r}, written was {expected!r}"
                )
            processed[partition].add(offset)
            while below[partition] in processed[partition]:
                below[partition] += 1
        elif event.what["kind"] == "committing":
            for partition, offset in _positions(event):
                if below[partition] < offset:
                    raise Violation(
                        "skipped",
                        f"{event.place}: commits {partition}/{offset}, but {partition}/{below[partition]} "
                        "was processed by nobody",
                    )
    for partition, some in written.items():
        missing = sorted(some.keys() - processed[partition])
        if missing:
            raise Violation(
                "lost", f"{partition}/{missing[0]} and {len(missing) - 1} more were never processed"
            )


def check_positions(events: list[Event], seen: list[tuple[int, dict[int, int]]]) -> None:
    """What the observer saw never goes back, nor below what a member was told before the observer asked."""
    told = sorted(
        (event.at, partition, offset, event.place)
        for event in events
        if event.what["kind"] == "committed"
        for partition, offset in _positions(event)
    )
    least: dict[int, tuple[int, str]] = {}
    taken = 0
    for asked_at, positions in seen:
        while taken < len(told) and told[taken][0] < asked_at:
            _, partition, offset, place = told[taken]
            if offset > least.get(partition, (-1, ""))[0]:
                least[partition] = (offset, f"the commit at {place}")
            taken += 1
        for partition, offset in positions.items():
            floor, why = least.get(partition, (-1, ""))
            if offset < floor:
                raise Violation(
                    "positions",
                    f"asked at {asked_at}: partition {partition} stands at {offset}, below {why} of {floor}",
                )
            least[partition] = max(least.get(partition, (-1, "")), (offset, f"what was seen at {asked_at}"))


def _positions(event: Event) -> Iterator[tuple[int, int]]:
    for partition, offset in event.what["positions"].items():
        yield int(partition), offset
