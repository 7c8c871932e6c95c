"""The real processes of the demo: a broker, a sender and a Spark job, each of which can be killed and started again.

Every one of them dies with the demo, however that ends: the kernel kills what was started directly when the demo's main
thread is gone, so processes are started from there only. What a job starts in turn (a JVM, Python workers) is found by
a mark in the environment that all of them inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Final, Protocol

from holdfast.demo.sender import Errand
from holdfast.errors import HoldfastError
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.pipeline_chaos import MARK, marked

KILL_SECONDS_MAX: Final = 30.0
STOP_SECONDS_MAX: Final = 120.0
"""A pipeline ends with the batch under way."""
POLL_SECONDS: Final = 0.01
QUOTED_CHARACTERS: Final = 2_000
_PR_SET_PDEATHSIG: Final = 1


class DemoFailed(HoldfastError):
    """One of the demo's own processes did what it must not do; its last words are in the message."""


class Engine(Protocol):
    """A broker that is killed."""

    name: str

    @property
    def bootstrap_servers(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def start(self) -> None: ...

    def crash(self) -> None: ...

    def stop(self) -> None: ...


class Embedded:
    name = "holdfast's own broker"

    def __init__(self, directory: Path) -> None:
        self._broker = BrokerProcess(str(directory / "data"))

    @property
    def bootstrap_servers(self) -> str:
        return self._broker.bootstrap_servers

    @property
    def pid(self) -> int:
        return self._broker.pid

    def start(self) -> None:
        self._broker.start()

    def crash(self) -> None:
        self._broker.crash()

    def stop(self) -> None:
        self._broker.stop()


class Apache:
    def __init__(self, directory: Path) -> None:
        from holdfast.testing.apache import KAFKA_VERSION, ApacheKafka, jars

        jars()  # fetched once, before anything else is started
        self.name = f"Apache Kafka {KAFKA_VERSION}"
        self._kafka = ApacheKafka(directory=directory / "kafka", heap_options=("-Xmx512M", "-Xms256M"))

    @property
    def bootstrap_servers(self) -> str:
        return self._kafka.bootstrap_servers

    @property
    def pid(self) -> int:
        return self._kafka.pid

    def start(self) -> None:
        self._kafka.start()

    def crash(self) -> None:
        self._kafka.kill()

    def stop(self) -> None:
        self._kafka.kill()


EMBEDDED: Final = "holdfast"
ENGINES: Final[Mapping[str, Callable[[Path], Engine]]] = {EMBEDDED: Embedded, "kafka": Apache}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A command with everything it starts, killed as a whole."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"the {self.name} was not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self, command: Sequence[str], *, talks: bool = False) -> subprocess.Popen[bytes]:
        """Start; one that talks has pipes for standard input and output, all the rest goes to its log."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                env={**os.environ, MARK: self._mark},
                # Ctrl-C is for the demo, which ends them in order.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return self._process

    def kill(self) -> int:
        """SIGKILL to all of it at once; returns how many processes that were."""
        if self._process is None:
            return 0
        killed = self._kill_members(self._process)
        self._process.wait()
        self._process = None
        return killed

    def _kill_members(self, process: subprocess.Popen[bytes]) -> int:
        killed: set[int] = set()
        deadline = time.monotonic() + KILL_SECONDS_MAX
        while members := marked(self._mark):
            if time.monotonic() > deadline:
                raise DemoFailed(f"processes of the {self.name} that cannot be killed: {members}")
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed.update(members)
            time.sleep(POLL_SECONDS)
            process.poll()
        return len(killed)

    def stop(self) -> None:
        """SIGTERM, and wait for a good end; what it would leave behind (an archive of classes being made) ends too."""
        assert self._process is not None
        self._process.terminate()
        try:
            code = self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the {self.name} does not end after SIGTERM{self.last_words()}") from None
        self._kill_members(self._process)
        self._process = None
        if code:
            raise DemoFailed(f"the {self.name} ended with {code}{self.last_words()}")

    def require_alive(self) -> None:
        if not self.is_alive:
            code = None if self._process is None else self._process.returncode
            raise DemoFailed(f"the {self.name} ended by itself with {code}{self.last_words()}")

    def last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return f"; {self._log} ends:\n{text[-QUOTED_CHARACTERS:]}"


class Sender(Child):
    """The sender, and what it has answered so far: a new process goes on behind the last answer."""

    def __init__(self, log: Path, errand: Errand) -> None:
        super().__init__("sender", log)
        self._errand = errand
        self.until = 0
        """How far it may go."""
        self.taken = 0
        """Orders whose customers were told so, by all its processes."""
        self.is_done = False
        self._listener: threading.Thread | None = None

    def start(self, bootstrap: str) -> None:
        errand = replace(self._errand, bootstrap=bootstrap, first=self.taken)
        command = [sys.executable, "-m", "holdfast.demo.sender", errand.as_json()]
        process = self.spawn(command, talks=True)
        assert process.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
        self._listener.start()
        self.allow(self.until)

    def allow(self, until: int) -> None:
        """It may go so far."""
        self.until = until
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % until)
            self._process.stdin.flush()
        except BrokenPipeError:
            self.require_alive()
            raise

    def kill(self) -> int:
        killed = super().kill()
        if self._listener is not None:
            self._listener.join()  # what it answered in its last moment counts
        return killed

    def _listen(self, answers: IO[bytes]) -> None:
        for line in answers:
            word, _, number = line.decode().strip().partition(" ")
            if word == "taken":
                self.taken = int(number)
            elif word == "done":
                self.is_done = True

    def require_alive(self) -> None:
        if not self.is_done:
            super().require_alive()
