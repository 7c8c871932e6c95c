"""Produce and the producer's rules: good batches, every kind of bad one, sequences and epochs."""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side

from holdfast.wire.api_keys import DESCRIBE_PRODUCERS, INIT_PRODUCER_ID, LIST_OFFSETS, PRODUCE
from holdfast.wire.batch import HEADER_SIZE, Record, build_batch, make_batch, read_header, seal
from holdfast.wire.codecs import Codec

MINUTE_MS = 60_000
NOW = 0
Compare = Callable[[Script], None]


@pytest.fixture(autouse=True)
def now() -> None:
    """A header is judged by its age: those of a script stay young, however late its turn comes and long it takes."""
    global NOW
    NOW = int(time.time() * 1000) + 30 * MINUTE_MS


def batch(*values: bytes, **options: Any) -> bytes:
    return make_batch(values or (b"value",), timestamp=options.pop("timestamp", NOW), **options)


def with_header(data: bytes, **changes: int) -> bytes:
    """The same batch with fields of its header changed and its checksum made right again."""
    return seal(read_header(data)._replace(**changes), data[HEADER_SIZE:])


def with_raw(data: bytes, position: int, form: str, value: int) -> bytes:
    """The same batch with one field overwritten and the checksum left as it was."""
    changed = bytearray(data)
    struct.pack_into(form, changed, position, value)
    return bytes(changed)


def old_format(magic: int) -> bytes:
    """A message set of format 0 or 1 with one message (checksum of zero)."""
    message = struct.pack(">IbB", 0, magic, 0) + (struct.pack(">q", NOW) if magic else b"")
    message += struct.pack(">i", -1) + struct.pack(">i", 5) + b"value"
    return struct.pack(">qi", 0, len(message)) + message


def good_batches(side: Side) -> None:
    topic_id = side.create_topic("good", 2)
    for version in (3, 5, 7, 8, 9, 11, 12):
        side.produce(f"version {version}", "good", batch(b"a", b"b"), version=version)
    side.produce("version 13, by topic id", topic_id, batch(b"c"), version=13)
    side.produce("acks 1", "good", batch(b"d"), acks=1)
    for codec in Codec:
        side.produce(codec.name, "good", batch(b"x" * 500, b"y" * 500, codec=codec), partition=1)
    record = Record(0, 0, b"k", None, (("h", b"v"), ("h", None), ("", b"")))
    side.produce("headers and null value", "good", build_batch([record], base_timestamp=NOW))
    side.read_back("partition 0", "good", 0)
    side.read_back("partition 1", "good", 1)


def two_topics_in_one_request(side: Side) -> None:
    side.create_topic("left", 2)
    side.create_topic("right", 1)
    parts = [{"index": index, "records": batch(b"%d" % index)} for index in (0, 1, 2, -1)]
    data = [
        {"name": "left", "partition_data": parts},
        {"name": "right", "partition_data": parts[:1]},
        {"name": "missing", "partition_data": parts[:1]},
    ]
    for version in (8, 12):
        side.ask(
            f"mixed, version {version}", PRODUCE, version, {"acks": -1, "timeout": 9_000, "topic_data": data}
        )
    side.ask("no topics", PRODUCE, 9, {"acks": -1, "timeout": 1000, "topic_data": []})
    empty = [{"name": "left", "partition_data": []}]
    side.ask("no partitions", PRODUCE, 9, {"acks": -1, "timeout": 1000, "topic_data": empty})


def unknown_places(side: Side) -> None:
    topic_id = side.create_topic("known")
    side.produce("no such topic", "nowhere", batch())
    side.produce("no such partition", "known", batch(), partition=7)
    side.produce("no such partition by id", topic_id, batch(), partition=7, version=13)
    side.produce("no such topic id", uuid.UUID(int=0xDEADBEEF), batch(), version=13)
    side.produce("zero topic id", uuid.UUID(int=0), batch(), version=13)
    side.produce("illegal topic name", "no/such", batch())
    side.produce("empty topic name", "", batch())


def acknowledgements(side: Side) -> None:
    side.create_topic("acks")
    for acks in (7, 2, -2):
        side.produce(f"acks {acks}", "acks", batch(), acks=acks)
    side.end_offset("nothing stored", "acks")


