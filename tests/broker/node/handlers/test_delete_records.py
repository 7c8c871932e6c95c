"""DeleteRecords: what was acknowledged may be deleted, within the time-out, with one write per log directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.testing.disk_files import SimulatedFile
from holdfast.wire.batch import make_batch

BATCH = make_batch([b"a", b"b"], timestamp=1_700_000_000_000)
TIMEOUT_MS = 5_000
UP_TO_HIGH_WATERMARK = -1


@pytest.fixture
def client(node: BareNode) -> BareClient:
    client = node.connect()
    client.create_topic("t", partitions=3)
    return client


def begin(client: BareClient, *wanted: tuple[int, int], timeout_ms: int = TIMEOUT_MS) -> int:
    partitions = [{"partition_index": index, "offset": offset} for index, offset in wanted]
    return client.begin(21, 2, topics=[{"name": "t", "partitions": partitions}], timeout=timeout_ms)


def results(client: BareClient, asked: int) -> list[tuple[int, ErrorCode, int]]:
    (topic,) = client.answer(asked).topics
    return [(one.partition_index, one.error_code, one.low_watermark) for one in topic.partitions]


@pytest.mark.parametrize("offset", [2, UP_TO_HIGH_WATERMARK])
def test_what_was_acknowledged_and_is_not_flushed_is_deleted_after_the_flush(
    node: BareNode, client: BareClient, offset: int
) -> None:
    produced = client.begin_produce("t", BATCH, acks=1)
    assert client.answer(produced).responses[0].partition_responses[0].error_code is ErrorCode.none
    asked = begin(client, (0, offset))
    assert not client.frames
    assert node.hosted("t").log.start_offset == 0
    node.settle()
    assert results(client, asked) == [(0, ErrorCode.none, 2)]
    assert node.lose_power().hosted("t").log.start_offset == 2


def test_an_offset_behind_the_log_is_refused_at_once(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", BATCH, acks=1)
    asked = begin(client, (0, 3), (1, 1), (2, 0), (2, -2), (9, 0))
    codes = [code for _, code, _ in results(client, asked)]
    assert codes == [
        ErrorCode.offset_out_of_range,
        ErrorCode.offset_out_of_range,
        ErrorCode.none,
        ErrorCode.offset_out_of_range,
        ErrorCode.unknown_topic_or_partition,
    ]


@pytest.mark.parametrize("timeout_ms", [TIMEOUT_MS, 0, -1])
def test_what_is_not_flushed_in_time_is_told_so_and_the_rest_is_deleted(
    node: BareNode, client: BareClient, timeout_ms: int
) -> None:
    client.produce("t", BATCH, index=1)
    client.begin_produce("t", BATCH, acks=1)
    client.frames.clear()
    asked = begin(client, (0, 1), (1, 2), timeout_ms=timeout_ms)
    assert not client.frames
    node.advance(max(timeout_ms, 0))
    assert results(client, asked) == [(0, ErrorCode.request_timed_out, -1), (1, ErrorCode.none, 2)]
    node.settle()
    assert not client.frames, "answered once"
    assert node.hosted("t").log.start_offset == 0, "nothing is deleted that was reported as not deleted"


def test_many_partitions_take_one_write_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    node = BareNode()
    client = node.connect()
    client.create_topic("t", partitions=50)
    for index in range(50):
        client.begin_produce("t", BATCH, index, acks=1)
    node.settle()
    client.frames.clear()
    flushes: list[str] = []

    def counted(flush: Callable[..., None]) -> Callable[..., None]:
        def flush_and_count(*arguments: Any) -> None:
            flushes.append(repr(arguments))
            flush(*arguments)

        return flush_and_count

    for owner, name in ((SimulatedFile, "flush"), (SimulatedDisk, "flush_directory")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    asked = begin(client, *((index, 1) for index in range(50)))
    assert {code for _, code, _ in results(client, asked)} == {ErrorCode.none}
    assert len(flushes) == 2, flushes


def test_of_two_offsets_for_one_partition_the_larger_counts(node: BareNode, client: BareClient) -> None:
    client.produce("t", BATCH)
    asked = begin(client, (0, 2), (0, 1))
    assert results(client, asked) == [(0, ErrorCode.none, 2)] * 2


def fail(node: BareNode, client: BareClient) -> None:
    node.disk.plan(Fault("flush", path_contains="/t-0"))


def delete_topic(node: BareNode, client: BareClient) -> None:
    node.connect().begin(20, 5, topic_names=["t"], timeout=5_000)


@pytest.mark.parametrize(
    ("what", "code"),
    [(fail, ErrorCode.kafka_storage_error), (delete_topic, ErrorCode.unknown_topic_or_partition)],
)
def test_whatever_ends_the_waiting_is_told(
    node: BareNode, client: BareClient, what: Any, code: ErrorCode
) -> None:
    client.begin_produce("t", BATCH, acks=1)
    client.frames.clear()
    asked = begin(client, (0, 1), (1, 0))
    what(node, client)
    node.settle()
    assert results(client, asked) == [(0, code, -1), (1, code, -1)]


def test_a_client_that_left_has_nothing_deleted_later(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", BATCH, acks=1)
    begin(client, (0, 1))
    client.connection.lost()
    node.settle()
    node.advance(TIMEOUT_MS)
    assert node.hosted("t").log.start_offset == 0
