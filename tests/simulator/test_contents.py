"""What the simulator's readers make of a fetch is what every client makes of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulator.contents import BatchReader, hidden_batches

from holdfast.testing.committed_reader import read_answer
from holdfast.wire.batch import Record, build_batch, make_batch
from holdfast.wire.control_records import EndTransactionMarker

STEPS = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(("data", "plain", "commit", "abort"))), max_size=25
)


def written(steps: list[tuple[int, str]]) -> tuple[bytes, list[tuple[int, int]]]:
    """A log in which producers write and end transactions; and (producer, first offset) of the aborted ones."""
    log = b""
    first_offsets: dict[int, int] = {}
    aborted: list[tuple[int, int]] = []
    for offset, (producer, step) in enumerate(steps):
        value = b"%d" % offset
        if step == "plain":
            log += make_batch([value], base_offset=offset)
        elif step == "data":
            first_offsets.setdefault(producer, offset)
            log += build_batch(
                [Record(0, 0, None, value)], base_offset=offset, producer_id=producer, is_transactional=True
            )
        else:
            marker = EndTransactionMarker(step == "commit", 0)
            log += build_batch(
                [Record(0, 0, marker.encode_key(), marker.encode_value())],
                base_offset=offset,
                producer_id=producer,
                is_transactional=True,
                is_control=True,
            )
            first = first_offsets.pop(producer, None)
            if first is not None and step == "abort":
                aborted.append((producer, first))
    return log, aborted


@given(STEPS)
def test_readers_of_committed_records_leave_out_what_a_client_leaves_out(
    steps: list[tuple[int, str]],
) -> None:
    log, aborted = written(steps)
    batches = BatchReader().read(log)
    hidden = hidden_batches(batches, aborted)
    shown = [
        (offset, value)
        for batch in batches
        if batch.stored.base_offset not in hidden
        for offset, value in zip(batch.stored.record_offsets, batch.stored.values, strict=True)
    ]
    expected = read_answer(log, 0, aborted)
    assert shown == [(record.offset, record.value) for record in expected.records]
    assert all(batch.stored.next_offset == batch.stored.base_offset + 1 for batch in batches)


def test_a_log_without_transactions_hides_nothing() -> None:
    log, aborted = written([(1, "plain"), (1, "data"), (1, "commit")])
    assert not aborted
    assert hidden_batches(BatchReader().read(log), aborted) == frozenset()
