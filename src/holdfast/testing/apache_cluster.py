"""Three Apache Kafka brokers on loopback, for what one broker cannot show: a leader that dies, followers that lag.

Node 1 is broker and controller, nodes 2 and 3 are brokers. Each is a process that can be frozen, thawed and killed:

    with ApacheCluster() as cluster:
        cluster.create_topic("orders", leader=2)
        cluster.freeze(1, 3)
        ...
        cluster.kill(2)
        cluster.thaw(1, 3)

While node 1 is frozen nobody is elected: what happens in between is not a race with the controller. Kill nodes 2 and 3
only: with node 1 the controller would go. `ApacheCluster(with_controller=True)` has a controller apart, and then any of
the three may be killed, lose its disk (`destroy_disk`) and be started again (`revive`). With a network as well
(`ApacheCluster(with_controller=True, network="auto")`) nodes can be cut off from each other and run on:

    cluster.partition([2], [1, 3, CONTROLLER])
    ...
    cluster.heal()
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.testing.apache import SHORT_LIVED_JVM, START_TIMEOUT_S, ApacheKafka, new_id
from holdfast.testing.engines import QUIET, WAIT_SECONDS, Engine, wait_until
from holdfast.testing.networks import Network, NetworkChoice, NodeAddress, make_network
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import METADATA

NODES: Final = (1, 2, 3)
CONTROLLER: Final = 9
ASK_SECONDS: Final = 5.0
"""Somebody who stands still is not waited for longer: another is asked."""
HEAP_OPTIONS: Final = ("-Xmx256M", "-Xms96M")
PROPERTIES: Final[Mapping[str, str]] = {
    # A dead broker is missed after this; a machine that is busy for as long would lose living ones.
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "500",
    # Followers that are frozen for a moment stay in sync, and so may be elected.
    "replica.lag.time.max.ms": "120000",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "num.network.threads": "2",
    "num.io.threads": "2",
    "background.threads": "2",
    "log.cleaner.enable": "false",
}


class View(NamedTuple):
    """What one broker says of a partition."""

    leader: int
    epoch: int
    in_sync: tuple[int, ...]


class _Broker(ApacheKafka):
    """A broker without a controller of its own, in the cluster of another node."""

    def __init__(
        self,
        node: int,
        controller: ApacheKafka,
        cluster_id: str,
        directory: Path,
        *,
        is_detached: bool = False,
    ) -> None:
        super().__init__(
            directory=directory,
            heap_options=HEAP_OPTIONS,
            jvm_options=SHORT_LIVED_JVM,
            is_detached=is_detached,
        )
        self._node = node
        self._cluster_id = cluster_id
        self._controller_address = f"{controller.host}:{controller.controller_port}"
        self._place: NodeAddress | None = None

    @property
    def bootstrap_servers(self) -> str:
        return self._place.advertised if self._place is not None else super().bootstrap_servers

    def settle(self, place: NodeAddress, controller: NodeAddress) -> None:
        """Live there, and find the controller where it lives."""
        _settle(self, place)
        self._place = place
        self._controller_address = controller.controller_address

    def prepare(self) -> None:
        """As the storage tool formats a broker, without a JVM for it."""
        if self.port == 0:
            self._choose_ports()
        self._write_properties()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if (self.data_dir / "meta.properties").exists():
            return
        (self.data_dir / "meta.properties").write_text(
            f"version=1\ncluster.id={self._cluster_id}\nnode.id={self._node}\ndirectory.id={new_id()}\n",
            encoding="ascii",
        )

    def _write_properties(self) -> None:
        listener = f"PLAINTEXT://{self.host}:{self.port}"
        self.properties = {
            **PROPERTIES,
            "process.roles": "broker",
            "node.id": str(self._node),
            "controller.quorum.bootstrap.servers": self._controller_address,
            "listeners": listener,
            "advertised.listeners": listener,
            **(self._place.broker_properties if self._place is not None else {}),
        }
        super()._write_properties()


class _Controller(ApacheKafka):
    """A controller that is no broker."""

    def _write_properties(self) -> None:
        listener = f"CONTROLLER://{self.host}:{self.controller_port}"
        self.properties = {
            **PROPERTIES,
            "process.roles": "controller",
            "node.id": str(CONTROLLER),
            "listeners": listener,
            "advertised.listeners": listener,
            **self.properties,
        }
        super()._write_properties()


class ApacheCluster:
    """Replication factor 3 is possible, and min.insync.replicas 2 means something."""

    def __init__(
        self,
        *,
        with_controller: bool = False,
        directory: Path | None = None,
        brokers: int = len(NODES),
        is_detached: bool = False,
        network: NetworkChoice | None = None,
    ) -> None:
        """With `is_detached` the processes outlive this one, and whoever started them has to end them."""
        if network is not None and (is_detached or not with_controller):
            raise ValueError("a network is for a cluster with a controller apart, which ends with us")
        self._network_choice = network
        self.network: Network | None = None
        """Of what it was started in, if it can be split."""
        self._owns_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="kafka-cluster-"))
        self.numbers = NODES[:brokers]
        self._is_detached = is_detached
        kind, number = (_Controller, CONTROLLER) if with_controller else (ApacheKafka, 1)
        self._first = kind(
            {} if with_controller else PROPERTIES,
            directory=self.directory / str(number),
            heap_options=HEAP_OPTIONS,
            jvm_options=SHORT_LIVED_JVM,
            is_detached=is_detached,
        )
        self._nodes: dict[int, ApacheKafka] = {} if with_controller else {1: self._first}
        self._frozen: set[int] = set()
        self._cluster_id = ""
        self._admin: Any = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.bootstrap_servers for node in self._nodes.values())

    def start(self) -> None:
        """Start all nodes at the same time, and wait until each knows of the others."""
        self._join_network()
        self._first.prepare()
        meta = (self._first.data_dir / "meta.properties").read_text(encoding="ascii")
        self._cluster_id = next(
            line.partition("=")[2] for line in meta.splitlines() if line.startswith("cluster.id=")
        )
        for number in self.numbers:
            if number not in self._nodes:
                self._nodes[number] = self._broker(number)
        for node in self.processes.values():
            node.launch()
        for node in self._nodes.values():
            node.wait_until_ready()
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, **QUIET})
        self._await_all()

    def _join_network(self) -> None:
        if self._network_choice is None:
            return
        self.network = make_network(self._network_choice, (*self.numbers, CONTROLLER))
        place = self.network.place(CONTROLLER)
        _settle(self._first, place)
        self._first.properties = dict(place.controller_properties)

    def _broker(self, number: int) -> ApacheKafka:
        directory = self.directory / str(number)
        broker = _Broker(number, self._first, self._cluster_id, directory, is_detached=self._is_detached)
        if self.network is not None:
            broker.settle(self.network.place(number), self.network.place(CONTROLLER))
        broker.prepare()
        return broker

    def _await_all(self) -> None:
        wait_until(
            lambda: len(self._admin.list_topics(timeout=WAIT_SECONDS).brokers) == len(self.numbers),
            "all brokers are known",
            START_TIMEOUT_S,
        )

    @property
    def processes(self) -> dict[int, ApacheKafka]:
        """Every node, the controller first."""
        controller = {} if self._first in self._nodes.values() else {CONTROLLER: self._first}
        return {**controller, **self._nodes}

    def close(self) -> None:
        self.thaw(*self._frozen)
        for node in self.processes.values():
            node.close()
        if self.network is not None:
            self.network.close()
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    # Breaking things

    def freeze(self, *nodes: int) -> None:
        """Nodes that do nothing any more, and hold on to their connections."""
        for number in nodes:
            os.kill(self.processes[number].pid, signal.SIGSTOP)
            self._frozen.add(number)

    def thaw(self, *nodes: int) -> None:
        for number in nodes:
            self._frozen.discard(number)
            if self.processes[number].running:
                os.kill(self.processes[number].pid, signal.SIGCONT)

    def partition(self, *sides: Sequence[int]) -> None:
        """Nobody of one side reaches anybody of another; whoever is named nowhere, clients too, reaches all."""
        if self.network is None:
            raise ValueError("the cluster was started without a network that can be split")
        self.network.partition(*sides)

    def heal(self) -> None:
        if self.network is not None:
            self.network.heal()

    def kill(self, node: int) -> None:
        """As if its machine had gone."""
        self._nodes[node].kill()

    def stop(self, node: int) -> None:
        """Shut a node down in order, as for maintenance: it hands over what it leads, and leaves the in-sync sets."""
        self._nodes[node].stop()

    def destroy_disk(self, node: int) -> None:
        """A killed node's disk is gone; it starts again with an empty one."""
        shutil.rmtree(self._nodes[node].data_dir)
        self._nodes[node].prepare()

    def revive(self, *nodes: int) -> None:
        """Start killed nodes on what they have, all at once."""
        for number in nodes:
            self._nodes[number].launch()
        for number in nodes:
            self._nodes[number].wait_until_ready()

    def restore(self) -> None:
        """Every broker up and known."""
        self.heal()
        self.thaw(*self._frozen)
        self.revive(*(number for number, node in self._nodes.items() if not node.running))
        self._await_all()

    # Looking

    def engine(self) -> Engine:
        return Engine("a cluster of Apache Kafka", self.bootstrap_servers)

    def create_topic(
        self,
        name: str,
        *,
        leader: int,
        config: Mapping[str, str] | None = None,
        replicas: Sequence[int] | None = None,
    ) -> str:
        """A topic of one partition on all nodes, two of which must have a message before acks=all confirms it.

        Unless these settings or replicas, the leader first, say otherwise.
        """
        on = list(replicas or [leader, *(number for number in NODES if number != leader)])
        settings = {"min.insync.replicas": "2", **(config or {})}
        topic = NewTopic(name, 1, replica_assignment=[on], config=settings)
        self._admin.create_topics([topic])[name].result(WAIT_SECONDS)
        wait_until(lambda: self.in_sync(name) == set(on), f"all its nodes have {name}")
        return name

    def leader(self, topic: str) -> int:
        """The last leader that was elected; −1 when there is none, or nobody could be asked."""
        found = self._latest(topic)
        return -1 if found is None else found.leader

    def in_sync(self, topic: str) -> set[int]:
        """As the leader sees it, where it can be asked."""
        found = self._latest(topic)
        return set() if found is None else set(found.in_sync)

    def is_agreed(self, topic: str) -> bool:
        """Whether every node that runs knows of the same leader: one that was cut off may still take itself for it."""
        views = self._views(topic)
        running = [number for number, node in self._nodes.items() if node.running]
        return len(views) == len(running) and len({(each.epoch, each.leader) for each in views.values()}) == 1

    def _latest(self, topic: str) -> View | None:
        views = self._views(topic)
        if not views:
            return None
        epoch = max(each.epoch for each in views.values())
        latest = {number: each for number, each in views.items() if each.epoch == epoch}
        return next(
            iter([each for number, each in latest.items() if number == each.leader] or latest.values())
        )

    def _views(self, topic: str) -> dict[int, View]:
        """What each broker that runs and answers says of the topic's one partition."""
        found: dict[int, View] = {}
        for number, node in self._nodes.items():
            if not node.running or number in self._frozen:
                continue
            try:
                with WireClient(f"{node.host}:{node.port}", timeout_s=ASK_SECONDS) as client:
                    answer = client.ask(METADATA, 12, {"topics": [{"name": topic}]})
            except OSError:
                continue
            if isinstance(answer, str):
                continue
            for each in answer.topics[0].partitions:
                found[number] = View(
                    int(each.leader_id), int(each.leader_epoch), tuple(map(int, each.isr_nodes))
                )
        return found


def _settle(node: ApacheKafka, place: NodeAddress) -> None:
    node.host, node.port, node.controller_port = place.host, place.port, place.controller_port
    node.command_prefix = place.command_prefix
