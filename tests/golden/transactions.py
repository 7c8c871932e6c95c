"""A transactional producer of raw requests that writes down, in its scene, what it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.golden.opening import check_code
from tests.golden.scene import OPEN, Scene

from holdfast.wire.api_keys import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from holdfast.wire.batch import Record, build_batch

CONCURRENT_TRANSACTIONS = 51


class GoldenProducer:
    """With `is_newer` as clients do since KIP-890; without, partitions are enrolled by a request of their own."""

    def __init__(self, scene: Scene, transactional_id: str, *, is_newer: bool = True) -> None:
        self._scene = scene
        self._id = transactional_id
        self._is_newer = is_newer
        self._sequences: dict[tuple[str, int], int] = {}
        answer = self._settled(
            INIT_PRODUCER_ID,
            5,
            transactional_id=transactional_id,
            transaction_timeout=900_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        self._note("Empty")

    @classmethod
    def resumed(cls, scene: Scene, transactional_id: str, *, anew: bool = False) -> GoldenProducer:
        """The producer of an earlier run: goes on in its transaction, or introduces itself `anew`."""
        if anew:
            return cls(scene, transactional_id)
        found = cls.__new__(cls)
        known = scene.expected["transactions"][transactional_id]
        found._scene, found._id, found._is_newer = scene, transactional_id, True
        found.producer_id, found.epoch = known["producer_id"], known["epoch"]
        found._sequences = {
            (topic, partition): following for topic, partition, following in known["sequences"]
        }
        return found

    def _note(self, state: str) -> None:
        self._scene.expected["transactions"][self._id] = {
            "state": state,
            "producer_id": self.producer_id,
            "epoch": self.epoch,
            "sequences": [[*where, following] for where, following in self._sequences.items()],
        }

    def _settled(self, api_key: int, version: int, **fields: Any) -> Any:
        """Asked again while the transaction before is still being ended, as clients do."""
        while True:
            answer = self._scene.ask(api_key, version, **fields)
            if answer.error_code != CONCURRENT_TRANSACTIONS:
                check_code(answer, f"{self._id}: request {api_key}")
                return answer

    @property
    def _named(self) -> dict[str, Any]:
        return {"transactional_id": self._id, "producer_id": self.producer_id, "producer_epoch": self.epoch}

    def produce(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        scene = self._scene
        if not self._is_newer:
            answer = scene.ask(
                ADD_PARTITIONS_TO_TXN,
                3,
                v3_and_below_transactional_id=self._id,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.epoch,
                v3_and_below_topics=[{"name": topic, "partitions": [partition]}],
            )
            (result,) = answer.results_by_topic_v3_and_below[0].results_by_partition
            assert not result.partition_error_code, result
        sequence = self._sequences.get((topic, partition), 0)
        self._sequences[topic, partition] = sequence + len(records)
        batch = build_batch(
            records,
            base_timestamp=scene.clock.wall_ms,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        data = [{"name": topic, "partition_data": [{"index": partition, "records": batch}]}]
        answer = scene.ask(
            PRODUCE,
            12 if self._is_newer else 11,
            transactional_id=self._id,
            acks=-1,
            timeout=30_000,
            topic_data=data,
        )
        (result,) = answer.responses[0].partition_responses
        check_code(result, f"{self._id}: producing to {topic}-{partition}")
        first = scene.note(topic, partition, records, OPEN, producer_id=self.producer_id)
        assert result.base_offset == first, (topic, partition, result.base_offset, first)
        self._note("Ongoing")

    def commit_position(self, group: str, topic: str, partition: int, offset: int, *, counts: bool) -> None:
        """`counts` when the transaction will be committed."""
        if not self._is_newer:
            self._settled(ADD_OFFSETS_TO_TXN, 4, **self._named, group_id=group)
        position = {
            "partition_index": partition,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        topics = [{"name": topic, "partitions": [position]}]
        answer = self._scene.ask(TXN_OFFSET_COMMIT, 5, **self._named, group_id=group, topics=topics)
        check_code(answer.topics[0].partitions[0], f"{self._id}: a position of {group}")
        if counts:
            known = self._scene.expected["positions"].setdefault(group, {}).setdefault(topic, {})
            known[str(partition)] = [offset, ""]

    def end(self, *, is_commit: bool) -> None:
        self._scene.decide(self.producer_id, is_commit=is_commit)
        answer = self._settled(END_TXN, 5 if self._is_newer else 4, **self._named, committed=is_commit)
        if self._is_newer:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self._sequences.clear()
        self._note("CompleteCommit" if is_commit else "CompleteAbort")
