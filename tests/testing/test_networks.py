"""Networks that are split and heal: namespaces of the kernel where they are allowed, and proxies everywhere."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.testing import networks
from holdfast.testing.engines import wait_until
from holdfast.testing.networks import (
    CLIENTS,
    NamespaceNetwork,
    NetworkUnavailable,
    ProxyNetwork,
    make_network,
)
from holdfast.testing.wire_client import frame
from holdfast.wire.api_keys import METADATA

NODES = (1, 2, 3, 9)
PORT = 7777
QUICK_SECONDS = 0.2
"""What gets through does so in a millisecond."""


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    try:
        made = NamespaceNetwork(NODES)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def servers(network: NamespaceNetwork) -> Iterator[dict[int, socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield {
            node: stack.enter_context(
                network.inside(node, lambda node=node: socket.create_server((network.address(node), PORT)))  # type: ignore[misc]
            )
            for node in NODES
        }


def unreachable(network: NamespaceNetwork) -> set[tuple[int, int]]:
    """Who cannot open a connection to whom."""
    return {
        (one, other)
        for one in (*NODES, CLIENTS)
        for other in NODES
        if one != other and not _from(network, one, lambda other=other: _connects(network, other))  # type: ignore[misc]
    }


def _from(network: NamespaceNetwork, one: int, work: Callable[[], bool]) -> bool:
    return work() if one == CLIENTS else network.inside(one, work)


def _connects(network: NamespaceNetwork, node: int) -> bool:
    try:
        socket.create_connection((network.address(node), PORT), timeout=QUICK_SECONDS).close()
    except OSError:
        return False
    return True


def test_namespaces_that_are_split_reach_each_other_only_on_their_side(
    network: NamespaceNetwork, servers: dict[int, socket.socket]
) -> None:
    assert unreachable(network) == set()
    network.partition([2], [1, 3, 9])
    assert unreachable(network) == {(2, 1), (2, 3), (2, 9), (1, 2), (3, 2), (9, 2)}
    network.partition([1, CLIENTS], [3])
    assert unreachable(network) == {(1, 3), (3, 1), (CLIENTS, 3)}
    network.heal()
    assert unreachable(network) == set()


def test_what_is_sent_into_a_split_arrives_when_it_heals(
    network: NamespaceNetwork, servers: dict[int, socket.socket]
) -> None:
    with network.inside(1, lambda: socket.create_connection((network.address(2), PORT))) as client:
        server, _ = servers[2].accept()
        with server:
            network.partition([1], [2])
            client.sendall(b"held")
            server.settimeout(QUICK_SECONDS)
            with pytest.raises(TimeoutError):
                server.recv(4)
            network.heal()
            server.settimeout(30)
            assert server.recv(4) == b"held"


def test_nothing_is_left_of_a_network_that_was_closed(network: NamespaceNetwork) -> None:
    holders = [holder.pid for holder in network._holders.values()]
    interface = Path("/sys/class/net") / network.interface
    assert interface.exists()
    network.close()
    assert not interface.exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in holders)


def test_nothing_is_left_of_a_network_whose_process_was_killed(network: NamespaceNetwork) -> None:
    text = (
        "import os, signal\n"
        "from holdfast.testing.networks import NamespaceNetwork\n"
        "network = NamespaceNetwork((1, 2))\n"
        "print(network.interface, *(each.pid for each in network._holders.values()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    interface, *pids = done.stdout.split()
    assert interface != network.interface
    wait_for_the_kernel = [Path(f"/proc/{pid}/ns/net") for pid in pids]
    wait_for_the_kernel.append(Path("/sys/class/net") / interface)
    wait_until(lambda: not any(each.exists() for each in wait_for_the_kernel), "everything is gone")


def test_where_namespaces_cannot_be_made_the_reason_is_named_and_a_proxy_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(networks, "TOOLS", ("no-such-tool",))
    with pytest.raises(NetworkUnavailable, match="no-such-tool was not found"):
        make_network("namespaces", NODES)
    made = make_network("auto", NODES)
    try:
        assert made.kind == "proxy"
        assert "no-such-tool was not found" in made.instead_of
    finally:
        made.close()


# ---------------------------------------------------------------- proxies


@pytest.fixture
def proxies() -> Iterator[ProxyNetwork]:
    made = ProxyNetwork(NODES)
    try:
        yield made
    finally:
        made.close()


def test_proxies_tell_nodes_apart_by_the_ids_they_give(proxies: ProxyNetwork) -> None:
    place = proxies.place(1)
    with (
        socket.create_server((place.host, place.port)) as for_clients,
        socket.create_server((place.host, place.controller_port)) as for_nodes,
    ):

        def gets_through(address: str, server: socket.socket, client_id: str) -> bool:
            host, _, port = address.rpartition(":")
            sent = frame(METADATA, 1, b"\0\0\0\0", client_id=client_id)
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(sent)
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(QUICK_SECONDS)
                    try:
                        return connection.recv(len(sent)) == sent
                    except TimeoutError:
                        return False

        def reach() -> set[str]:
            nodes = ("2", "raft-client-2", "broker-2-fetcher-0", "broker-3-fetcher-0", "3", "raft-client-9")
            found = {each for each in nodes if gets_through(place.controller_address, for_nodes, each)}
            return found | (
                {"client 2"} if gets_through(place.advertised, for_clients, "client 2") else set()
            )

        everybody = reach()
        assert len(everybody) == 7
        proxies.partition([1, 3, 9], [2])
        assert reach() == {"broker-3-fetcher-0", "3", "raft-client-9", "client 2"}
        proxies.partition([1], [CLIENTS])
        assert reach() == everybody - {"client 2"}
        proxies.heal()
        assert reach() == everybody
