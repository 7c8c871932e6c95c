"""A broker as a process of its own, for tests that kill it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final, Self

from holdfast.errors import HoldfastError
from holdfast.testing.processes import POLL_SECONDS, die_with_parent, wait_until_ready

START_SECONDS_MAX: Final = 60.0
SAID_SECONDS_MAX: Final = 10.0
_READY = re.compile(r"ready on (\S+?)(?:,| in )")


class BrokerDied(HoldfastError):
    """The broker's process ended by itself; its log is in the message."""


class BrokerProcess:
    """`holdfast serve` in a child process that can be killed and started again on the same port and data."""

    open_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    """How it is started: a suite with many of them may put something quicker in its place."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        settings: Mapping[str, str] | None = None,
        listen: str = "127.0.0.1:0",
        prefix: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.data_dir = os.fspath(data_dir)
        self.settings = dict(settings or {})
        self._listen = listen
        self._prefix = prefix
        """A command to run the broker under, such as strace."""
        self._arguments = arguments
        """Further flags of `holdfast serve`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.log_path = f"{self.data_dir.rstrip('/')}.log"

    @property
    def bootstrap_servers(self) -> str:
        return self._listen

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def start(self) -> Self:
        """Start and wait until it takes connections."""
        self._wait_until_ready(self.begin_start())
        return self

    def begin_start(self) -> subprocess.Popen[bytes]:
        """Start and do not wait: for tests that kill it before it is ready."""
        os.makedirs(os.path.dirname(self.log_path) or ".", exist_ok=True)
        command = [*self._prefix, sys.executable, "-m", "holdfast.cli", "serve"]
        command += ["--data-dir", self.data_dir, "--listen", self._listen, *self._arguments]
        for name, value in self.settings.items():
            command += ["--override", f"{name}={value}"]
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = type(self).open_process(
                command, stdin=subprocess.DEVNULL, stderr=log, preexec_fn=die_with_parent()
            )
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        def is_ready() -> bool:
            found = _READY.search(self.log()[self._log_start :])
            if found and self._listen.endswith(":0"):
                # Otherwise it is known, and what is ready may be another that was to be advertised.
                self._listen = found.group(1)
            return found is not None

        def failed(why: str) -> BrokerDied:
            self.crash()
            return BrokerDied(f"the broker {why}:\n{self.log()[self._log_start :]}")

        wait_until_ready(process, is_ready, failed, START_SECONDS_MAX)

    def create_topic(self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """As `holdfast.Broker` does."""
        from holdfast.broker.server.embed import create_topic

        create_topic(self.bootstrap_servers, name, partitions, settings)

    def crash(self) -> None:
        """SIGKILL: nothing is flushed, nothing is said."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit code."""
        if self._process is None:
            return 0
        self._process.terminate()
        return self._end()

    def wait(self) -> int:
        """Wait until it ends by itself; returns the exit code."""
        return self._end()

    def restart(self) -> None:
        """Stop cleanly if it runs, then start on the same data and port."""
        self.stop()
        self.start()

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        process.wait()
        return process.returncode

    def log(self) -> str:
        """What the broker has said so far, over all its runs."""
        with open(self.log_path, encoding="ascii", errors="replace") as log:
            return log.read()

    def has_said(self, pattern: str) -> bool:
        """Whether the log has a line like this, or will soon: a thread of the broker writes it in its own time."""
        deadline = time.monotonic() + SAID_SECONDS_MAX
        while re.search(pattern, self.log()) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.crash()
