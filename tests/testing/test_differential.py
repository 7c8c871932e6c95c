"""The comparison of two brokers notices what it should, and only that."""

from __future__ import annotations

import uuid
from typing import Any

from tests.support.differential import Allowed, Difference, Normaliser, differences, judge

from holdfast.wire.batch import make_batch

ONE, TWO = uuid.UUID(int=1), uuid.UUID(int=2)


def test_names_chosen_by_a_broker_are_compared_by_their_use() -> None:
    answer = [{"topic_id": ONE, "producer_id": 7}, {"topic_id": ONE, "producer_id": 9}]
    other = [{"topic_id": TWO, "producer_id": 1}, {"topic_id": TWO, "producer_id": 0}]
    mixed = [{"topic_id": TWO, "producer_id": 1}, {"topic_id": ONE, "producer_id": 0}]
    assert Normaliser()(answer) == Normaliser()(other)
    assert Normaliser()(answer) != Normaliser()(mixed)


def test_no_id_is_not_taken_for_one() -> None:
    assert Normaliser()({"producer_id": -1}) == {"producer_id": -1}
    assert Normaliser()({"session_id": 0}) == {"session_id": 0}
    assert Normaliser()({"producer_id": 0}) == {"producer_id": "<producer 1>"}


def test_order_counts_only_where_it_means_something() -> None:
    topics = [{"name": "b", "offset": 1}, {"name": "a", "offset": 2}]
    assert Normaliser()({"topics": topics}) == Normaliser()({"topics": topics[::-1]})
    assert Normaliser()({"replicas": [2, 1]}) != Normaliser()({"replicas": [1, 2]})


def test_records_are_compared_batch_by_batch() -> None:
    one, two = make_batch([b"a", b"b"], timestamp=5), make_batch([b"a", b"c"], timestamp=5)
    seen = Normaliser().batches(one + two[:-3])
    assert len(seen["batches"]) == 1
    assert seen["cut_batch_follows"]
    found = differences("script", {"read": Normaliser().batches(one)}, {"read": Normaliser().batches(two)})
    assert [each.path for each in found] == ["script/read/batches[0].records_held[1]"]


def compared(ours: Any, theirs: Any) -> list[Difference]:
    return differences("script", {"label": ours}, {"label": theirs})


def test_a_difference_is_found_wherever_it_hides() -> None:
    found = compared(
        {"topics": [{"name": "t", "partitions": [{"partition_index": 3, "error_code": "none"}]}]},
        {"topics": [{"name": "t", "partitions": [{"partition_index": 3, "error_code": "unknown"}]}]},
    )
    assert found == [Difference("script/label/topics[t].partitions[3].error_code", "none", "unknown")]
    assert [each.path for each in compared({"a": 1}, {"a": 1, "b": 2})] == ["script/label/b"]
    assert compared(0, False) == [Difference("script/label/", 0, False)]
    assert differences("script", {"only ours": 1}, {})[0].theirs == "<not reached>"


def test_a_difference_without_a_name_fails_and_so_does_a_name_without_difference() -> None:
    found = [Difference("script/label/error_message", "<error_message>", None)]
    assert judge("script", found, []) == [str(found[0])]
    assert judge("script", found, [Allowed("texts", ("*error_message",))]) == []
    assert judge("script", found, [Allowed("texts", ("*error_message",), theirs="''")]) == [str(found[0])]
    stale = Allowed("stale", ("script/label/offset",))
    assert judge("script", [], [stale]) == [
        "the allowed difference 'stale' no longer shows at script/label/offset"
    ]
    assert judge("another", [], [stale]) == []


def test_brackets_in_a_pattern_are_brackets() -> None:
    difference = Difference("script/label/topics[t].offset", 1, 2)
    assert Allowed("name", ("script/*/topics[t].offset",)).covers(difference)
    assert not Allowed("name", ("script/*/topics[x].offset",)).covers(difference)
