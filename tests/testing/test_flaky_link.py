"""A link that is cut, silent, or whole."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from holdfast.testing.flaky_link import Link


@pytest.fixture
def echo() -> Iterator[str]:
    """A server that sends back what it gets."""

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(4096):
                    connection.sendall(data)
            except ConnectionError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def link(echo: str) -> Iterator[Link]:
    with Link() as link:
        link.lead_to(echo)
        yield link


def connect(link: Link) -> socket.socket:
    host, _, port = link.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_whole_link_passes_both_ways(link: Link) -> None:
    with connect(link) as client:
        client.sendall(b"hello")
        assert client.recv(5) == b"hello"


def test_a_cut_link_resets_what_is_open_and_what_is_opened_until_it_is_mended(link: Link) -> None:
    with connect(link) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        link.cut()
        assert is_dead(client)
    with connect(link) as refused:
        assert is_dead(refused)
    link.mend()
    with connect(link) as client:
        client.sendall(b"again")
        assert client.recv(5) == b"again"


def is_dead(client: socket.socket) -> bool:
    try:
        client.sendall(b"x")
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_a_silent_link_holds_back_and_forgets_nothing(link: Link) -> None:
    with connect(link) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        link.silence()
        client.sendall(b"held")
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(4)
        client.settimeout(10)
        link.mend()
        assert client.recv(4) == b"held"


def test_a_link_to_nobody_refuses(link: Link) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        link.lead_to(f"127.0.0.1:{gone.getsockname()[1]}")
    with connect(link) as client:
        assert is_dead(client)
