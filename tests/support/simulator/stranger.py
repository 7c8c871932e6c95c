"""Somebody who may send anything: requests against internal topics, and those that only coordinators send.

Nobody minds what it is answered. The checkers see what it has done to others: it must be nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.simulator.link import Link

from holdfast.wire.batch import make_batch

if TYPE_CHECKING:
    from tests.support.simulator.world import World

PRODUCE, DELETE_TOPICS, DELETE_RECORDS, WRITE_TXN_MARKERS = 0, 20, 21, 27
CREATE_TOPICS, CREATE_PARTITIONS, INCREMENTAL_ALTER_CONFIGS = 19, 37, 44
TOPIC_RESOURCE, SET = 2, 0
INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state")
_SETTINGS = (
    ("cleanup.policy", "delete"),
    ("retention.ms", "1"),
    ("retention.bytes", "1"),
    ("delete.retention.ms", "0"),
    ("max.compaction.lag.ms", "1"),
    ("message.timestamp.type", "LogAppendTime"),
)


class Stranger:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.link = Link(world, name)
        self._waiting = False

    is_settled = True

    def settle(self) -> None:
        """Nobody waits for it."""

    def act(self) -> bool:
        if self._waiting:
            return False
        rng = self.world.rng
        api_key, version, fields = rng.choice((self._markers, self._markers, self._administration))()
        self._waiting = True
        self.world.say(f"{self.name}: request {api_key} {fields}")

        def answered(response: Any | None) -> None:
            self._waiting = False
            self.world.count(f"stranger: {api_key}", "unknown" if response is None else "answered")

        self.link.request(api_key, version, fields, answered)
        return True

    def _markers(self) -> tuple[int, int, dict[str, Any]]:
        """The end of somebody's transaction, of any epoch and of a coordinator that nobody knows."""
        rng = self.world.rng
        topics = [
            {"name": known.topic.name, "partition_indexes": [known.index]}
            for known in self.world.some_partitions(2)
        ]
        marker = {
            "producer_id": rng.randrange(6),
            "producer_epoch": rng.choice((0, 1, 2, 32_767)),
            "transaction_result": rng.random() < 0.5,
            "topics": [*topics, {"name": INTERNAL_TOPICS[0], "partition_indexes": [0, 1]}],
            "coordinator_epoch": rng.choice((0, 0, 1, 100, 2**31 - 1)),
        }
        return WRITE_TXN_MARKERS, 1, {"markers": [marker]}

    def _administration(self) -> tuple[int, int, dict[str, Any]]:
        rng = self.world.rng
        name = rng.choice(INTERNAL_TOPICS)
        setting, value = rng.choice(_SETTINGS)
        configs = [{"name": setting, "config_operation": SET, "value": value}]
        resource = {"resource_type": TOPIC_RESOURCE, "resource_name": name, "configs": configs}
        more = {"name": name, "count": rng.choice((3, 50)), "assignments": None}
        anew = {"name": name, "num_partitions": 7, "replication_factor": 1, "assignments": [], "configs": []}
        before = [{"partition_index": index, "offset": -1} for index in (0, 1)]
        junk = [{"index": index, "records": make_batch([b"junk"])} for index in (0, 1)]
        requests: tuple[tuple[int, int, dict[str, Any]], ...] = (
            (CREATE_PARTITIONS, 3, {"topics": [more], "timeout": 30_000, "validate_only": False}),
            (CREATE_TOPICS, 7, {"topics": [anew], "timeout": 30_000, "validate_only": False}),
            (DELETE_TOPICS, 6, {"topics": [{"name": name, "topic_id": None}], "timeout": 30_000}),
            (DELETE_RECORDS, 2, {"topics": [{"name": name, "partitions": before}], "timeout": 30_000}),
            (INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False}),
            (
                PRODUCE,
                9,
                {
                    "transactional_id": None,
                    "acks": -1,
                    "timeout": 30_000,
                    "topic_data": [{"name": name, "partition_data": junk}],
                },
            ),
        )
        return rng.choice(requests)
