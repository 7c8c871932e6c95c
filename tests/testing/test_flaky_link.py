"""A link that is cut, silent, or whole."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from holdfast.testing.engines import wait_until
from holdfast.testing.flaky_link import KafkaLink, Link
from holdfast.testing.wire_client import frame
from holdfast.wire.api_keys import API_VERSIONS, METADATA


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


def test_one_way_can_be_silent_alone(link: Link) -> None:
    with connect(link) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        link.silence("responses")
        client.sendall(b"asked")
        assert not comes(client)
        link.mend()
        assert client.recv(5) == b"asked"


def comes(client: socket.socket) -> bool:
    """Whether something comes that is not on its way for long; what would come does so in a millisecond."""
    return bool(select.select([client], [], [], 0.05)[0])


def test_a_delay_keeps_the_order_and_loses_nothing(link: Link) -> None:
    with connect(link) as client:
        link.delay(0.2)
        for letter in b"abc":
            client.sendall(bytes([letter]))
        assert not comes(client)
        stream = client.makefile("rb")
        assert stream.read(3) == b"abc"


# ---------------------------------------------------------------- links that know requests and answers


@pytest.fixture
def kafka_link(echo: str) -> Iterator[KafkaLink]:
    """The echo answers a request with itself."""
    with KafkaLink() as made:
        made.lead_to(echo)
        yield made


def request(api_key: int, client_id: str | None = "a") -> bytes:
    """An answer to itself as well: read as one, API key and version are its correlation id."""
    return frame(api_key, 0, b"", correlation_id=api_key << 16, client_id=client_id, header_version=1)


def answers(client: socket.socket, sent: bytes) -> bool:
    client.sendall(sent)
    return client.recv(len(sent)) == sent


def gets_nothing(client: socket.socket, sent: bytes) -> bool:
    client.sendall(sent)
    return not comes(client)


@pytest.mark.parametrize("client_id", ["a", "", None])
def test_frames_pass_both_ways(kafka_link: KafkaLink, client_id: str | None) -> None:
    with connect(kafka_link) as client:
        assert answers(client, request(METADATA, client_id))


def test_single_clients_are_cut_off_by_their_id_and_reached_again(kafka_link: KafkaLink) -> None:
    with connect(kafka_link) as zombie, connect(kafka_link) as other:
        assert answers(zombie, request(METADATA, "zombie"))
        kafka_link.silence_clients(lambda client_id: client_id == "zombie")
        assert gets_nothing(zombie, request(METADATA, "zombie"))
        assert answers(other, request(METADATA, "other"))
        with connect(kafka_link) as later:
            assert gets_nothing(later, request(METADATA, "zombie"))
        kafka_link.mend()
        assert zombie.recv(100) == request(METADATA, "zombie")


def test_single_answers_are_held_and_go_on(kafka_link: KafkaLink) -> None:
    with connect(kafka_link) as client:
        held = kafka_link.hold(METADATA)
        assert answers(client, request(API_VERSIONS))
        assert not held.is_done
        client.sendall(request(METADATA))
        assert held.wait(10)
        assert not comes(client)
        held.release()
        assert client.recv(100) == request(METADATA)
        assert answers(client, request(METADATA))


def test_answers_that_are_held_can_be_lost_with_their_connection_alone(kafka_link: KafkaLink) -> None:
    with connect(kafka_link) as client, connect(kafka_link) as other:
        held = kafka_link.hold(METADATA)
        client.sendall(request(METADATA))
        assert held.wait(10)
        held.drop()
        assert is_dead(client)
        assert answers(other, request(METADATA))


def test_requests_can_be_held_as_well(kafka_link: KafkaLink) -> None:
    with connect(kafka_link) as client:
        held = kafka_link.hold(METADATA, direction="requests")
        client.sendall(request(METADATA))
        assert held.wait(10)
        assert not comes(client)
        kafka_link.mend()
        assert client.recv(100) == request(METADATA)


def test_swallowed_answers_are_gone_and_the_last_takes_the_connection_along(kafka_link: KafkaLink) -> None:
    with connect(kafka_link) as client:
        lost = kafka_link.swallow(METADATA, 2)
        client.sendall(request(METADATA))
        assert answers(client, request(API_VERSIONS))
        assert not lost.is_done
        client.sendall(request(METADATA))
        wait_until(lambda: lost.is_done, "both are swallowed")
        assert is_dead(client)
    with connect(kafka_link) as client:
        assert answers(client, request(METADATA))
