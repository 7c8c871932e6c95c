"""Networks that can be split, for brokers that are processes on one machine.

    network = make_network("auto", nodes=(1, 2, 3, 9))
    place = network.place(2)               # what node 2 is started with
    network.partition([2], [1, 3, 9])      # between these two sides nothing comes through, and nobody is told
    network.partition([2], [1, 3, 9, CLIENTS])
    network.heal()
    network.close()

Two kinds, by the same words. `namespaces`: every node has a network namespace of its own, and packets are lost
(`NamespaceNetwork`; Linux, and the right to make them). `proxy`: every listener stands behind a link of ours
that knows by the `client.id` of a connection who has opened it, and holds back what crosses the split
(`holdfast.testing.flaky_link`; everywhere). Whoever is on no side can be reached from all of them. What TCP has not
delivered when the network heals arrives then, or its connection has timed out meanwhile: the same with both.

In a network of namespaces every node lives as on a machine of its own, with a cable to one switch.

    clients (this machine) ── veth ──┐
    node 1 ── eth0 ── veth ──────── switch (a bridge, in a namespace of its own)
    node 2 ── eth0 ── veth ──────────┘

The rules it keeps:

- A namespace lives as long as a process in it: each is held by one that dies with us, and with the namespace go its
  ends of cables, and so their other ends. Whatever becomes of this process, nothing is left behind.
- The only thing this machine sees is one interface `hfN` with an address of 198.18.0.0/15, which nobody may use on the
  Internet. The name says which part of that range is taken, and the kernel gives a name once: parallel runs do not
  meet. Nothing is routed or forwarded.
- Nobody asks who has an address: each node is told the hardware address of every other. A cut from one to another is
  an entry that names a hardware address nobody has: packets of connections that are open and of such as are being
  opened leave, and arrive nowhere, without a word. It needs no packet filter, and each way can be cut alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import ipaddress
import itertools
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from holdfast.errors import HoldfastError
from holdfast.testing.flaky_link import KafkaLink
from holdfast.testing.processes import die_with_parent, free_ports

NetworkKind = Literal["namespaces", "proxy"]
NetworkChoice = Literal["auto", "namespaces", "proxy"]

CLIENTS: Final = 0
"""Who is no node: everything that is started outside of the network's places."""
BROKER_OF_CLIENT_ID: Final = re.compile(r"(?:broker-|raft-client-)?(\d+)(?:-.*)?")
"""As Apache Kafka's nodes call themselves when they ask each other."""


class NetworkUnavailable(HoldfastError):
    """The machine does not allow such a network; the message says what it lacks."""


