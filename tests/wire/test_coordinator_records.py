"""The records of the coordinators' topics: ours and Apache Kafka's are the same bytes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.errors import CorruptLog
from holdfast.wire.control_records import EndTransactionMarker, decode_end_marker
from holdfast.wire.coordinator_records import (
    GROUP_KINDS,
    TRANSACTION_KINDS,
    ClassicMemberMetadata,
    ClassicProtocol,
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
    CoordinatorKey,
    CoordinatorValue,
    CurrentTopicPartitions,
    GroupMetadataKey,
    GroupMetadataValue,
    LegacyOffsetCommitKey,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
    TargetTopicPartitions,
    TransactionLogKey,
    TransactionLogValue,
    TransactionPartitions,
    UnknownRecord,
    decode_group_record,
    decode_transaction_record,
)

TOPIC_ID = UUID("700e96a0-5218-4241-bf75-cd1784325f26")
TOPIC = "recr8c3993-t"
SUBSCRIPTION = bytes.fromhex("000300000001000c726563723863333939332d740000000000000000ffffffff0000")
CLASSIC_ID = "rdkafka-f85886b7-d5d4-471e-b708-7ecb923732fd"

# Records an Apache Kafka 4.3.1 node wrote for librdkafka's clients.
GROUP_RECORDS_WRITTEN_BY_KAFKA: list[tuple[str, str, CoordinatorKey, CoordinatorValue]] = [
    (
        "00010010726563723863333939332d7265676578000c726563723863333939332d7400000001",
        "000400000000000000040000000001000001a1ddf03df5010010700e96a052184241bf75cd1784325f26",
        OffsetCommitKey("recr8c3993-regex", TOPIC, 1),
        OffsetCommitValue(offset=4, leader_epoch=0, commit_timestamp=1794724871669, topic_id=TOPIC_ID),
    ),
    (  # in a transaction
        "0001000d726563723863333939332d6774000c726563723863333939332d7400000000",
        "00040000000000000003ffffffff036d00000001a1ddf06eaa00",
        OffsetCommitKey("recr8c3993-gt", TOPIC, 0),
        OffsetCommitValue(offset=3, metadata="m\0", commit_timestamp=1794724884138),
    ),
    (  # a group that waits for its first members
        "0002000d726563723863333939332d6774",
        "0003000000000000ffffffff000001a1ddf0627200000000",
        GroupMetadataKey("recr8c3993-gt"),
        GroupMetadataValue(
            protocol_type="", generation=0, protocol=None, leader=None, current_state_timestamp=1794724881010
        ),
    ),
    (
        "0002000d726563723863333939332d6774",
        "00030008636f6e73756d657200000001000572616e6765002c72646b61666b612d66383538383662372d643564342d343731652d"
        "623730382d376563623932333733326664000001a1ddf06e2c00000001002c72646b61666b612d66383538383662372d64356434"
        "2d343731652d623730382d376563623932333733326664ffff000772646b61666b61000a2f3132372e302e302e31000493e00000"
        "afc800000022000300000001000c726563723863333939332d740000000000000000ffffffff0000000000240000000000010"
        "00c726563723863333939332d7400000002000000000000000100000000",
        GroupMetadataKey("recr8c3993-gt"),
        GroupMetadataValue(
            protocol_type="consumer",
            generation=1,
            protocol="range",
            leader=CLASSIC_ID,
            current_state_timestamp=1794724884012,
            members=(
                MemberMetadata(
                    member_id=CLASSIC_ID,
                    client_id="rdkafka",
                    client_host="/127.0.0.1",
                    rebalance_timeout=300_000,
                    session_timeout=45_000,
                    subscription=SUBSCRIPTION,
                    assignment=bytes.fromhex(
                        "000000000001000c726563723863333939332d7400000002000000000000000100000000"
                    ),
                ),
            ),
        ),
    ),
    (
        "00030010726563723863333939332d7265676578",
        "000000000002010008070f74f24fcc21d5",
        ConsumerGroupMetadataKey("recr8c3993-regex"),
        ConsumerGroupMetadataValue(epoch=2, metadata_hash=508753866985841109),
    ),
    (
        "00030010726563723863333939332d6d69786564",
        "00000000000500",
        ConsumerGroupMetadataKey("recr8c3993-mixed"),
        ConsumerGroupMetadataValue(epoch=5),
    ),
    (
        "00050010726563723863333939332d72656765780016346a584a727a6c5a524132546c4757507a3753614767",
        "0000047269300003636e0b2f3132372e302e302e310110285e726563723863333939332e2a29000493e00001000100",
        ConsumerGroupMemberMetadataKey("recr8c3993-regex", "4jXJrzlZRA2TlGWPz7SaGg"),
        ConsumerGroupMemberMetadataValue(
            instance_id="ri0",
            client_id="cn",
            client_host="/127.0.0.1",
            subscribed_topic_regex="(^recr8c3993.*)",
            rebalance_timeout_ms=300_000,
        ),
    ),
    (  # a member that speaks the classic protocol
        "00050010726563723863333939332d6d697865640016752d30776c526d4353354b4a52793174704743725a41",
        "000000000872646b61666b610b2f3132372e302e302e31020d726563723863333939332d7401000493e000010060010000afc803"
        "0672616e676523000300000001000c726563723863333939332d740000000000000000ffffffff0000000b726f756e64726f6269"
        "6e23000300000001000c726563723863333939332d740000000000000000ffffffff00000000",
        ConsumerGroupMemberMetadataKey("recr8c3993-mixed", "u-0wlRmCS5KJRy1tpGCrZA"),
        ConsumerGroupMemberMetadataValue(
            client_id="rdkafka",
            client_host="/127.0.0.1",
            subscribed_topic_names=(TOPIC,),
            subscribed_topic_regex="",
            rebalance_timeout_ms=300_000,
            classic_member_metadata=ClassicMemberMetadata(
                45_000,
                (ClassicProtocol("range", SUBSCRIPTION), ClassicProtocol("roundrobin", SUBSCRIPTION)),
            ),
        ),
    ),
    (
        "00060010726563723863333939332d7265676578",
        "000000000002010008000001a1ddf03ca3",
        ConsumerGroupTargetAssignmentMetadataKey("recr8c3993-regex"),
        ConsumerGroupTargetAssignmentMetadataValue(assignment_epoch=2, assignment_timestamp=1794724871331),
    ),
    (
        "00070013726563723863333939332d636f6e73756d6572001635336e704d47566d51756d5155497332587a73385451",
        "000002700e96a052184241bf75cd1784325f260300000000000000010000",
        ConsumerGroupTargetAssignmentMemberKey("recr8c3993-consumer", "53npMGVmQumQUIs2Xzs8TQ"),
        ConsumerGroupTargetAssignmentMemberValue(topic_partitions=(TargetTopicPartitions(TOPIC_ID, (0, 1)),)),
    ),
    (
        "00080010726563723863333939332d6d6978656400166a6f4c4653526d3852437961616c3548634766666667",
        "000000000002000000020102700e96a052184241bf75cd1784325f260200000000010005020000000202700e96a05218"
        "4241bf75cd1784325f260200000001010005020000000200",
        ConsumerGroupCurrentMemberAssignmentKey("recr8c3993-mixed", "joLFSRm8RCyaal5HcGfffg"),
        ConsumerGroupCurrentMemberAssignmentValue(
            member_epoch=2,
            previous_member_epoch=2,
            state=1,
            assigned_partitions=(CurrentTopicPartitions(TOPIC_ID, (0,), (2,)),),
            partitions_pending_revocation=(CurrentTopicPartitions(TOPIC_ID, (1,), (2,)),),
        ),
    ),
    (
        "00100010726563723863333939332d7265676578000f285e726563723863333939332e2a29",
        "0000020d726563723863333939332d7400000000000036be000001a1ddf0292c00",
        ConsumerGroupRegularExpressionKey("recr8c3993-regex", "(^recr8c3993.*)"),
        ConsumerGroupRegularExpressionValue(topics=(TOPIC,), version=14014, timestamp=1794724866348),
    ),
]

TRANSACTION_RECORDS_WRITTEN_BY_KAFKA: list[tuple[str, str, CoordinatorKey, CoordinatorValue]] = [
    (
        "0000000e726563723863333939332d74786e",
        "000100000000000003e80000000030390000000001a1ddf0616bffffffffffffffff01000800000000000003e8",
        TransactionLogKey("recr8c3993-txn"),
        TransactionLogValue(
            producer_id=1000,
            previous_producer_id=1000,
            producer_epoch=0,
            transaction_timeout_ms=12345,
            transaction_status=0,
            transaction_partitions=None,
            transaction_last_update_timestamp_ms=1794724880747,
        ),
    ),
    (
        "0000000e726563723863333939332d74786e",
        "000100000000000003e800000000303902030d726563723863333939332d74020000000000135f5f636f6e73756d65725f6f666673"
        "657473020000001f00000001a1ddf06ec0000001a1ddf06e9e01000800000000000003e8",
        TransactionLogKey("recr8c3993-txn"),
        TransactionLogValue(
            producer_id=1000,
            previous_producer_id=1000,
            producer_epoch=0,
            transaction_timeout_ms=12345,
            transaction_status=2,
            transaction_partitions=(
                TransactionPartitions(TOPIC, (0,)),
                TransactionPartitions("__consumer_offsets", (31,)),
            ),
            transaction_last_update_timestamp_ms=1794724884160,
            transaction_start_timestamp_ms=1794724884126,
        ),
    ),
]

WRITTEN_BY_KAFKA = [
    *((decode_group_record, *case) for case in GROUP_RECORDS_WRITTEN_BY_KAFKA),
    *((decode_transaction_record, *case) for case in TRANSACTION_RECORDS_WRITTEN_BY_KAFKA),
]
KINDS = [
    *((decode_group_record, key, value) for key, value in GROUP_KINDS.values()),
    *((decode_transaction_record, key, value) for key, value in TRANSACTION_KINDS.values()),
]
ALL_VERSIONS = [
    (decode, key, value, version) for decode, key, value in KINDS for version in range(value.version_max + 1)
]


@pytest.mark.parametrize(("decode", "key", "value", "named", "said"), WRITTEN_BY_KAFKA)
def test_what_kafka_wrote_is_read_and_written_back(
    decode: Any, key: str, value: str, named: CoordinatorKey, said: CoordinatorValue
) -> None:
    key_bytes, value_bytes = bytes.fromhex(key), bytes.fromhex(value)
    read = decode(key_bytes, value_bytes)
    assert read == (named, said)
    assert tuple(part.encode() for part in read) == (key_bytes, value_bytes)
    assert (named.encode(), said.encode()) == (key_bytes, value_bytes)


@pytest.mark.parametrize(("decode", "key", "value", "named", "said"), WRITTEN_BY_KAFKA)
def test_every_cut_and_every_extension_is_refused(
    decode: Any, key: str, value: str, named: CoordinatorKey, said: CoordinatorValue
) -> None:
    key_bytes, value_bytes = bytes.fromhex(key), bytes.fromhex(value)
    for size in range(len(key_bytes)):
        with pytest.raises(CorruptLog):
            decode(key_bytes[:size], None)
    for size in range(len(value_bytes)):
        with pytest.raises(CorruptLog):
            decode(key_bytes, value_bytes[:size])
    with pytest.raises(CorruptLog, match="1 bytes follow"):
        decode(key_bytes + b"\0", value_bytes)
    with pytest.raises(CorruptLog, match="1 bytes follow"):
        decode(key_bytes, value_bytes + b"\0")


@pytest.mark.parametrize(("decode", "key_type", "value_type", "version"), ALL_VERSIONS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_every_record_comes_back(
    made: Any, decode: Any, key_type: Any, value_type: Any, version: int, data: Any
) -> None:
    key = data.draw(made.record(key_type))
    value = dataclasses.replace(data.draw(made.record(value_type, version)), layout_version=version)
    encoded = key.encode(), value.encode()
    again = decode(*encoded)
    assert again == (key, value)
    assert again[1].layout == version
    assert tuple(part.encode() for part in again) == encoded
    assert decode(memoryview(encoded[0]), memoryview(encoded[1])) == (key, value)
    assert decode(encoded[0], None) == (key, None)


@settings(max_examples=examples(300), deadline=None)
@given(kind=st.sampled_from(ALL_VERSIONS), chance=st.randoms(use_true_random=False), data=st.data())
def test_damaged_records_are_refused_or_read_but_nothing_else(
    made: Any, kind: Any, chance: random.Random, data: Any
) -> None:
    decode, key_type, value_type, version = kind
    value = dataclasses.replace(data.draw(made.record(value_type, version)), layout_version=version)
    parts = [bytearray(data.draw(made.record(key_type)).encode()), bytearray(value.encode())]
    damaged = chance.choice(parts)
    for _ in range(chance.randint(1, 3)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    del damaged[chance.choice([len(damaged), chance.randrange(len(damaged))]) :]
    try:
        decode(*map(bytes, parts))
    except CorruptLog:
        return


def test_a_record_without_key_is_corrupt() -> None:
    for key in (None, b"", b"\0"):
        with pytest.raises(CorruptLog, match="no number in front"):
            decode_group_record(key, b"\0\0")


def test_kinds_not_known_are_kept_as_bytes() -> None:
    for kind, value in ((b"\0\x0b", b"\0\0share group"), (b"\x7f\0", None), (b"\xff\xff", b"\0\7")):
        key, said = decode_group_record(kind + b"name", value)
        assert isinstance(key, UnknownRecord)
        assert key.encode() == kind + b"name"
        assert said is None if value is None else said == UnknownRecord(value[1], value[2:])
    assert isinstance(decode_transaction_record(b"\0\1x", None)[0], UnknownRecord)


@pytest.mark.parametrize(("decode", "key_type", "value_type"), KINDS)
def test_versions_not_known_are_kept_as_bytes(
    made: Any, decode: Any, key_type: Any, value_type: type[CoordinatorValue]
) -> None:
    arguments = {field.name: "name" for field in dataclasses.fields(key_type)}
    key = key_type(**arguments | ({"partition": 1} if "partition" in arguments else {}))
    for version in (value_type.version_max + 1, -1):
        value = version.to_bytes(2, signed=True) + b"of the future"
        assert decode(key.encode(), value) == (key, UnknownRecord(version, b"of the future"))
        assert decode(key.encode(), value)[1].encode() == value


def test_a_position_of_long_ago_has_a_key_of_its_own() -> None:
    key, _ = decode_group_record(b"\0\0\0\1g\0\1t\0\0\0\7", None)
    assert key == LegacyOffsetCommitKey("g", "t", 7)
    assert isinstance(key, OffsetCommitKey)


def test_a_position_that_expires_by_itself_is_written_in_version_1() -> None:
    value = OffsetCommitValue(
        offset=5, leader_epoch=3, metadata="m", commit_timestamp=10, expire_timestamp=20, topic_id=TOPIC_ID
    )
    _, again = decode_group_record(OffsetCommitKey("g", "t", 0).encode(), value.encode())
    assert value.encode()[:2] == b"\0\1"
    assert again == OffsetCommitValue(offset=5, metadata="m", commit_timestamp=10, expire_timestamp=20)


def test_a_value_the_version_has_no_room_for_is_an_error() -> None:
    value = TransactionLogValue(
        producer_id=1,
        next_producer_id=2,
        producer_epoch=0,
        transaction_timeout_ms=1,
        transaction_status=0,
        transaction_last_update_timestamp_ms=0,
        layout_version=0,
    )
    with pytest.raises(ValueError, match="version 0 has no field 'next_producer_id'"):
        value.encode()


def test_a_missing_tag_is_an_empty_classic_member_as_kafka_reads_it() -> None:
    value = ConsumerGroupMemberMetadataValue(client_id="c", client_host="h")
    assert value.encode().endswith(b"\x01\x00\x01\x00")
    key = ConsumerGroupMemberMetadataKey("g", "m").encode()
    _, without = decode_group_record(key, value.encode()[:-4] + b"\0")
    assert isinstance(without, ConsumerGroupMemberMetadataValue)
    assert without.classic_member_metadata == ClassicMemberMetadata(0, ())
    assert without.encode() == value.encode()[:-4] + b"\0"


def test_what_has_no_room_is_refused() -> None:
    assert len(GroupMetadataKey("g" * 32767).encode()) == 32771
    with pytest.raises(ValueError, match="32768 bytes or items do not fit"):
        GroupMetadataKey("g" * 32768).encode()
    with pytest.raises(ValueError, match="does not fit"):
        OffsetCommitKey("g", "t", 2**31).encode()
    with pytest.raises(ValueError, match="null"):
        GroupMetadataKey(None).encode()  # type: ignore[arg-type]


def test_absurd_lengths_allocate_nothing() -> None:
    key = GroupMetadataKey("g").encode()
    head = b"\0\3\0\0\0\0\0\1\xff\xff\xff\xff" + bytes(8)
    with pytest.raises(CorruptLog, match="a length of 2147483647 where 0 bytes are left"):
        decode_group_record(key, head + b"\x7f\xff\xff\xff")
    with pytest.raises(CorruptLog, match="null"):
        decode_group_record(key, head + b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    ("key", "value", "marker"),
    [
        ("00000001", "000000000000", EndTransactionMarker(is_commit=True, coordinator_epoch=0)),
        ("00000000", "000000000007", EndTransactionMarker(is_commit=False, coordinator_epoch=7)),
    ],
)
def test_markers_are_read_and_written_back(key: str, value: str, marker: EndTransactionMarker) -> None:
    key_bytes, value_bytes = bytes.fromhex(key), bytes.fromhex(value)
    assert decode_end_marker(key_bytes, value_bytes) == marker
    assert (marker.encode_key(), marker.encode_value()) == (key_bytes, value_bytes)
    assert decode_end_marker(key_bytes, value_bytes + b"grown") == marker
    for size in range(len(value_bytes)):
        with pytest.raises(CorruptLog, match="too short"):
            decode_end_marker(key_bytes, value_bytes[:size])


def test_other_control_records_are_no_markers() -> None:
    assert decode_end_marker(b"\0\0\0\2", b"") is None
    with pytest.raises(CorruptLog, match="too short"):
        decode_end_marker(None, None)
    with pytest.raises(CorruptLog, match="version -1"):
        decode_end_marker(b"\0\0\0\1", b"\xff\xff\0\0\0\0")