def no_acknowledgement(side: Side) -> None:
    side.create_topic("silent")

    def tell(label: str, topic: str, records: bytes | None) -> None:
        data = [{"name": topic, "partition_data": [{"index": 0, "records": records}]}]
        side.client.tell(PRODUCE, 9, {"acks": 0, "timeout": 1000, "topic_data": data})
        side.note(label, side.client.is_alive())

    tell("good", "silent", batch())
    tell("bad checksum", "silent", with_raw(batch(), 17, ">I", 1))
    tell("unknown topic", "nowhere", batch())

    def is_readable() -> bool:
        wanted = [{"name": "silent", "partitions": [{"partition_index": 0, "timestamp": -1}]}]
        answer = side.client.ask(LIST_OFFSETS, 5, {"topics": wanted})
        return bool(answer.topics[0].partitions[0].offset >= 1)

    side.wait_until(is_readable)  # what nobody waits for becomes readable a flush later
    side.end_offset("after all", "silent")


def damaged_batches(side: Side) -> None:
    side.create_topic("damaged")
    whole = batch(b"one", b"two", b"three")
    cases = {
        "no bytes": b"",
        "one byte": b"\0",
        "garbage": b"\xff" * 100,
        "zeros": bytes(100),
        "cut off": whole[:-5],
        "header alone": whole[:HEADER_SIZE],
        "header cut off": whole[:40],
        "two batches": whole + batch(b"second"),
        "wrong checksum": with_raw(whole, 17, ">I", 12345),
        "length too small": with_raw(whole, 8, ">i", 20),
        "length too large": with_raw(whole, 8, ">i", len(whole) + 100),
        "negative length": with_raw(whole, 8, ">i", -5),
        "magic 0": old_format(0),
        "magic 1": old_format(1),
        "magic 3": with_raw(whole, 16, ">b", 3),
        "magic -1": with_raw(whole, 16, ">b", -1),
        "count one more": with_header(whole, records_count=4, last_offset_delta=3),
        "count one less": with_header(whole, records_count=2, last_offset_delta=1),
        "count and last delta disagree": with_header(whole, records_count=2),
        "last delta too large": with_header(whole, last_offset_delta=10),
        "negative count": with_header(whole, records_count=-1),
        "negative last delta": with_header(whole, last_offset_delta=-2),
        "empty batch": build_batch([], base_timestamp=NOW),
        "base offset not zero": with_header(whole, base_offset=77),
        "leader epoch set": with_header(whole, leader_epoch=9),
        "deltas not consecutive": build_batch(
            [Record(0, 0, None, b"a"), Record(5, 0, None, b"b")], base_timestamp=NOW, last_offset_delta=1
        ),
        "deltas with a gap": build_batch(
            [Record(0, 0, None, b"a"), Record(5, 0, None, b"b")], base_timestamp=NOW
        ),
        "record cut off": seal(read_header(whole), whole[HEADER_SIZE:-2]),
        "bytes after records": seal(read_header(whole), whole[HEADER_SIZE:] + b"\x02\x02"),
    }
    for label, records in cases.items():
        side.produce(label, "damaged", records)
        side.end_offset(f"{label}: end", "damaged")
    side.read_back("stored", "damaged")


def bytes_after_the_batch(side: Side) -> None:
    side.create_topic("followed")
    side.produce("garbage", "followed", batch(b"one", b"two") + b"xyz")
    side.read_back("stored", "followed")


def null_records(side: Side) -> None:
    side.create_topic("nothing")
    side.client.timeout_s = 1.0  # Apache Kafka never answers
    side.produce("null", "nothing", None)
    side.end_offset("end", "nothing")


