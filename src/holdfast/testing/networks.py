"""Networks that can be split, for brokers that are processes on one machine.

    network = make_network("auto", nodes=(1, 2, 3, 9))
    place = network.place(2)               # what node 2 is started with
    network.partition([2], [1, 3, 9])      # between these two sides nothing comes through, and nobody is told
    network.partition([2], [1, 3, 9, CLIENTS])
    network.heal()
    network.close()

Two kinds, by the same words. `namespaces`: every node has a network namespace of its own, and packets are lost
(`holdfast.testing.namespaces`; Linux, and the right to make them). `proxy`: every listener stands behind a link of ours
that knows by the `client.id` of a connection who has opened it, and holds back what crosses the split
(`holdfast.testing.flaky_link`; everywhere). Whoever is on no side can be reached from all of them. What TCP has not
delivered when the network heals arrives then, or its connection has timed out meanwhile: the same with both.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from holdfast.errors import HoldfastError
from holdfast.testing.apache import free_ports
from holdfast.testing.flaky_link import KafkaLink

NetworkKind = Literal["namespaces", "proxy"]
NetworkChoice = Literal["auto", "namespaces", "proxy"]

CLIENTS: Final = 0
"""Who is no node: everything that is started outside of the network's places."""
BROKER_OF_CLIENT_ID: Final = re.compile(r"(?:broker-|raft-client-)?(\d+)(?:-.*)?")
"""As Apache Kafka's nodes call themselves when they ask each other."""


class NetworkUnavailable(HoldfastError):
    """The machine does not allow such a network; the message says what it lacks."""


@dataclass(frozen=True)
class Place:
    """Where one node lives, and how it is started there."""

    host: str
    port: int
    """For clients."""
    controller_port: int
    advertised: str
    """The address that clients are given."""
    controller_address: str
    """The address that brokers are given, if the node is the controller."""
    command_prefix: tuple[str, ...] = ()
    broker_properties: Mapping[str, str] = field(default_factory=dict)
    controller_properties: Mapping[str, str] = field(default_factory=dict)


class Network(ABC):
    kind: NetworkKind
    instead_of: str = ""
    """Why a better kind cannot be had, if one was looked for."""

    @abstractmethod
    def place(self, node: int) -> Place: ...

    @abstractmethod
    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """From the first of each pair to the second nothing arrives; in place of what was cut before."""

    @abstractmethod
    def close(self) -> None: ...

    def partition(self, *sides: Sequence[int]) -> None:
        """Nobody of one side reaches anybody of another."""
        pairs: set[tuple[int, int]] = set()
        for one, other in itertools.permutations(sides, 2):
            pairs.update(itertools.product(one, other))
        self.cut(pairs)

    def heal(self) -> None:
        self.cut(())


class ProxyNetwork(Network):
    """Links of ours in front of every node: one for clients, one for the other nodes."""

    kind: NetworkKind = "proxy"

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = tuple(nodes)
        self._for_clients: dict[int, KafkaLink] = {}
        self._for_nodes: dict[int, KafkaLink] = {}
        self._places: dict[int, Place] = {}

    def place(self, node: int) -> Place:
        if node not in self._places:
            self._places[node] = self._make_place(node)
        return self._places[node]

    def _make_place(self, node: int) -> Place:
        # A node is a broker or a controller: what it is not has a port that nobody listens on.
        port, node_port = free_ports(2)
        for_clients, for_nodes = KafkaLink(), KafkaLink()
        self._for_clients[node], self._for_nodes[node] = for_clients, for_nodes
        for_clients.lead_to(f"127.0.0.1:{port}")
        for_nodes.lead_to(f"127.0.0.1:{node_port}")
        return Place(
            host="127.0.0.1",
            port=port,
            controller_port=node_port,
            advertised=for_clients.address,
            controller_address=for_nodes.address,
            broker_properties={
                "listeners": f"PLAINTEXT://127.0.0.1:{port},NODES://127.0.0.1:{node_port}",
                "advertised.listeners": f"PLAINTEXT://{for_clients.address},NODES://{for_nodes.address}",
                "inter.broker.listener.name": "NODES",
                "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,NODES:PLAINTEXT",
            },
            controller_properties={"advertised.listeners": f"CONTROLLER://{for_nodes.address}"},
        )

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """A connection whose one way is cut is silent in both: without answers nothing more is asked."""
        apart: dict[int, set[int]] = {node: set() for node in (*self._nodes, CLIENTS)}
        for one, other in pairs:
            apart[one].add(other)
            apart[other].add(one)
        for node, link in self._for_nodes.items():
            link.silence_clients(_opened_by(apart[node]))
        for node, link in self._for_clients.items():
            link.silence_clients(_anybody if CLIENTS in apart[node] else _nobody)

    def close(self) -> None:
        for link in (*self._for_clients.values(), *self._for_nodes.values()):
            link.close()


def _opened_by(nodes: Iterable[int]) -> Callable[[str], bool]:
    """Whether one of these nodes has opened a connection, by the id it gives there."""
    wanted = frozenset(nodes)

    def is_one(client_id: str) -> bool:
        found = BROKER_OF_CLIENT_ID.fullmatch(client_id)
        return found is not None and int(found[1]) in wanted

    return is_one


def _anybody(_: str) -> bool:
    return True


def _nobody(_: str) -> bool:
    return False


def make_network(choice: NetworkChoice, nodes: Sequence[int]) -> Network:
    """The kind that was chosen; by itself, namespaces where they are allowed."""
    from holdfast.testing.namespaces import NamespaceNetwork

    if choice == "proxy":
        return ProxyNetwork(nodes)
    try:
        return NamespaceNetwork(nodes)
    except NetworkUnavailable as error:
        if choice == "namespaces":
            raise
        network = ProxyNetwork(nodes)
        network.instead_of = str(error)
        return network
