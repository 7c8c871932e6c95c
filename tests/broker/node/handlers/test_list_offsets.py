"""ListOffsets over batches whose producers got them wrong: a lookup answers, and passes over nothing."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.wire.batch import Record, build_batch, read_header, seal

PRODUCE = 0
LIST_OFFSETS = 2
DELETE_RECORDS = 21
MAX_TIMESTAMP = -3
TIME = 1_700_000_000_000
UNREADABLE = bytes.fromhex("14 00 08 00 01 01 02 02 68 06 78")
"""A record of the right length in which a header's value runs over the end."""


def produce(desk: Any, batch: bytes) -> None:
    data = [{"name": "orders", "partition_data": [{"index": 0, "records": batch}]}]
    answer = desk.ask(PRODUCE, 9, acks=-1, timeout=1000, topic_data=data)
    assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none


def found(desk: Any, timestamp: int) -> tuple[int, int]:
    wanted = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    answer = desk.ask(LIST_OFFSETS, 7, topics=[{"name": "orders", "partitions": [wanted]}], replica_id=-1)
    part = answer.topics[0].partitions[0]
    assert part.error_code is ErrorCode.none
    return part.offset, part.timestamp


def plain(*deltas: int, **options: int) -> bytes:
    records = [Record(index, delta, None, b"v") for index, delta in enumerate(deltas)]
    return build_batch(records, base_timestamp=TIME, **options)  # type: ignore[arg-type]


@pytest.fixture
def orders(desk: Any) -> Any:
    desk.create("orders")
    return desk


def test_a_lookup_in_a_batch_nobody_can_read_answers_its_start(orders: Any) -> None:
    produce(orders, plain(0))
    produce(orders, seal(read_header(plain(10)), UNREADABLE))
    produce(orders, plain(20))
    assert found(orders, TIME + 5) == (1, TIME + 10)
    assert found(orders, TIME + 15) == (2, TIME + 20)
    assert found(orders, MAX_TIMESTAMP) == (2, TIME + 20)


def test_batches_that_tell_a_maximum_none_of_their_records_has_are_passed(orders: Any) -> None:
    produce(orders, plain(0, max_timestamp=TIME + 50))
    produce(orders, plain(1, max_timestamp=TIME + 50))
    produce(orders, plain(30, 40))
    assert found(orders, TIME + 35) == (3, TIME + 40)


def test_records_below_the_log_start_are_not_found(orders: Any) -> None:
    produce(orders, plain(9, 0))
    produce(orders, plain(5))
    cut = [{"name": "orders", "partitions": [{"partition_index": 0, "offset": 1}]}]
    orders.ask(DELETE_RECORDS, 2, topics=cut, timeout=1000)
    assert found(orders, TIME + 1) == (2, TIME + 5)


def test_a_batch_with_a_wrong_maximum_is_answered_by_its_youngest_record(orders: Any) -> None:
    produce(orders, plain(0))
    produce(orders, plain(5, 10, 7, max_timestamp=TIME + 50))
    assert found(orders, MAX_TIMESTAMP) == (2, TIME + 10)
