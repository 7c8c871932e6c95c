"""What each client writes, each client reads: every codec, headers, nulls, timestamps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.clients import (
    CLIENTS,
    NULL_HEADERS,
    TIMESTAMPS,
    Client,
    Delivered,
    JavaConsole,
    Message,
)

from holdfast.testing.kafka_fixtures import require_apache_kafka
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import FETCH
from holdfast.wire.batch import BatchHeader, iterate_records, read_header
from holdfast.wire.codecs import Codec

pytestmark = [pytest.mark.check, pytest.mark.java]

CODECS = tuple(codec.name.lower() for codec in Codec)
BASE_MS = 1_700_000_000_000
MakeTopic = Callable[..., str]
Written = dict[tuple[str, str], list[Message]]


def messages_of(client: Client, codec: str) -> list[Message]:
    """Messages that name their writer, in their key or, where there is no key, their value."""
    tag = f"{client.name}/{codec}"

    def timestamp(number: int) -> int | None:
        return BASE_MS + number if TIMESTAMPS in client.can else None

    headers: tuple[tuple[str, bytes | None], ...] = (
        ("plain", b"h1"),
        ("plain", b"h2"),
        ("letters", "žluť".encode()),
    )
    if NULL_HEADERS in client.can:
        headers += (("nothing", None),)
    return [
        Message(f"{tag}/0".encode(), b"value", headers, timestamp(0)),
        Message(None, f"{tag}/1".encode(), (), timestamp(1)),
        Message(f"{tag}/2".encode(), None, (), timestamp(2)),
        Message(f"{tag}/3".encode(), b"", (), timestamp(3)),
        Message(f"{tag}/4".encode(), "käse 日本 🧀".encode(), (("e", b""),), timestamp(4)),
        Message(f"{tag}/5".encode(), b"compressible " * 800, (), timestamp(5)),
    ]


def writer_of(key: bytes | None, value: bytes | None) -> tuple[str, str]:
    name, codec, _ = (key if key is not None else value or b"").decode().split("/")
    return name, codec


@pytest.fixture(scope="module")
def matrix(bootstrap: str, make_topic: MakeTopic) -> tuple[str, Written]:
    """A topic into which every client wrote with every codec, and what they wrote."""
    require_apache_kafka()
    topic = make_topic("matrix")
    written = {(client.name, codec): messages_of(client, codec) for client in CLIENTS for codec in CODECS}

    def write(client: Client, codec: str) -> None:
        client.produce(bootstrap, topic, written[client.name, codec], codec=codec)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write, client, codec) for client in CLIENTS for codec in CODECS]:
            done.result()
    return topic, written


@pytest.mark.parametrize("reader", CLIENTS, ids=lambda client: client.name)
def test_every_client_reads_what_every_client_wrote(
    reader: Client, matrix: tuple[str, Written], bootstrap: str
) -> None:
    topic, written = matrix
    found = reader.consume(bootstrap, topic, sum(map(len, written.values())))
    assert [message.offset for message in found] == list(range(len(found)))
    by_writer: dict[tuple[str, str], list[Delivered]] = {}
    for message in found:
        by_writer.setdefault(writer_of(message.key, message.value), []).append(message)
    assert by_writer.keys() == written.keys()
    for writer, messages in written.items():
        seen = [
            Message(each.key, each.value, each.headers, each.timestamp_ms if sent.timestamp_ms else None)
            for each, sent in zip(by_writer[writer], messages, strict=True)
        ]
        assert seen == messages, writer
    assert not any(message.is_log_append_time for message in found)


def test_batches_are_stored_as_their_writers_compressed_them(
    matrix: tuple[str, Written], bootstrap: str
) -> None:
    topic, written = matrix
    codecs: dict[tuple[str, str], set[int]] = {}
    for header, data in stored_batches(bootstrap, topic):
        for record in iterate_records(data):
            codecs.setdefault(writer_of(record.key, record.value), set()).add(header.codec)
        assert header.producer_id >= 0, "every client here is idempotent"
        assert header.base_sequence >= 0
    expected = {(name, codec): {int(Codec[codec.upper()])} for name, codec in written}
    # librdkafka would not compress with lz4 for a broker that it takes for an old one.
    assert codecs == expected


def stored_batches(bootstrap: str, topic: str) -> Iterator[tuple[BatchHeader, bytes]]:
    """Every batch of partition 0, as it is stored."""
    offset = 0
    with WireClient(bootstrap) as client:
        while True:
            part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 50 << 20}
            fields = {
                "max_bytes": 50 << 20,
                "topics": [{"topic": topic, "partitions": [part]}],
                "replica_id": -1,
            }
            answer = client.ask(FETCH, 11, {**fields, "session_id": 0, "session_epoch": -1})
            data = answer.responses[0].partitions[0].records
            if not data:
                return
            position = 0
            while position < len(data):
                header = read_header(data, position)
                yield header, data[position : position + header.size]
                position += header.size
                offset = header.next_offset


def test_the_broker_s_time_is_seen_as_such_by_every_client(bootstrap: str, make_topic: MakeTopic) -> None:
    require_apache_kafka()
    topic = make_topic("stamped", config={"message.timestamp.type": "LogAppendTime"})
    sent = 0
    for client in CLIENTS:
        if not isinstance(client, JavaConsole):
            client.produce(bootstrap, topic, [Message(b"k", b"v", (), BASE_MS)] * 2, codec="lz4")
            sent += 2
    times = set()
    for reader in CLIENTS:
        found = reader.consume(bootstrap, topic, sent)
        assert all(message.is_log_append_time for message in found)
        times.add(tuple(message.timestamp_ms for message in found))
    assert len(times) == 1, "all readers see the same times"
    assert min(times.pop()) > BASE_MS + 1000, "and not the producers'"
