"""Storms over our own clients: processes killed, stopped and added, while the broker is killed, frozen and cut off.

`ClientStorm` decides by its seed, and ends when it has killed so many clients. `Shore` is what it rages over: a broker
behind a link, and the swarm of clients. What must hold afterwards is in `client_chaos_checkers`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError, TopicPartition
from tests.support.chaos import BROKER_SETTINGS, SPARE, STOPPED_SECONDS_MAX, Storm, Swarm
from tests.support.client_chaos_checkers import Arrived, Finished

from holdfast.client.spool.marks import parse_mark
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import Engine
from holdfast.testing.flaky_link import Link
from holdfast.testing.postgres import free_port

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
        listen = f"127.0.0.1:{free_port()}"
        self.broker = BrokerProcess(str(directory / "data"), settings=settings, listen=listen)
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
    ended: set[int] = set()
    deadline = time.monotonic() + READ_SECONDS_MAX
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "reads-without-a-group",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )
    with closing(consumer):
        consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
        while len(ended) < partitions:
            assert time.monotonic() < deadline, f"the end of {topic} is not reached: {sorted(ended)}"
            message: Any = consumer.poll(1.0)
            if message is None:
                continue
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                ended.add(message.partition())
                continue
            mark = parse_mark(dict(message.headers())["hf-id"])
            assert mark is not None
            assert not mark.is_undecided, "the topic is known from the beginning"
            found[message.partition()].append(
                Arrived(mark.spool, mark.partition, mark.sequence, message.value().decode())
            )
    return dict(found)
