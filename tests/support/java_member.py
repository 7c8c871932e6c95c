"""Kafka's Java consumer as a member of a group: VerifiableConsumer, a process that tells its events as JSON.

It commits after every batch, before it tells of it, and leaves the group when it is asked to end (SIGTERM).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from tests.support.group_clients import HEARTBEAT_MS, SESSION_MS, Event, Seen

from holdfast.testing.apache import VERIFIABLE_CONSUMER, die_with_parent, tool_command
from holdfast.testing.engines import WAIT_SECONDS, Place

ASSIGNORS: Final = {
    "range": "org.apache.kafka.clients.consumer.RangeAssignor",
    "roundrobin": "org.apache.kafka.clients.consumer.RoundRobinAssignor",
    "sticky": "org.apache.kafka.clients.consumer.StickyAssignor",
    "cooperative-sticky": "org.apache.kafka.clients.consumer.CooperativeStickyAssignor",
}


class JavaMember:
    """One VerifiableConsumer; it can read one topic."""

    def __init__(
        self,
        bootstrap_servers: str,
        group: str,
        topics: Sequence[str],
        *,
        assignor: str,
        protocol: str = "classic",
        instance_id: str | None = None,
    ) -> None:
        (topic,) = topics
        self.seen: list[Seen] = []
        self.events: list[Event] = []
        self.errors: list[str] = []
        self._held: set[Place] = set()
        self._read = self._committed = 0
        arguments = [
            "--bootstrap-server",
            bootstrap_servers,
            "--topic",
            topic,
            "--group-id",
            group,
            "--verbose",
        ]
        arguments += ["--group-protocol", protocol]
        settings = "fetch.max.wait.ms=50\nmetadata.max.age.ms=500\n"
        if protocol == "classic":
            arguments += ["--assignment-strategy", ASSIGNORS[assignor], "--session-timeout", str(SESSION_MS)]
            settings += f"heartbeat.interval.ms={HEARTBEAT_MS}\n"
        else:
            arguments += ["--group-remote-assignor", assignor]
        if instance_id is not None:
            arguments += ["--group-instance-id", instance_id]
        # Read by the process when it starts, removed when it has ended.
        descriptor, self._settings_file = tempfile.mkstemp(suffix=".properties", text=True)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(settings)
        arguments += ["--command-config", self._settings_file]
        self._process = subprocess.Popen(
            tool_command(VERIFIABLE_CONSUMER, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        match event["name"]:
            case "partitions_assigned" | "partitions_revoked" as name:
                places = frozenset((each["topic"], each["partition"]) for each in event["partitions"])
                if name == "partitions_assigned":
                    self._held |= places
                else:
                    self._held -= places
                self.events.append(Event(name.removeprefix("partitions_"), places))
            case "record_data":
                self.seen.append(Seen(event["topic"], event["partition"], event["offset"], event["value"]))
            case "records_consumed":
                self._read += 1
            case "offsets_committed":
                self._committed += 1
                if not event["success"]:
                    self.errors.append(event["error"])

    @property
    def assignment(self) -> frozenset[Place]:
        return frozenset(self._held)

    def poll(self, timeout_s: float) -> None:
        """It polls by itself."""
        time.sleep(timeout_s)

    def commit(self) -> None:
        """It commits by itself, each batch it tells of."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._committed < self._read and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._listener.join(WAIT_SECONDS)
            if self._process.stdout is not None:
                self._process.stdout.close()
            os.unlink(self._settings_file)
