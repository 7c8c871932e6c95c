"""The files of a spool: what was stored is found again after anything, in order, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.spool.format import DamagedSpool, Entry, Message
from holdfast.client.spool.store import SpoolFailed, SpoolFull, SpoolStore
from holdfast.testing.disk import Fault, SimulatedDisk

HOME = "/spool"


def message(value: bytes, topic: str = "orders", partition: int = 0) -> Message:
    return Message(topic, partition, b"key", value, (("trace", b"1"), ("none", None)), 1_700_000_000_000)


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(HOME)
    disk.flush_directory("/")
    return disk


def read_all(store: SpoolStore, max_bytes: int = 4096) -> list[Entry]:
    entries: list[Entry] = []
    position = store.start
    while position < store.end:
        got, position = store.read(position, max_bytes)
        entries += got
    return entries


def values(store: SpoolStore) -> list[bytes | None]:
    return [entry.message.value for entry in read_all(store)]


def test_what_is_stored_is_read_back_as_it_was() -> None:
    store = SpoolStore(new_disk(), HOME)
    sent = [
        message(b"one"),
        Message("orders", 3, None, None, (), -1),
        Message("payments-€", 0, b"", b"", (("ünïcode", b"\x00\xff"),), 5),
    ]
    stored = store.write(sent).entries
    assert [entry.message for entry in stored] == sent
    assert read_all(store) == stored


def test_sequences_count_each_partition_of_each_topic_from_zero() -> None:
    store = SpoolStore(new_disk(), HOME)
    first = store.write([message(b"a"), message(b"b", partition=1), message(b"c")]).entries
    second = store.write([message(b"d"), message(b"e", topic="payments")]).entries
    assert [entry.sequence for entry in first + second] == [0, 0, 1, 2, 0]


def test_sequences_go_on_when_everything_was_trimmed_and_the_spool_reopened() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME, segment_bytes=200)
    for number in range(20):
        store.write([message(b"%d" % number)])
    store.trim(store.end)
    reopened = SpoolStore(disk, HOME, segment_bytes=200)
    assert [entry.sequence for entry in reopened.write([message(b"next")]).entries] == [20]


def test_trim_frees_delivered_segments_and_nothing_else() -> None:
    store = SpoolStore(new_disk(), HOME, segment_bytes=300)
    entries = [entry for number in range(30) for entry in store.write([message(b"%d" % number)]).entries]
    before = store.used_bytes
    store.trim(entries[15].position)
    assert store.used_bytes < before
    kept = [entry.message.value for entry in read_all(store)]
    assert kept[-15:] == [b"%d" % number for number in range(15, 30)]


def test_a_message_longer_than_a_read_is_read_whole() -> None:
    store = SpoolStore(new_disk(), HOME)
    store.write([message(b"x" * 100_000), message(b"small")])
    assert [len(value or b"") for value in values(store)] == [100_000, 5]


def test_a_full_disk_refuses_the_group_and_what_was_stored_stays() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME)
    store.write([message(b"kept")])
    disk.capacity_bytes = disk.used_bytes + 100
    with pytest.raises(SpoolFull):
        store.write([message(b"y" * 5000)])
    disk.capacity_bytes = None
    assert [entry.sequence for entry in store.write([message(b"after")]).entries] == [1]
    assert values(SpoolStore(disk, HOME)) == [b"kept", b"after"]


def test_a_failed_flush_ends_the_store_until_it_is_reopened() -> None:
    disk = new_disk()
    store = SpoolStore(disk, HOME)
    store.write([message(b"kept")])
    disk.plan(Fault("flush"))
    with pytest.raises(SpoolFailed):
        store.write([message(b"unknown")])
    with pytest.raises(SpoolFailed):
        store.write([message(b"refused")])
    assert values(SpoolStore(disk, HOME))[0] == b"kept"


def stored_file(groups: int) -> tuple[bytes, list[tuple[int, int]], str]:
    """A segment of several groups: its bytes, and after each group the size and how many messages it holds."""
    disk = new_disk()
    store = SpoolStore(disk, HOME)
    ends: list[tuple[int, int]] = []
    count = 0
    for number in range(groups):
        store.write([message(b"m%d-%d" % (number, each)) for each in range(number % 3 + 1)])
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


def test_cut_at_every_byte_the_stored_groups_before_it_are_all_there() -> None:
    data, ends, path = stored_file(4)
    for size in range(len(data) + 1):
        found = values(opened_on(data[:size], path))
        promised = max((count for end, count in ends if end <= size), default=0)
        assert len(found) >= promised, f"cut at {size}"
        assert found == values(opened_on(data, path))[: len(found)]


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
        assert len(values(opened_on(damaged, path))) >= count


@settings(max_examples=60, deadline=None)
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
        store.write([message(value) for value in group])
    tail = store._segments[-1]
    store._file(tail).pwritev([unflushed], tail.size)
    disk.crash()
    assert values(SpoolStore(disk, HOME, segment_bytes=250)) == sent
