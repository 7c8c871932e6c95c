"""Every message of the table, encoded and decoded; whatever is no message, refused."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer
from tests.support.tiers import examples

from holdfast.errors import ApiError, MalformedFrame
from holdfast.wire import apis, messages
from holdfast.wire.message_encoder import plain_value

FEW = settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PRODUCE, FETCH, METADATA, HEARTBEAT, CREATE_TOPICS, DESCRIBE_TRANSACTIONS = 0, 1, 3, 12, 19, 65


def written_by_kio(entity: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def heartbeat(group: str = "g") -> dict[str, Any]:
    return {"group_id": group, "generation_id": 7, "member_id": "m", "group_instance_id": None}


def test_a_message_of_defaults_is_what_kio_writes(made: Any) -> None:
    for kind, key, version, entity_type in made.every_type():
        expected = written_by_kio(made.zero_entity(entity_type))
        assert made.encoder(kind)(key, version, {}) == expected, (kind, key, version)


@pytest.mark.parametrize("api", apis.APIS, ids=lambda api: api.name)
@FEW
@given(data=st.data())
def test_any_message_is_encoded_as_kio_does_and_decoded_to_the_same(made: Any, api: Any, data: Any) -> None:
    choices = [(kind, version, type_) for kind, key, version, type_ in made.every_type() if key == api.key]
    kind, version, entity_type = data.draw(st.sampled_from(choices))
    entity = data.draw(made.entity(entity_type))
    encoded = made.encoder(kind)(api.key, version, plain_value(entity))
    assert encoded == written_by_kio(entity)
    assert made.decoder(kind)(api.key, version, b"head" + encoded, 4) == entity


@settings(FEW, max_examples=examples(100))
@given(data=st.data())
def test_damaged_frames_are_refused_or_read_but_nothing_else(made: Any, data: Any) -> None:
    kind, key, version, entity_type = data.draw(st.sampled_from(list(made.every_type())))
    encoded = bytearray(written_by_kio(data.draw(made.entity(entity_type))))
    chance = data.draw(st.randoms(use_true_random=False))
    for _ in range(40):
        damaged = damage(encoded, chance)
        try:
            made.decoder(kind)(key, version, damaged, 0)
        except MalformedFrame:
            continue


def damage(encoded: bytearray, chance: random.Random) -> bytes:
    damaged = bytearray(encoded)
    for _ in range(chance.randint(1, 3)):
        position = chance.randrange(len(damaged) + 1)
        match chance.randrange(4):
            case 0:
                del damaged[position:]
            case 1:
                damaged[position:position] = chance.randbytes(chance.randint(1, 4))
            case 2:
                damaged[position : position + 1] = chance.randbytes(1)
            case _:
                damaged[position : position + 4] = chance.choice(
                    [b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80" * 4]
                )
    return bytes(damaged)


ABSURD_LENGTHS = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from holdfast.errors import MalformedFrame
from holdfast.wire import apis, messages
from holdfast.wire.message_schema import request_type, shapes

def one_of_each(entity_type):
    fields = {}
    for shape in shapes(entity_type):
        if shape.struct_type is not None:
            item = one_of_each(shape.struct_type)
            fields[shape.name] = [item] if shape.is_array else item
        elif shape.is_array:
            fields[shape.name] = [{"string": "a", "uuid": None}.get(shape.kafka_type, 0)]
    return fields

lengths = [bytes.fromhex(digits) for digits in ("7fffffff", "0fffffff", "ffffffff0f", "ffffff7f")]
for api in apis.APIS:
    for version in sorted({api.served_from, api.max}):
        whole = messages.encode_request(api.key, version, one_of_each(request_type(api.key, version)))
        for position in range(len(whole)):
            for length in lengths:
                frame = whole[:position] + length + whole[position + (4 if length[0] < 128 else 1):]
                try:
                    messages.decode_request(api.key, version, frame)
                except MalformedFrame:
                    pass
print("survived")
"""


