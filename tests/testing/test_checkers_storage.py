"""Rules about partitions that promise less: compacted, not flushed, expiring; and lookups by time."""

from __future__ import annotations

import pytest
from tests.support import history as h
from tests.support.checkers import Violation, check

P: h.Partition = ("topic", 0)


def broken_rule(*parts: list[h.Event]) -> str:
    with pytest.raises(Violation) as violation:
        passes(*parts)
    return violation.value.rule


def passes(*parts: list[h.Event]) -> None:
    check([event for part in parts for event in part])


def stored(
    number: int, base: int, *, key: bytes = b"", timestamp: int = -1, value: bytes | None = None
) -> list[h.Event]:
    """A batch of one record, acknowledged."""
    keys = (key,) if key else ()
    return [
        h.BatchSent(P, "p", number, (value or b"v%d" % number,), keys, timestamp),
        h.BatchAcknowledged(P, "p", number, base, True),
    ]


def read(*batches: h.StoredBatch, end: int, position: int = 0, reader: str = "r") -> list[h.Event]:
    return [h.ReadBegun(reader, P), h.BatchesRead(reader, P, position, batches, end, 0)]


def batch(number: int, base: int) -> h.StoredBatch:
    return h.StoredBatch(base, (b"v%d" % number,))


# Compacted topics

COMPACTED: list[h.Event] = [h.CompactionAllowed(P)]


def scanned(*records: tuple[int, bytes]) -> list[h.Event]:
    return [h.ScanBegun("r", P), h.PartitionScanned("r", P, records)]


def test_compaction_leaves_gaps_and_changes_nothing() -> None:
    three = [*stored(0, 0, key=b"a"), *stored(1, 1, key=b"a"), *stored(2, 2, key=b"b")]
    passes(COMPACTED, three, read(batch(1, 1), batch(2, 2), end=3))
    left = h.StoredBatch(0, (b"v1",), offsets=(1,), end_offset=3)
    passes(COMPACTED, three, read(left, end=3))
    assert broken_rule(three, read(batch(1, 1), batch(2, 2), end=3)) == "gap"
    assert broken_rule(COMPACTED, three, read(batch(1, 2), end=3)) == "stored-twice"
    assert broken_rule(COMPACTED, read(batch(9, 2), end=3)) == "changed"


def test_the_last_record_of_a_key_stays() -> None:
    both = [*stored(0, 0, key=b"a"), *stored(1, 1, key=b"a")]
    passes(COMPACTED, both, scanned((1, b"v1")))
    passes(COMPACTED, both, scanned((0, b"v0"), (1, b"v1")))
    assert broken_rule(COMPACTED, both, scanned((0, b"v0"))) == "compacted-lost"
    assert broken_rule(COMPACTED, both, scanned()) == "compacted-lost"


def test_a_tombstone_may_go_and_takes_the_rest_of_its_key_along() -> None:
    deleted = [*stored(0, 0, key=b"a"), *stored(1, 1, key=b"a", value=b"tombstone:1")]
    passes(COMPACTED, deleted, scanned())
    assert broken_rule(COMPACTED, deleted, scanned((0, b"v0"))) == "compacted-lost"
    unknown: list[h.Event] = [h.BatchSent(P, "p", 1, (b"tombstone:1",), (b"a",))]
    passes(COMPACTED, stored(0, 0, key=b"a"), unknown, scanned())


def test_an_aborted_record_replaces_nothing() -> None:
    transaction: list[h.Event] = [
        h.TransactionalIdTaken("id", "s", 1, 0),
        h.TransactionBegun("t", "id", "s"),
        h.BatchSent(P, "s", 1, (b"v1",), (b"a",), -1, "t"),
        h.BatchAcknowledged(P, "s", 1, 1, True),
    ]
    abort: list[h.Event] = [h.TransactionEndRequested("t", False), h.TransactionEnded("t", False)]
    commit: list[h.Event] = [h.TransactionEndRequested("t", True), h.TransactionEnded("t", True)]
    first = stored(0, 0, key=b"a")
    passes(COMPACTED, first, transaction, abort, scanned((0, b"v0")))
    assert broken_rule(COMPACTED, first, transaction, abort, scanned()) == "compacted-lost"
    assert broken_rule(COMPACTED, first, transaction, commit, scanned((0, b"v0"))) == "compacted-lost"


# Topics that are not flushed

UNFLUSHED: list[h.Event] = [h.LossAllowed(P)]
LOST: list[h.Event] = [h.PageCacheLost()]
TWO = [*stored(0, 0), *stored(1, 1)]


