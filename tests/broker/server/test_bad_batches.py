"""Batches that must not enter a log: each is refused by its own error, and nothing of it is stored."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import lz4.frame
import pytest
import zstandard
from crc32c import crc32c
from kio.schema.errors import ErrorCode

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import CLOSED, WireClient
from holdfast.wire.api_keys import LIST_OFFSETS, PRODUCE
from holdfast.wire.batch import HEADER_SIZE, Record, build_batch, encode_record
from holdfast.wire.codecs import Codec, compress

CreateTopic = Callable[..., None]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def batch(*values: bytes, **options: Any) -> bytes:
    records = [Record(index, 0, b"k", value) for index, value in enumerate(values or (b"v",))]
    return build_batch(records, base_timestamp=now_ms(), **options)


def sealed(data: bytes | bytearray) -> bytes:
    """With the length and the checksum that its bytes should have."""
    changed = bytearray(data)
    changed[8:12] = struct.pack(">i", len(changed) - 12)
    changed[17:21] = struct.pack(">I", crc32c(bytes(changed[21:])))
    return bytes(changed)


def patched(data: bytes, position: int, value: bytes) -> bytes:
    return sealed(data[:position] + value + data[position + len(value) :])


def with_records(records: bytes, codec: int) -> bytes:
    """A batch of one record by its header, whose body is anything."""
    head = bytearray(batch()[:HEADER_SIZE])
    head[21:23] = struct.pack(">h", codec)
    return sealed(bytes(head) + records)


def old_format(magic: int) -> bytes:
    """A message set of format 0 or 1, as producers wrote before 2017."""
    timestamp = struct.pack(">q", now_ms()) if magic else b""
    content = struct.pack(">bb", magic, 0) + timestamp + struct.pack(">i", -1) + struct.pack(">i", 3) + b"old"
    message = struct.pack(">I", zlib.crc32(content)) + content
    return struct.pack(">qi", 0, len(message)) + message


def produce(client: WireClient, topic: str, records: bytes | None, acks: int = -1, version: int = 9) -> Any:
    fields = {
        "transactional_id": None,
        "acks": acks,
        "timeout": 30_000,
        "topic_data": [{"name": topic, "partition_data": [{"index": 0, "records": records}]}],
    }
    if acks == 0:
        client.tell(PRODUCE, version, fields)
        return None
    answer = client.ask(PRODUCE, version, fields)
    return answer if isinstance(answer, str) else answer.responses[0].partition_responses[0]


def end_offset(client: WireClient, topic: str) -> int:
    asked = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}
    fields = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": topic, "partitions": [asked]}]}
    return int(client.ask(LIST_OFFSETS, 5, fields).topics[0].partitions[0].offset)


GOOD = batch()
BAD: dict[str, tuple[Callable[[], bytes | None], ErrorCode]] = (
    {
        "no batch at all": (lambda: None, ErrorCode.invalid_record),
        "an empty batch": (lambda: b"", ErrorCode.invalid_record),
        "a flipped bit": (lambda: GOOD[:-1] + bytes([GOOD[-1] ^ 1]), ErrorCode.corrupt_message),
        "a wrong checksum": (lambda: GOOD[:17] + b"\0\0\0\0" + GOOD[21:], ErrorCode.corrupt_message),
        "cut": (lambda: GOOD[:-5], ErrorCode.invalid_record),
        "cut in its header": (lambda: GOOD[:40], ErrorCode.invalid_record),
        "two batches": (lambda: GOOD + GOOD, ErrorCode.invalid_record),
        "bytes behind it": (lambda: GOOD + b"\0", ErrorCode.invalid_record),
        "format 0": (lambda: old_format(0), ErrorCode.invalid_record),
        "format 1": (lambda: old_format(1), ErrorCode.invalid_record),
        "format 3": (lambda: GOOD[:16] + b"\x03" + GOOD[17:], ErrorCode.corrupt_message),
        "fewer records than counted": (
            lambda: patched(GOOD, 57, struct.pack(">i", 2)),
            ErrorCode.invalid_record,
        ),
        "more offsets than records": (
            lambda: patched(GOOD, 23, struct.pack(">i", 7)),
            ErrorCode.invalid_record,
        ),
        "a negative count": (lambda: patched(GOOD, 57, struct.pack(">i", -1)), ErrorCode.invalid_record),
        "no records": (lambda: build_batch([], base_timestamp=now_ms()), ErrorCode.invalid_record),
        "a record beyond the end": (lambda: with_records(b"\xfe\x01", 0), ErrorCode.invalid_record),
        "a record of negative length": (
            lambda: with_records(b"\x01" + bytes(9), 0),
            ErrorCode.invalid_record,
        ),
        "a control batch": (
            lambda: build_batch(
                [Record(0, 0, b"\0\0\0\1", b"\0" * 6)], base_timestamp=now_ms(), is_control=True
            ),
            ErrorCode.invalid_record,
        ),
        "a transactional control batch": (
            lambda: build_batch(
                [Record(0, 0, b"\0\0\0\1", b"\0" * 6)],
                base_timestamp=now_ms(),
                is_control=True,
                is_transactional=True,
                producer_id=5,
                producer_epoch=0,
                base_sequence=0,
            ),
            ErrorCode.transactional_id_authorization_failed,
        ),
        "a transaction without a transactional id": (
            lambda: batch(is_transactional=True),
            ErrorCode.transactional_id_authorization_failed,
        ),
        "a producer without a sequence": (
            lambda: batch(producer_id=5, producer_epoch=0),
            ErrorCode.invalid_record,
        ),
        "a codec that does not exist": (
            lambda: with_records(b"x" * 30, 7),
            ErrorCode.unsupported_compression_type,
        ),
        "broker's time from a client": (lambda: batch(log_append_time=True), ErrorCode.invalid_timestamp),
        "a day ahead": (
            lambda: build_batch([Record(0, 0, b"k", b"v")], base_timestamp=now_ms() + 86_400_000),
            ErrorCode.invalid_timestamp,
        ),
        "too large": (lambda: batch(b"x" * 1_100_000), ErrorCode.message_too_large),
    }
    | {
        f"garbage called {codec.name}": (
            lambda codec=codec: with_records(b"this is not compressed at all" * 3, codec),
            ErrorCode.invalid_record,
        )
        for codec in Codec
        if codec
    }
    | {
        f"{codec.name} cut short": (
            lambda codec=codec: with_records(
                compress(codec, encode_record(Record(0, 0, b"k", b"v" * 500)))[:-6], codec
            ),
            ErrorCode.invalid_record,
        )
        for codec in Codec
        if codec
    }
    | {
        f"{codec.name} of another codec's bytes": (
            lambda codec=codec: with_records(
                compress(
                    Codec.GZIP if codec is not Codec.GZIP else Codec.ZSTD,
                    encode_record(Record(0, 0, b"k", b"v")),
                ),
                codec,
            ),
            ErrorCode.invalid_record,
        )
        for codec in Codec
        if codec
    }
)


def test_every_bad_batch_is_refused_with_its_code_and_none_is_stored(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t")
    with WireClient(broker.bootstrap_servers) as client:
        assert produce(client, "t", GOOD).base_offset == 0
        for what, (make, code) in BAD.items():
            done = produce(client, "t", make())
            assert done.error_code is code, f"{what}: {done}"
            assert done.base_offset == -1, what
            assert end_offset(client, "t") == 1, what
        assert produce(client, "t", GOOD).base_offset == 1
    assert "defect" not in broker.log(), broker.log()


def test_one_bad_partition_does_not_cost_the_others_of_its_request(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t", partitions=3)
    data = [
        {"index": 0, "records": GOOD},
        {"index": 1, "records": GOOD[:-1]},
        {"index": 2, "records": GOOD},
        {"index": 9, "records": GOOD},
    ]
    fields = {"acks": -1, "timeout": 30_000, "topic_data": [{"name": "t", "partition_data": data}]}
    with WireClient(broker.bootstrap_servers) as client:
        answer = client.ask(PRODUCE, 9, fields)
    codes = {p.index: p.error_code for p in answer.responses[0].partition_responses}
    assert codes == {
        0: ErrorCode.none,
        1: ErrorCode.invalid_record,
        2: ErrorCode.none,
        9: ErrorCode.unknown_topic_or_partition,
    }


def test_an_error_with_acks_0_closes_the_connection_and_success_says_nothing(
    broker: BrokerProcess, create_topic: CreateTopic
) -> None:
    create_topic(broker, "t")
    with WireClient(broker.bootstrap_servers) as other, WireClient(broker.bootstrap_servers) as client:
        produce(client, "t", GOOD, acks=0)
        assert client.is_alive(), "the next answer is that of the next request"
        produce(client, "t", GOOD[:-1], acks=0)
        assert client.receive() == CLOSED
        # What was not waited for is there before what is.
        produce(other, "t", GOOD)
        assert end_offset(other, "t") == 2


def test_acks_that_do_not_exist_are_refused(broker: BrokerProcess, create_topic: CreateTopic) -> None:
    create_topic(broker, "t")
    with WireClient(broker.bootstrap_servers) as client:
        for acks in (2, -2, 100):
            assert produce(client, "t", GOOD, acks=acks).error_code is ErrorCode.invalid_required_acks
        assert end_offset(client, "t") == 0


@pytest.mark.parametrize(
    "codec",
    [pytest.param(codec, marks=() if codec is Codec.GZIP else pytest.mark.long) for codec in Codec if codec],
)
def test_a_bomb_is_refused_within_bounded_memory(
    broker: BrokerProcess, create_topic: CreateTopic, codec: Codec
) -> None:
    """A megabyte that unpacks to a thousand: refused, and the broker's largest size stays within the bound."""
    create_topic(broker, "t", max_message_bytes="20000000")
    bomb = with_records(bomb_of(codec), codec)
    assert len(bomb) < 20_000_000
    with WireClient(broker.bootstrap_servers) as client:
        for _ in range(2):
            done = produce(client, "t", bomb)
            assert done.error_code in (ErrorCode.message_too_large, ErrorCode.invalid_record), done
        assert end_offset(client, "t") == 0
        assert produce(client, "t", GOOD).base_offset == 0
    peak = peak_bytes(broker.pid)
    assert peak < 700 << 20, f"{peak >> 20} MiB"


