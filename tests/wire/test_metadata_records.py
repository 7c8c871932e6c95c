"""The records Kafka writes into its own logs: ours and Apache Kafka's are the same bytes."""

from __future__ import annotations

import dataclasses
import datetime
import io
import random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.k_raft_version_record.v0.data import KRaftVersionRecord
from kio.schema.leader_change_message.v0.data import LeaderChangeMessage as LeaderChangeV0
from kio.schema.leader_change_message.v1.data import LeaderChangeMessage as LeaderChangeV1
from kio.schema.snapshot_footer_record.v0.data import SnapshotFooterRecord
from kio.schema.snapshot_header_record.v0.data import SnapshotHeaderRecord
from kio.schema.voters_record.v0.data import VotersRecord
from kio.serial import entity_reader, entity_writer
from tests.support.tiers import examples

from holdfast.errors import CorruptLog
from holdfast.wire import control_records
from holdfast.wire.control_records import (
    ControlRecord,
    KRaftVersion,
    LeaderChange,
    SnapshotHeader,
    UnknownControlRecord,
    VoterDescription,
    VoterEndPoint,
    Voters,
    decode_control_record,
)
from holdfast.wire.message_encoder import plain_value
from holdfast.wire.metadata_records import (
    KINDS,
    BeginTransaction,
    BrokerRegistrationChange,
    ClearElr,
    Config,
    EndPoint,
    EndTransaction,
    FeatureLevel,
    MetadataRecord,
    NoOp,
    Partition,
    PartitionChange,
    ProducerIds,
    RegisterBroker,
    RemoveTopic,
    SupportedFeature,
    Topic,
    UnknownRecord,
    decode_metadata_record,
)

DIRECTORY = UUID("22827452-32bc-4a51-8c64-e1a367361b24")
TOPIC_ID = UUID("b087cb77-6c81-4270-a2ff-9069c945f8c5")
ALL_VERSIONS = [(kind, version) for kind in KINDS.values() for version in range(kind.version_max + 1)]

# Values of records in the metadata log of an Apache Kafka 4.3.1 node.
WRITTEN_BY_KAFKA: list[tuple[str, MetadataRecord]] = [
    ("01170001001212426f6f747374726170207265636f726473", BeginTransaction(name="Bootstrap records")),
    (
        "010c00116d657461646174612e76657273696f6e001e00",
        FeatureLevel(name="metadata.version", feature_level=30),
    ),
    (
        "0104000401146d696e2e696e73796e632e7265706c69636173023100",
        Config(resource_type=4, resource_name="", name="min.insync.replicas", value="1"),
    ),
    ("01180000", EndTransaction()),
    ("01140000", NoOp()),
    (
        "0100040000000100a094116d432b48fc916a588451c891e2000000000000000d020a504c41494e544558540a3132372e302e302e31"
        "4a94000000080e6b726166742e76657273696f6e00000001000e67726f75702e76657273696f6e00000001001073747265616d732e"
        "76657273696f6e0000000100147472616e73616374696f6e2e76657273696f6e000000020021656c696769626c652e6c6561646572"
        "2e7265706c696361732e76657273696f6e0000000100116d657461646174612e76657273696f6e0007001e000e73686172652e7665"
        "7273696f6e0000000100000100010011022282745232bc4a518c64e1a367361b24",
        RegisterBroker(
            broker_id=1,
            incarnation_id=UUID("a094116d-432b-48fc-916a-588451c891e2"),
            broker_epoch=13,
            end_points=(EndPoint("PLAINTEXT", "127.0.0.1", 19092, 0),),
            features=(
                SupportedFeature("kraft.version", 0, 1),
                SupportedFeature("group.version", 0, 1),
                SupportedFeature("streams.version", 0, 1),
                SupportedFeature("transaction.version", 0, 2),
                SupportedFeature("eligible.leader.replicas.version", 0, 1),
                SupportedFeature("metadata.version", 7, 30),
                SupportedFeature("share.version", 0, 1),
            ),
            fenced=True,
            log_dirs=(DIRECTORY,),
        ),
    ),
    (
        "01110000000001000000000000000d010001ff",
        BrokerRegistrationChange(broker_id=1, broker_epoch=13, fenced=-1, version=0),
    ),
    (
        "01110300000001000000000000000d01030101",
        BrokerRegistrationChange(broker_id=1, broker_epoch=13, cordoned_log_dirs=()),
    ),
    (
        "0102000e6366672d70726f62652d78797ab087cb776c814270a2ff9069c945f8c500",
        Topic(name="cfg-probe-xyz", topic_id=TOPIC_ID),
    ),
    (
        "01030200000000b087cb776c814270a2ff9069c945f8c5020000000102000000010101000000010000000000000000"
        "022282745232bc4a518c64e1a367361b2400",
        Partition(
            partition_id=0,
            topic_id=TOPIC_ID,
            replicas=(1,),
            isr=(1,),
            leader=1,
            leader_epoch=0,
            partition_epoch=0,
            directories=(DIRECTORY,),
        ),
    ),
    (
        "010f0000000001000000000000000d00000000000003e800",
        ProducerIds(broker_id=1, broker_epoch=13, next_producer_id=1000),
    ),
    (
        "0109003ccb893de74a43a08ae96328b502b16700",
        RemoveTopic(topic_id=UUID("3ccb893d-e74a-43a0-8ae9-6328b502b167")),
    ),
    ("011c00145f5f7472616e73616374696f6e5f737461746500", ClearElr(topic_name="__transaction_state")),
]