def damaged_compression(side: Side) -> None:
    side.create_topic("squeezed")
    whole = batch(b"one", b"two")
    for codec in list(Codec)[1:]:
        packed = batch(b"one" * 100, b"two" * 100, codec=codec)
        header = read_header(packed)
        body = packed[HEADER_SIZE:]
        side.produce(f"{codec.name} of garbage", "squeezed", seal(header, b"garbage"))
        side.produce(f"{codec.name} of nothing", "squeezed", seal(header, b""))
        side.produce(f"{codec.name} cut off", "squeezed", seal(header, body[: len(body) // 2]))
        side.produce(
            f"{codec.name} counted wrongly",
            "squeezed",
            with_header(packed, records_count=3, last_offset_delta=2),
        )
        side.end_offset(f"{codec.name}: end", "squeezed")
    for number in (5, 6, 7):
        side.produce(f"codec {number}", "squeezed", with_header(whole, attributes=number))
    side.produce("zstd in version 6", "squeezed", batch(b"old" * 100, codec=Codec.ZSTD), version=6)
    side.produce("zstd in version 7", "squeezed", batch(b"old" * 100, codec=Codec.ZSTD), version=7)
    side.end_offset("at last", "squeezed")


def unreadable_records(side: Side) -> None:
    """Records of the right number and lengths whose fields make no sense."""
    header = read_header(batch(b"value"))
    too_long = bytes.fromhex(
        "14 00 08 00 01 01 02 02 68 06 78"
    )  # a header's value runs over the record's end
    side.create_topic("unreadable")
    side.produce("plain", "unreadable", seal(header, too_long))
    side.create_topic("unreadable-keys", 1, {"cleanup.policy": "compact"})
    side.produce("where keys are looked at", "unreadable-keys", seal(header, too_long))
    side.create_topic("unreadable-times", 1, {"message.timestamp.before.max.ms": "600000"})
    side.produce("where times are looked at", "unreadable-times", seal(header, too_long))


def attributes_clients_may_not_set(side: Side) -> None:
    side.create_topic("attributes")
    whole = batch(b"value")
    side.produce("control", "attributes", with_header(whole, attributes=0x20))
    side.produce("transactional without producer id", "attributes", with_header(whole, attributes=0x10))
    side.produce("transactional and control", "attributes", with_header(whole, attributes=0x30))
    side.produce("delete horizon", "attributes", with_header(whole, attributes=0x40))
    side.produce("unused bits", "attributes", with_header(whole, attributes=0x100))
    side.produce("log append time", "attributes", with_header(whole, attributes=0x08))
    side.read_back("stored", "attributes")


def too_large(side: Side) -> None:
    topic_id = side.create_topic("bounded", 1, {"max.message.bytes": "1000"})
    side.produce("just right", "bounded", batch(b"x" * 800))
    side.produce("too large", "bounded", batch(b"x" * 2000))
    side.produce("too large, by id", topic_id, batch(b"x" * 2000), version=13)
    side.produce("large but compressed", "bounded", batch(b"x" * 5000, codec=Codec.GZIP))
    overhead = len(batch(b"")) + 2
    for delta in (-1, 0, 1):
        exact = batch(b"x" * (1000 - overhead + delta))
        side.note(f"size {delta:+d}", len(exact) - 1000)
        side.produce(f"limit {delta:+d}", "bounded", exact)
    side.create_topic("small-segments", 1, {"segment.bytes": "1048576", "max.message.bytes": "3000000"})
    side.produce("larger than a segment", "small-segments", batch(b"x" * 1_200_000))


def keys_on_compacted_topics(side: Side) -> None:
    side.create_topic("compacted", 1, {"cleanup.policy": "compact"})
    side.produce("no key", "compacted", batch(b"value"), version=8)
    keyed = [Record(0, 0, b"k", b"v"), Record(1, 0, None, b"v"), Record(2, 0, None, b"v")]
    side.produce("two of three without key", "compacted", build_batch(keyed, base_timestamp=NOW))
    side.produce("compressed without key", "compacted", batch(b"value", codec=Codec.LZ4))
    side.produce("empty key", "compacted", build_batch([Record(0, 0, b"", b"v")], base_timestamp=NOW))
    side.produce("tombstone", "compacted", build_batch([Record(0, 0, b"k", None)], base_timestamp=NOW))
    side.read_back("stored", "compacted")


def timestamps(side: Side) -> None:
    half_a_day = str(12 * 60 * MINUTE_MS)  # much longer than these tests take
    limits = {"message.timestamp.before.max.ms": half_a_day, "message.timestamp.after.max.ms": half_a_day}
    side.create_topic("timed", 1, limits)
    for hours in (-5, 5, -60, 60):
        moment = NOW + hours * 60 * MINUTE_MS
        side.produce(f"{hours:+d} hours", "timed", batch(b"a", timestamp=moment))
    records = [Record(0, 0, None, b"a"), Record(1, -5400 * MINUTE_MS, None, b"b"), Record(2, 0, None, b"c")]
    side.produce("one of three too old", "timed", build_batch(records, base_timestamp=NOW))
    side.produce("too old, version 7", "timed", batch(b"a", timestamp=1000), version=7)
    side.produce("no timestamp", "timed", batch(b"a", timestamp=-1))
    side.produce("negative timestamp", "timed", batch(b"a", timestamp=-5000))
    lying = build_batch([Record(0, 0, None, b"a")], base_timestamp=NOW, max_timestamp=NOW + MINUTE_MS)
    side.produce("maximum larger than any record's", "timed", lying)
    lying = build_batch([Record(0, MINUTE_MS, None, b"a")], base_timestamp=NOW, max_timestamp=NOW)
    side.produce("maximum smaller than a record's", "timed", lying)
    side.read_back("stored", "timed")
    side.create_topic("default-limits")
    side.produce("two hours ahead", "default-limits", batch(b"a", timestamp=NOW + 120 * MINUTE_MS))
    side.produce("decades ago", "default-limits", batch(b"a", timestamp=1000))
    side.produce("no timestamp, no limits", "default-limits", batch(b"a", timestamp=-1))
    for newest in (-1, 0, 900):
        lying = build_batch([Record(0, 0, None, b"a")], base_timestamp=-1, max_timestamp=newest)
        side.produce(f"no timestamp, maximum {newest}", "default-limits", lying)
        lying = build_batch([Record(0, 2000, None, b"a")], base_timestamp=1000, max_timestamp=newest)
        side.produce(f"decades ago, maximum {newest}", "default-limits", lying)
    side.read_back("stored by default", "default-limits")


def log_append_time(side: Side) -> None:
    side.create_topic("stamped", 1, {"message.timestamp.type": "LogAppendTime"})
    side.produce("plain", "stamped", batch(b"a", b"b"))
    side.produce("gzip", "stamped", batch(b"a", b"b", codec=Codec.GZIP))
    side.produce("far future", "stamped", batch(b"a", timestamp=NOW * 2))
    side.produce("claims append time", "stamped", with_header(batch(b"a"), attributes=0x08))
    side.produce("version 7", "stamped", batch(b"a"), version=7)
    side.read_back("stored", "stamped")


def recompression(side: Side) -> None:
    for name in ("uncompressed", "gzip", "snappy", "lz4", "zstd"):
        topic = f"recompress-{name}"
        side.create_topic(topic, 1, {"compression.type": name})
        for codec in Codec:
            side.produce(f"{codec.name} to {name}", topic, batch(b"x" * 300, b"y" * 300, codec=codec))
        side.read_back(f"stored as {name}", topic)


def new_producer(side: Side, label: str) -> int:
    fields = {"transactional_id": None, "transaction_timeout": 60_000}
    # Apache Kafka has no ids to give for a moment after its start.
    side.wait_until(lambda: side.client.ask(INIT_PRODUCER_ID, 4, fields).producer_id >= 0)
    producer_id = side.ask(label, INIT_PRODUCER_ID, 4, fields).producer_id
    assert isinstance(producer_id, int)
    return producer_id


def sequences(side: Side) -> None:
    side.create_topic("sequenced")
    producer_id = new_producer(side, "producer")

    def send(label: str, sequence: int, *values: bytes, epoch: int = 0, version: int = 9) -> None:
        data = batch(*values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
        side.produce(label, "sequenced", data, version=version)

    send("first", 0, b"0", b"1")
    send("second", 2, b"2")
    send("gap", 5, b"5")
    send("gap, version 12", 5, b"5", version=12)
    send("last again", 2, b"2")
    send("first again", 0, b"0", b"1")
    send("half of the first again", 1, b"1")
    for sequence in range(3, 9):
        send(f"sequence {sequence}", sequence, b"%d" % sequence)
    send("third of nine again", 4, b"4")
    send("oldest again, no longer remembered", 0, b"0", b"1")
    send("overlaps the newest", 8, b"8", b"9")
    send("below, never sent so", 3, b"3", b"4")
    send("newer epoch, not from zero", 9, b"x", epoch=1)
    send("newer epoch from zero", 0, b"x", epoch=1)
    send("older epoch", 9, b"9", epoch=0)
    send("older epoch, version 12", 9, b"9", epoch=0, version=12)
    send("much newer epoch from zero", 0, b"y", epoch=5)
    send("no epoch", 1, b"y", epoch=-1)
    send("negative sequence", -1, b"y", epoch=5)
    side.read_back("stored", "sequenced")
    wanted = [
        {"name": "sequenced", "partition_indexes": [0, 1]},
        {"name": "nowhere", "partition_indexes": [0]},
    ]
    side.ask("producers", DESCRIBE_PRODUCERS, 0, {"topics": wanted})


def producer_unknown_here(side: Side) -> None:
    """A producer id without state may begin at any sequence: its first batches may be deleted already."""
    side.create_topic("midway")
    producer_id = new_producer(side, "producer")

    def send(label: str, sequence: int, epoch: int = 0) -> None:
        data = batch(b"v", producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
        side.produce(label, "midway", data)

    send("begins at 17", 17, epoch=3)
    send("goes on", 18, epoch=3)
    send("gap", 25, epoch=3)
    stranger = batch(b"v", producer_id=987_654_321, producer_epoch=4, base_sequence=0)
    side.produce("an id never given out", "midway", stranger)
    side.end_offset("end", "midway")


def sequence_wrap(side: Side) -> None:
    side.create_topic("wrapped")
    producer_id = new_producer(side, "producer")
    last = 2**31 - 1

    def send(label: str, sequence: int, *values: bytes) -> None:
        data = batch(*values, producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
        side.produce(label, "wrapped", data)

    send("near the end", last - 1, b"a")
    send("over the end", last, b"b", b"c", b"d")
    send("over the end again", last, b"b", b"c", b"d")
    send("gap after the wrap", 4, b"e")
    send("after the wrap", 2, b"e")
    side.read_back("stored", "wrapped")


def transactional_without_transaction(side: Side) -> None:
    side.create_topic("untransacted")
    producer_id = new_producer(side, "producer")
    data = batch(b"v", producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True)
    side.produce("transactional batch", "untransacted", data)
    side.end_offset("end", "untransacted")


HEADER_LIMITS = {
    "base_offset": (-1, -(2**63), 2**63 - 1),
    "leader_epoch": (-2, -(2**31), 2**31 - 1),
    "attributes": (0x80, 0x7F00, -32768, -1),
    "last_offset_delta": (-(2**31), 2**31 - 1),
    "records_count": (0, -(2**31), 2**31 - 1),
    "base_timestamp": (-(2**63), -2, -1, 0, 2**63 - 1),
    "max_timestamp": (-(2**63), -2, -1, 0, 2**63 - 1),
    "producer_id": (-(2**63), -2, 0, 2**63 - 1),
    "producer_epoch": (-(2**15), -2, 0, 2**15 - 1),
    "base_sequence": (-(2**31), -2, 0, 2**31 - 1),
}


def header_limits(side: Side) -> None:
    """Each field of the header at its limits, in a batch of nobody's and in one of a producer's."""
    batches = {
        "plain": batch(b"one", b"two"),
        "whose": batch(b"one", b"two", producer_id=1 << 40, producer_epoch=3, base_sequence=7),
    }
    cases = [
        (f"{field} {value} {label}", with_header(data, **{field: value}))
        for field, values in HEADER_LIMITS.items()
        for value in values
        for label, data in batches.items()
    ]
    side.create_topic("limits", len(cases))
    for partition, (label, data) in enumerate(cases):
        side.produce(label, "limits", data, partition=partition)
        side.read_back(f"{label}: stored", "limits", partition)


def internal_topics(side: Side) -> None:
    side.produce("group offsets", "__consumer_offsets", batch())
    side.produce("transactions", "__transaction_state", batch())
    side.produce("metadata", "__cluster_metadata", batch())


SCRIPTS = (
    good_batches,
    two_topics_in_one_request,
    unknown_places,
    acknowledgements,
    no_acknowledgement,
    damaged_batches,
    bytes_after_the_batch,
    null_records,
    damaged_compression,
    unreadable_records,
    attributes_clients_may_not_set,
    too_large,
    keys_on_compacted_topics,
    timestamps,
    log_append_time,
    recompression,
    sequences,
    producer_unknown_here,
    sequence_wrap,
    transactional_without_transaction,
    header_limits,
    internal_topics,
)


@pytest.mark.parametrize(
    "script",
    # The first is what `make test` sees of Apache Kafka.
    [pytest.param(each, marks=pytest.mark.quick if each is SCRIPTS[0] else ()) for each in SCRIPTS],
    ids=lambda script: script.__name__,
)
def test_produce_is_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