@pytest.mark.parametrize("declared", [200 << 20, 4 << 30, (1 << 64) - 1])
@pytest.mark.check
def test_a_declared_size_that_is_a_lie_costs_nothing(
    broker: BrokerProcess, create_topic: CreateTopic, declared: int
) -> None:
    create_topic(broker, "t")
    body = compress(Codec.ZSTD, encode_record(Record(0, 0, b"k", b"v")))
    lie = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", declared) + body[6:]
    with WireClient(broker.bootstrap_servers) as client:
        for _ in range(3):
            assert produce(client, "t", with_records(lie, Codec.ZSTD)).error_code is ErrorCode.invalid_record
    peak = peak_bytes(broker.pid)
    assert peak < 100 << 20, f"{peak >> 20} MiB"


def bomb_of(codec: Codec) -> bytes:
    """What unpacks to far more than the bound, and is itself small."""
    if codec is Codec.SNAPPY:
        # The raw format declares its size up front; a stream in Java's framing carries many such blocks.
        block = compress(Codec.SNAPPY, bytes(1 << 20))[16:]
        return b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + block * 320
    if codec is Codec.GZIP:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        zeros = bytes(1 << 24)
        return b"".join([*(packer.compress(zeros) for _ in range(40)), packer.flush()])
    if codec is Codec.LZ4:
        return bytes(lz4.frame.compress(bytes(400 << 20), block_linked=False, store_size=False))
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1 << 30))


def peak_bytes(pid: int) -> int:
    """The most memory the process has had."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc")
