"""Dead letters of a pipeline, read by the auditor: whose they are, where from, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.support.audit_sinks import Ledger
from tests.support.audit_topics import FakeTopics, Sent, TopicBuilder, dead_letter
from tests.support.audit_topics import dead_letters as dead_letters_in
from tests.support.fake_cluster import FakeCluster

from holdfast.audit.sinks.kafka import DeadLetters
from holdfast.audit.sinks.letters import dead_letters, letters
from holdfast.audit.sinks.opening import open_dead_letters

if TYPE_CHECKING:
    from tests.audit.sinks.conftest import Shop


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


def letter(offset: int, reason: str = "parse", group: str = "shop", **more: object) -> Sent:
    return dead_letter(group, ("orders", 0, offset), b"k", b"v", reason=reason, **more)  # type: ignore[arg-type]


def filled(shop: Shop, cluster: FakeCluster, *letters: Sent) -> TopicBuilder:
    shop.ledger = Ledger("shop", "dead-letter")
    builder = dead_letters_in(FakeTopics(cluster), "shop-dlt", "shop")
    builder.commit(shop.opening())
    builder.commit(shop.entry(0, len(letters)), letters)
    return builder


def reader_of(shop: Shop, cluster: FakeCluster) -> DeadLetters:
    reader = open_dead_letters(shop.definition(), {"bootstrap.servers": cluster.bootstrap_servers})
    assert isinstance(reader, DeadLetters)
    return reader


def test_dead_letters_say_where_from_and_why(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, cluster, letter(3), letter(5, "positive", error="amount > 0"))
    reader = reader_of(shop, cluster)
    assert shop.offsets(reader) == [3, 5]
    found = [(row.offset, row.reason, row.error, row.where) for row in dead_letters(reader)]
    assert found == [
        (3, "parse", "it is no JSON", "shop-dlt-0@0"),
        (5, "positive", "amount > 0", "shop-dlt-0@1"),
    ]
    [(batch, reasons)] = letters(reader)
    assert (batch.offsets.tolist(), reasons.to_pylist()) == ([3, 5], ["parse", "positive"])
    assert [entry.number for entry in reader.entries()] == [0, 1]
    assert list(reader.problems()) == []
    assert reader.find(shop.place, 5) == ["shop-dlt-0@1"]


def test_one_that_failed_before_counts_by_its_last_failure(shop: Shop, cluster: FakeCluster) -> None:
    earlier = letter(99, "old", group="else").headers
    filled(shop, cluster, letter(4, own=earlier))
    [row] = dead_letters(reader_of(shop, cluster))
    assert (row.offset, row.reason) == (4, "parse")


def test_dead_letters_of_other_groups_are_left_out(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, cluster, letter(3), letter(4, group="consumers"), Sent(b"k", b"v", ()))
    reader = reader_of(shop, cluster)
    assert shop.offsets(reader) == [3]
    [gap] = reader.gaps()
    assert gap.what.startswith("2 records")


@pytest.mark.parametrize("header", ["hf-dlt-topic", "hf-dlt-partition", "hf-dlt-offset", "hf-dlt-group"])
def test_one_that_lacks_a_header_names_no_record(shop: Shop, cluster: FakeCluster, header: str) -> None:
    whole = letter(4)
    broken = whole._replace(headers=tuple(each for each in whole.headers if each[0] != header))
    filled(shop, cluster, letter(3), broken)
    assert shop.offsets(reader_of(shop, cluster)) == [3]


def test_a_dead_letter_that_is_there_twice_is_given_twice(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, cluster, letter(3), letter(3))
    assert shop.offsets(reader_of(shop, cluster)) == [3, 3]


def test_letters_of_several_partitions_come_by_partition(shop: Shop, cluster: FakeCluster) -> None:
    places = [("orders", 1, 5), ("orders", 0, 6), ("else", 0, 1), ("orders", 1, 7)]
    filled(shop, cluster, *(dead_letter("shop", each, None, None, reason=f"r{each[2]}") for each in places))
    found = {
        (batch.topic, batch.partition): list(zip(batch.offsets.tolist(), reasons.to_pylist(), strict=True))
        for batch, reasons in letters(reader_of(shop, cluster))
    }
    assert found == {
        ("orders", 1): [(5, "r5"), (7, "r7")],
        ("orders", 0): [(6, "r6")],
        ("else", 0): [(1, "r1")],
    }