def test_without_a_loss_of_the_page_cache_nothing_is_lost() -> None:
    passes(UNFLUSHED, TWO, [h.BrokerStarted()], read(batch(0, 0), batch(1, 1), end=2))
    assert broken_rule(UNFLUSHED, TWO, [h.BrokerStarted()], read(batch(0, 0), end=1)) == "acknowledged-lost"


def test_a_loss_of_the_page_cache_may_take_a_tail() -> None:
    passes(UNFLUSHED, TWO, LOST, read(batch(0, 0), end=1))
    passes(UNFLUSHED, TWO, LOST, read(end=0))
    passes(UNFLUSHED, TWO, LOST, stored(2, 1), read(batch(0, 0), batch(2, 1), end=2))
    assert broken_rule(TWO, LOST, read(batch(0, 0), end=1)) == "acknowledged-lost"


def test_after_a_loss_nothing_is_lost_again_before_the_next() -> None:
    seen = read(batch(0, 0), end=1)
    assert broken_rule(UNFLUSHED, TWO, LOST, seen, read(end=0, reader="s")) == "acknowledged-lost"


def test_what_was_cut_off_does_not_come_back() -> None:
    cut = [*stored(2, 1), *read(batch(0, 0), batch(2, 1), end=2)]
    passes(UNFLUSHED, TWO, LOST, cut, read(batch(2, 1), position=1, end=2))
    assert broken_rule(UNFLUSHED, TWO, LOST, cut, read(batch(1, 1), position=1, end=2)) == "offset-reused"


# Expiring topics


def test_an_expired_start_comes_back_only_after_a_full_disk() -> None:
    expiring: list[h.Event] = [h.ExpiryAllowed(P)]

    def starts(offset: int) -> list[h.Event]:
        return [h.ReadBegun("r", P), h.OffsetsListed("r", P, start=offset)]

    assert broken_rule(expiring, starts(3), starts(2)) == "start-moved-back"
    passes(expiring, starts(3), [h.ExpiryForgotten()], starts(2))


# Time


def looked_up(timestamp: int, offset: int, found: int) -> list[h.Event]:
    return [h.ReadBegun("r", P), h.TimeLookedUp("r", P, timestamp, offset, found)]


AT_TIMES = [*stored(0, 0, timestamp=10), *stored(1, 1, timestamp=30), *stored(2, 2, timestamp=20)]


def test_a_lookup_finds_the_first_record_of_that_time_or_later() -> None:
    passes(AT_TIMES, looked_up(10, 0, 10), looked_up(11, 1, 30), looked_up(30, 1, 30), looked_up(31, -1, -1))
    assert broken_rule(AT_TIMES, looked_up(11, 2, 20)) == "time-lookup"
    assert broken_rule(AT_TIMES, looked_up(11, -1, -1)) == "time-lookup"
    assert broken_rule(AT_TIMES, looked_up(11, 1, 31)) == "time-lookup"
    assert broken_rule(AT_TIMES, looked_up(25, 2, 20)) == "time-lookup"


def test_a_lookup_of_the_largest_time_finds_it() -> None:
    passes(AT_TIMES, looked_up(-3, 1, 30))
    assert broken_rule(AT_TIMES, looked_up(-3, 2, 20)) == "time-lookup"


def test_a_lookup_need_not_find_what_may_be_deleted() -> None:
    passes(AT_TIMES, [h.DeletionRequested(P, 2)], looked_up(11, 2, 20))


# Markers, and topics that are only mentioned


def test_a_marker_takes_an_offset_of_its_own() -> None:
    marker = h.StoredBatch(1, (), end_offset=2, marker=h.Marker(7, "commit"))
    other = h.StoredBatch(1, (), end_offset=2, marker=h.Marker(7, "abort"))
    passes(stored(0, 0), read(batch(0, 0), marker, end=2), read(marker, position=1, end=2))
    assert broken_rule(stored(0, 0), read(marker, position=1, end=2), stored(1, 1)) == "offset-reused"
    assert (
        broken_rule(read(marker, position=1, end=2), read(other, position=1, end=2, reader="s"))
        == "offset-reused"
    )


def test_a_topic_that_was_mentioned_exists() -> None:
    mentioned: list[h.Event] = [h.TopicMentioned("id1"), h.MetadataBegun("r")]
    requested: list[h.Event] = [h.TopicCreationRequested("t", 1)]
    passes(requested, mentioned, [h.MetadataRead("r", {"t": h.TopicSeen("id1", (0,))})])
    assert broken_rule(mentioned, [h.MetadataRead("r", {})]) == "topic-lost"
