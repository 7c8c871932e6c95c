"""How old records are, whatever their producers wrote in front of them: nothing goes before its time."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.partition_logs import read_all
from tests.support.quiet_broker import QuietBroker
from tests.support.tiers import examples

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.node.handlers.log_offsets import MAX_TIMESTAMP, find_offset
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.housekeeping import FIRST_CHECK_MS, roll
from holdfast.broker.node.intake import FRESH_MS, admit
from holdfast.errors import InvalidRecords
from holdfast.testing.fakes import START_WALL_MS
from holdfast.wire.batch import HEADER_SIZE, Record, build_batch, check_whole, read_header, seal
from holdfast.wire.codecs import Codec

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS
NO_BOUND = str(2**63 - 1)
MARGIN_MS = FRESH_MS + 1
"""By so much a header that claims to be of now may be older than its append."""


def with_header(batch: bytes, **fields: int) -> bytes:
    return bytes(seal(read_header(batch)._replace(**fields), batch[HEADER_SIZE:]))


def put(broker: QuietBroker, hosted: HostedPartition, batch: bytes) -> int | None:
    """Take a batch in as a Produce request does; its base offset, or None when it is refused."""
    now = broker.clock.now()
    try:
        admitted = admit(hosted, batch, now)
    except InvalidRecords:
        return None
    assert not isinstance(admitted, Duplicate)
    base_offset = hosted.log.append(*admitted, hosted.leader_epoch, now).base_offset
    broker.node.commit.appended(hosted)
    broker.settle()
    return base_offset


def untimed(broker: QuietBroker, **fields: int) -> bytes:
    """As librdkafka writes it for a message whose time is -1."""
    batch = build_batch([Record(0, 0, b"k", b"v")], base_timestamp=-1)
    return with_header(batch, **({"max_timestamp": 0} | fields))


def go_on(broker: QuietBroker, ms: int) -> None:
    """Let time pass at a stroke; then every check is made that is due. Compaction is after the scrub."""
    for step in (ms, 10_500, 5_000, 2_000):
        broker.node.tick(broker.clock.advance(step))
        broker.settle()


def retained(hosted: HostedPartition) -> set[int]:
    return {record.offset for record in read_all(hosted.log)}


# ---- records without times


@pytest.mark.parametrize("max_timestamp", [-(2**63), -1, 0, 1])
@pytest.mark.parametrize("ends", ["runs on", "stops", "is killed"])
def test_records_without_times_expire_by_their_last_append(ends: str, max_timestamp: int) -> None:
    broker = QuietBroker()
    hosted = broker.create("t", retention_ms=str(HOUR_MS), segment_ms=str(YEAR_MS))
    for _ in range(3):
        put(broker, hosted, untimed(broker, max_timestamp=max_timestamp))
        go_on(broker, HOUR_MS // 2)
    if ends == "stops":
        broker = broker.restart()
    elif ends == "is killed":
        broker.disk.kill()
        broker = QuietBroker(disk=broker.disk, clock=broker.clock)
    hosted = broker.node.partitions.get("t", 0) or hosted
    go_on(broker, HOUR_MS // 3)
    assert retained(hosted) == {0, 1, 2}
    go_on(broker, HOUR_MS)
    assert retained(hosted) == set()


def test_a_neighbour_from_the_past_does_not_take_records_without_times_along() -> None:
    broker = QuietBroker()
    hosted = broker.create("t", retention_ms=str(HOUR_MS))
    put(broker, hosted, untimed(broker))
    put(broker, hosted, build_batch([Record(0, 0, b"k", b"v")], base_timestamp=1_000))
    roll(broker.node, hosted, broker.clock.now())
    broker.settle()
    for _ in range(2):
        go_on(broker, FIRST_CHECK_MS)
        assert retained(hosted) == {0, 1}
        broker = broker.restart()
        hosted = broker.node.partitions.get("t", 0) or hosted
    go_on(broker, HOUR_MS)
    assert retained(hosted) == set()


def test_indexes_of_an_earlier_version_are_asked_again_whether_all_records_have_times() -> None:
    """It wrote the header's 0 down as a time; neither its batches nor its index say more."""
    broker = QuietBroker()
    hosted = broker.create("t", retention_ms=str(HOUR_MS))
    batch = untimed(broker)
    hosted.log.append(check_whole(batch), batch, hosted.leader_epoch, broker.clock.now())
    broker.node.commit.appended(hosted)
    roll(broker.node, hosted, broker.clock.now())
    broker.settle()
    path = hosted.log.segments[0].path(".timeindex")
    broker.node.stop(broker.clock.now())
    file = broker.disk.open(path, "write")
    file.truncate(0)
    file.pwritev([bytes(12)], 0)
    broker = QuietBroker(disk=broker.disk, clock=broker.clock)
    hosted = broker.node.partitions.get("t", 0) or hosted
    go_on(broker, HOUR_MS // 2)
    assert retained(hosted) == {0}


def test_records_without_times_are_compacted_when_their_lag_is_over() -> None:
    broker = QuietBroker()
    hosted = broker.create(
        "t",
        cleanup_policy="compact",
        min_compaction_lag_ms=str(HOUR_MS),
        min_cleanable_dirty_ratio="0",
        segment_ms="1000",
    )
    for _ in range(3):
        put(broker, hosted, untimed(broker))
        go_on(broker, HOUR_MS // 3)
    assert 2 in retained(hosted)
    broker = broker.restart()
    hosted = broker.node.partitions.get("t", 0) or hosted
    go_on(broker, HOUR_MS // 2)
    assert {1, 2} <= retained(hosted)
    put(broker, hosted, untimed(broker))
    go_on(broker, 2 * HOUR_MS)
    assert retained(hosted) == {3}


def test_compaction_makes_records_without_times_no_younger() -> None:
    broker = QuietBroker()
    hosted = broker.create(
        "t",
        cleanup_policy="compact,delete",
        retention_ms=str(4 * HOUR_MS),
        min_cleanable_dirty_ratio="0",
    )
    for _ in range(2):
        put(broker, hosted, untimed(broker))
    roll(broker.node, hosted, broker.clock.now())
    broker.settle()
    appended_ms = hosted.log.segments[0].appended_ms
    go_on(broker, 2 * HOUR_MS)
    assert retained(hosted) == {1}, "compacted two hours after the append"
    broker = broker.restart()
    hosted = broker.node.partitions.get("t", 0) or hosted
    assert hosted.log.segments[0].newest_ms == appended_ms
    go_on(broker, 2 * HOUR_MS)
    assert retained(hosted) == set()


# ---- what clients may send


def test_no_producer_says_when_tombstones_go() -> None:
    broker = QuietBroker()
    hosted = broker.create(
        "t", cleanup_policy="compact", min_cleanable_dirty_ratio="0", delete_retention_ms=str(HOUR_MS)
    )
    tombstone = build_batch([Record(0, 0, b"k", None)], base_timestamp=START_WALL_MS)
    for at in range(4):
        assert put(broker, hosted, with_header(tombstone, attributes=0x40)) == at
        roll(broker.node, hosted, broker.clock.now())
        go_on(broker, HOUR_MS // 4)
        assert retained(hosted) == {at}
    for _ in range(2):
        go_on(broker, HOUR_MS)
        put(broker, hosted, build_batch([Record(0, 0, b"other", b"v")], base_timestamp=START_WALL_MS))
        roll(broker.node, hosted, broker.clock.now())
        go_on(broker, HOUR_MS)
    assert 3 not in retained(hosted)


def test_a_maximum_that_hides_younger_records_is_put_right() -> None:
    broker = QuietBroker()
    hosted = broker.create("t", retention_ms=str(HOUR_MS))
    for codec in (Codec.NONE, Codec.ZSTD):
        records = [Record(0, 0, b"k", b"v"), Record(1, YEAR_MS, b"k", b"v")]
        honest = build_batch(records, base_timestamp=START_WALL_MS - YEAR_MS, codec=codec)
        assert read_header(honest).max_timestamp == START_WALL_MS
        put(broker, hosted, with_header(honest, max_timestamp=START_WALL_MS - YEAR_MS))
    stored = [found.header.max_timestamp for found in hosted.log.batches_from(0)]
    assert stored == [START_WALL_MS, START_WALL_MS]


class Sent(NamedTuple):
    """A batch as some client makes it up."""

    base: int
    newest: int
    times: tuple[int, ...]
    """Of its records; those that do not fit the base are as near as an int64 allows."""
    attributes: int

    @property
    def deltas(self) -> list[int]:
        return [max(-(2**63), min(time - self.base, 2**63 - 1)) for time in self.times]

    def encode(self) -> bytes:
        records = [Record(at, delta, b"%d" % (at % 2), b"v") for at, delta in enumerate(self.deltas)]
        codec = Codec.LZ4 if self.attributes & 0x07 else Codec.NONE
        batch = build_batch(records, base_timestamp=self.base, max_timestamp=self.newest, codec=codec)
        return with_header(batch, attributes=self.attributes)

    def floor_ms(self, appended_ms: int) -> int:
        """Retention and lags may count from here, and from no earlier time."""
        newest = max(self.base + delta for delta in self.deltas)
        return min(newest if newest > 0 else appended_ms, appended_ms - MARGIN_MS)


TIMES = st.sampled_from(
    [-(2**63), -(2**62), -1, 0, 1, 1_000, 2**62, 2**63 - 1]
    + [
        START_WALL_MS + age
        for age in (-YEAR_MS, -2 * HOUR_MS, -HOUR_MS // 2, -FRESH_MS, 0, HOUR_MS // 2, HOUR_MS, 9 * HOUR_MS)
    ]
)
sent = st.builds(
    Sent,
    base=TIMES,
    newest=TIMES,
    times=st.lists(TIMES, min_size=1, max_size=3).map(tuple),
    attributes=st.sampled_from([0, 0, 0, 0, 3, 3, 0x08, 0x40, 0x80, 0x4000]),
)
plain = st.builds(
    lambda time: Sent(time, time, (time,), 0), st.sampled_from([START_WALL_MS, START_WALL_MS - HOUR_MS])
)
scripts = st.lists(
    st.one_of(
        sent, sent, plain, st.sampled_from(["stops", "is killed", "rolls", FIRST_CHECK_MS, HOUR_MS // 3])
    ),
    max_size=8,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    scripts,
    st.sampled_from(["delete", "compact", "compact,delete"]),
    st.sampled_from([NO_BOUND, str(HOUR_MS)]),
    st.sampled_from(["200", "1000000"]),
)
def test_no_header_makes_records_go_before_their_time(
    script: list[Sent | str | int], policy: str, after_max_ms: str, segment_bytes: str
) -> None:
    broker = QuietBroker()
    hosted = broker.create(
        "t",
        cleanup_policy=policy,
        retention_ms=str(HOUR_MS),
        min_compaction_lag_ms=str(HOUR_MS),
        min_cleanable_dirty_ratio="0",
        internal_segment_bytes=segment_bytes,
        message_timestamp_after_max_ms=after_max_ms,
    )
    floors: dict[int, int] = {}
    sent_at: dict[int, int] = {}
    for step in [*script, HOUR_MS // 2, "stops", HOUR_MS // 2, HOUR_MS]:
        if isinstance(step, Sent):
            now_ms = broker.clock.now().wall_ms
            base_offset = put(broker, hosted, step.encode())
            if base_offset is not None:
                for at, delta in enumerate(step.deltas):
                    floors[base_offset + at] = step.floor_ms(now_ms)
                    sent_at[base_offset + at] = step.base + delta
            continue
        if step == "rolls":
            if hosted.log.active.size:
                roll(broker.node, hosted, broker.clock.now())
                broker.settle()
        elif isinstance(step, int):
            go_on(broker, step)
        else:
            if step == "stops":
                broker.node.stop(broker.clock.now())
            else:
                broker.disk.kill()
            broker = QuietBroker(disk=broker.disk, clock=broker.clock)
            hosted = broker.node.partitions.get("t", 0) or hosted
        now_ms = broker.clock.now().wall_ms
        young = {offset for offset, floor_ms in floors.items() if now_ms - HOUR_MS <= floor_ms}
        assert young <= retained(hosted)
        timestamp, offset = find_offset(hosted, MAX_TIMESTAMP, read_committed=False)
        assert offset < 0 or sent_at[offset] == timestamp
        for asked in (0, START_WALL_MS - HOUR_MS, START_WALL_MS, 2**62):
            timestamp, offset = find_offset(hosted, asked, read_committed=False)
            assert offset < 0 or (sent_at[offset] == timestamp >= asked and offset in retained(hosted))
    if policy != "compact" and after_max_ms != NO_BOUND:
        go_on(broker, 2 * HOUR_MS)
        assert retained(hosted) == set(), "and everything goes when its time has come"
