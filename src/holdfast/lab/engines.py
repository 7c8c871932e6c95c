"""The brokers of the lab: started when the first experiment asks, shared by all that leave them whole.

    with Engines(directory) as engines:
        engines.scene("holdfast")     # the embedded broker, one process
        engines.scene("kafka")        # Apache Kafka, one node
        engines.cluster()             # three Apache Kafka brokers and a controller; their network can be split
        engines.spark()               # one Spark session, with Spark's own Kafka connector

Everything is on the loopback interface and in the given directory, and ends with the `with`. An experiment whose fault
damages what it uses asks for one of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from holdfast.errors import HoldfastError
from holdfast.testing.apache import SHORT_LIVED_JVM, ApacheKafka, ApacheKafkaUnavailable, jars
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.flaky_link import KafkaLink
from holdfast.testing.networks import NetworkChoice, NetworkUnavailable
from holdfast.testing.processes import free_ports
from holdfast.testing.risks import SETTINGS, Scene

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.testing.apache_cluster import ApacheCluster

EngineName = Literal["holdfast", "holdfast-fuse", "kafka"]
ENGINES: Final[tuple[EngineName, ...]] = ("holdfast", "holdfast-fuse", "kafka")
"""The second: the embedded broker as a process, on a file system that forgets what was not flushed."""
SMALL: Final[dict[str, Any]] = {"heap_options": ("-Xmx384M", "-Xms128M"), "jvm_options": SHORT_LIVED_JVM}


class EngineUnavailable(HoldfastError):
    """The machine lacks what an engine needs (Java, Maven, Spark); the message says what."""

    exit_code = 3


class NotOnThisMachine(EngineUnavailable):
    """An engine that not every machine can have: it is left out where all are run."""


class ApacheMachine:
    """One Apache Kafka node with the words of our own broker's process."""

    def __init__(self, kafka: ApacheKafka) -> None:
        self.kafka = kafka

    @property
    def bootstrap_servers(self) -> str:
        advertised = self.kafka.properties.get("advertised.listeners", "")
        _, _, address = advertised.partition("PLAINTEXT://")
        return address.partition(",")[0] or self.kafka.bootstrap_servers

    @property
    def pid(self) -> int:
        return self.kafka.pid

    def crash(self) -> None:
        self.kafka.kill()

    def start(self) -> object:
        self.kafka.start()
        return self


class Engines:
    def __init__(self, directory: Path, *, network: NetworkChoice = "auto") -> None:
        self.directory = directory
        self.network: NetworkChoice = network
        """How three brokers are cut off from each other."""
        self.networks_used: set[str] = set()
        """By the experiment that runs."""
        self._remarks: list[str] = []
        self._stack = contextlib.ExitStack()
        self._scenes: dict[tuple[EngineName, tuple[tuple[str, str], ...]], Scene] = {}
        self._links: dict[EngineName, tuple[Scene, KafkaLink]] = {}
        self._cluster: ApacheCluster | None = None
        self._spark: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def scene(self, engine: EngineName, settings: Mapping[str, str] | None = None) -> Scene:
        """One broker with these settings over the usual ones; the same for everybody who asks for the same."""
        key = (engine, tuple(sorted((settings or {}).items())))
        if key not in self._scenes:
            machine = self._machine(engine, f"broker-{engine}-{len(self._scenes)}", dict(settings or {}))
            self._scenes[key] = Scene(machine, engine)
        return self._scenes[key]

    def _machine(
        self,
        engine: EngineName,
        name: str,
        settings: Mapping[str, str],
        ports: tuple[int, int] | None = None,
    ) -> Any:
        """A broker; `ports` are its own and its controller's."""
        given = {**SETTINGS, **settings}
        directory = self.directory / name
        if engine == "holdfast":
            listen = "127.0.0.1:0" if ports is None else f"127.0.0.1:{ports[0]}"
            return self._stack.enter_context(BrokerProcess(str(directory), settings=given, listen=listen))
        require_kafka()
        kafka = ApacheKafka(given, directory=directory, **SMALL)
        if ports is not None:
            kafka.port, kafka.controller_port = ports
        return ApacheMachine(self._stack.enter_context(kafka))

    def behind_a_link(self, engine: EngineName) -> tuple[Scene, KafkaLink]:
        """A broker whose requests and answers may get lost on the way."""
        self.networks_used.add("proxy")
        if engine in self._links:
            return self._links[engine]
        between = KafkaLink()
        self._stack.callback(between.close)
        port, controller_port = free_ports(2)
        # Before there is anybody: Apache Kafka talks to itself through its advertised address.
        between.lead_to(f"127.0.0.1:{port}")
        listeners = f"PLAINTEXT://{between.address}"
        if engine != "holdfast":
            listeners += f",CONTROLLER://127.0.0.1:{controller_port}"
        settings = {"advertised.listeners": listeners}
        machine = self._machine(engine, f"link-{engine}", settings, (port, controller_port))
        self._links[engine] = (Scene(machine, engine), between)
        return self._links[engine]

    def cluster(self) -> ApacheCluster:
        """Three Apache Kafka brokers, all up, and their controller."""
        if self._cluster is None:
            from holdfast.testing.apache_cluster import ApacheCluster

            require_kafka()
            made = ApacheCluster(with_controller=True, network=self.network)
            try:
                self._cluster = self._stack.enter_context(made)
            except NetworkUnavailable as missing:
                raise NotOnThisMachine(str(missing)) from missing
            if self._cluster.network is not None and self._cluster.network.instead_of:
                self._remarks.append(
                    f"proxies split the network, not namespaces: {self._cluster.network.instead_of}"
                )
        self._cluster.restore()
        return self._cluster

    def remarks(self) -> list[str]:
        """What whoever reads the results should know of the machine; each is told once."""
        told, self._remarks = self._remarks, []
        return told

    def spark(self) -> SparkSession:
        if self._spark is None:
            from holdfast.pipeline.java import JavaMissing, find_java
            from holdfast.pipeline.session import SparkUnusable, require_spark, spark_session
            from holdfast.testing.spark_connector import ConnectorUnavailable, connector_jars

            try:
                require_spark()
                find_java()
                settings = {"spark.jars": ",".join(map(str, connector_jars()))}
            except (SparkUnusable, JavaMissing, ConnectorUnavailable) as missing:
                raise EngineUnavailable(str(missing)) from missing
            home = str(self.directory / "spark")
            self._spark = spark_session("lab", home, master="local[2]", settings=settings)
            self._stack.callback(self._spark.stop)
        return self._spark  # type: ignore[no-any-return]

    def adopt(self, spark: SparkSession) -> None:
        """Use this session, which somebody else ends."""
        self._spark = spark

    def restore(self) -> None:
        """Mend what the last half broke, and end its programs."""
        for scene in self._scenes.values():
            scene.restore()
        for scene, between in self._links.values():
            between.mend()
            scene.restore()


def require_kafka() -> None:
    try:
        jars()
    except ApacheKafkaUnavailable as missing:
        raise EngineUnavailable(str(missing)) from missing