CONTROL_RECORDS_WRITTEN_BY_KAFKA: list[tuple[str, str, ControlRecord]] = [
    (
        "00000002",
        "00000000000102000000010002000000010000",
        LeaderChange(
            leader_id=1, voters=(control_records.Voter(1),), granting_voters=(control_records.Voter(1),)
        ),
    ),
    ("00000005", "0000000100", KRaftVersion(kraft_version=1)),
    (
        "00000006",
        "000002000000012282745232bc4a518c64e1a367361b24020b434f4e54524f4c4c45520a3132372e302e302e314a95"
        "0000000001000000",
        Voters(voters=(VoterDescription(1, DIRECTORY, (VoterEndPoint("CONTROLLER", "127.0.0.1", 19093),)),)),
    ),
]


@pytest.mark.parametrize(("digits", "record"), WRITTEN_BY_KAFKA, ids=lambda value: type(value).__name__)
def test_what_kafka_wrote_is_read_and_written_back(digits: str, record: MetadataRecord) -> None:
    value = bytes.fromhex(digits)
    assert decode_metadata_record(value) == record
    assert decode_metadata_record(value).encode() == value
    assert record.encode() == value


@pytest.mark.parametrize(("kind", "version"), ALL_VERSIONS)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_every_record_comes_back(made: Any, kind: type[MetadataRecord], version: int, data: Any) -> None:
    record = dataclasses.replace(data.draw(made.record(kind, version)), version=version)
    value = record.encode()
    again = decode_metadata_record(value)
    assert again == record
    assert again.version == version
    assert again.encode() == value
    assert decode_metadata_record(memoryview(value)) == record


@settings(max_examples=examples(200), deadline=None)
@given(kind=st.sampled_from(list(KINDS.values())), chance=st.randoms(use_true_random=False), data=st.data())
def test_damaged_records_are_refused_or_read_but_nothing_else(
    made: Any, kind: type[MetadataRecord], chance: random.Random, data: Any
) -> None:
    value = bytearray(data.draw(made.record(kind)).encode())
    for _ in range(chance.randint(1, 3)):
        value[chance.randrange(len(value))] = chance.randrange(256)
    del value[chance.choice([len(value), chance.randrange(len(value))]) :]
    try:
        decode_metadata_record(bytes(value))
    except CorruptLog:
        return


@pytest.mark.parametrize(("digits", "record"), WRITTEN_BY_KAFKA, ids=lambda value: type(value).__name__)
def test_every_cut_and_every_extension_is_refused(digits: str, record: MetadataRecord) -> None:
    value = bytes.fromhex(digits)
    for size in range(len(value)):
        with pytest.raises(CorruptLog):
            decode_metadata_record(value[:size])
    with pytest.raises(CorruptLog, match="1 bytes follow"):
        decode_metadata_record(value + b"\0")


def test_an_absurd_length_allocates_nothing() -> None:
    partition = bytes.fromhex("010302") + bytes(20)
    with pytest.raises(CorruptLog, match="a length of 4294967294"):
        decode_metadata_record(partition + b"\xff\xff\xff\xff\x0f")


