"""A member of a storm does its part: what it could not commit, it commits as long as it may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from tests.support.chaos_member import History, Member


class Raw:
    def __init__(self, number: int) -> None:
        self._number = number

    def partition(self) -> int:
        return self._number

    def offset(self) -> int:
        return 7

    def value(self) -> bytes:
        return b"x"


class Refusing:
    """A consumer whose first commit comes at a bad time, and which has partition 1 alone afterwards."""

    def __init__(self) -> None:
        self.commits: list[dict[int, int]] = []

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        self.commits.append({each.partition: each.offset for each in offsets})
        if len(self.commits) == 1:
            raise KafkaException(KafkaError(KafkaError.REBALANCE_IN_PROGRESS))

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition("storm", 1)]


def test_a_refused_commit_is_repeated_for_the_partitions_that_stayed(tmp_path: Path) -> None:
    member = Member.__new__(Member)  # without its watchdog
    member.options = {"topic": "storm"}
    member.history = History(str(tmp_path / "history"))
    member.uncommitted = {}
    consumer = Refusing()
    member._process(cast("Any", consumer), [Raw(0), Raw(1)])
    member._process(cast("Any", consumer), [])
    assert consumer.commits == [{0: 8, 1: 8}, {1: 8}]
    assert not member.uncommitted
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "history").read_text().splitlines()]
    assert kinds[2:] == ["committing", "not committed", "committing", "committed"]
