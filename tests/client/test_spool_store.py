"""The files of a spool: what was stored is found again after anything, in order, and nothing else is."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.client.spool import format as frames
from holdfast.client.spool.format import MOVED, UNDECIDED, DamagedSpool, Headers, Moved, SpooledMessage
from holdfast.client.spool.store import SpoolFailed, SpoolFull, SpoolStore
from holdfast.testing.disk import Fault, PowerLost, SimulatedDisk

HOME = "/spool"
OF_AN_EARLIER_VERSION = (
    "000000053550a96d020000000000000065f481b56003677270000000000000000d000000020000000000000000000001"
    "8bcfe56800000000000006ffffffff0000000300006f72646572736f6e6500000000000000000000018bcfe568000000"
    "00020006000000030000000300006f72646572736b657974776f"
)
"""A segment with one group of messages without headers, as it was written before there were groups in columns."""


@dataclass
class Draft:
    value: bytes | None
    topic: str = "orders"
    partition: int | None = 0
    key: bytes | None = b"key"
    headers: Headers = (("trace", b"1"), ("none", None))
    timestamp_ms: int = 1_700_000_000_000
    sequence: int = -1

    def as_message(self) -> SpooledMessage:
        partition = UNDECIDED if self.partition is None else self.partition
        return SpooledMessage(
            self.topic, partition, self.key, self.value, self.headers, self.timestamp_ms, self.sequence
        )


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(HOME)
    disk.flush_directory("/")
    return disk


def read_all(store: SpoolStore, max_bytes: int = 4096) -> list[SpooledMessage]:
    messages: list[SpooledMessage] = []
    position = store.start
    while position < store.end:
        groups, position = store.read(position, max_bytes=max_bytes)
        messages += [message for group in groups for message in group.messages]
    return messages


def values(store: SpoolStore) -> list[bytes | None]:
    return [message.value for message in read_all(store)]


def test_what_is_stored_is_read_back_as_it_was() -> None:
    store = SpoolStore(new_disk(), HOME)
    sent = [
        Draft(b"one"),
        Draft(None, partition=3, key=None, headers=(), timestamp_ms=-1),
        Draft(b"", topic="payments-€", key=b"", headers=(("ünïcode", b"\x00\xff"),), timestamp_ms=5),
    ]
    store.write(sent)
    assert read_all(store) == [draft.as_message() for draft in sent]


def test_sequences_count_each_partition_of_each_topic_from_zero() -> None:
    store = SpoolStore(new_disk(), HOME)
    first = [Draft(b"a"), Draft(b"b", partition=1), Draft(b"c")]
    second = [Draft(b"d"), Draft(b"e", topic="payments")]
    store.write(first)
    following = store.write(second).following
    assert [draft.sequence for draft in first + second] == [0, 0, 1, 2, 0]
    assert following == {("orders", 0): 3, ("payments", 0): 1}


@settings(max_examples=examples(80), deadline=None)
@given(
    groups=st.lists(
        st.lists(
            st.builds(
                Draft,
                value=st.none() | st.binary(max_size=20),
                topic=st.sampled_from(["orders", "orders", "orders", "payments-€"]),
                partition=st.sampled_from([0, 1, 2**31 - 1]),
                key=st.none() | st.binary(max_size=10),
                headers=st.sampled_from([(), (), (), (("trace", b"1"),)]),
                timestamp_ms=st.sampled_from([1_700_000_000_000, 1_700_000_000_000, 5, -1]),
            ),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_messages_come_back_whatever_they_have_in_common(groups: list[list[Draft]]) -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME)
    for group in groups:
        store.write(group)
    sent = [draft.as_message() for group in groups for draft in group]
    assert read_all(store) == sent
    reopened = SpoolStore(disk, HOME)
    assert read_all(reopened) == sent
    assert reopened.counters == store.counters


def test_a_spool_of_an_earlier_version_is_read_and_goes_on() -> None:
    earlier = bytes.fromhex(OF_AN_EARLIER_VERSION)
    store = opened_on(earlier, f"{HOME}/{0:020d}.spool")
    kept = [
        SpooledMessage("orders", 0, None, b"one", (), 1_700_000_000_000, 0),
        SpooledMessage("orders", 2, b"key", b"two", (), 1_700_000_000_000, 0),
    ]
    assert read_all(store) == kept
    after = [Draft(b"three", partition=2, headers=())]
    store.write(after)
    assert after[0].sequence == 1
    assert read_all(store) == [*kept, after[0].as_message()]


@settings(max_examples=examples(200), deadline=None)
@given(
    kind=st.sampled_from(frames.GROUPS),
    count=st.integers(0, 3) | st.just(2**32 - 1),
    rest=st.binary(max_size=120),
)
def test_a_group_that_makes_no_sense_is_damage(kind: int, count: int, rest: bytes) -> None:
    body = frames.frame(struct.pack(">B3sqI", kind, b"grp", 0, count) + rest)
    found = frames.read_frame(body, 0, 0)
    assert found is not None
    try:
        frames.decode_group(found)
    except DamagedSpool:
        return


def test_groups_lie_without_a_gap_and_a_reader_stops_where_it_is_told() -> None:
    store = SpoolStore(new_disk(), HOME, segment_bytes=300)
    written = [store.write([Draft(b"%d" % number)]) for number in range(10)]
    assert [each.start for each in written[1:]] == [each.end for each in written[:-1]]
    position, got = written[3].start, []
    while position < written[7].start:
        groups, position = store.read(position, until=written[7].start)
        got += [message.value for group in groups for message in group.messages]
    assert got == [b"3", b"4", b"5", b"6"]
    assert store.read(written[7].start, until=written[7].start) == ([], written[7].start)


def test_sequences_go_on_when_everything_was_trimmed_and_the_spool_reopened() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME, segment_bytes=200)
    for number in range(20):
        store.write([Draft(b"%d" % number)])
    store.trim(store.end)
    reopened = SpoolStore(disk, HOME, segment_bytes=200)
    following = Draft(b"next")
    reopened.write([following])
    assert following.sequence == 20
    assert reopened.trimmed["orders", 0] > 10


def test_undecided_messages_are_counted_and_so_is_what_was_moved() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME, segment_bytes=200)
    store.write([Draft(b"a", partition=None), Draft(b"b", partition=None)])
    store.write([Draft(b"a", partition=4)], Moved("orders", 1))
    for reopened in (store, SpoolStore(disk, HOME, segment_bytes=200)):
        assert reopened.counters == {("orders", UNDECIDED): 2, ("orders", 4): 1, ("orders", MOVED): 1}
        groups, _ = reopened.read(reopened.start)
        assert [message.partition for message in groups[0].messages] == [UNDECIDED] * 2


def test_trim_frees_delivered_segments_and_nothing_else() -> None:
    store = SpoolStore(new_disk(), HOME, segment_bytes=300)
    written = [store.write([Draft(b"%d" % number)]) for number in range(30)]
    before = store.end - store.start
    store.trim(written[15].start)
    assert store.end - store.start < before
    assert values(store)[-15:] == [b"%d" % number for number in range(15, 30)]


def test_a_group_longer_than_a_read_is_read_whole() -> None:
    store = SpoolStore(new_disk(), HOME)
    store.write([Draft(b"x" * 100_000), Draft(b"small")])
    assert [len(value or b"") for value in values(store)] == [100_000, 5]


def test_a_full_disk_refuses_the_group_and_what_was_stored_stays() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME)
    store.write([Draft(b"kept")])
    disk.capacity_bytes = disk.used_bytes + 100
    with pytest.raises(SpoolFull):
        store.write([Draft(b"y" * 5000)])
    disk.capacity_bytes = None
    after = Draft(b"after")
    store.write([after])
    assert after.sequence == 1
    assert values(SpoolStore(disk, HOME)) == [b"kept", b"after"]


def test_a_full_disk_at_the_beginning_of_a_segment_leaves_no_trace() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME, segment_bytes=1)
    store.write([Draft(b"kept")])
    disk.capacity_bytes = disk.used_bytes + 50
    with pytest.raises(SpoolFull):
        store.write([Draft(b"y" * 5000)])
    assert values(SpoolStore(disk, HOME)) == [b"kept"]
    disk.capacity_bytes = None
    store.write([Draft(b"after")])
    assert values(SpoolStore(disk, HOME)) == [b"kept", b"after"]


def test_a_failed_flush_ends_the_store_until_it_is_reopened() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME)
    store.write([Draft(b"kept")])
    disk.plan(Fault("flush"))
    with pytest.raises(SpoolFailed):
        store.write([Draft(b"unknown")])
    with pytest.raises(SpoolFailed):
        store.write([Draft(b"refused")])
    # Its sender was told that it was not stored.
    assert values(SpoolStore(disk, HOME)) == [b"kept"]


def stored_file(groups: int) -> tuple[bytes, list[tuple[int, int]], str]:
    """A segment of several groups: its bytes, and after each group the size and how many messages it holds."""
    disk = new_disk()
    store = SpoolStore(disk, HOME)
    ends: list[tuple[int, int]] = []
    count = 0
    for number in range(groups):
        # Groups with headers and without are written in different ways.
        headers: Headers = (("trace", b"1"),) if number % 2 else ()
        store.write([Draft(b"m%d-%d" % (number, each), headers=headers) for each in range(number % 3 + 1)])
        count += number % 3 + 1
        ends.append((store.end, count))
    path = f"{HOME}/{0:020d}.spool"
    file = disk.open(path, "read")
    return file.pread(file.size(), 0), ends, path


def opened_on(data: bytes, path: str) -> SpoolStore:
    disk = new_disk()
    file = disk.open(path, "create")
    file.pwritev([data], 0)
    return SpoolStore(disk, HOME)


def test_cut_at_every_byte_the_stored_groups_before_it_are_all_there_and_no_part_of_another() -> None:
    data, ends, path = stored_file(4)
    whole = values(opened_on(data, path))
    for size in range(len(data) + 1):
        promised = max((count for end, count in ends if end <= size), default=0)
        assert values(opened_on(data[:size], path)) == whole[:promised], f"cut at {size}"


def test_a_flipped_bit_in_front_of_a_later_group_is_named_and_nothing_is_changed() -> None:
    data, ends, path = stored_file(3)
    last_group = ends[1][0]
    for at in range(last_group):
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        with pytest.raises(DamagedSpool, match="damaged at byte"):
            opened_on(damaged, path)


def test_a_flipped_bit_in_the_last_group_is_a_torn_end() -> None:
    data, ends, path = stored_file(3)
    whole, count = ends[1]
    for at in range(whole, len(data)):
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        assert len(values(opened_on(damaged, path))) == count


def test_a_segment_that_is_missing_in_the_middle_is_damage() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME, segment_bytes=1)
    for number in range(3):
        store.write([Draft(b"%d" % number)])
    disk.remove(f"{HOME}/{disk.list(HOME)[1]}")
    with pytest.raises(DamagedSpool):
        SpoolStore(disk, HOME)


@settings(max_examples=examples(60), deadline=None)
@given(
    groups=st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=4), min_size=1, max_size=12),
    unflushed=st.binary(max_size=300),
    seed=st.integers(0, 2**32),
)
def test_power_failure_keeps_what_was_stored(groups: list[list[bytes]], unflushed: bytes, seed: int) -> None:
    disk = SimulatedDisk(seed=seed)
    disk.make_directory(HOME)
    disk.flush_directory("/")
    store = SpoolStore(disk, HOME, segment_bytes=250)
    sent = [value for group in groups for value in group]
    for group in groups:
        store.write([Draft(value) for value in group])
    tail = store._segments[-1]
    store._file(tail).pwritev([unflushed], tail.size)
    disk.crash()
    assert values(SpoolStore(disk, HOME, segment_bytes=250)) == sent


def test_power_lost_while_a_segment_is_begun_takes_no_stored_message_along() -> None:
    """Whatever pages of the counters and of the first group behind them the disk has kept."""
    wide = [Draft(b"%d" % partition, partition=partition) for partition in range(400)]
    tried = 0
    for operations in range(1, 12):
        for seed in range(12):
            disk = SimulatedDisk(seed=seed)
            disk.prepare(HOME)
            store = SpoolStore(disk, HOME, segment_bytes=1)
            store.write(wide)
            disk.lose_power_after(operations)
            try:
                store.write([Draft(b"x" * 9000)])
            except PowerLost:
                tried += 1
            disk.crash()
            assert values(SpoolStore(disk, HOME, segment_bytes=1))[:400] == [draft.value for draft in wide]
    assert tried, "the power was lost in the middle"
