"""Fetch by hand is Fetch by the schemas: the same fields in every version, and no byte trusted."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.errors import MalformedFrame
from holdfast.reader.fetch_messages import FETCH, LOWEST_VERSION, Asked, pack_fetch, walk_fetch
from holdfast.wire import apis
from holdfast.wire.messages import decode_request, decode_response, encode_response

VERSIONS = range(LOWEST_VERSION, apis.BY_KEY[FETCH].max + 1)


def random_answer(chance: random.Random) -> dict[str, Any]:
    def partition(number: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "partition_index": number,
            "error_code": chance.choice((0, 0, 1, 6, 74)),
            "high_watermark": chance.getrandbits(40),
            "last_stable_offset": chance.getrandbits(40),
            "log_start_offset": chance.getrandbits(40),
            "aborted_transactions": chance.choice(
                (None, [], [{"producer_id": chance.getrandbits(40), "first_offset": n} for n in range(3)])
            ),
            "records": chance.choice((None, b"", chance.randbytes(chance.randrange(300)))),
        }
        if chance.random() < 0.3:
            fields["current_leader"] = {"leader_id": 3, "leader_epoch": 9}
            fields["diverging_epoch"] = {"epoch": 1, "end_offset": 5}
        return fields

    topics = [
        {
            "topic_id": UUID(int=chance.getrandbits(128)),
            "partitions": [partition(number) for number in range(chance.randrange(4))],
        }
        for _ in range(chance.randrange(4))
    ]
    return {
        "throttle_time": chance.choice((0, 17)),
        "error_code": chance.choice((0, 71)),
        "responses": topics,
        "node_endpoints": [{"node_id": 3, "host": "h", "port": 9092, "rack": None}] if topics else [],
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_answers_are_walked_as_the_schemas_read_them(version: int) -> None:
    for seed in range(40):
        body = encode_response(FETCH, version, random_answer(random.Random(seed)))
        entity = decode_response(FETCH, version, body)
        answer = walk_fetch(memoryview(body))
        assert answer.throttle_ms == entity.throttle_time.total_seconds() * 1000
        assert answer.error_code == entity.error_code
        assert [
            (
                each.topic_id.bytes,
                each.partition,
                each.error_code,
                each.high_watermark,
                each.last_stable_offset,
                each.log_start_offset,
                [tuple(aborted) for aborted in each.aborted],
                bytes(each.records),
            )
            for each in answer.partitions
        ] == [
            (
                topic.topic_id.bytes,
                each.partition_index,
                each.error_code,
                each.high_watermark,
                each.last_stable_offset,
                each.log_start_offset,
                [(aborted.producer_id, aborted.first_offset) for aborted in each.aborted_transactions or ()],
                bytes(each.records or b""),
            )
            for topic in entity.responses
            for each in topic.partitions
        ]


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_are_packed_as_the_schemas_read_them(version: int) -> None:
    topics = {
        UUID(int=7): [Asked(0, 5, 1_000, 65_536), Asked(200, -1, 2**40, 1 << 30)],
        UUID(int=8): [Asked(1, 0, 0, 1)],
    }
    body = pack_fetch(version, topics, isolation_level=1, wait_ms=100, bytes_max=4 << 20)
    request = decode_request(FETCH, version, body)
    assert (request.max_wait.total_seconds(), request.min_bytes, request.max_bytes) == (0.1, 1, 4 << 20)
    assert (request.isolation_level, request.session_id, request.session_epoch) == (1, 0, -1)
    assert {
        UUID(bytes=topic.topic_id.bytes): [
            Asked(each.partition, each.current_leader_epoch, each.fetch_offset, each.partition_max_bytes)
            for each in topic.partitions
        ]
        for topic in request.topics
    } == topics
    assert all(
        (each.last_fetched_epoch, each.log_start_offset) == (-1, -1)
        for topic in request.topics
        for each in topic.partitions
    )
    assert (request.forgotten_topics_data, request.rack_id) == ((), "")


@settings(max_examples=examples(300))
@given(seed=st.integers(0, 10**6), data=st.data())
def test_damaged_answers_are_malformed_or_read_within_their_bytes(seed: int, data: st.DataObject) -> None:
    body = bytearray(encode_response(FETCH, 17, random_answer(random.Random(seed))))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))
    cut = data.draw(st.integers(0, len(body)))
    try:
        answer = walk_fetch(memoryview(body)[:cut])
    except MalformedFrame:
        return
    assert sum(len(each.records) for each in answer.partitions) <= cut


@given(st.binary(max_size=200))
def test_random_bytes_are_no_answer_or_a_small_one(body: bytes) -> None:
    try:
        answer = walk_fetch(memoryview(body))
    except MalformedFrame:
        return
    assert len(answer.partitions) <= len(body)
