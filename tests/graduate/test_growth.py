"""The steps as they are printed: one Apache Kafka on our data grows to three, each of which is then killed once."""

from __future__ import annotations

import json
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from holdfast import Broker
from holdfast.cli.app import run_command
from holdfast.cli.exits import run
from holdfast.config.properties import parse_properties
from holdfast.graduate.handing_over import MANIFEST_FILE, Request, graduate
from holdfast.graduate.properties import FACTORS
from holdfast.graduate.report import Report
from holdfast.graduate.starting import start_kafka
from holdfast.graduate.steps import STEPS_FILE
from holdfast.graduate.verifying import verify
from holdfast.manifest.model import decode
from holdfast.testing.apache import CONFIGS, METADATA_QUORUM, SHORT_LIVED_JVM, STORAGE, ApacheKafka, run_tool
from holdfast.testing.apache_cluster import HEAP_OPTIONS
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET, Engine, read_log, wait_until
from holdfast.testing.processes import free_ports

pytestmark = [pytest.mark.long, pytest.mark.java, pytest.mark.timeout(900)]

TOOLS = {
    "kafka-configs.sh": CONFIGS,
    "kafka-reassign-partitions.sh": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
}


def join(directory: Path, first: str, cluster_id: str, node: int, server: str) -> ApacheKafka:
    """Step 2: another machine, broker and controller."""
    directory.mkdir()
    port, controller = free_ports(2)
    text = Path(first, "server.properties").read_text()
    listeners = f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}"
    properties = {
        **parse_properties(text),
        "node.id": str(node),
        "listeners": listeners,
        "advertised.listeners": listeners,
        "log.dirs": str(directory / "data"),
        "metadata.log.dir": str(directory / "data"),
        "broker.rack": f"supply-{node}",
    }
    settings = directory / "server.properties"
    settings.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    arguments = ("--cluster-id", cluster_id, "--no-initial-controllers", "--config", str(settings))
    run_tool(STORAGE, "format", *arguments)
    kafka = ApacheKafka(directory=directory, heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM)
    kafka.port = port
    kafka.launch()
    kafka.wait_until_ready()
    run_tool(
        METADATA_QUORUM, "--bootstrap-server", server, "--command-config", str(settings), "add-controller"
    )
    return kafka


def raise_factors(directory: Path, node: int, controllers: str) -> None:
    """The end of step 3."""
    settings = directory / "server.properties"
    factors = {name: "2" if name.endswith("min.isr") else "3" for name in FACTORS}
    properties = {
        **parse_properties(settings.read_text()),
        **factors,
        "default.replication.factor": "3",
        "controller.quorum.bootstrap.servers": controllers,
        "broker.rack": f"supply-{node}",
    }
    settings.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))


def run_step(steps: str, words: str) -> bytes:
    """Run the one command of the printed steps that ends with these words; what it says."""
    (command,) = [line for line in steps.splitlines() if line.startswith("    ") and line.endswith(words)]
    script, *arguments = shlex.split(command)
    return run_tool(TOOLS[script], *arguments).stdout


class Sender:
    """One idempotent producer, all the while."""

    def __init__(self, servers: str) -> None:
        self._producer = Producer(
            {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5, **QUIET}
        )
        self._is_over = threading.Event()
        self.acknowledged: set[str] = set()
        self.failures: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._is_over.is_set():
            self._producer.produce("orders", f"later-{number}", on_delivery=self._delivered)
            number += 1
            self._producer.poll(0.005)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self.acknowledged.add(message.value().decode())
        else:
            self.failures.append(error)

    def gets_on(self) -> None:
        before = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) > before + 50, "the sender gets on", 120)

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert self._producer.flush(100) == 0
        assert self.failures == []


def risks(server: str, capsys: pytest.CaptureFixture[str]) -> set[tuple[str, str]]:
    capsys.readouterr()
    run(lambda: run_command(["doctor", "--bootstrap-server", server, "--output", "json"]))
    document = json.loads(capsys.readouterr().out)
    return {(each["id"], each["severity"]) for each in document["findings"]}


def test_three_brokers_and_each_is_killed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port, controller = free_ports(2)
    data, output = str(tmp_path / "data"), str(tmp_path / "out")
    with Broker(data, listen=f"127.0.0.1:{port}") as broker:
        engine = Engine("holdfast", broker.bootstrap_servers)
        engine.create_topic("orders", 3)
        engine.create_topic("prices", 1, {"cleanup.policy": "compact", "min.insync.replicas": "1"})
        engine.write("orders", {number: map(str, range(2000)) for number in range(3)})
        before = risks(broker.bootstrap_servers, capsys)
    graduate(Request((data,), ("127.0.0.1", port), ("127.0.0.1", controller), output))
    manifest = decode(Path(output, MANIFEST_FILE).read_bytes(), MANIFEST_FILE)
    kafkas: dict[int, ApacheKafka] = {}
    try:
        first = kafkas[1] = start_kafka(output, is_detached=False, jvm_options=SHORT_LIVED_JVM)
        server = first.bootstrap_servers
        kafkas[2] = join(tmp_path / "second", output, manifest.cluster_id, 2, server)
        kafkas[3] = join(tmp_path / "third", output, manifest.cluster_id, 3, server)
        servers = ",".join(each.bootstrap_servers for each in kafkas.values())

        def check() -> Report:
            report = verify(manifest, output, {"bootstrap.servers": servers})
            assert report.findings == []
            return report

        assert "has every broker flush first" in check().replicas
        steps = Path(output, STEPS_FILE).read_text()
        run_step(steps, "--execute")
        wait_until(lambda: b"still in progress" not in run_step(steps, "--verify"), "moved", 300)
        run_step(steps, "--entity-default --add-config min.insync.replicas=2")
        run_step(steps, "--topic prices --add-config min.insync.replicas=2")
        assert check().replicas.endswith("can go (step 4)")
        run_step(steps, "--entity-default --delete-config log.flush.interval.messages")
        assert check().replicas == "every topic has 3, and 2 must have a message"
        controllers = ",".join(
            parse_properties((each.directory / "server.properties").read_text())["listeners"].rpartition("/")[
                2
            ]
            for each in kafkas.values()
        )
        sender = Sender(servers)
        for node, kafka in kafkas.items():
            raise_factors(kafka.directory, node, controllers)
            sender.gets_on()
            kafka.kill()
            sender.gets_on()
            kafka.launch()
            kafka.wait_until_ready()
            wait_until(lambda: is_in_sync(servers), "all replicas are in sync", 200)
        sender.end()
        stored = [message.value().decode() for message in read_log(servers, "orders")]
        assert len(stored) == len(set(stored)) - len({*map(str, range(2000))}) + 6000
        assert {*stored} >= sender.acknowledged
        check()
        assert risks(servers, capsys) <= before
        for kafka in kafkas.values():
            kafka.kill()
        alone = BrokerProcess(data)
        assert alone.begin_start().wait() == 2
        for reason in (
            "the quorum has other voters",
            "other brokers are registered",
            "replicas on other nodes",
        ):
            assert alone.has_said(reason)
    finally:
        for kafka in kafkas.values():
            kafka.kill()


def is_in_sync(servers: str) -> bool:
    found = Engine("kafka", servers).admin.list_topics(timeout=20).topics.values()
    return all(len(part.isrs) == 3 for topic in found for part in topic.partitions.values())
