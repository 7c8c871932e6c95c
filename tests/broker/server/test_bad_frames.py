"""Bytes that are no requests: one connection is closed, with a reason in the log, and nothing else happens."""

from __future__ import annotations

import random
import struct

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import CLOSED, WireClient, frame
from holdfast.wire.api_keys import API_VERSIONS, FETCH, METADATA, PRODUCE
from holdfast.wire.messages import encode_request

SEED = 20_260_101
FRAME_BYTES_MAX = 104_857_600
"""Kafka's default of socket.request.max.bytes."""


def is_closed_after(broker: BrokerProcess, data: bytes) -> bool:
    with WireClient(broker.bootstrap_servers) as client:
        client.send(data)
        return client.receive() == CLOSED


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("negative", struct.pack(">i", -1)),
        ("most negative", struct.pack(">i", -(2**31))),
        ("one too long", struct.pack(">i", FRAME_BYTES_MAX + 1)),
        ("longest there is", struct.pack(">i", 2**31 - 1)),
        ("empty", struct.pack(">i", 0)),
        ("shorter than a header", struct.pack(">i", 3) + b"abc"),
        ("a header alone", struct.pack(">ihhih", 10, 3, 9, 1, -1)),
        ("client id beyond the end", struct.pack(">ihhih", 10, 3, 9, 1, 1000)),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("TLS", bytes.fromhex("160301020001000100") + bytes(600)),
        ("unknown API", frame(9999, 0, b"", header_version=1)),
        ("negative API", frame(-5, 0, b"", header_version=1)),
        ("an API of brokers, not of clients", frame(4, 7, bytes(30), header_version=2)),
        ("unknown version", frame(METADATA, 99, bytes(30), header_version=2)),
        ("negative version", frame(METADATA, -1, bytes(30), header_version=1)),
        ("a produce version advertised and not served", frame(PRODUCE, 1, bytes(30))),
        ("an array of two thousand million", frame(METADATA, 1, struct.pack(">i", 2**31 - 1))),
        ("a body of zeros", frame(FETCH, 12, bytes(3))),
        ("a body of ones", frame(PRODUCE, 9, b"\xff" * 200)),
    ],
)
def test_what_is_no_request_closes_that_connection_and_no_other(
    broker: BrokerProcess, what: str, data: bytes
) -> None:
    with WireClient(broker.bootstrap_servers) as other:
        assert other.is_alive()
        assert is_closed_after(broker, data), what
        assert other.is_alive()
    assert broker.has_said("closing the connection of 127.0.0.1")
    assert "defect" not in broker.log()


def test_an_unknown_version_of_api_versions_is_answered(broker: BrokerProcess) -> None:
    with WireClient(broker.bootstrap_servers) as client:
        client.send(frame(API_VERSIONS, 99, b"", correlation_id=77, header_version=2))
        answer = client.receive()
        assert isinstance(answer, bytes)
        correlation_id, error_code = struct.unpack_from(">ih", answer)
        assert (correlation_id, error_code) == (77, 35)
        assert client.is_alive()


def test_a_small_maximum_is_kept(start_broker: object, broker: BrokerProcess) -> None:
    assert callable(start_broker)
    small: BrokerProcess = start_broker("small", socket_request_max_bytes="1000")
    assert is_closed_after(small, struct.pack(">i", 1001))
    with WireClient(small.bootstrap_servers) as client:
        body = encode_request(METADATA, 9, {"topics": [{"name": "x" * 100}] * 5})
        client.send(frame(METADATA, 9, body))
        assert isinstance(client.receive(), bytes)


def test_garbage_of_every_kind_leaves_the_broker_as_it_was(broker: BrokerProcess) -> None:
    """Whole frames of random bytes, real requests with random bytes changed, and plain noise."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    real = [
        frame(METADATA, 9, encode_request(METADATA, 9, {"topics": None})),
        frame(METADATA, 1, encode_request(METADATA, 1, {"topics": [{"name": "a"}, {"name": "b"}]})),
        frame(API_VERSIONS, 3, encode_request(API_VERSIONS, 3, {"client_software_name": "x"})),
        frame(
            FETCH,
            12,
            encode_request(FETCH, 12, {"topics": [{"topic": "t", "partitions": [{"partition": 0}]}]}),
        ),
        frame(PRODUCE, 9, encode_request(PRODUCE, 9, {"acks": -1, "topic_data": [{"name": "t"}]})),
        frame(
            19,
            5,
            encode_request(19, 5, {"topics": [{"name": "t", "num_partitions": 1}], "validate_only": True}),
        ),
        frame(32, 4, encode_request(32, 4, {"resources": [{"resource_type": 2, "resource_name": "t"}]})),
    ]
    for _ in range(300):
        kind = chance.randrange(3)
        if kind == 0:
            body = chance.randbytes(chance.randrange(200))
            data = struct.pack(">i", len(body)) + body
        elif kind == 1:
            changed = bytearray(chance.choice(real))
            for _ in range(chance.randrange(1, 6)):
                changed[chance.randrange(4, len(changed))] = chance.randrange(256)
            data = bytes(changed)
        else:
            data = chance.randbytes(chance.randrange(1, 300))
        with WireClient(broker.bootstrap_servers) as client:
            client.send(data)
            client.half_close()
            client.receive()  # an answer or an end, as it pleases
    with WireClient(broker.bootstrap_servers) as client:
        assert client.is_alive()
    assert "defect" not in broker.log(), broker.log()


def test_a_frame_that_comes_byte_by_byte_is_answered(broker: BrokerProcess) -> None:
    request = frame(METADATA, 9, encode_request(METADATA, 9, {"topics": None}), correlation_id=5)
    with WireClient(broker.bootstrap_servers) as client:
        for byte in request:
            client.send(bytes([byte]))
        answer = client.receive()
        assert isinstance(answer, bytes)
        assert struct.unpack_from(">i", answer) == (5,)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_frames_cut_anywhere_are_answered_in_order(broker: BrokerProcess, pieces: int) -> None:
    chance = random.Random(pieces)
    requests = [
        frame(
            METADATA,
            9,
            encode_request(METADATA, 9, {"topics": [{"name": "n" * chance.randrange(200)}]}),
            correlation_id=n,
        )
        for n in range(60)
    ]
    data = b"".join(requests)
    cuts = sorted(chance.randrange(len(data)) for _ in range(pieces - 1))
    with WireClient(broker.bootstrap_servers) as client:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            client.send(data[start:end])
        for number in range(60):
            answer = client.receive()
            assert isinstance(answer, bytes)
            assert struct.unpack_from(">i", answer) == (number,)
