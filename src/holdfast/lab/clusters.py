"""Clusters that outlive the command that started them: `cluster.json` says which processes they are.

A process is known by its id *and* by when it started, as the kernel counts it: an id that was given to another process
since is not ours, and is left alone. Ending is asked for first (SIGTERM), and after `STOP_SECONDS` made so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from holdfast.errors import HoldfastError, UsageError
from holdfast.lab.engines import require_kafka
from holdfast.testing.apache import broker_answers
from holdfast.testing.apache_cluster import CONTROLLER, ApacheCluster
from holdfast.testing.processes import free_ports

STATE: Final = "cluster.json"
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.05


class ClusterError(UsageError):
    """There is no such cluster, or there is one already."""


class ClusterFailed(HoldfastError):
    """A cluster that did not start; the message says where its log is."""


@dataclass(frozen=True)
class Node:
    name: str
    pid: int
    started: int
    """When the process started, in the kernel's ticks since boot."""

    def is_alive(self) -> bool:
        return started_at(self.pid) == self.started


@dataclass(frozen=True)
class Cluster:
    directory: Path
    engine: str
    bootstrap_servers: str
    nodes: tuple[Node, ...]

    def save(self) -> None:
        document = {
            "engine": self.engine,
            "bootstrap_servers": self.bootstrap_servers,
            "nodes": [asdict(node) for node in self.nodes],
        }
        (self.directory / STATE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def stop(self) -> int:
        """End what lives of it; returns how many that were."""
        living = [node for node in self.nodes if node.is_alive()]
        # Brokers before their controller: they say goodbye to it.
        for node in reversed(living):
            _signal(node, signal.SIGTERM)
            _await_end(node, STOP_SECONDS)
            if node.is_alive():
                _signal(node, signal.SIGKILL)
                _await_end(node, STOP_SECONDS)
        (self.directory / STATE).unlink()
        return len(living)


def started_at(pid: int) -> int | None:
    """When a process started; None when there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _signal(node: Node, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(node.pid, number)


def _await_end(node: Node, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while node.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(node.pid, os.WNOHANG)
        time.sleep(POLL_SECONDS)


def load_cluster(directory: Path) -> Cluster:
    try:
        document = json.loads((directory / STATE).read_text(encoding="utf-8"))
        nodes = tuple(
            Node(each["name"], int(each["pid"]), int(each["started"])) for each in document["nodes"]
        )
        return Cluster(directory, document["engine"], document["bootstrap_servers"], nodes)
    except FileNotFoundError as error:
        raise ClusterError(f"no cluster was started in {directory}: there is no {STATE}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"{directory / STATE} cannot be read: {error}") from error


def start_cluster(engine: str, brokers: int, directory: Path) -> Cluster:
    if (engine == "kafka" and brokers not in (1, 3)) or (engine == "holdfast" and brokers != 1):
        raise ClusterError(f"{brokers} brokers of {engine} cannot be had: 1 of either, or 3 of kafka")
    if (directory / STATE).exists() and any(node.is_alive() for node in load_cluster(directory).nodes):
        raise ClusterError(f"a cluster runs in {directory}: end it with `holdfast cluster down` first")
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()
    cluster = _start_kafka(brokers, directory) if engine == "kafka" else _start_holdfast(directory)
    cluster.save()
    return cluster


def _start_kafka(brokers: int, directory: Path) -> Cluster:
    require_kafka()
    made = ApacheCluster(with_controller=True, directory=directory, brokers=brokers, is_detached=True)
    try:
        made.start()
    except BaseException:
        made.close()
        raise
    names = {CONTROLLER: "controller"}
    nodes = tuple(
        node_of(names.get(number, f"broker {number}"), process.pid)
        for number, process in made.processes.items()
    )
    return Cluster(directory, "kafka", made.bootstrap_servers, nodes)


def _start_holdfast(directory: Path) -> Cluster:
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--data-dir", str(directory / "data")]
    with open(directory / "broker.log", "ab") as log:
        process = subprocess.Popen(
            [*command, "--listen", address],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while not broker_answers("127.0.0.1", port):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise ClusterFailed(f"the broker did not start; its log is {directory / 'broker.log'}")
        time.sleep(POLL_SECONDS)
    return Cluster(directory, "holdfast", address, (node_of("broker 1", process.pid),))


def node_of(name: str, pid: int) -> Node:
    started = started_at(pid)
    if started is None:
        raise ClusterFailed(f"{name} ended as soon as it was started")
    return Node(name, pid, started)
