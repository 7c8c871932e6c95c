"""What was seen before: the same answer from every reader, whenever it took over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.client.dedupe import SPOOLS_MAX, Dedupe, SeenIds, SeenKeys, parse_id
from holdfast.client.messages import OFFSET, Fields, Message
from holdfast.errors import UsageError

METADATA_BYTES_MAX = 4096


def with_id(offset: int, spool: int, sequence: int, timestamp_ms: int = 0) -> Message:
    header = b"%016x:0:%d" % (spool, sequence)
    return Message("orders", 0, offset, timestamp_ms, None, b"", (("hf-id", header),))


def with_key(offset: int, key: str | None, timestamp_ms: int = 0) -> Message:
    return Message("orders", 0, offset, timestamp_ms, None, None if key is None else key.encode())


def test_an_id_at_or_below_the_highest_of_its_spool_is_a_duplicate() -> None:
    seen = SeenIds()
    log = [(1, 0), (1, 1), (2, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    messages = [with_id(offset, *each) for offset, each in enumerate(log)]
    assert list(map(OFFSET, seen.fresh(messages))) == [0, 1, 2, 4, 6]


def test_messages_without_an_id_are_never_duplicates() -> None:
    seen = SeenIds()
    plain = [Message("orders", 0, offset, 0, None, b"") for offset in range(3)]
    assert seen.fresh(plain) == plain
    odd = [
        Message("orders", 0, 3, 0, None, b"", (("hf-id", value),))
        for value in (
            None,
            b"",
            b"x:0:1",
            b"00000000000000aa:0",
            b"00000000000000aa:0:-1",
            b"zz" * 8 + b":0:1",
        )
    ]
    assert seen.fresh([*odd, *odd]) == [*odd, *odd]


def test_an_id_copied_from_a_message_of_another_partition_says_nothing() -> None:
    seen = SeenIds()
    copied = [
        Message("out", 1, offset, 0, None, b"", (("hf-id", b"%016x:0:%d" % (7, sequence)),))
        for offset, sequence in enumerate((5, 4, 4))
    ]
    assert seen.fresh(copied) == copied


def marked(topic: str, offset: int, mark: bytes) -> Message:
    return Message(topic, 0, offset, 0, None, b"", (("hf-id", mark),))


def test_an_id_copied_from_a_message_of_another_topic_says_nothing() -> None:
    """Two topics merged into one by somebody who copies headers: each has its own numbers from 0 on."""
    merged = [
        marked("all", offset, b"00000000000000aa:0000000%d:%b:0:%d" % (opening, origin, sequence))
        for offset, (opening, origin, sequence) in enumerate(
            (opening, origin, sequence)
            for sequence in range(5)
            for opening, origin in ((1, b"one"), (1, b"two"))
        )
    ]
    assert SeenIds().fresh(merged) == merged
    at_home = [
        marked("one", offset, b"00000000000000aa:00000001:one:0:%d" % sequence)
        for offset, sequence in enumerate((0, 1, 1, 0, 2))
    ]
    assert list(map(OFFSET, SeenIds().fresh(at_home))) == [0, 1, 4]


def test_each_opening_of_a_spool_has_numbers_of_its_own() -> None:
    """Put back from an older copy, a spool gives out sequences again, under another opening."""
    marks = [
        b"00000000000000aa:00000001:orders:0:0",
        b"00000000000000aa:00000001:orders:0:1",
        b"00000000000000aa:00000002:orders:0:1",
        b"00000000000000aa:00000002:orders:0:u1",
        b"00000000000000aa:0:1",
    ]
    log = [marked("orders", offset, mark) for offset, mark in enumerate([*marks, *marks])]
    reader = SeenIds()
    assert list(map(OFFSET, reader.fresh(log[:5]))) == [0, 1, 2, 3, 4]
    assert SeenIds(reader.note(5), 5).fresh(log[5:]) == []


def test_what_was_noted_of_ids_that_earlier_versions_gave_still_counts() -> None:
    noted = "hf1:9:AAAAAAAAAKoAAAAAAAU="
    again = [marked("orders", 9 + number, b"00000000000000aa:0:%d" % number) for number in range(8)]
    assert list(map(OFFSET, SeenIds(noted, 9).fresh(again))) == [15, 16]


def test_an_id_with_numbers_that_no_number_can_hold_says_nothing() -> None:
    assert parse_id(b"00000000000000aa:0:" + b"1" * 5000) is None
    assert parse_id(b"00000000000000aa:%b:1" % (b"1" * 5000)) is None


def test_numbers_beside_a_position_that_somebody_else_set_are_not_used() -> None:
    seen = SeenIds()
    seen.fresh([with_id(0, 1, 0), with_id(1, 1, 1)])
    note = seen.note(2)
    again = [with_id(0, 1, 0)]
    assert SeenIds(note, 2).fresh(again) == []
    assert SeenIds(note, 0).fresh(again) == again
    assert SeenIds("hf1:2:not base 64!", 2).fresh(again) == again
    assert SeenIds("somebody's own words", 2).fresh(again) == again


def test_as_many_spools_as_are_remembered_fit_beside_a_position() -> None:
    seen = SeenIds()
    seen.fresh([with_id(spool, 2**63 + spool, 2**48 - 1) for spool in range(SPOOLS_MAX + 50)])
    note = seen.note(10**18)
    assert len(note) <= METADATA_BYTES_MAX
    reader = SeenIds(note, 10**18)
    # Those silent for the longest were forgotten.
    assert reader.fresh([with_id(999, 2**63 + 49, 0)])
    assert not reader.fresh([with_id(1000, 2**63 + 60, 0)])


def test_a_spool_silent_for_too_long_is_forgotten() -> None:
    seen = SeenIds(keep_seconds=10)
    seen.fresh([with_id(0, 1, 5, timestamp_ms=0), with_id(1, 2, 0, timestamp_ms=11_000)])
    assert seen.fresh([with_id(2, 1, 5, timestamp_ms=11_000)])


LOGS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=40)


@given(log=LOGS, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_readers_that_take_over_from_each_other_hand_out_what_one_reader_would(
    log: list[tuple[int, int]], cuts: list[int]
) -> None:
    messages = [with_id(offset, *each) for offset, each in enumerate(log)]
    alone = SeenIds().fresh(messages)
    together: list[Fields] = []
    note, position = "", 0
    for end in [*sorted(cut for cut in cuts if cut < len(messages)), len(messages)]:
        reader = SeenIds(note, position)
        # It reads on behind what it may commit, and loses that when it goes.
        fresh = reader.fresh(messages[position:])
        together += [message for message in fresh if OFFSET(message) < end]
        note, position = reader.note(end), end
    assert together == alone


@given(
    log=st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=40),
    position=st.integers(0, 40),
    window=st.integers(1, 12),
)
def test_a_reader_that_learns_the_window_decides_like_one_that_read_everything(
    log: list[str | None], position: int, window: int
) -> None:
    messages = [with_key(offset, key) for offset, key in enumerate(log)]
    dedupe = Dedupe(key=lambda message: message.value, window=window)
    alone = dedupe.start("", 0).fresh(messages)
    # The definition: the same key within the window before it.
    assert list(map(OFFSET, alone)) == [
        offset
        for offset, key in enumerate(log)
        if key is None or key not in log[max(0, offset - window) : offset]
    ]
    reader = dedupe.start("", position)
    for message in messages[max(0, position - dedupe.lookback) : position]:
        reader.learn(message)
    assert reader.fresh(messages[position:]) == [each for each in alone if OFFSET(each) >= position]


def test_a_key_seen_too_long_ago_is_new() -> None:
    seen = SeenKeys(lambda message: message.value, 100, keep_seconds=5)
    log = [with_key(0, "a", 0), with_key(1, "a", 5_000), with_key(2, "a", 10_001)]
    assert list(map(OFFSET, seen.fresh(log))) == [0, 2]


def test_a_window_nobody_could_read_again_is_refused() -> None:
    for window in (0, 10**9):
        with pytest.raises(UsageError):
            SeenKeys(lambda message: message.key, window, 1)


@given(st.binary(max_size=60))
def test_whatever_is_in_the_header_an_id_is_one_or_none(value: bytes) -> None:
    found = parse_id(value)
    assert found is None or (0 <= found.spool < 2**64 and found.sequence >= 0)
