"""Random members, positions and transactions, the same on both brokers: what no list of cases thought of.

A seed that fails is repeated by its name, `-k "transactions_of_seed_3"`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side
from tests.support.raw_groups import PARKED, RawMember, assignment, subscription
from tests.support.tiers import by_tier

from holdfast.wire.api_keys import (
    ADD_OFFSETS_TO_TXN,
    ADD_PARTITIONS_TO_TXN,
    DESCRIBE_GROUPS,
    DESCRIBE_TRANSACTIONS,
    END_TXN,
    FETCH,
    INIT_PRODUCER_ID,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    PRODUCE,
    TXN_OFFSET_COMMIT,
)
from holdfast.wire.batch import make_batch

Compare = Callable[[Script], None]
NOW = int(time.time() * 1000)
SEEDS = range(by_tier(quick=1, check=1, long=3))
STEPS = 120
STEPS_OF_MEMBERS = 70
"""Fewer: a member that has to wait is watched for a moment each time."""
CONCURRENT = 51
RETRY_SECONDS_MAX = 8.0


def named(name: str, script: Script) -> Script:
    script.__name__ = name
    return script


class Instance:
    """One that believes to be the producer of a transactional id; there may be several."""

    def __init__(self) -> None:
        self.producer_id = -1
        self.epoch = -1
        self.sequence: dict[int, int] = {}


class RandomTransactions:
    """Two instances of one transactional id that do anything in any order, by either transaction protocol."""

    def __init__(self, side: Side, seed: int) -> None:
        self.side = side
        self.chance = random.Random(seed)
        self.name = f"random-{seed}"
        self.topic = f"random-txn-{seed}"
        self.instances = [Instance(), Instance()]
        self.latest: Instance | None = None
        """Who was initialised last, and so is not late."""
        side.create_topic(self.topic, 2)

    def ask(self, label: str, api_key: int, version: int, fields: dict[str, Any], error: Any) -> Any:
        """Apache Kafka ends transactions behind its answers: what comes too soon is asked again."""
        deadline = time.monotonic() + RETRY_SECONDS_MAX
        while True:
            answer = self.side.client.ask(api_key, version, fields)
            if isinstance(answer, str) or error(answer) != CONCURRENT or time.monotonic() > deadline:
                self.side.note(label, answer)
                return answer
            time.sleep(0.005)

    def who(self, instance: Instance) -> dict[str, Any]:
        return {
            "transactional_id": self.name,
            "producer_id": instance.producer_id,
            "producer_epoch": instance.epoch,
        }

    def step(self, number: int) -> None:
        chance = self.chance
        instance = chance.choice((self.instances[0],) * 3 + (self.instances[1],))
        which = self.instances.index(instance)
        actions = ("produce",) * 4 + ("add",) * 3 + ("end",) * 3 + ("offsets",) * 2 + ("init",)
        action = chance.choice(actions) if instance.producer_id >= 0 else "init"
        getattr(self, action)(f"{number}: {which} {action}", instance)

    def init(self, label: str, instance: Instance) -> None:
        # A late instance that asks so ends the other's transaction in Apache Kafka: see late_initialisation.
        own = self.chance.random() < 0.4 and instance is self.latest
        version = self.chance.randint(3, 5)
        fields = {
            "transactional_id": self.name,
            "transaction_timeout": 60_000,
            "producer_id": instance.producer_id if own else -1,
            "producer_epoch": instance.epoch if own else -1,
        }
        answer = self.ask(
            f"{label} {version} {own}", INIT_PRODUCER_ID, version, fields, lambda a: a.error_code
        )
        if answer.error_code == 0:
            instance.producer_id, instance.epoch = answer.producer_id, answer.producer_epoch
            instance.sequence.clear()
            self.latest = instance
        self.settle()

    def add(self, label: str, instance: Instance) -> None:
        partitions = self.chance.choice(([0], [1], [0, 1], [0, 9]))
        topics = [{"name": self.topic, "partitions": partitions}]
        who = {f"v3_and_below_{name}": value for name, value in self.who(instance).items()}
        fields = {**who, **self.who(instance), "v3_and_below_topics": topics, "topics": topics}

        def first(answer: Any) -> Any:
            return answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code

        self.ask(f"{label} {partitions}", ADD_PARTITIONS_TO_TXN, self.chance.randint(0, 3), fields, first)

    def produce(self, label: str, instance: Instance) -> None:
        chance = self.chance
        partition = chance.randrange(2)
        version = chance.choice((9, 11, 12))
        sequence = instance.sequence.get(partition, 0)
        batch = make_batch(
            [label.encode()],
            timestamp=NOW,
            producer_id=instance.producer_id,
            producer_epoch=instance.epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        topic = {"name": self.topic, "partition_data": [{"index": partition, "records": batch}]}
        fields = {"transactional_id": self.name, "acks": -1, "timeout": 9000, "topic_data": [topic]}

        def first(answer: Any) -> Any:
            return answer.responses[0].partition_responses[0].error_code

        answer = self.ask(f"{label} {version} {partition}/{sequence}", PRODUCE, version, fields, first)
        if first(answer) == 0:
            instance.sequence[partition] = sequence + 1

    def offsets(self, label: str, instance: Instance) -> None:
        chance = self.chance
        group = f"{self.name}-{chance.randrange(2)}"
        who = self.who(instance)
        if chance.random() < 0.6:
            fields = {**who, "group_id": group}
            self.ask(
                f"{label} added", ADD_OFFSETS_TO_TXN, chance.randint(0, 4), fields, lambda a: a.error_code
            )
        part = {"partition_index": 0, "committed_offset": chance.randrange(100), "committed_metadata": ""}
        fields = {
            **who,
            "group_id": group,
            "generation_id": -1,
            "member_id": "",
            "topics": [{"name": self.topic, "partitions": [part]}],
        }
        version = chance.choice((3, 5))

        def first(answer: Any) -> Any:
            return answer.topics[0].partitions[0].error_code

        self.ask(f"{label} {version}", TXN_OFFSET_COMMIT, version, fields, first)

    def end(self, label: str, instance: Instance) -> None:
        chance = self.chance
        version = chance.choice((3, 4, 5))
        fields = {**self.who(instance), "committed": chance.random() < 0.6}
        said = f"{label} {version} {fields['committed']}"
        for repeated in range(chance.choice((1, 1, 2))):
            again = " again" if repeated else ""
            answer = self.ask(f"{said}{again}", END_TXN, version, fields, lambda a: a.error_code)
            self.settle()
        if answer.error_code == 0 and version == 5:
            if (answer.producer_id, answer.producer_epoch) != (instance.producer_id, instance.epoch):
                instance.sequence.clear()
            instance.producer_id, instance.epoch = answer.producer_id, answer.producer_epoch

    def settle(self) -> None:
        def is_settled() -> bool:
            answer = self.side.client.ask(DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [self.name]})
            return not answer.transaction_states[0].transaction_state.startswith("Prepare")

        self.side.wait_until(is_settled)

    def look(self) -> None:
        """What readers and groups see in the end."""
        for partition in (0, 1):
            part = {"partition": partition, "fetch_offset": 0, "partition_max_bytes": 10 << 20}
            fields = {
                "replica_id": -1,
                "max_bytes": 50 << 20,
                "isolation_level": 1,
                "session_id": 0,
                "session_epoch": -1,
                "topics": [{"topic": self.topic, "partitions": [part]}],
            }
            found = self.side.client.ask(FETCH, 11, fields).responses[0].partitions[0]
            aborted = [each.first_offset for each in found.aborted_transactions or ()]
            what = {"end": found.high_watermark, "stable": found.last_stable_offset, "aborted": aborted}
            self.side.note(f"partition {partition}", {**what, "records": found.records or b""})
        groups = [{"group_id": f"{self.name}-{number}", "topics": None} for number in range(2)]
        self.side.ask("positions", OFFSET_FETCH, 8, {"groups": groups, "require_stable": True})


def transactions_of(seed: int) -> Script:
    def script(side: Side) -> None:
        world = RandomTransactions(side, seed)
        for number in range(STEPS):
            world.step(number)
        world.settle()
        world.look()

    return named(f"transactions_of_seed_{seed}", script)


def members_of(seed: int) -> Script:
    """Four members of a classic group, two of them static, that join, sync, commit, leave and repeat themselves."""

    def script(side: Side) -> None:
        chance = random.Random(seed)
        group, topic = f"random-members-{seed}", f"random-members-{seed}"
        side.create_topic(topic, 1)
        members = []
        for index in range(4):
            # Alone it has what it likes best; of several with as many votes either may be chosen.
            protocols = [
                {"name": name, "metadata": subscription(f"{index} {name}", topic)}
                for name in (f"own-{index}", "common")
            ]
            static: dict[str, Any] = {"group_instance_id": f"static-{index}"} if index < 2 else {}
            members.append(RawMember(side, group, f"member {index}", protocols=protocols, **static))
        # A group without members and positions may be gone at any moment.
        part = {"partition_index": 0, "committed_offset": 0}
        kept = {"group_id": group, "topics": [{"name": topic, "partitions": [part]}]}
        side.ask("kept", OFFSET_COMMIT, 8, {**kept, "generation_id_or_member_epoch": -1})
        for step in range(STEPS_OF_MEMBERS):
            member = chance.choice(members)
            if member.is_waiting and member.answer(patiently=False) == PARKED:
                side.note(f"{step}: {member.name} waits", True)
                continue
            act(side, chance, member, f"{step}:", group, topic)
            if step % 10 == 0:
                side.ask(f"{step}: described", DESCRIBE_GROUPS, 5, {"groups": [group]})

    return named(f"members_of_seed_{seed}", script)


def act(side: Side, chance: random.Random, member: RawMember, label: str, group: str, topic: str) -> None:
    generation = member.generation + chance.choice((0,) * 8 + (1, -1))
    match chance.choice(("join",) * 4 + ("sync",) * 4 + ("heartbeat",) * 2 + ("commit",) * 2 + ("leave",)):
        case "join":
            member.tell_join(f"{label} joins")
            member.answer(patiently=False)
        case "sync":
            given = {name: assignment(f"{label} {place}") for place, name in enumerate(member.members)}
            member.tell_sync(
                f"{label} syncs", given, generation_id=generation, protocol_name=None, protocol_type=None
            )
            member.answer(patiently=False)
        case "heartbeat":
            member.heartbeat(f"{label} is alive", generation_id=generation)
        case "commit":
            part = {"partition_index": 0, "committed_offset": chance.randrange(1000)}
            fields = {
                "group_id": group,
                "generation_id_or_member_epoch": generation,
                "member_id": member.member_id,
                "topics": [{"name": topic, "partitions": [part]}],
            }
            side.ask(f"{label} {member.name} commits", OFFSET_COMMIT, 8, fields)
        case "leave" if member.leader != member.member_id:
            # Who leads after a leader has left is anybody's choice.
            member.leave(f"{label} leaves")


SCRIPTS = tuple(make(seed) for make in (transactions_of, members_of) for seed in SEEDS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_random_sequences_are_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
