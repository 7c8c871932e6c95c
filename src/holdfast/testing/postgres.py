"""A real PostgreSQL for tests, in a temporary directory, ended with whoever started it.

    with PostgresServer() as server:
        psycopg.connect(server.url)
        server.crash()      # SIGQUIT: PostgreSQL's own crash, recovered from at the next start
        server.start()      # same data, same port

The programs are Debian's (`/usr/lib/postgresql/*/bin`) or on PATH. PostgreSQL refuses to run as root, so a root's tests
run it as the system user `postgres` or `nobody`. It listens on the loopback interface only and trusts whoever comes.
The kernel ends it when the thread that started it ends: start it from one that lives as long as it is needed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from glob import glob
from typing import Final, Self

from holdfast.errors import HoldfastError
from holdfast.testing.processes import ask_to_die, end, free_ports, wait_until_ready

DEBIAN: Final = "/usr/lib/postgresql/*/bin"
START_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 30.0
UNPRIVILEGED: Final = ("postgres", "nobody")


class NoPostgres(HoldfastError):
    """There are no PostgreSQL server programs on this machine."""


class PostgresDied(HoldfastError):
    """The server ended by itself or never became ready; its log is in the message."""


def binaries() -> str:
    """The directory of PostgreSQL's server programs: the newest of Debian's, or the one on PATH."""
    debian = sorted(glob(DEBIAN), key=lambda path: float(path.split("/")[-2]))
    for directory in reversed(debian):
        if os.path.exists(f"{directory}/postgres") and os.path.exists(f"{directory}/initdb"):
            return directory
    found = shutil.which("initdb")
    if found is None:
        raise NoPostgres(f"no PostgreSQL server here: neither {DEBIAN} nor initdb on PATH")
    return os.path.dirname(os.path.realpath(found))


class PostgresServer:
    def __init__(self, *, settings: Sequence[str] = ()) -> None:
        """`settings` are given to the server as `name=value`."""
        self._binaries = binaries()
        self._settings = list(settings)
        self._user = self._unprivileged_user()
        self.directory = tempfile.mkdtemp(prefix="holdfast-postgres-")
        self._data = f"{self.directory}/data"
        self._log_path = f"{self.directory}/log"
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            os.chown(self.directory, self._user.pw_uid, self._user.pw_gid)

    @property
    def url(self) -> str:
        return f"postgresql://holdfast@127.0.0.1:{self.port}/postgres"

    def start(self) -> Self:
        if not os.path.exists(self._data):
            self._initialise()
        command = [f"{self._binaries}/postgres", "-D", self._data, "-p", str(self.port), "-h", "127.0.0.1"]
        for setting in ("unix_socket_directories=", "shared_buffers=32MB", *self._settings):
            command += ["-c", setting]
        with open(self._log_path, "ab") as log:
            self._process = self._run(command, log.fileno())
        self._wait_until_ready()
        return self

    def crash(self) -> None:
        """Immediate shutdown: connections are cut, nothing is written out, the next start replays the log."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        """Cut off whoever is connected and write everything out."""
        self._end(signal.SIGINT)

    def close(self) -> None:
        """Stop, and remove all data."""
        self.crash()
        shutil.rmtree(self.directory)

    def log(self) -> str:
        with open(self._log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _unprivileged_user() -> pwd.struct_passwd | None:
        if os.geteuid() != 0:
            return None
        known = {each.pw_name: each for each in pwd.getpwall()}
        for name in UNPRIVILEGED:
            if name in known:
                return known[name]
        raise NoPostgres(f"PostgreSQL does not run as root, and there is no user {' or '.join(UNPRIVILEGED)}")

    def _initialise(self) -> None:
        command = [f"{self._binaries}/initdb", "-D", self._data, "-U", "holdfast", "-A", "trust"]
        command += ["-E", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"]
        with open(self._log_path, "ab") as log:
            process = self._run(command, log.fileno())
        if process.wait() != 0:
            raise PostgresDied(f"initdb exited with {process.returncode}:\n{self.log()}")

    def _run(self, command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
        user, parent_pid = self._user, os.getpid()

        def become() -> None:
            if user is not None:
                os.setgroups([])
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
            # After the change of user, which forgets it: the server ends when the test process dies, however it dies.
            ask_to_die(parent_pid, signal.SIGQUIT)

        return subprocess.Popen(
            command,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=become,
            env={**os.environ, "LC_ALL": "C", "PGDATA": ""},
        )

    def _wait_until_ready(self) -> None:
        assert self._process is not None

        def failed(why: str) -> PostgresDied:
            self.crash()
            return PostgresDied(f"the server {why}:\n{self.log()}")

        wait_until_ready(self._process, self._is_ready, failed, START_SECONDS_MAX)

    def _is_ready(self) -> bool:
        """The server writes its state into the last line of its pid file."""
        try:
            with open(f"{self._data}/postmaster.pid", encoding="ascii") as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            return False
        assert self._process is not None
        return lines[:1] == [str(self._process.pid)] and len(lines) > 7 and lines[7].strip() == "ready"

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            end(process, how, STOP_SECONDS_MAX)
