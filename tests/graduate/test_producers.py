"""What Kafka is told of producers that may send their last batches again."""

from __future__ import annotations

from holdfast.broker.log.producer_state import SnapshotEntry
from holdfast.graduate.producers import as_of


def entry(producer: int, last: int, sequence: int, *, first_of_transaction: int = -1) -> SnapshotEntry:
    return SnapshotEntry(producer, 0, sequence, last, 0, 5, 3, first_of_transaction)


def test_the_state_at_an_offset_has_what_is_not_read_behind_it() -> None:
    found = as_of(
        [
            entry(1, 10, 0),
            entry(1, 20, 1),
            entry(1, 30, 2),
            entry(2, 31, 0),
            entry(3, 25, 7, first_of_transaction=4),
            entry(3, 33, 8, first_of_transaction=4),
            entry(4, 34, 9, first_of_transaction=5),
            entry(5, 35, 1, first_of_transaction=32),
        ],
        30,
    )
    assert found == [
        entry(1, 20, 1),
        entry(3, 25, 7, first_of_transaction=4),
        entry(4, -1, -1, first_of_transaction=5),
    ]
