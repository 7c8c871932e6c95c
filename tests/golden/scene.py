"""One run of a broker that golden directories are made with: what is asked of it, and what must be found afterwards.

Expectations are kept from what was sent, never from what was read: offsets are counted, compaction is done again over
the list of records. Only names that a broker chooses (ids, epochs) come from its answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.golden.opening import (
    EARLIEST,
    LATEST,
    StoppedClock,
    check_code,
    fetch_all,
    offset_at,
    produce,
    text_of,
)

from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import (
    CONSUMER_GROUP_HEARTBEAT,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_GROUPS,
    DELETE_RECORDS,
    DELETE_TOPICS,
    FIND_COORDINATOR,
    INCREMENTAL_ALTER_CONFIGS,
    INIT_PRODUCER_ID,
    JOIN_GROUP,
    LEAVE_GROUP,
    OFFSET_COMMIT,
    SYNC_GROUP,
)
from holdfast.wire.batch import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    Record,
    build_batch,
    iterate_records,
)
from holdfast.wire.codecs import Codec
from holdfast.wire.consumer_protocol import ConsumerAssignment, ConsumerSubscription, OwnedPartitions

TOPIC, BROKER = 2, 4
SET: Final = 0
PLAIN, COMMITTED, ABORTED, OPEN = "plain", "committed", "aborted", "open"
GROUPS, TRANSACTIONS = 0, 1


class Scene:
    """One run of the broker, the client that talks to it, and what must be found afterwards."""

    def __init__(self, client: WireClient, clock: StoppedClock, directory: Path, expected: Any) -> None:
        self.client = client
        self.clock = clock
        self.directory = directory
        self.expected = expected

    def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        return self.client.ask(api_key, version, fields)

    # Topics

    def create(self, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        listed = [{"name": setting, "value": value} for setting, value in configs.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": []}
        (made,) = self.ask(CREATE_TOPICS, 7, topics=[{**topic, "configs": listed}], timeout=5000).topics
        check_code(made, f"creating {name}")
        self.expected["topics"][name] = {
            "id": str(made.topic_id),
            "configs": dict(configs),
            "partitions": [new_partition() for _ in range(partitions)],
        }

    def delete(self, name: str) -> None:
        (gone,) = self.ask(DELETE_TOPICS, 6, topics=[{"name": name}], timeout=5000).responses
        check_code(gone, f"deleting {name}")
        self.expected["topics"].pop(name)

    def grow(self, name: str, count: int) -> None:
        (grown,) = self.ask(
            CREATE_PARTITIONS, 3, topics=[{"name": name, "count": count}], timeout=5000
        ).results
        check_code(grown, f"more partitions for {name}")
        partitions = self.expected["topics"][name]["partitions"]
        partitions += [new_partition() for _ in range(count - len(partitions))]

    def shorten(self, name: str, offset: int) -> None:
        asked = [{"name": name, "partitions": [{"partition_index": 0, "offset": offset}]}]
        answer = self.ask(DELETE_RECORDS, 2, topics=asked, timeout=5000)
        check_code(answer.topics[0].partitions[0], f"shortening {name}")
        self.expected["topics"][name]["partitions"][0]["start"] = offset

    def alter(self, kind: int, name: str, setting: str, value: str) -> None:
        change = {"name": setting, "config_operation": SET, "value": value}
        resource = {"resource_type": kind, "resource_name": name, "configs": [change]}
        (altered,) = self.ask(INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource]).responses
        check_code(altered, f"setting {setting}")
        if kind == TOPIC:
            self.expected["topics"][name]["configs"][setting] = value
        else:
            self.expected["brokers"].setdefault(name, {})[setting] = value

    # Records

    def partition(self, topic: str, partition: int) -> dict[str, Any]:
        found: dict[str, Any] = self.expected["topics"][topic]["partitions"][partition]
        return found

    def note(
        self,
        topic: str,
        partition: int,
        records: Sequence[Record],
        fate: str,
        *,
        producer_id: int = NO_PRODUCER_ID,
    ) -> int:
        """Write down what the next offsets must hold; returns the first."""
        where = self.partition(topic, partition)
        is_stamped = self.expected["topics"][topic]["configs"].get("message.timestamp.type")
        for record in records:
            at_ms = self.clock.wall_ms if is_stamped else self.clock.wall_ms + record.timestamp_delta
            where["records"].append(
                {
                    "offset": where["end"],
                    "timestamp": at_ms,
                    "key": text_of(record.key),
                    "value": text_of(record.value),
                    "headers": [[name, text_of(value)] for name, value in record.headers],
                    "fate": fate,
                    "producer": producer_id,
                }
            )
            where["end"] += 1
        return int(where["end"]) - len(records)

    def decide(self, producer_id: int, *, is_commit: bool) -> None:
        """The open records of a producer are decided, and a marker stands behind them in each partition."""
        for topic in self.expected["topics"].values():
            for where in topic["partitions"]:
                of_producer = [
                    each
                    for each in where["records"]
                    if each["producer"] == producer_id and each["fate"] == OPEN
                ]
                for each in of_producer:
                    each["fate"] = COMMITTED if is_commit else ABORTED
                if of_producer:
                    where["end"] += 1

    def send(
        self,
        topic: str,
        partition: int,
        records: Sequence[Record],
        codec: Codec = Codec.NONE,
        *,
        producer: tuple[int, int] = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH),
        sequence: int = NO_SEQUENCE,
    ) -> bytes:
        """A batch outside of any transaction, of a producer's id and epoch; returns it as it was sent."""
        batch = build_batch(
            records,
            base_timestamp=self.clock.wall_ms,
            codec=codec,
            producer_id=producer[0],
            producer_epoch=producer[1],
            base_sequence=sequence,
        )
        answer = produce(self.client, topic, partition, batch)
        check_code(answer, f"producing to {topic}-{partition}")
        first = self.note(topic, partition, records, PLAIN, producer_id=producer[0])
        if answer.base_offset != first:
            raise AssertionError(f"{topic}-{partition}: offset {answer.base_offset} where {first} comes next")
        return batch

    # Groups

    def commit(
        self, group: str, topic: str, positions: Mapping[int, int], metadata: str = "", **member: Any
    ) -> None:
        partitions = [
            {
                "partition_index": partition,
                "committed_offset": offset,
                "committed_leader_epoch": -1,
                "committed_metadata": metadata,
            }
            for partition, offset in positions.items()
        ]
        fields = {
            "group_id": group,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "group_instance_id": None,
            "retention_time": -1,
            "topics": [{"name": topic, "partitions": partitions}],
            **member,
        }
        answer = self.ask(OFFSET_COMMIT, 9, **fields)
        for each in answer.topics[0].partitions:
            check_code(each, f"committing for {group}")
        known = self.expected["positions"].setdefault(group, {}).setdefault(topic, {})
        known |= {str(partition): [offset, metadata] for partition, offset in positions.items()}

    def join_classic(self, group: str, topic: str, instance_id: str | None = None) -> dict[str, Any]:
        """The only member of a classic group; returns how it is addressed."""
        wanted: dict[str, Any] = {
            "group_id": group,
            "member_id": "",
            "group_instance_id": instance_id,
            "session_timeout": 1_800_000,
            "rebalance_timeout": 30_000,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": ConsumerSubscription(topics=(topic,)).encode(1)}],
        }
        answer = self.ask(JOIN_GROUP, 9, **wanted)
        if instance_id is None:
            wanted["member_id"] = answer.member_id
            answer = self.ask(JOIN_GROUP, 9, **wanted)
        check_code(answer, f"joining {group}")
        member = {"member_id": answer.member_id, "group_instance_id": instance_id}
        given = ConsumerAssignment(assigned_partitions=(OwnedPartitions(topic, (0, 1)),)).encode(1)
        synced = self.ask(
            SYNC_GROUP,
            5,
            group_id=group,
            generation_id=answer.generation_id,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[{"member_id": answer.member_id, "assignment": given}],
            **member,
        )
        check_code(synced, f"syncing {group}")
        self.expected["classic"][group] = {
            "state": "Stable",
            "generation": answer.generation_id,
            "protocol": "range",
            "assignment": text_of(given),
            **member,
        }
        return {"generation_id_or_member_epoch": answer.generation_id, **member}

    def leave_classic(self, group: str, member: Mapping[str, Any]) -> None:
        identity = {"member_id": member["member_id"], "group_instance_id": member["group_instance_id"]}
        check_code(self.ask(LEAVE_GROUP, 5, group_id=group, members=[identity]), f"leaving {group}")
        known = self.expected["classic"][group]
        self.expected["classic"][group] = {"state": "Empty", "generation": known["generation"] + 1}

    def join_consumer(
        self, group: str, *topics: str, regex: str | None = None, instance_id: str | None = None
    ) -> dict[str, Any]:
        """The only member of a group in the new protocol; returns how it is addressed."""
        said: dict[str, Any] = {
            "group_id": group,
            "member_id": f"{group}-member",
            "instance_id": instance_id,
            "rebalance_timeout": 30_000,
            "subscribed_topic_names": list(topics),
            "subscribed_topic_regex": regex,
            "topic_partitions": [],
        }
        answer = self.ask(CONSUMER_GROUP_HEARTBEAT, 1, **said, member_epoch=0)
        check_code(answer, f"joining {group}")
        owned = [
            {"topic_id": each.topic_id, "partitions": list(each.partitions)}
            for each in answer.assignment.topic_partitions
        ]
        held = self.ask(
            CONSUMER_GROUP_HEARTBEAT,
            1,
            **{
                **said,
                "topic_partitions": owned,
                "subscribed_topic_names": None,
                "subscribed_topic_regex": None,
            },
            member_epoch=answer.member_epoch,
        )
        check_code(held, f"owning partitions in {group}")
        self.expected["consumer"][group] = {
            "state": "Stable",
            "member_id": said["member_id"],
            "instance_id": instance_id,
            "epoch": answer.member_epoch,
            "assignment": {str(each["topic_id"]): each["partitions"] for each in owned},
        }
        return {"generation_id_or_member_epoch": answer.member_epoch, "member_id": said["member_id"]}

    def leave_consumer(self, group: str) -> None:
        known = self.expected["consumer"][group]
        answer = self.ask(
            CONSUMER_GROUP_HEARTBEAT,
            1,
            group_id=group,
            member_id=known["member_id"],
            member_epoch=-1,
            rebalance_timeout=-1,
        )
        check_code(answer, f"leaving {group}")
        self.expected["consumer"][group] = {"state": "Empty", "epoch": known["epoch"] + 1}

    def forget_group(self, group: str) -> None:
        (gone,) = self.ask(DELETE_GROUPS, 2, groups_names=[group]).results
        check_code(gone, f"deleting {group}")
        self.expected["positions"].pop(group)

    # Producers

    def idempotent_producer(self) -> tuple[int, int]:
        """A new id and its epoch."""
        answer = self.ask(
            INIT_PRODUCER_ID,
            5,
            transactional_id=None,
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        check_code(answer, "asking for a producer id")
        return answer.producer_id, answer.producer_epoch

    def find_coordinator(self, kind: int, key: str) -> None:
        """The first question makes the topic of coordinators; it is asked until that is there."""
        fields = {"key_type": kind, "coordinator_keys": [key]}
        wait_until(lambda: not self.ask(FIND_COORDINATOR, 5, **fields).coordinators[0].error_code)

    # Waiting for background work, and for what it must come to

    def wait_for_compaction(self, topic: str) -> None:
        """Until everything but the active segment is cleaned; then do the same to what is expected."""
        (home,) = self.directory.glob(f"*/{topic}-0")

        def cleaned_to() -> int:
            checkpoint = home.parent / "cleaner-offset-checkpoint"
            lines = checkpoint.read_text().splitlines() if checkpoint.exists() else []
            return next((int(line.split()[2]) for line in lines if line.startswith(f"{topic} 0 ")), 0)

        def active() -> int:
            return max(int(path.stem) for path in home.glob("*.log"))

        wait_until(lambda: cleaned_to() == active())
        where = self.partition(topic, 0)
        latest = {each["key"]: each["offset"] for each in where["records"] if each["offset"] < active()}
        where["records"] = [
            each
            for each in where["records"]
            if each["offset"] >= active() or latest[each["key"]] == each["offset"]
        ]

    def check(self) -> None:
        """What is served now must be what is expected: a golden directory with an error in it is of no use."""
        for name, topic in self.expected["topics"].items():
            for number, where in enumerate(topic["partitions"]):
                offsets = [
                    header.base_offset + record.offset_delta
                    for header, batch in fetch_all(self.client, name, number)
                    if not header.is_control
                    for record in iterate_records(batch)
                    if header.base_offset + record.offset_delta >= where["start"]
                ]
                expected = [each["offset"] for each in where["records"] if each["offset"] >= where["start"]]
                assert offsets == expected, (name, number, offsets, expected)
                assert offset_at(self.client, name, number, EARLIEST) == where["start"], (name, number)
                assert offset_at(self.client, name, number, LATEST) == where["end"], (name, number)


def new_partition() -> dict[str, Any]:
    return {"start": 0, "end": 0, "records": []}


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError("waited in vain")
        time.sleep(0.02)
