"""What a batch must pass before it enters a log: every refusal with its code, and what is stored of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.node import intake
from holdfast.broker.node.context import Session
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.intake import admit
from holdfast.errors import ApiError, InvalidRecords
from holdfast.testing.bare_node import BareNode
from holdfast.wire.batch import (
    HEADER_SIZE,
    Record,
    build_batch,
    check_whole,
    iterate_records,
    read_header,
    seal,
)
from holdfast.wire.codecs import Codec

MakeHosted = Callable[..., HostedPartition]


@pytest.fixture
def make_hosted(node: BareNode) -> MakeHosted:
    """A partition of a topic with these settings, given with underscores for dots."""
    client = node.connect()

    def make(name: str = "t", **configs: str) -> HostedPartition:
        client.create_topic(name, 1, **configs)
        return node.hosted(name)

    return make


@pytest.fixture
def hosted(make_hosted: MakeHosted) -> HostedPartition:
    return make_hosted()


def batch(node: BareNode, *records: Record, timestamp: int | None = None, **options: Any) -> bytes:
    when = node.clock.now().wall_ms if timestamp is None else timestamp
    return build_batch(records or (Record(0, 0, b"k", b"v"),), base_timestamp=when, **options)


def refusal(node: BareNode, hosted: HostedPartition, data: bytes) -> tuple[ErrorCode, list[int]]:
    """The code a batch is refused with, and the records it is refused for."""
    before = hosted.log.end_offset
    with pytest.raises((InvalidRecords, ApiError)) as caught:
        admit(hosted, data, node.clock.now())
    assert hosted.log.end_offset == before
    error = caught.value
    assert isinstance(error, InvalidRecords | ApiError)
    return error.code, list(getattr(error, "record_indexes", ()))


def test_a_good_batch_passes_as_the_bytes_it_came_as(node: BareNode, hosted: HostedPartition) -> None:
    for codec in Codec:
        data = batch(node, Record(0, 0, None, b"v" * 100), Record(1, 5, b"k", None), codec=codec)
        admitted = admit(hosted, data, node.clock.now())
        assert not isinstance(admitted, Duplicate)
        header, stored = admitted
        assert stored == data
        assert header == read_header(data)


def test_a_batch_above_the_topics_maximum_is_too_large(node: BareNode, make_hosted: MakeHosted) -> None:
    hosted = make_hosted(max_message_bytes="200")
    small = batch(node, Record(0, 0, None, b"x" * 60))
    assert admit(hosted, small, node.clock.now())
    large = batch(node, Record(0, 0, None, b"x" * 200))
    assert refusal(node, hosted, large) == (ErrorCode.message_too_large, [])


def test_the_maximum_counts_the_compressed_size(node: BareNode, make_hosted: MakeHosted) -> None:
    hosted = make_hosted(max_message_bytes="200")
    assert admit(hosted, batch(node, Record(0, 0, None, b"x" * 5000), codec=Codec.ZSTD), node.clock.now())


def test_a_batch_that_the_topics_compression_makes_too_large_is_refused(
    node: BareNode, make_hosted: MakeHosted
) -> None:
    data = batch(node, Record(0, 0, None, b"x" * 5000), codec=Codec.ZSTD)
    hosted = make_hosted(max_message_bytes="300", compression_type="uncompressed")
    assert refusal(node, hosted, data) == (ErrorCode.message_too_large, [])
    hosted = make_hosted("s", internal_segment_bytes="300", compression_type="uncompressed")
    assert refusal(node, hosted, data) == (ErrorCode.record_list_too_large, [])


def test_a_batch_larger_than_a_segment_is_refused(node: BareNode, make_hosted: MakeHosted) -> None:
    hosted = make_hosted(internal_segment_bytes="300")
    data = batch(node, Record(0, 0, None, b"x" * 400))
    assert refusal(node, hosted, data) == (ErrorCode.record_list_too_large, [])


def test_a_compacted_topic_needs_a_key_in_every_record(node: BareNode, make_hosted: MakeHosted) -> None:
    hosted = make_hosted(cleanup_policy="compact")
    records = [
        Record(0, 0, b"k", b"v"),
        Record(1, 0, None, b"v"),
        Record(2, 0, b"k", None),
        Record(3, 0, None, None),
    ]
    for codec in Codec:
        data = batch(node, *records, codec=codec)
        assert refusal(node, hosted, data) == (ErrorCode.invalid_record, [1, 3])
    assert admit(hosted, batch(node, records[0], Record(1, 0, b"", b"v")), node.clock.now())


def test_times_too_far_from_the_brokers_are_refused_record_by_record(
    node: BareNode, make_hosted: MakeHosted
) -> None:
    hosted = make_hosted(message_timestamp_before_max_ms="1000", message_timestamp_after_max_ms="500")
    now = node.clock.now().wall_ms
    fine = [Record(0, -1000, b"k", b"v"), Record(1, 500, b"k", b"v"), Record(2, 0, b"k", b"v")]
    assert admit(hosted, batch(node, *fine), node.clock.now())
    early = [Record(0, -1001, b"k", b"v"), Record(1, 0, b"k", b"v")]
    assert refusal(node, hosted, batch(node, *early)) == (ErrorCode.invalid_timestamp, [0])
    late = [Record(0, 0, b"k", b"v"), Record(1, 501, b"k", b"v")]
    assert refusal(node, hosted, batch(node, *late)) == (ErrorCode.invalid_timestamp, [1])
    lie = batch(node, Record(0, 0, b"k", b"v"), max_timestamp=now + 10_000)
    assert refusal(node, hosted, lie)[0] is ErrorCode.invalid_timestamp


@pytest.mark.parametrize("base_timestamp", [2**63 - 1, -(2**63)])
def test_times_at_the_ends_of_time_are_refused_whatever_the_header_says_of_the_greatest(
    node: BareNode, hosted: HostedPartition, base_timestamp: int
) -> None:
    data = batch(node)
    odd = seal(read_header(data)._replace(base_timestamp=base_timestamp), data[HEADER_SIZE:])
    assert refusal(node, hosted, odd) == (ErrorCode.invalid_timestamp, [0])


def test_records_without_time_pass(node: BareNode, make_hosted: MakeHosted) -> None:
    hosted = make_hosted(message_timestamp_before_max_ms="1000")
    assert admit(hosted, batch(node, timestamp=-1), node.clock.now())


def test_a_client_may_not_claim_the_brokers_time(node: BareNode, make_hosted: MakeHosted) -> None:
    for number, kind in enumerate(("CreateTime", "LogAppendTime")):
        hosted = make_hosted(f"t{number}", message_timestamp_type=kind)
        data = batch(node, log_append_time=True)
        assert refusal(node, hosted, data)[0] is ErrorCode.invalid_timestamp


def test_log_append_time_stamps_the_batch_and_keeps_its_records(
    node: BareNode, make_hosted: MakeHosted
) -> None:
    hosted = make_hosted(message_timestamp_type="LogAppendTime")
    data = batch(node, Record(0, 0, b"k", b"v"), timestamp=5, codec=Codec.LZ4)
    admitted = admit(hosted, data, node.clock.now())
    assert not isinstance(admitted, Duplicate)
    header, stored = admitted
    assert check_whole(stored) == header
    assert header.is_log_append_time
    assert header.max_timestamp == node.clock.now().wall_ms
    assert list(iterate_records(stored)) == list(iterate_records(data))


@pytest.mark.parametrize("sent", list(Codec))
@pytest.mark.parametrize("wanted", ["uncompressed", "gzip", "snappy", "lz4", "zstd", "producer"])
def test_a_topic_may_have_its_own_compression(
    node: BareNode, make_hosted: MakeHosted, wanted: str, sent: Codec
) -> None:
    hosted = make_hosted(compression_type=wanted)
    records = [Record(index, index, b"k%d" % index, b"v" * 50, (("h", b"x"),)) for index in range(5)]
    data = batch(node, *records, codec=sent, producer_id=9, producer_epoch=1, base_sequence=4)
    admitted = admit(hosted, data, node.clock.now())
    assert not isinstance(admitted, Duplicate)
    header, stored = admitted
    assert check_whole(stored) == header
    codecs = {"uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4, "producer": int(sent)}
    assert header.codec == codecs[wanted]
    assert list(iterate_records(stored)) == records
    assert header[5:] == check_whole(data)._replace(attributes=header.attributes)[5:]


# Idempotence


def send(node: BareNode, sequence: int, epoch: int = 0, count: int = 1) -> bytes:
    records = [Record(index, 0, b"k", b"v") for index in range(count)]
    return batch(node, *records, producer_id=7, producer_epoch=epoch, base_sequence=sequence)


def write(node: BareNode, hosted: HostedPartition, data: bytes) -> Any:
    admitted = admit(hosted, data, node.clock.now())
    if isinstance(admitted, Duplicate):
        return admitted
    return hosted.log.append(*admitted, hosted.leader_epoch, node.clock.now())


def test_a_repeated_batch_is_a_duplicate_of_the_last_five(node: BareNode, hosted: HostedPartition) -> None:
    sent = [send(node, number * 2, count=2) for number in range(7)]
    for data in sent:
        write(node, hosted, data)
    for number in range(2, 7):
        verdict = write(node, hosted, sent[number])
        assert isinstance(verdict, Duplicate)
        assert (verdict.first_offset, verdict.last_offset) == (number * 2, number * 2 + 1)
    assert refusal(node, hosted, sent[1])[0] is ErrorCode.out_of_order_sequence_number
    assert hosted.log.end_offset == 14


def test_a_gap_in_sequences_is_refused(node: BareNode, hosted: HostedPartition) -> None:
    write(node, hosted, send(node, 0))
    assert refusal(node, hosted, send(node, 2))[0] is ErrorCode.out_of_order_sequence_number
    assert write(node, hosted, send(node, 1)).base_offset == 1


def test_an_older_epoch_is_fenced_and_a_newer_one_begins_at_0(
    node: BareNode, hosted: HostedPartition
) -> None:
    write(node, hosted, send(node, 0, epoch=3))
    assert refusal(node, hosted, send(node, 1, epoch=2))[0] is ErrorCode.invalid_producer_epoch
    assert refusal(node, hosted, send(node, 1, epoch=4))[0] is ErrorCode.out_of_order_sequence_number
    assert write(node, hosted, send(node, 0, epoch=4)).base_offset == 1


def test_an_unknown_producer_may_begin_anywhere(node: BareNode, hosted: HostedPartition) -> None:
    assert write(node, hosted, send(node, 1234)).base_offset == 0


def test_sequences_wrap(node: BareNode, hosted: HostedPartition) -> None:
    write(node, hosted, send(node, 2**31 - 2, count=2))
    assert write(node, hosted, send(node, 0)).base_offset == 2


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_duplicate_is_known_after_any_restart(node: BareNode, hosted: HostedPartition, end: str) -> None:
    client = node.connect()
    sent = [send(node, number) for number in range(3)]
    for data in sent:
        assert client.produce("t", data).error_code is ErrorCode.none
    node = getattr(node, end)()
    client = node.connect()
    again = client.produce("t", sent[1])
    assert (again.error_code, again.base_offset) == (ErrorCode.none, 1)
    assert node.hosted("t").log.end_offset == 3


@pytest.mark.parametrize("version", [8, 9], ids=["general", "usual"])
def test_both_ways_of_produce_ask_for_permission_in_one_place(
    node: BareNode, hosted: HostedPartition, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def refuse(session: Session, topic: str, size: int) -> None:
        asked.append((session.principal, session.client_id, topic))
        raise ApiError(ErrorCode.topic_authorization_failed)

    client = node.connect()
    client.connection.session.principal = "User:ann"
    monkeypatch.setattr(intake, "permit", refuse)
    answer = client.ask(0, version, **client.produce_fields("t", {0: batch(node)}))
    (told,) = answer.responses[0].partition_responses
    assert told.error_code is ErrorCode.topic_authorization_failed
    assert [(principal, topic) for principal, _, topic in asked] == [("User:ann", "t")]
    assert asked[0][1], "the request names its client"
    assert hosted.log.end_offset == 0
