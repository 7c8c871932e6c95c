"""What the tests of the risks HFnnn share: a broker that may be frozen and killed, plain clients, programs that die.

Each risk is shown in two halves. In the first a plain confluent-kafka client, set as the risk says, loses a message or
handles one twice; in the second a client of ours in the same situation does not. Nothing here waits for time to pass:
`wait_until` asks until something has come about.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from holdfast.testing.engines import QUIET, WAIT_SECONDS, Engine, NotComeAbout, wait_until

SETTINGS: Final[Mapping[str, str]] = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}
SHORT_SESSION: Final[Mapping[str, Any]] = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 200}
"""A member that was killed is missed soon."""


class Report:
    """Collects what a plain producer reports."""

    def __init__(self) -> None:
        self.delivered: list[str] = []
        self.failed: list[tuple[str, KafkaError]] = []

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        value = (message.value() or b"").decode()
        if error is None:
            self.delivered.append(value)
        else:
            self.failed.append((value, error))


class Program:
    """A Python program of a test's own, that says what it does line by line."""

    def __init__(self, text: str, *arguments: str, on_line: Callable[[str], None] = lambda _: None) -> None:
        self._on_line = on_line
        """Is given every line the program says, up to its last."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self, line: str) -> None:
        """Wait for this line; others before it are passed over."""
        assert self._process.stdout is not None
        heard: list[str] = []
        patience = threading.Timer(WAIT_SECONDS, self._process.kill)
        patience.start()
        try:
            for said in self._process.stdout:
                heard.append(said.rstrip())
                self._on_line(heard[-1])
                if heard[-1] == line:
                    return
        finally:
            patience.cancel()
        _, errors = self._process.communicate()
        raise NotComeAbout(f"{line!r}: the program said {heard}, and {errors}")

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self.ends()

    def ends(self) -> tuple[int, str]:
        """Wait for its end: exit code, and what it complained of."""
        assert self._process.stdout is not None
        patience = threading.Timer(WAIT_SECONDS, self._process.kill)
        patience.start()
        try:
            # What it has said and nobody has read yet; `communicate` would pass over what is buffered here.
            for said in self._process.stdout:
                self._on_line(said.rstrip())
            _, errors = self._process.communicate()
        finally:
            patience.cancel()
        return self._process.returncode, errors


class Background:
    """Something that runs on a thread of its own; its error is raised by whoever waits for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._error = error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join(WAIT_SECONDS)
        if self._thread.is_alive():
            raise NotComeAbout("a thread did not end")
        if self._error is not None:
            raise self._error


class Machine(Protocol):
    """A broker as a process that may be frozen, killed, and started again on its data."""

    @property
    def bootstrap_servers(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def crash(self) -> None: ...

    def start(self) -> object: ...


class Scene(Engine):
    """A broker as a process, with plain clients for it. What a test breaks, `restore` mends."""

    def __init__(self, broker: Machine, name: str = "holdfast") -> None:
        super().__init__(name, broker.bootstrap_servers)
        self.broker = broker
        self._programs: list[Program] = []
        self._is_dead = False

    # The broker

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The broker takes connections and bytes, and does nothing."""
        os.kill(self.broker.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if not self._is_dead:
                os.kill(self.broker.pid, signal.SIGCONT)

    def crash(self) -> None:
        self._is_dead = True
        self.broker.crash()

    def revive(self) -> None:
        """Start the broker again on its data; only from the main thread, with which it would die."""
        self.broker.start()
        self._is_dead = False

    def restore(self) -> None:
        for program in self._programs:
            program.kill()
        if self._is_dead:
            self.revive()

    # Plain clients

    def plain(self, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {"bootstrap.servers": self.bootstrap_servers, **QUIET, **(settings or {})}

    def producer(self, settings: Mapping[str, Any] | None = None) -> Producer:
        return Producer(self.plain(settings))

    def consumer(self, group: str, settings: Mapping[str, Any] | None = None) -> Consumer:
        """One that commits nothing and begins at the beginning, unless told otherwise."""
        given = {"enable.auto.commit": False, "auto.offset.reset": "earliest", **(settings or {})}
        return Consumer(self.plain({"group.id": group, **given}))

    def next_of(self, group: str, topic: str, partition: int = 0) -> str:
        """The message that this group is handed next."""
        consumer = self.consumer(group)
        try:
            consumer.assign([TopicPartition(topic, partition)])
            return value_of(wait_until(lambda: consumer.poll(1.0), f"a message of {topic} for {group}"))
        finally:
            consumer.close()

    def committed_offset(self, group: str, topic: str, partition: int = 0) -> int:
        """Where a group stands; negative when it has no committed offset."""
        return self.committed(group).get(f"{topic}-{partition}", -1)

    def members(self, group: str) -> int:
        """How many members a group has whose partitions are theirs; 0 while that changes."""
        found = self.admin.describe_consumer_groups([group])[group].result(WAIT_SECONDS)
        return len(found.members) if found.state.name == "STABLE" else 0

    # Programs

    def program(self, text: str, *arguments: str, on_line: Callable[[str], None] = lambda _: None) -> Program:
        """Start a program with the address of the broker as its first argument; it does not outlive the test."""
        self._programs.append(Program(text, self.bootstrap_servers, *arguments, on_line=on_line))
        return self._programs[-1]


def take(consumer: Consumer, count: int) -> list[Any]:
    """So many messages from a plain consumer."""
    taken: list[Any] = []

    def more() -> bool:
        for message in consumer.consume(count - len(taken), 0.5):
            if (error := message.error()) is not None:
                raise KafkaException(error)
            taken.append(message)
        return len(taken) == count

    wait_until(more, f"{count} messages")
    return taken


def value_of(message: Any) -> str:
    """The text of a message: a plain one, or one of ours."""
    value = message.value() if callable(message.value) else message.value
    return (value or b"").decode()


def numbers(start: int, end: int) -> list[str]:
    return [str(number) for number in range(start, end)]
