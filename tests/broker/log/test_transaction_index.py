"""The transaction index: which aborted transactions a fetch must tell of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.log.index import AbortedEntry, AbortedTransaction, TransactionIndex
from holdfast.errors import CorruptLog, UsageError


def history(choices: list[tuple[int, str]]) -> tuple[list[AbortedEntry], int]:
    """Transactions of three producers as a log would hold them: the aborted ones and the end offset."""
    open_since: dict[int, int] = {}
    aborted: list[AbortedEntry] = []
    for offset, (producer_id, action) in enumerate(choices):
        first = open_since.get(producer_id)
        if first is None:
            open_since[producer_id] = offset
        elif action != "write":
            del open_since[producer_id]
            if action == "abort":
                last_stable = min(open_since.values(), default=offset + 1)
                aborted.append(AbortedEntry(producer_id, first, offset, last_stable))
    return aborted, len(choices)


def filled(entries: list[AbortedEntry]) -> TransactionIndex:
    index = TransactionIndex()
    for entry in entries:
        index.append(*entry)
    return index


histories = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["write", "abort", "commit"])), max_size=40
).map(history)


@given(histories, st.data())
def test_a_search_finds_the_transactions_that_touch_its_range(
    logged: tuple[list[AbortedEntry], int], data: st.DataObject
) -> None:
    aborted, end = logged
    bounds = st.integers(0, end + 1)
    if aborted:
        bounds |= st.sampled_from([entry.last_offset for entry in aborted])
    fetch_offset = data.draw(bounds)
    upper_bound = data.draw(st.integers(fetch_offset, end + 2))
    found = filled(aborted).collect(fetch_offset, upper_bound)
    expected = [
        AbortedTransaction(entry.producer_id, entry.first_offset)
        for entry in aborted
        if entry.last_offset >= fetch_offset and entry.first_offset < upper_bound
    ]
    assert found.transactions == expected


@given(histories, st.data())
def test_a_complete_search_misses_nothing_that_aborts_later(
    logged: tuple[list[AbortedEntry], int], data: st.DataObject
) -> None:
    aborted, end = logged
    kept = data.draw(st.integers(0, len(aborted)))
    upper_bound = data.draw(st.integers(0, end + 2))
    if filled(aborted[:kept]).collect(0, upper_bound).is_complete:
        assert all(entry.first_offset >= upper_bound for entry in aborted[kept:])


@given(histories)
def test_entries_survive_their_file(logged: tuple[list[AbortedEntry], int]) -> None:
    index = filled(logged[0])
    again = TransactionIndex.from_bytes(index.to_bytes(), 0)
    assert list(again.entries) == list(index.entries) == logged[0]
    assert again.last_offset == (logged[0][-1].last_offset if logged[0] else None)


def test_the_file_is_kafkas() -> None:
    index = filled([AbortedEntry(1000, 5, 9, 10)])
    assert index.to_bytes() == bytes.fromhex(
        "0000 00000000000003e8 0000000000000005 0000000000000009 000000000000000a"
    )


def test_a_search_goes_on_while_an_older_transaction_is_undecided() -> None:
    # Producer 2 aborts at 5 while producer 1 is open since 0, and aborts at 9.
    index = filled([AbortedEntry(2, 3, 5, 0), AbortedEntry(1, 0, 9, 10)])
    assert index.collect(0, 4) == ([AbortedTransaction(2, 3), AbortedTransaction(1, 0)], True)
    assert index.collect(5, 6).transactions == [AbortedTransaction(2, 3), AbortedTransaction(1, 0)]
    assert index.collect(6, 10).transactions == [AbortedTransaction(1, 0)]
    assert not filled([AbortedEntry(2, 3, 5, 0)]).collect(0, 4).is_complete


def test_a_marker_that_does_not_follow_is_refused() -> None:
    index = filled([AbortedEntry(1, 5, 9, 10)])
    with pytest.raises(UsageError):
        index.append(2, 6, 9, 10)
    assert len(index) == 1


GOOD = (0, 1, 105, 109, 110)


@pytest.mark.parametrize(
    ("field", "value"),
    [(0, 1), (0, -1), (1, -1), (2, -1), (2, 109), (3, 99), (4, 111), (4, -1)],
)
def test_an_entry_that_cannot_be_is_corrupt(field: int, value: int) -> None:
    fields = list(GOOD)
    fields[field] = value
    content = b"".join(
        number.to_bytes(size, "big", signed=True)
        for number, size in zip(fields, (2, 8, 8, 8, 8), strict=True)
    )
    with pytest.raises(CorruptLog, match="transaction index from 100"):
        TransactionIndex.from_bytes(content, 100)


def test_markers_out_of_order_are_corrupt() -> None:
    entry = filled([AbortedEntry(1, 105, 109, 110)]).to_bytes()
    with pytest.raises(CorruptLog):
        TransactionIndex.from_bytes(entry + entry, 100)
    with pytest.raises(CorruptLog):
        TransactionIndex.from_bytes(entry[:-1], 100)


@given(histories, st.data())
def test_a_damaged_file_gives_ordered_entries_or_corrupt(
    logged: tuple[list[AbortedEntry], int], data: st.DataObject
) -> None:
    content = bytearray(filled(logged[0]).to_bytes())
    if content and data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        index = TransactionIndex.from_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]), 0)
    except CorruptLog:
        return
    markers = [entry.last_offset for entry in index.entries]
    assert markers == sorted(set(markers))
