"""Frames that are no requests, APIs and versions that nobody offers: who closes, who answers, who keeps quiet."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side

from holdfast.testing.wire_client import frame
from holdfast.wire.api_keys import API_VERSIONS, FETCH, METADATA, PRODUCE
from holdfast.wire.messages import encode_request

Compare = Callable[[Script], None]


def after(side: Side, label: str, data: bytes) -> None:
    """What follows some bytes, and whether the broker still serves others."""
    side.client.send(data)
    answer = side.client.receive(timeout_s=5.0)
    side.note(label, answer if isinstance(answer, str) else "an answer")
    side.client.close()
    side.note(f"{label}: others are served", side.client.is_alive())


def lengths(side: Side) -> None:
    good = frame(METADATA, 1, struct.pack(">i", -1))
    after(side, "good", good)
    after(side, "negative length", struct.pack(">i", -1) + good[4:])
    after(side, "most negative length", struct.pack(">i", -(2**31)) + good[4:])
    after(side, "longest length", struct.pack(">i", 2**31 - 1) + good[4:])
    after(side, "one byte more than allowed", struct.pack(">i", 104_857_601) + good[4:])
    after(side, "length 0", struct.pack(">i", 0))
    after(side, "length 1", struct.pack(">i", 1) + b"\0")
    after(side, "length 7", struct.pack(">i", 7) + good[4:11])
    after(side, "only the ids", struct.pack(">i", 8) + good[4:12])
    after(side, "an HTTP request", b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n")
    after(side, "a TLS hello", bytes.fromhex("16030100f5010000f10303") + bytes(100))


def bodies(side: Side) -> None:
    whole = encode_request(METADATA, 12, {"topics": [{"name": "frames", "topic_id": None}]})
    after(side, "whole", frame(METADATA, 12, whole))
    after(side, "cut off", frame(METADATA, 12, whole[:-4]))
    after(side, "empty", frame(METADATA, 12, b""))
    after(side, "garbage", frame(METADATA, 12, b"\xff" * 50))
    after(side, "zeros", frame(METADATA, 12, bytes(50)))
    after(side, "an old array of two billion", frame(METADATA, 1, struct.pack(">i", 2**31 - 1)))
    after(side, "an array of minus two", frame(METADATA, 1, struct.pack(">i", -2)))
    after(side, "a name of minus five bytes", frame(METADATA, 1, struct.pack(">ih", 1, -5)))
    after(side, "a name longer than the frame", frame(METADATA, 1, struct.pack(">ih", 1, 500) + b"abc"))
    after(side, "a name that is not UTF-8", frame(METADATA, 1, struct.pack(">ih", 1, 2) + b"\xff\xfe"))
    after(side, "a produce of garbage", frame(PRODUCE, 9, b"\x01\xff\xff\xff\xff\xff\xff\xff"))
    after(side, "a fetch of nothing", frame(FETCH, 12, b""))


def headers(side: Side) -> None:
    body = struct.pack(">i", -1)
    after(side, "no client id", frame(METADATA, 1, body, client_id=None))
    after(side, "empty client id", frame(METADATA, 1, body, client_id=""))
    after(side, "client id in many letters", frame(METADATA, 1, body, client_id="käfka-é-日本"))
    long_id = struct.pack(">hhih", METADATA, 1, 1, 30_000) + b"x"
    after(side, "client id longer than the frame", struct.pack(">i", len(long_id)) + long_id)
    negative = struct.pack(">hhih", METADATA, 1, 1, -7) + body
    after(side, "client id of minus seven bytes", struct.pack(">i", len(negative)) + negative)
    tagged = (
        struct.pack(">hhih", METADATA, 12, 1, 0)
        + b"\x01\x63\x02ab"
        + encode_request(METADATA, 12, {"topics": []})
    )
    after(side, "a tagged field nobody knows", struct.pack(">i", len(tagged)) + tagged)


def versions_not_offered(side: Side) -> None:
    for api_key, version in (
        (METADATA, 14),
        (METADATA, 99),
        (METADATA, -1),
        (PRODUCE, 2),
        (PRODUCE, 0),
        (PRODUCE, 14),
        (FETCH, 3),
        (FETCH, 19),
    ):
        body = encode_request(api_key, 12, {"topics": []} if api_key != PRODUCE else {"topic_data": []})
        after(side, f"api {api_key} version {version}", frame(api_key, version, body))
    for api_key in (4, 5, 6, 7, 52, 53, 54, 56, 58, 59, 62, 63, 67, 70, 71, 73, 82, 93, 500, -1):
        after(side, f"api {api_key}", frame(api_key, 0, b"", header_version=1))


def answers_to_api_versions(side: Side) -> None:
    """Asked in a version we do not know, ApiVersions alone answers: in version 0."""
    for version in (5, 9, 32_767, -1):
        side.client.send(frame(API_VERSIONS, version, b"\x02x\x021\0", correlation_id=7, header_version=2))
        answer = side.client.receive()
        side.note(f"version {version}", answer if isinstance(answer, str) else _version_zero(side, answer))
        side.client.close()

    def ask(label: str, version: int, name: str, software: str) -> None:
        fields = {"client_software_name": name, "client_software_version": software}
        answer = side.client.ask(API_VERSIONS, version, fields)
        side.note(label, answer if isinstance(answer, str) else answer.error_code)

    ask("good name", 3, "librdkafka", "2.1.0-rc1")
    ask("empty name", 3, "", "1")
    ask("empty version", 4, "x", "")
    ask("odd name", 4, "my client", "1")
    ask("begins with a dash", 4, "-x", "1")
    ask("ends with a dot", 4, "x.", "1")
    ask("underscore", 4, "a_b", "1")


def _version_zero(side: Side, answer: bytes) -> dict[str, Any]:
    decoded = side.client.decode(answer, API_VERSIONS, 0, 7)
    return {"error_code": decoded.error_code, "api_keys": decoded.api_keys}


def requests_without_waiting(side: Side) -> None:
    """Many requests at once are answered in order, the first although it has to wait."""
    side.create_topic("pipelined")
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000, "current_leader_epoch": -1}
    waiting = {
        "replica_id": -1,
        "max_wait": 300,
        "min_bytes": 1,
        "max_bytes": 1000,
        "session_epoch": -1,
        "topics": [{"topic": "pipelined", "partitions": [part]}],
    }
    expected = [side.client.tell(FETCH, 12, waiting)]
    expected += [side.client.tell(METADATA, 12, {"topics": []}) for _ in range(20)]
    answers = [side.client.receive() for _ in expected]
    side.note(
        "in order",
        [a[:4] if isinstance(a, bytes) else a for a in answers] == [struct.pack(">i", e) for e in expected],
    )


SCRIPTS = (
    lengths,
    bodies,
    headers,
    versions_not_offered,
    answers_to_api_versions,
    requests_without_waiting,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_frames_are_taken_as_apache_kafka_takes_them(script: Script, compare: Compare) -> None:
    compare(script)