def test_an_absurd_array_length_reserves_no_memory() -> None:
    # A process of its own with two gigabytes of address space: a reader that cannot reserve memory aborts.
    done = subprocess.run([sys.executable, "-c", ABSURD_LENGTHS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "survived\n"


@pytest.mark.parametrize("length", [2**31 - 1, 2**20, 3])
def test_an_array_longer_than_the_frame_is_refused(length: int) -> None:
    with pytest.raises(MalformedFrame, match=f"array of {length} items"):
        messages.decode_request(METADATA, 1, length.to_bytes(4) + b"\0\1a\0")


def test_bytes_after_the_message_are_ignored_as_kafka_does() -> None:
    encoded = messages.encode_request(HEARTBEAT, 4, heartbeat())
    assert messages.decode_request(HEARTBEAT, 4, encoded + b"\0") == messages.decode_request(
        HEARTBEAT, 4, encoded
    )


def test_every_cut_of_a_message_is_refused() -> None:
    partitions = [{"index": 0, "records": b"records"}]
    for version in range(3, 14):
        fields = {"topic_data": [{"name": "t", "topic_id": bytes(16), "partition_data": partitions}]}
        encoded = messages.encode_request(PRODUCE, version, fields)
        for size in range(len(encoded)):
            with pytest.raises(MalformedFrame):
                messages.decode_request(PRODUCE, version, encoded[:size])


@pytest.mark.parametrize("buffer_type", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_read(buffer_type: Any) -> None:
    encoded = messages.encode_request(HEARTBEAT, 4, heartbeat())
    assert messages.decode_request(HEARTBEAT, 4, buffer_type(encoded)).group_id == "g"


def test_unknown_tagged_fields_are_skipped_at_every_level() -> None:
    # KIP-482: a reader skips the tagged fields it does not know.
    tags = b"\x02\x63\x03abc\xc8\x01\x00"
    encoded = messages.encode_request(HEARTBEAT, 4, heartbeat())
    expected = messages.decode_request(HEARTBEAT, 4, encoded)
    assert messages.decode_request(HEARTBEAT, 4, encoded[:-1] + tags) == expected

    fields = {"topics": [{"name": "t", "num_partitions": 3, "replication_factor": 1}], "timeout": 5}
    encoded = messages.encode_request(CREATE_TOPICS, 7, fields)
    expected = messages.decode_request(CREATE_TOPICS, 7, encoded)
    assert encoded.endswith(b"\0" + b"\0\0\0\5\0\0")  # the topic's tags, the timeout, validate_only, our tags
    assert messages.decode_request(CREATE_TOPICS, 7, encoded[:-7] + tags + encoded[-6:-1] + tags) == (
        expected
    )


def test_unknown_tagged_fields_inside_a_known_one_are_skipped() -> None:
    partition = {"partition_index": 1, "diverging_epoch": {"epoch": 5, "end_offset": 6}}
    fields = {"responses": [{"topic_id": bytes(16), "partitions": [partition]}]}
    encoded = messages.encode_response(FETCH, 16, fields)
    tagged = b"\x01\x00\x0d" + (5).to_bytes(4) + (6).to_bytes(8) + b"\x00"
    assert tagged in encoded
    grown = b"\x02\x00\x11" + (5).to_bytes(4) + (6).to_bytes(8) + b"\x01\x63\x02ab" + b"\x63\x00"
    assert messages.decode_response(FETCH, 16, encoded.replace(tagged, grown)) == messages.decode_response(
        FETCH, 16, encoded
    )


@pytest.mark.parametrize(
    "tags",
    [
        b"\x01",
        b"\x01\x63",
        b"\x01\x63\x05abc",
        b"\xff\xff\xff\xff\x0f",
        b"\x01\x63\xff\xff\xff\xff\x0f",
        b"\x80" * 6,
    ],
)
def test_damaged_tagged_fields_are_refused(tags: bytes) -> None:
    encoded = messages.encode_request(HEARTBEAT, 4, heartbeat())
    with pytest.raises(MalformedFrame):
        messages.decode_request(HEARTBEAT, 4, encoded[:-1] + tags)


def test_a_known_tagged_field_of_the_wrong_size_is_refused() -> None:
    encoded = messages.encode_request(FETCH, 12, {"cluster_id": "abc"})
    right = b"\x01\x00\x04\x04abc"
    assert encoded.endswith(right)
    with pytest.raises(MalformedFrame, match="does not fill"):
        messages.decode_request(FETCH, 12, encoded[: -len(right)] + b"\x01\x00\x06\x04abcde")


def test_tagged_fields_are_written_only_when_they_differ_from_the_default() -> None:
    partition = {"partition_index": 1, "diverging_epoch": {"epoch": -1, "end_offset": -1}}
    same = messages.encode_response(FETCH, 12, {"responses": [{"topic": "t", "partitions": [partition]}]})
    del partition["diverging_epoch"]
    assert same == messages.encode_response(
        FETCH, 12, {"responses": [{"topic": "t", "partitions": [partition]}]}
    )


def test_fields_another_version_has_are_dropped() -> None:
    topic = {"topic": "t", "topic_id": bytes(16), "partitions": []}
    fields = {"responses": [topic], "node_endpoints": [], "session_id": 3, "throttle_time": 9}
    for version in range(4, 19):
        decoded = messages.decode_response(FETCH, version, messages.encode_response(FETCH, version, fields))
        assert len(decoded.responses) == 1


def test_a_field_no_version_has_is_an_error_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no version of FetchableTopicResponse has a field 'partition'"):
        messages.encode_response(FETCH, 12, {"responses": [{"partition": []}]})
    monkeypatch.setattr(messages, "strict_fields", False)
    assert messages.encode_response(FETCH, 12, {"nonsense": 1}) == messages.encode_response(FETCH, 12, {})


def test_plain_values_stand_for_every_special_type() -> None:
    topic_id = uuid.uuid4()
    as_bytes = messages.encode_request(METADATA, 12, {"topics": [{"topic_id": topic_id.bytes, "name": None}]})
    assert as_bytes == messages.encode_request(
        METADATA, 12, {"topics": [{"topic_id": topic_id, "name": None}]}
    )
    assert messages.decode_request(METADATA, 12, as_bytes).topics[0].topic_id == topic_id
    refused = messages.encode_response(HEARTBEAT, 4, {"error_code": ErrorCode.rebalance_in_progress})
    assert refused == messages.encode_response(HEARTBEAT, 4, {"error_code": 27, "throttle_time": 0})
    appended = {"index": 0, "log_append_time": None}
    fields = {"responses": [{"name": "t", "partition_responses": [appended]}]}
    assert (-1).to_bytes(8, signed=True) in messages.encode_response(PRODUCE, 9, fields)


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        (4, {"group_id": None}),
        (4, {"generation_id": "seven"}),
        (4, {"generation_id": 2**31}),
        (0, {"group_id": "g" * 2**15}),
        (4, {"member_id": 7}),
    ],
)
def test_a_value_the_field_cannot_hold_is_an_error(version: int, fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError, struct.error)) as caught:
        messages.encode_request(HEARTBEAT, version, fields)
    assert "HeartbeatRequest" in "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("start_time", [-1, None, 1_700_000_000_123])