def test_kinds_and_versions_not_known_are_kept_as_bytes() -> None:
    for value in (b"\x01\x7f\x00something of the future", b"\x01\x02\x01topic of the future"):
        unknown = decode_metadata_record(value)
        assert isinstance(unknown, UnknownRecord)
        assert unknown.kind == value[1]
        assert unknown.version == value[2]
        assert unknown.encode() == value


def test_another_frame_version_is_refused() -> None:
    with pytest.raises(CorruptLog, match="frame version 2"):
        decode_metadata_record(b"\x02\x14\x00\x00")
    with pytest.raises(CorruptLog):
        decode_metadata_record(b"")


def test_tags_not_known_are_skipped() -> None:
    assert decode_metadata_record(b"\x01\x14\x00\x01\x63\x03abc") == NoOp()
    change = BrokerRegistrationChange(broker_id=1, broker_epoch=13, fenced=1)
    value = change.encode()
    assert value.endswith(b"\x01\x00\x01\x01")
    assert decode_metadata_record(value[:-4] + b"\x02\x00\x01\x01\x63\x00") == change


def test_a_tagged_field_of_the_wrong_size_is_refused() -> None:
    value = BrokerRegistrationChange(broker_id=1, broker_epoch=13, fenced=1).encode()
    with pytest.raises(CorruptLog, match="does not fill"):
        decode_metadata_record(value[:-4] + b"\x01\x00\x02\x01\x01")


def test_a_value_the_version_has_no_room_for_is_an_error() -> None:
    change = PartitionChange(partition_id=0, topic_id=TOPIC_ID, directories=(DIRECTORY,), version=0)
    with pytest.raises(ValueError, match="version 0 has no field 'directories'"):
        change.encode()


def test_null_where_none_may_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="null"):
        Topic(name=None, topic_id=TOPIC_ID).encode()  # type: ignore[arg-type]
    with pytest.raises(CorruptLog, match="null"):
        decode_metadata_record(b"\x01\x02\x00\x00" + bytes(17))


@pytest.mark.parametrize(("key", "value", "record"), CONTROL_RECORDS_WRITTEN_BY_KAFKA)
def test_control_records_kafka_wrote_are_read_and_written_back(
    key: str, value: str, record: ControlRecord
) -> None:
    key_bytes, value_bytes = bytes.fromhex(key), bytes.fromhex(value)
    assert decode_control_record(key_bytes, value_bytes) == record
    assert (record.encode_key(), record.encode_value()) == (key_bytes, value_bytes)
    for size in range(len(value_bytes)):
        with pytest.raises(CorruptLog):
            decode_control_record(key_bytes, value_bytes[:size])
    with pytest.raises(CorruptLog, match="1 bytes follow"):
        decode_control_record(key_bytes, value_bytes + b"\0")
    with pytest.raises(CorruptLog):
        decode_control_record(key_bytes[:3], value_bytes)


@pytest.mark.parametrize(
    ("kind", "version", "schema"),
    [
        (LeaderChange, 0, LeaderChangeV0),
        (LeaderChange, 1, LeaderChangeV1),
        (SnapshotHeader, 0, SnapshotHeaderRecord),
        (control_records.SnapshotFooter, 0, SnapshotFooterRecord),
        (KRaftVersion, 0, KRaftVersionRecord),
        (Voters, 0, VotersRecord),
    ],
)
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_control_records_are_those_of_the_schemas(
    made: Any, kind: type[ControlRecord], version: int, schema: Any, data: Any
) -> None:
    record = dataclasses.replace(data.draw(made.record(kind, version)), version=version)
    value = record.encode_value()
    assert decode_control_record(record.encode_key(), value) == record
    entity, size = entity_reader(schema)(value, 0)
    assert size == len(value)
    buffer = io.BytesIO()
    entity_writer(schema)(buffer, entity)
    assert buffer.getvalue() == value
    assert plain_value(entity)["version"] == version


def test_control_records_not_known_are_kept_as_bytes() -> None:
    for key, value in ((b"\0\0\0\1", b"\0\0\0\0\0\5"), (b"\0\0\0\5", b"\0\7\0\1\0")):
        record = decode_control_record(key, value)
        assert isinstance(record, UnknownControlRecord)
        assert (record.encode_key(), record.encode_value()) == (key, value)


def test_a_snapshot_header_tells_a_time() -> None:
    moment = int(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp() * 1000)
    header = SnapshotHeader(last_contained_log_timestamp=moment)
    assert header.encode_value() == b"\0\0" + moment.to_bytes(8) + b"\0"
