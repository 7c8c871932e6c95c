"""A broker as a process of its own, for tests that kill it, freeze it and start it again.

`BrokerProcess` is `holdfast serve`. With `faults=True` it runs on a disk and a clock that the test commands through
`disk` and `clock` (`holdfast.testing.faults`), and with `warm=True` it is forked from a process that has done the
imports, which takes milliseconds (`holdfast.testing.forked`). The fixtures of the pytest plugin have both.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final, Self

from holdfast.errors import HoldfastError, UsageError
from holdfast.testing.faults import Clock, Disk, Faults
from holdfast.testing.forked import NURSERY
from holdfast.testing.processes import POLL_SECONDS, die_with_parent, wait_until_ready
from holdfast.testing.topics import Topics

START_SECONDS_MAX: Final = 60.0
SAID_SECONDS_MAX: Final = 10.0
OBEY_SECONDS_MAX: Final = 60.0
"""A broker whose disk is slow hears of it late, and not for ever."""
_READY = re.compile(r"ready on (\S+?)(?:,| in | \()")


class BrokerDied(HoldfastError):
    """The broker's process ended by itself; its log is in the message."""


class BrokerProcess(Topics):
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
        faults: bool = False,
        warm: bool = False,
    ) -> None:
        """`prefix` is a command to run the broker under, such as strace; `arguments` are flags of `holdfast serve`."""
        if faults and arguments:
            raise UsageError(f"a broker with faults takes settings, and no flags: {' '.join(arguments)}")
        self.data_dir = os.fspath(data_dir)
        self.settings = dict(settings or {})
        self._listen = listen
        self._prefix = prefix
        self._arguments = arguments
        self._faults = Faults() if faults else None
        self._control: socket.socket | None = None
        """Where a broker with faults is told of them."""
        self._is_frozen = False
        if warm and self.open_process is subprocess.Popen:
            self.open_process = NURSERY.open_process
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.log_path = f"{self.data_dir.rstrip('/')}.log"
        self.disk = Disk(self._change)
        self.clock = Clock(self._change)

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
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            if self._faults is None:
                self._process = self._open(self._command(), subprocess.DEVNULL, log.fileno())
            else:
                self._control, theirs = socket.socketpair()
                self._control.settimeout(OBEY_SECONDS_MAX)
                with theirs:
                    self._process = self._open(
                        self._command_with_faults(self._faults), theirs.fileno(), log.fileno()
                    )
        return self._process

    def _open(self, command: list[str], stdin: int, stderr: int) -> subprocess.Popen[bytes]:
        return self.open_process(command, stdin=stdin, stderr=stderr, preexec_fn=die_with_parent())

    def _command(self) -> list[str]:
        command = [*self._prefix, sys.executable, "-m", "holdfast.cli", "serve"]
        command += ["--data-dir", self.data_dir, "--listen", self._listen, *self._arguments]
        for name, value in self.settings.items():
            command += ["--override", f"{name}={value}"]
        return command

    def _command_with_faults(self, faults: Faults) -> list[str]:
        options = {"data_dir": self.data_dir, "listen": [self._listen], "overrides": self.settings}
        module = "holdfast.testing.faulty_serve"
        return [
            *self._prefix,
            sys.executable,
            "-m",
            module,
            json.dumps(options),
            json.dumps(asdict(faults)),
        ]

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        def is_ready() -> bool:
            found = _READY.search(self.log()[self._log_start :])
            if found and self._listen.endswith(":0"):
                self._listen = found.group(1)
            return found is not None

        def failed(why: str) -> BrokerDied:
            self.crash()
            return BrokerDied(f"the broker {why}:\n{self.log()[self._log_start :]}")

        wait_until_ready(process, is_ready, failed, START_SECONDS_MAX)

    def _change(self, fields: Mapping[str, float | None]) -> None:
        """Tell the broker of its faults, now if it runs and at its next start as well."""
        if self._faults is None:
            raise UsageError(
                "this broker runs on the real disk and clock; BrokerProcess(..., faults=True) does not"
            )
        if self._is_frozen:
            raise UsageError("a frozen broker hears nothing: thaw() it before you change its disk or clock")
        self._faults.change(fields)
        if self._control is not None:
            try:
                self._control.sendall(json.dumps(fields).encode())
                heard = self._control.recv(1)
            except OSError as error:
                raise BrokerDied(f"the broker does not hear: {error}\n{self.log()}") from error
            if not heard:
                raise BrokerDied(f"the broker has ended:\n{self.log()}")

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and answers nobody, like a process that swaps or a machine that hangs."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self._is_frozen = True

    def thaw(self) -> None:
        """SIGCONT: it goes on, and finds that time has passed."""
        os.kill(self.pid, signal.SIGCONT)
        self._is_frozen = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Frozen inside the block."""
        self.freeze()
        try:
            yield
        finally:
            if self._process is not None:
                self.thaw()

    def crash(self) -> None:
        """SIGKILL: nothing is flushed, nothing is said."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit code."""
        if self._process is None:
            return 0
        if self._is_frozen:
            self.thaw()
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
        self._is_frozen = False
        if self._control is not None:
            self._control.close()
            self._control = None
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
