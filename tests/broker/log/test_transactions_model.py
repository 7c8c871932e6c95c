"""Transactions in a log against a history that is worked out by counting.

Random interleavings of transactional and other batches, commits, aborts, rolls, flushes, deleted records, stops, kills
and power failures: a read_committed reader sees exactly the committed records below the last stable offset, from
wherever it begins and however little it fetches at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.partition_logs import DELETE_RETENTION_MS, compacted, topic_config
from tests.support.tiers import examples
from tests.support.transactional_log import TransactionalLog

from holdfast.broker.log.end_markers import replay_batch
from holdfast.broker.log.producer_state import ProducerStateMap
from holdfast.config.topic import TopicConfig
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.codecs import Codec

PRODUCERS = [1, 2, 3]
KEYS = [b"a", b"b", b"c", b"d"]
pairs = st.lists(st.tuples(st.sampled_from(KEYS), st.none() | st.binary(max_size=30)), min_size=1, max_size=3)

writes = st.tuples(
    st.just("write"),
    st.sampled_from([-1, *PRODUCERS, *PRODUCERS]),
    st.sampled_from([True, True, True, False]),
    pairs,
    st.sampled_from([Codec.NONE, Codec.NONE, Codec.LZ4]),
)
ends = st.tuples(
    st.sampled_from(["end", "end", "end while flushing"]),
    st.sampled_from(PRODUCERS),
    st.booleans(),
    st.booleans(),
)
quiet = st.tuples(st.just("power lost in stop"), st.integers(0, 30)) | st.sampled_from(
    ["roll", "begin_flush", "flush", "flush", "checkpoint", "restart", "kill", "lose_power"]
).map(lambda n: (n,))
deletes = st.tuples(st.just("delete"), st.integers(0, 60))
compactions = st.tuples(st.just("compact"), st.sampled_from([1 << 20, 1 << 20, 2 * 160])) | st.tuples(
    st.just("power lost in compaction"), st.integers(0, 120)
)
ages = st.tuples(st.just("age"), st.just(DELETE_RETENTION_MS))
losses = st.tuples(st.just("lose snapshots"), st.booleans())
expiries = st.just(("expire",))
waits = st.tuples(st.just("wait"), st.sampled_from([1, DELETE_RETENTION_MS]))


def act(subject: TransactionalLog, step: tuple[Any, ...]) -> None:
    kind, *rest = step
    if kind == "write":
        producer_id, transactional, content, codec = rest
        if subject.log.producers.has_transaction(producer_id):
            transactional = True
        subject.write(content, producer_id, transactional=transactional, codec=codec)
    elif kind in ("end", "end while flushing"):
        producer_id, is_commit, bumps = rest
        if kind == "end while flushing":
            subject.begin_flush()
        subject.end(producer_id, is_commit=is_commit, bumps_epoch=bumps)
        if kind == "end while flushing":
            subject.flush()
    elif kind == "delete":
        subject.delete_below(*rest)
    elif kind == "compact":
        subject.flush()
        subject.checkpoint()
        subject.compact(*rest)
    elif kind == "power lost in compaction":
        subject.flush()
        subject.checkpoint()
        subject.compact(power_lost_after=rest[0])
    elif kind == "power lost in stop":
        subject.restart(power_lost_after=rest[0])
    elif kind == "lose snapshots":
        if not subject.start_offset:
            subject.lose_snapshots(clean=rest[0])
    elif kind == "expire":
        subject.log.producers.remove_expired(subject.now_ms + 1, 1)
    elif kind == "age":
        subject.age(*rest)
    elif kind == "wait":
        subject.now_ms += rest[0]
    else:
        plain: dict[str, Callable[[], None]] = {
            "roll": subject.roll,
            "begin_flush": subject.begin_flush,
            "flush": subject.flush,
            "checkpoint": subject.checkpoint,
            "restart": subject.restart,
            "kill": subject.kill,
            "lose_power": subject.lose_power,
        }
        plain[kind]()


def check_replay(subject: TransactionalLog) -> None:
    """Replaying the whole log gives the state that a snapshot and its tail gave."""
    producers = ProducerStateMap()
    for segment in subject.log.segments:
        for found in subject.log.batches_from(segment.base_offset):
            if subject.log.segments[subject.log.segment_for(found.header.base_offset)] is segment:
                replay_batch(producers, found.header, segment.file, found.position, subject.now_ms)
    assert producers.ongoing_transactions == subject.log.producers.ongoing_transactions
    replayed = {p.producer_id: p._replace(last_timestamp=0) for p in producers.describe()}
    kept = {p.producer_id: p._replace(last_timestamp=0) for p in subject.log.producers.describe()}
    assert replayed == kept
    for producer_id in kept:
        # A snapshot has one timestamp for the producer and its newest batch, as Kafka's has.
        assert [batch[:4] for batch in producers.batches_of(producer_id)] == [
            batch[:4] for batch in subject.log.producers.batches_of(producer_id)
        ]


CONFIGS = {
    "group": topic_config(internal_segment_bytes="600"),
    "os": topic_config(internal_segment_bytes="600", holdfast_flush="os"),
    "large": topic_config(internal_segment_bytes="100000"),
}


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(sorted(CONFIGS)),
    st.lists(writes | writes | ends | quiet | deletes | losses, min_size=10, max_size=40),
    st.integers(0, 1 << 16),
)
def test_committed_readers_see_committed_records_in_order(
    config: str, steps: list[tuple[Any, ...]], seed: int
) -> None:
    subject = TransactionalLog(CONFIGS[config], SimulatedDisk(seed))
    for step in steps:
        act(subject, step)
        if step[0] not in ("write", "checkpoint"):
            subject.check()
    subject.check()
    if not subject.start_offset:
        check_replay(subject)


def check_compacted(subject: TransactionalLog) -> None:
    expected = subject.expected()
    assert subject.hosted.offsets.last_stable_offset == expected.last_stable_offset
    assert subject.log.producers.ongoing_transactions == expected.open_transactions
    shown = subject.shown()
    everything = iter(expected.shown)
    assert all(record in everything for record in shown), "a record that was not committed, or out of order"
    latest = {record.key: record for record in expected.shown}
    must_be_there = {record for record in latest.values() if record.value is not None} | {
        record for record in expected.shown if record.offset >= subject.touched_to
    }
    assert must_be_there <= set(shown)
    for max_bytes in (250, 1 << 20):
        assert subject.shown(max_bytes=max_bytes) == shown
    for offset in range(subject.start_offset, expected.last_stable_offset + 1):
        assert subject.shown(offset) == [record for record in shown if record.offset >= offset]
    markers = subject.markers()
    told = subject.index_entries()
    aborted = {(entry.producer_id, entry.last_offset): entry.first_offset for entry in expected.aborted}
    # Where nothing is left of its beginning, a rebuilt entry begins later.
    assert all(aborted[entry.producer_id, entry.last_offset] <= entry.first_offset for entry in told)
    assert all(markers.get(entry.last_offset) is False for entry in told), "an entry without its marker"


COMPACTED: dict[str, TopicConfig] = {
    "group": compacted(internal_segment_bytes="400"),
    "os": compacted(internal_segment_bytes="400", holdfast_flush="os"),
    "both": compacted(internal_segment_bytes="400", cleanup_policy="compact,delete"),
}


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(sorted(COMPACTED)),
    st.lists(
        writes | writes | ends | ends | quiet | compactions | ages | waits | deletes | losses | expiries,
        min_size=10,
        max_size=50,
    ),
    st.integers(0, 1 << 16),
)
@example(
    # The state of a roll is that of an open transaction, and compaction has removed all of it since.
    config="group",
    steps=[
        *[("write", producer_id, True, [(b"a", None)], Codec.NONE) for producer_id in (-1, -1, 1, 2)],
        ("age", DELETE_RETENTION_MS),
        ("end", 1, False, False),
        ("end", 2, True, True),
        ("end", 2, False, False),
        ("age", DELETE_RETENTION_MS),
        ("power lost in stop", 0),
    ],
    seed=0,
)
def test_compaction_keeps_what_committed_readers_see(
    config: str, steps: list[tuple[Any, ...]], seed: int
) -> None:
    subject = TransactionalLog(COMPACTED[config], SimulatedDisk(seed))
    for step in steps:
        act(subject, step)
        if step[0] not in ("write", "checkpoint", "wait"):
            check_compacted(subject)
    check_compacted(subject)
