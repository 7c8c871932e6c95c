"""Two topics that should hold the same: what is missing, there twice, there alone, or in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fake_cluster import LIST_OFFSETS, FakeCluster

from holdfast.audit import record_walk
from holdfast.audit.model import Fate, Verdict
from holdfast.audit.topics import audit_topics
from holdfast.reader.errors import TopicMissing

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import World

Pair = tuple[bytes | None, bytes]


def send(world: World, topic: str, records: Sequence[Pair], partition: int = 0) -> None:
    world.send(
        [value for _, value in records], topic=topic, partition=partition, keys=[key for key, _ in records]
    )


def pairs(numbers: Sequence[int]) -> list[Pair]:
    return [(b"k%d" % (each % 5), b"v%d" % each) for each in numbers]


def test_a_copy_in_other_partitions_is_proven(world: World) -> None:
    send(world, "a", pairs(range(10)))
    send(world, "a", pairs(range(10, 20)), partition=1)
    send(world, "b", pairs([each for each in range(20) if each % 5 < 3]))
    send(world, "b", pairs([each for each in range(20) if each % 5 >= 3]), partition=1)
    report = audit_topics("a", "b", world.settings, with_values=True, in_order=True)
    assert report.verdict is Verdict.PROVEN, report.reasons
    assert (report.mode, report.subject) == ("topics", "a and b")
    assert [account.fates for account in report.partitions] == [{"output": 10}, {"output": 10}]


def test_what_is_missing_in_the_middle_is_lost_and_at_the_end_perhaps(world: World) -> None:
    send(world, "a", pairs(range(10)))
    send(world, "b", pairs([0, 1, 3, 4, 5, 6]))
    report = audit_topics("a", "b", world.settings, with_values=True)
    (lost,) = report.findings
    assert (lost.fate, lost.ranges, lost.keys) == (Fate.LOST, ((2, 2),), ("k2",))
    assert report.partitions[0].fates == {"output": 6, "lost": 1, "pending": 3}
    finished = audit_topics("a", "b", world.settings, with_values=True, is_finished=True)
    assert finished.findings[0].ranges == ((2, 2), (7, 9))


def test_a_copy_under_way_is_inconclusive(world: World) -> None:
    send(world, "a", pairs(range(10)))
    send(world, "b", pairs(range(8)))
    report = audit_topics("a", "b", world.settings, with_values=True)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "2 records at the end of a-0, from offset 8 on" in report.reasons[0]


def test_markers_of_the_copy_are_waited_for(world: World) -> None:
    """Apache Kafka answers the end of a transaction before it writes them: its last records are in the copy."""
    send(world, "a", pairs(range(10)))
    send(world, "b", pairs(range(10)))
    copy = world.cluster.topics["b"].partitions[0]
    copy.last_stable = 8

    def mark(fields: dict[str, Any]) -> None:
        copy.last_stable = None

    keep = [lambda fields: None] * 4
    world.cluster.script(LIST_OFFSETS, *keep, mark)
    report = audit_topics("a", "b", world.settings, with_values=True, is_finished=True)
    assert report.verdict is Verdict.PROVEN, report.reasons


def test_what_stays_behind_an_open_transaction_is_no_loss(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_walk, "DECIDED_SECONDS_MAX", 0.05)
    send(world, "a", pairs(range(10)))
    send(world, "b", pairs(range(10)))
    world.cluster.topics["b"].partitions[0].last_stable = 8
    report = audit_topics("a", "b", world.settings, with_values=True, is_finished=True)
    assert (report.verdict, report.findings) == (Verdict.INCONCLUSIVE, ())
    assert "topic:b does not have them, and holds 2 offsets behind a transaction" in report.reasons[0]
    send(world, "c", pairs(range(5)))
    world.cluster.topics["c"].partitions[0].last_stable = 4
    # What may be there is less than what is missing.
    report = audit_topics("a", "c", world.settings, with_values=True, is_finished=True)
    assert [each.fate for each in report.findings] == [Fate.LOST]


def test_more_in_the_copy_is_duplicated_or_extra(world: World) -> None:
    send(world, "a", pairs(range(6)))
    send(world, "b", [*pairs([0, 1, 2, 2, 3, 4, 5]), (b"mine", b"own")])
    twice, extra = audit_topics("a", "b", world.settings, with_values=True).findings
    assert (twice.fate, twice.ranges) == (Fate.DUPLICATED, ((2, 2),))
    assert (extra.fate, extra.count, extra.keys) == (Fate.EXTRA, 1, ("mine",))
    assert "b-0 row 7" in extra.detail


def test_another_value_shows_only_where_values_are_compared(world: World) -> None:
    send(world, "a", [(b"x", b"1"), (b"y", b"2")])
    send(world, "b", [(b"x", b"9"), (b"y", b"2")])
    assert audit_topics("a", "b", world.settings).verdict is Verdict.PROVEN
    changed = audit_topics("a", "b", world.settings, with_values=True)
    assert {each.fate for each in changed.findings} == {Fate.LOST, Fate.EXTRA}


def test_another_order_of_one_key_is_found(world: World) -> None:
    send(world, "a", pairs(range(10)))
    # 3 and 8 have one key: they changed places. 0 and 1 have not.
    send(world, "b", pairs([1, 0, 2, 8, 4, 5, 6, 7, 3, 9]))
    assert audit_topics("a", "b", world.settings, with_values=True).verdict is Verdict.PROVEN
    (found,) = audit_topics("a", "b", world.settings, with_values=True, in_order=True).findings
    assert (found.fate, found.keys, found.count) == (Fate.ALTERED, ("k3",), 1)
    assert found.ranges == ((3, 3),)


@pytest.mark.parametrize("key", ["value.id", "headers.id", "topic || '-' || value.id", "key"])
def test_any_expression_is_a_key(world: World, key: str) -> None:
    for topic in ("a", "b"):
        world.send(
            [b'{"id":%d}' % each for each in range(5)],
            topic=topic,
            headers=[(("id", b"%d" % each),) for each in range(5)],
        )
    report = audit_topics("a", "b", world.settings, key=key)
    if key.startswith("topic"):  # of the source and of the copy it is another
        assert report.verdict is not Verdict.PROVEN
    else:
        assert report.verdict is Verdict.PROVEN, report.reasons


def test_a_condition_chooses_on_both_sides(world: World) -> None:
    for topic, ids in (("a", range(10)), ("b", range(4, 12))):
        world.send([b'{"id":%d}' % each for each in ids], topic=topic)
    report = audit_topics("a", "b", world.settings, key="value.id", where="value.id >= 4")
    assert [each.fate for each in report.findings] == [Fate.EXTRA]
    assert report.findings[0].keys == ("10", "11")


def test_the_copy_may_be_in_another_cluster(world: World, tmp_path: Path) -> None:
    send(world, "a", pairs(range(5)))
    with FakeCluster() as other:
        theirs = {"bootstrap.servers": other.bootstrap_servers}
        with pytest.raises(TopicMissing):
            audit_topics("a", "a", world.settings, copy_settings=theirs)
        topic = other.add_topic("a", 1)
        for log in world.cluster.topics["a"].partitions[0].batches:
            topic.partitions[0].append(log[1])
        assert audit_topics("a", "a", world.settings, copy_settings=theirs).verdict is Verdict.PROVEN
