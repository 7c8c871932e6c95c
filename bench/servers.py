"""The programs being measured: found or obtained, started on free ports, ended by process id.

Brokers (ours and Apache Kafka) share one face, `Broker`; what a durability mode means in topic settings
is theirs to say. Redis must be installed (Debian: apt-get install redis-server). The NATS server is built
once by `go install`, at a pinned version that Go's checksum database vouches for, into holdfast's cache
directory.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

from holdfast.testing.apache import ApacheKafka, broker_answers, cache_directory, exclusive_lock
from holdfast.testing.processes import die_with_parent, free_ports

NATS_VERSION: Final = "v2.15.2"
NATS_MODULE: Final = "github.com/nats-io/nats-server/v2"
START_TIMEOUT_S: Final = 300.0
"""Long enough for the recovery of gigabytes on a slow disk."""
STOP_TIMEOUT_S: Final = 60.0
BUILD_TIMEOUT_S: Final = 900.0
POLL_S: Final = 0.002

Durability: TypeAlias = Literal["flushed", "page cache"]


class ServerUnavailable(Exception):
    """A program to compare with is not on this machine; the message says how to get it."""


class ServerFailed(Exception):
    """A program started and failed; the message quotes its log."""


class Broker(Protocol):
    """What the measures need of a Kafka broker."""

    label: str
    host: str
    port: int
    data_dir: Path

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients."""

    @property
    def pid(self) -> int:
        """The process id."""

    def topic_settings(self, durability: Durability) -> dict[str, str]:
        """The topic settings that make acknowledged mean this."""

    def prepare(self) -> None:
        """What comes before a start and is not part of it."""

    def launch(self) -> None:
        """Start the process and return at once."""

    def start(self) -> None:
        """Prepare, launch and wait until it answers."""

    def stop(self) -> None:
        """Shut down cleanly."""

    def close(self) -> None:
        """End it; remove what is temporary."""


class KafkaBroker(ApacheKafka):
    """Apache Kafka as the measures see it."""

    label = "Apache Kafka"

    def topic_settings(self, durability: Durability) -> dict[str, str]:
        """Kafka's own way to flush every append before it is acknowledged."""
        return {"flush.messages": "1"} if durability == "flushed" else {}


class Child:
    """A process of ours with its log: waited for by asking, stopped by its id."""

    def __init__(self, command: list[str], log_file: Path) -> None:
        with open(log_file, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self.log_file = log_file
        self.name = Path(command[0]).name
        atexit.register(self.kill)

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when `ready()`; fail with the log when the process ended or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.name} exited with {self.process.returncode}; {self._quote()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} did not answer within {timeout_s:.0f} s; {self._quote()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """SIGTERM, and wait."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                self.kill()
                raise ServerFailed(f"{self.name} did not stop and was killed; {self._quote()}") from error
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """SIGKILL to its group, and wait."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        atexit.unregister(self.kill)

    def _quote(self) -> str:
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        return f"its log {self.log_file} ends:\n" + "\n".join(lines)


class HoldfastBroker:
    """Our broker, started by its command as a user would."""

    label = "holdfast"

    def __init__(self, properties: Mapping[str, str] | None = None, *, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.properties = dict(properties or {})
        self.host = "127.0.0.1"
        self.port = 0
        self._child: Child | None = None

    def topic_settings(self, durability: Durability) -> dict[str, str]:
        """Ours is flushed unless told otherwise; said anyway, so that a changed default changes no figure."""
        return {"holdfast.flush": "group" if durability == "flushed" else "os"}

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id."""
        if self._child is None:
            raise ServerFailed("holdfast is not running")
        return self._child.process.pid

    def prepare(self) -> None:
        """Directories and a port."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self.port == 0:
            (self.port,) = free_ports(1)

    def launch(self) -> None:
        """`holdfast serve`, and no waiting."""
        command = [str(Path(sys.executable).with_name("holdfast")), "serve", "--data-dir", str(self.data_dir)]
        command += ["--listen", self.bootstrap_servers]
        for name, value in self.properties.items():
            command += ["--override", f"{name}={value}"]
        self._child = Child(command, self.directory / "holdfast.log")

    def start(self) -> None:
        """Prepare, launch, and wait for an answer to Metadata."""
        self.prepare()
        self.launch()
        assert self._child is not None
        self._child.wait_until(lambda: broker_answers(self.host, self.port))

    def stop(self) -> None:
        """Shut down cleanly."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def close(self) -> None:
        """End it at once; the directory is the driver's to remove."""
        if self._child is not None:
            self._child.kill()
            self._child = None


class RedisServer:
    """Debian's Redis, append-only file flushed before every answer."""

    label = "Redis Streams"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self._child: Child | None = None

    @staticmethod
    def executable() -> str:
        """Where it is installed."""
        found = shutil.which("redis-server") or shutil.which("redis-server", path="/usr/local/bin:/usr/sbin")
        if found is None:
            raise ServerUnavailable("redis-server is not installed (Debian: apt-get install redis-server)")
        return found

    def start(self) -> None:
        """Start and wait until it accepts connections."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        command = [self.executable(), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--dir", str(self.directory), "--appendonly", "yes", "--appendfsync", "always"]
        command += ["--save", "", "--daemonize", "no"]
        self._child = Child(command, self.directory / "redis.log")
        self._child.wait_until(lambda: accepts(self.port))

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.kill()
            self._child = None


class NatsServer:
    """NATS with JetStream on files, flushed before every acknowledgement."""

    label = "NATS JetStream"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self._child: Child | None = None

    @staticmethod
    def executable() -> str:
        """The pinned version out of the cache, built when it is not there yet."""
        target = cache_directory() / f"nats-server-{NATS_VERSION}" / "nats-server"
        if target.exists():
            return str(target)
        go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
        if go is None:
            raise ServerUnavailable(
                f"nats-server {NATS_VERSION} is built by the Go tool, and 'go' is not on the PATH "
                "(Debian: apt-get install golang)"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(target.parent / "lock"):
            if not target.exists():
                _build_nats(go, target)
        return str(target)

    def start(self) -> None:
        """Start and wait until it accepts connections."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        settings = self.directory / "nats.conf"
        settings.write_text(
            f"host: 127.0.0.1\nport: {self.port}\n"
            f'jetstream {{ store_dir: "{self.directory}/jetstream", sync_interval: always }}\n',
            encoding="utf-8",
        )
        self._child = Child([self.executable(), "-c", str(settings)], self.directory / "nats.log")
        self._child.wait_until(lambda: accepts(self.port))

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def _build_nats(go: str, target: Path) -> None:
    aside = target.parent / "build"
    environment = {**os.environ, "GOBIN": str(aside), "GOTOOLCHAIN": "auto"}
    command = [go, "install", f"{NATS_MODULE}@{NATS_VERSION}"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ServerUnavailable(f"building nats-server took over {BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise ServerUnavailable(
            f"nats-server {NATS_VERSION} could not be built: {done.stderr.strip()[-500:]}"
        )
    (aside / "nats-server").replace(target)


def accepts(port: int) -> bool:
    """Whether something listens on this port of 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2.0).close()
    except OSError:
        return False
    return True
