"""A Spark cluster of this machine, for tests: one master and some workers, each a process of its own.

Spark comes from pip, as the driver's does. What makes a worker another machine: its own working directory, an
environment that has nothing of ours, and a Python without a single package. All share the file system, of course.

Everything a worker started is found by a mark in the environment that its processes inherit, so that it can die as a
machine does: worker, executor and Python at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from holdfast.errors import HoldfastError
from holdfast.testing.processes import MARK, die_with_parent, kill_marked, marked, wait_until_ready

START_SECONDS_MAX: Final = 120.0
POLL_SECONDS: Final = 0.05
EXECUTOR: Final = b"CoarseGrainedExecutorBackend"
MASTER_CLASS: Final = "org.apache.spark.deploy.master.Master"
WORKER_CLASS: Final = "org.apache.spark.deploy.worker.Worker"
_MASTER_READY: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_WORKER_READY: Final = re.compile(r"Successfully registered with master")


class ClusterFailed(HoldfastError):
    """Master or worker did not start; its log is in the message."""


def bare_python(directory: Path) -> Path:
    """A Python of this minor version without any package; the path of its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    return directory / "bin"


class SparkDaemon:
    """A master or a worker."""

    def __init__(self, name: str, directory: Path, path: str, java_home: str) -> None:
        import pyspark

        self.name = name
        self.directory = directory
        self._mark = uuid.uuid4().hex
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        spark_home = os.path.dirname(os.path.abspath(pyspark.__file__))
        self._start_command = [os.path.join(spark_home, "bin", "spark-class")]
        self._environment = {
            "PATH": path,
            "HOME": str(directory),
            "LANG": "C.UTF-8",
            "JAVA_HOME": java_home,
            "SPARK_HOME": spark_home,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(directory / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            MARK: self._mark,
        }

    def start(self, *arguments: str) -> None:
        (self.directory / "local").mkdir(parents=True)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*self._start_command, *arguments],
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def wait_for(self, pattern: re.Pattern[str]) -> str:
        """The first group of what it says when it is ready, or all of it."""
        assert self._process is not None
        wait_until_ready(
            self._process,
            lambda: pattern.search(self.said()),
            lambda why: ClusterFailed(f"{self.name} {why}:\n{self.said()[-4000:]}"),
            START_SECONDS_MAX,
        )
        found = pattern.search(self.said())
        assert found is not None
        return found[found.lastindex or 0]

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def executors(self) -> list[int]:
        """The processes of its executors."""
        return [pid for pid in marked(self._mark) if EXECUTOR in _command_of(pid)]

    def kill_executors(self) -> list[int]:
        """SIGKILL to its executors; the worker lives, and starts new ones when it is asked to."""
        killed = self.executors()
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return killed

    def kill(self) -> None:
        """SIGKILL to it and to everything it started, until nothing is there."""
        kill_marked(self._mark, self._process)
        if self._process is not None:
            self._process.wait()


def _command_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


class SparkCluster:
    """`with SparkCluster(directory, java_home=…) as cluster:` runs until the end of the block and leaves nothing."""

    def __init__(
        self,
        directory: Path,
        *,
        workers: int = 2,
        cores: int = 1,
        memory: str = "1g",
        python: str | None = None,
        java_home: str,
    ) -> None:
        self.directory = directory
        self._cores = cores
        self._memory = memory
        path = f"{python or bare_python(directory / 'python')}:/usr/local/bin:/usr/bin:/bin"
        self.master = SparkDaemon("the master", directory / "master", path, java_home)
        self.workers = [
            SparkDaemon(f"worker {number}", directory / f"worker-{number}", path, java_home)
            for number in range(workers)
        ]
        self.url = ""

    def __enter__(self) -> Self:
        address = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        try:
            self.master.start(MASTER_CLASS, *address)
            self.url = self.master.wait_for(_MASTER_READY)
            share = ["--cores", str(self._cores), "--memory", self._memory]
            for worker in self.workers:
                work = ["--work-dir", str(worker.directory / "work")]
                worker.start(WORKER_CLASS, *address, *share, *work, self.url)
            for worker in self.workers:
                worker.wait_for(_WORKER_READY)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        with contextlib.ExitStack() as stack:
            for daemon in (self.master, *self.workers):
                stack.callback(shutil.rmtree, daemon.directory / "work", ignore_errors=True)
                stack.callback(shutil.rmtree, daemon.directory / "local", ignore_errors=True)
                stack.callback(daemon.kill)

    def wait_until(self, come_about: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not come_about():
            if time.monotonic() > deadline:
                raise ClusterFailed(f"{what} did not come about")
            time.sleep(POLL_SECONDS)