def test_a_transaction_that_is_not_open_has_no_start_time(start_time: int | None) -> None:
    state = {"transactional_id": "t", "transaction_state": "Empty", "transaction_start_time": start_time}
    encoded = messages.encode_response(DESCRIBE_TRANSACTIONS, 0, {"transaction_states": [state]})
    (found,) = messages.decode_response(DESCRIBE_TRANSACTIONS, 0, encoded).transaction_states
    assert found.transactional_id == "t"
    if start_time is None or start_time < 0:
        assert found.transaction_start_time is None
    else:
        assert round(found.transaction_start_time.timestamp() * 1000) == start_time


def test_an_api_or_version_without_a_schema_is_unsupported() -> None:
    for key, version in [(999, 0), (-1, 0), (PRODUCE, 2), (PRODUCE, 99), (METADATA, -1)]:
        with pytest.raises(ApiError) as caught:
            messages.decode_request(key, version, b"", 0)
        assert caught.value.code is ErrorCode.unsupported_version
        with pytest.raises(ApiError):
            messages.encode_response(key, version, {})
        with pytest.raises(ApiError):
            messages.preload(key, version)


def header(key: int, version: int, client_id: str | None, tags: bytes) -> bytes:
    name = b"\xff\xff" if client_id is None else len(client_id.encode()).to_bytes(2) + client_id.encode()
    return key.to_bytes(2) + version.to_bytes(2) + (77).to_bytes(4) + name + tags


def test_request_headers_are_read_in_both_shapes() -> None:
    old = messages.parse_request_header(header(METADATA, 8, "me", b"") + b"body")
    assert old == (METADATA, 8, 77, "me", 12)
    new = messages.parse_request_header(header(METADATA, 9, "mé", b"\0") + b"body")
    assert new == (METADATA, 9, 77, "mé", 14)
    anonymous = messages.parse_request_header(header(METADATA, 9, None, b"\x01\x05\x02ab"))
    assert (anonymous.client_id, anonymous.body_offset) == (None, 15)


def test_a_client_from_the_future_still_has_a_header() -> None:
    future = messages.parse_request_header(header(apis.API_VERSIONS, 99, "x", b"\0") + b"whatever")
    assert (future.version, future.body_offset) == (99, 12)
    unknown = messages.parse_request_header(header(999, 1, "x", b""))
    assert (unknown.api_key, unknown.correlation_id) == (999, 77)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\3\0\1",
        header(METADATA, 9, "me", b"\0")[:-2],
        header(METADATA, 9, "me", b""),
        header(METADATA, 9, "me", b"\x01\x05\x09ab"),
        header(METADATA, 9, "me", b"\xff\xff\xff\xff\x0f"),
        header(METADATA, 1, "me", b"").replace(b"me", b"\xff\xfe"),
        header(METADATA, 1, None, b"").replace(b"\xff\xff", b"\xff\xfe"),
        header(METADATA, 1, "me", b"").replace(b"\0\2me", b"\x7f\xffme"),
    ],
)
def test_damaged_request_headers_are_refused(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        messages.parse_request_header(frame)


def test_response_headers_have_the_shape_kio_knows(made: Any) -> None:
    for kind, key, version, entity_type in made.every_type():
        flexible_header = entity_type.__header_schema__.__flexible__
        if kind == "response":
            assert messages.response_header_version(key, version) == int(flexible_header), (key, version)
            header_bytes = messages.response_header(key, version, 5)
            assert header_bytes == b"\0\0\0\5" + (b"\0" if flexible_header else b"")
        else:
            assert apis.request_header_version(key, version) == (2 if flexible_header else 1), (key, version)