@dataclass(frozen=True)
class NodeAddress:
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
    def place(self, node: int) -> NodeAddress: ...

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
        self._places: dict[int, NodeAddress] = {}

    def place(self, node: int) -> NodeAddress:
        if node not in self._places:
            self._places[node] = self._make_place(node)
        return self._places[node]

    def _make_place(self, node: int) -> NodeAddress:
        # A node is a broker or a controller: what it is not has a port that nobody listens on.
        port, node_port = free_ports(2)
        for_clients, for_nodes = KafkaLink(), KafkaLink()
        self._for_clients[node], self._for_nodes[node] = for_clients, for_nodes
        for_clients.lead_to(f"127.0.0.1:{port}")
        for_nodes.lead_to(f"127.0.0.1:{node_port}")
        return NodeAddress(
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
            link.silence_clients(_everybody(CLIENTS in apart[node]))

    def close(self) -> None:
        for link in (*self._for_clients.values(), *self._for_nodes.values()):
            link.close()


def _everybody(is_silenced: bool) -> Callable[[str], bool]:
    return lambda _: is_silenced


def _opened_by(nodes: Iterable[int]) -> Callable[[str], bool]:
    """Whether one of these nodes has opened a connection, by the id it gives there."""
    wanted = frozenset(nodes)

    def is_one(client_id: str) -> bool:
        found = BROKER_OF_CLIENT_ID.fullmatch(client_id)
        return found is not None and int(found[1]) in wanted

    return is_one


def make_network(choice: NetworkChoice, nodes: Sequence[int]) -> Network:
    """The kind that was chosen; by itself, namespaces where they are allowed."""
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


T = TypeVar("T")

RANGE: Final = ipaddress.ip_network("198.18.0.0/15")
"""For tests of network devices (RFC 2544)."""
PREFIX_LENGTH: Final = 27
"""Thirty addresses: more than there are nodes."""
ATTEMPTS: Final = 20
"""So many parts of the range may be found taken before we give up."""
NODES_MAX: Final = 20
CLIENT_PORT: Final = 9092
CONTROLLER_PORT: Final = 9093
NOWHERE: Final = "02:68:66:ff:ff:ff"
"""A hardware address that nobody has."""
TOOLS: Final = ("ip", "nsenter", "unshare")
TOOL_SECONDS: Final = 20.0
PROBE_SECONDS: Final = 5.0
CLONE_NEWNET: Final = 0x40000000


class NamespaceNetwork(Network):
    kind: NetworkKind = "namespaces"

    def __init__(self, nodes: Sequence[int]) -> None:
        _require_tools()
        if not all(0 < node <= NODES_MAX for node in nodes):
            raise ValueError(f"nodes are numbered 1 to {NODES_MAX}: {list(nodes)}")
        self._nodes = tuple(nodes)
        self._holders: dict[int | str, subprocess.Popen[bytes]] = {}
        self._cuts: set[tuple[int, int]] = set()
        self._subnet = RANGE
        self.interface = ""
        """Ours on this machine."""
        atexit.register(self.close)
        try:
            self._build()
            self._probe()
        except BaseException:
            self.close()
            raise

    def address(self, node: int) -> str:
        return str(self._subnet[node + 1])

    def place(self, node: int) -> NodeAddress:
        host = self.address(node)
        return NodeAddress(
            host=host,
            port=CLIENT_PORT,
            controller_port=CONTROLLER_PORT,
            advertised=f"{host}:{CLIENT_PORT}",
            controller_address=f"{host}:{CONTROLLER_PORT}",
            command_prefix=(_found("nsenter"), f"--net={self._namespace(node)}", "--"),
        )

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        wanted = set(pairs)
        for node in (*self._nodes, CLIENTS):
            changed = sorted(other for one, other in wanted ^ self._cuts if one == node)
            self._tell(
                node,
                [
                    self._neighbour(node, other, NOWHERE if (node, other) in wanted else _hardware(other))
                    for other in changed
                ],
            )
        self._cuts = wanted

    def close(self) -> None:
        """End the namespaces, and with them everything in them; processes there lose their network."""
        for holder in self._holders.values():
            holder.kill()
        for holder in self._holders.values():
            holder.wait()
        self._holders.clear()
        if self.interface:
            # The kernel takes a namespace down a moment after its last process; nobody has to wait for that.
            with contextlib.suppress(NetworkUnavailable):
                _ip(["link", "del", self.interface])
            self.interface = ""
        atexit.unregister(self.close)

    def inside(self, node: int, work: Callable[[], T]) -> T:
        """Do something on a thread that is in the node's namespace: sockets it opens belong there for good."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with open(self._namespace(node), "rb") as namespace:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(work())
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        thread = threading.Thread(target=run, name=f"inside-{node}")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    # Building

    def _build(self) -> None:
        self._hold("switch")
        self._take_a_part_of_the_range()
        for node in self._nodes:
            self._hold(node)
        switch = ["link add switch type bridge", "link set switch up", "link set clients master switch up"]
        for node in self._nodes:
            switch += [
                f"link add node{node} type veth peer name eth0 netns {self._holders[node].pid}",
                f"link set node{node} master switch up",
            ]
        _batch(self._namespace("switch"), switch)
        for node in self._nodes:
            self._tell(node, ["link set lo up", *self._cable(node, "eth0")])
        self._tell(CLIENTS, self._cable(CLIENTS, self.interface))

    def _cable(self, node: int, interface: str) -> list[str]:
        return [
            f"address add {self.address(node)}/{PREFIX_LENGTH} dev {interface}",
            f"link set {interface} address {_hardware(node)} up",
            *(
                self._neighbour(node, other, _hardware(other))
                for other in (*self._nodes, CLIENTS)
                if other != node
            ),
        ]

    def _take_a_part_of_the_range(self) -> None:
        parts = 1 << (PREFIX_LENGTH - RANGE.prefixlen)
        choose = random.Random(os.urandom(8))
        for _ in range(ATTEMPTS):
            number = choose.randrange(parts)
            start = int(RANGE.network_address) + (number << (32 - PREFIX_LENGTH))
            self._subnet = ipaddress.IPv4Network((start, PREFIX_LENGTH))
            name = f"hf{number}"
            if _ip(["route", "show", "root", str(self._subnet)]).strip():
                continue
            try:
                self._lay_cable(name)
            except NetworkUnavailable as error:
                if "File exists" in str(error):
                    continue
                raise
            self.interface = name
            return
        raise NetworkUnavailable(f"of {RANGE} everything that was tried is in use on this machine")

    def _lay_cable(self, name: str) -> None:
        switch = str(self._holders["switch"].pid)
        _ip(["link", "add", name, "type", "veth", "peer", "name", "clients", "netns", switch])

    def _hold(self, name: int | str) -> None:
        """A process in a namespace of its own, which says that it is there, and then does nothing."""
        command = [_found("unshare"), "--net", "--", "sh", "-c", "echo there; exec sleep infinity"]
        holder = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"there\n":
            why = holder.stderr.read().decode(errors="replace").strip()
            raise NetworkUnavailable(f"no network namespace can be made here: {why}")
        holder.stdout.close()
        holder.stderr.close()

    def _namespace(self, name: int | str) -> str:
        return f"/proc/{self._holders[name].pid}/ns/net"

    def _tell(self, node: int, lines: Sequence[str]) -> None:
        if lines:
            _batch(None if node == CLIENTS else self._namespace(node), lines)

    def _neighbour(self, node: int, other: int, hardware: str) -> str:
        interface = self.interface if node == CLIENTS else "eth0"
        return f"neigh replace {self.address(other)} lladdr {hardware} nud permanent dev {interface}"

    def _probe(self) -> None:
        """Whether a connection comes about: a firewall may stand between this machine and its own namespaces."""
        node = self._nodes[0]
        address = (self.address(node), CLIENT_PORT)
        with self.inside(node, lambda: socket.create_server(address)) as server:
            server.settimeout(PROBE_SECONDS)
            try:
                with socket.create_connection(address, timeout=PROBE_SECONDS):
                    server.accept()[0].close()
            except OSError as error:
                raise NetworkUnavailable(
                    f"a connection into a network namespace does not come about: {error}"
                ) from error


def _hardware(node: int) -> str:
    return f"02:68:66:00:00:{node:02x}"


def _found(tool: str) -> str:
    found = shutil.which(tool, path=os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin:/sbin")
    if found is None:
        raise NetworkUnavailable(f"{tool} was not found (Debian: apt-get install iproute2 util-linux)")
    return found


def _require_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise NetworkUnavailable(f"network namespaces are Linux's, and this is {sys.platform}")
    for tool in TOOLS:
        _found(tool)


def _ip(arguments: Sequence[str], *, namespace: str | None = None, text: str = "") -> str:
    command = [_found("ip"), *arguments]
    if namespace is not None:
        command = [_found("nsenter"), f"--net={namespace}", "--", *command]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
    )
    if done.returncode != 0:
        raise NetworkUnavailable(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _batch(namespace: str | None, lines: Sequence[str]) -> None:
    _ip(["-batch", "-"], namespace=namespace, text="\n".join(lines) + "\n")
