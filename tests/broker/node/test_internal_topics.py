"""Requests and settings about internal topics: no committed offset, no transaction and no fence is lost by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import NewTopic, add_partitions, create_topic
from holdfast.config.catalog import TOPIC as TOPIC_SETTINGS
from holdfast.config.definitions import Setting
from holdfast.testing.bare_clients import (
    TransactionalProducer,
    committed_offset_of,
    committed_values,
)
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.wire.metadata_records import Config

OFFSETS, TRANSACTIONS = "__consumer_offsets", "__transaction_state"
INTERNAL = (OFFSETS, TRANSACTIONS)
PRODUCE, OFFSET_COMMIT, CREATE_TOPICS, DELETE_TOPICS, DELETE_RECORDS, ALTER_CONFIGS = 0, 8, 19, 20, 21, 33
CREATE_PARTITIONS, ELECT_LEADERS, INCREMENTAL_ALTER_CONFIGS, ALTER_REASSIGNMENTS = 37, 43, 44, 45
SETTINGS = {"offsets.topic.num.partitions": "3", "transaction.state.log.num.partitions": "3"}
GROUPS = [f"group-{number}" for number in range(7)]
TOPIC, SET, APPEND = 2, 0, 2
SMALL = {
    "internal.segment.bytes": "600",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "1",
}


def commit(client: BareClient, group: str, offset: int) -> ErrorCode:
    partitions = [{"partition_index": 0, "committed_offset": offset, "committed_metadata": None}]
    answer = client.ask(
        OFFSET_COMMIT,
        8,
        group_id=group,
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[{"name": "orders", "partitions": partitions}],
    )
    code: ErrorCode = answer.topics[0].partitions[0].error_code
    return code


class Work:
    """Groups with positions, transactional ids with a past and an open transaction, and who wrote them."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.node = BareNode({**SETTINGS, **(settings or {})})
        self.client = self.node.connect()
        self.client.create_topic("orders")
        self.positions = {group: number for number, group in enumerate(GROUPS)}
        for group, offset in self.positions.items():
            assert commit(self.client, group, offset) is ErrorCode.none
        self.producers = [TransactionalProducer(self.node.connect(), f"copy-{number}") for number in range(7)]
        for number, producer in enumerate(self.producers):
            assert producer.init() is ErrorCode.none
            assert producer.produce("orders", 0, b"%d" % number) is ErrorCode.none
            assert producer.end(is_commit=True) is ErrorCode.none
        assert self.producers[0].produce("orders", 0, b"open") is ErrorCode.none

    def kept_positions(self) -> dict[str, int]:
        return {group: committed_offset_of(self.client, group, "orders") for group in GROUPS}

    def make_small(self) -> None:
        """A little work is compacted many times from now on."""
        for name in INTERNAL:
            for setting, value in SMALL.items():
                assert alter(self.client, name, setting, value) is ErrorCode.none

    def go_on(self) -> None:
        """More positions, also in transactions, half of which are aborted; and time for compaction."""
        for _ in range(3):
            for group, offset in self.positions.items():
                if commit(self.client, group, offset + 1) is ErrorCode.none:
                    self.positions[group] += 1
            for number, producer in enumerate(self.producers[1:]):
                group, is_commit = GROUPS[number], bool(number % 2)
                offset = self.positions[group] + 100
                code = producer.commit_offset(group, "orders", 0, offset)
                if producer.end(is_commit=is_commit) is code is ErrorCode.none and is_commit:
                    self.positions[group] = offset
            self.node.advance(20_000)
            self.node.settle()

    def restart(self, ending: str = "kill") -> None:
        self.node = getattr(self.node, ending)()
        self.client = self.node.connect()

    def check(self) -> None:
        """Nothing is lost: positions, committed records, and that a successor fences its predecessor."""
        assert self.kept_positions() == self.positions
        for old in self.producers:
            new = TransactionalProducer(self.node.connect(), old.transactional_id)
            assert new.init() is ErrorCode.none
            assert new.producer_id == old.producer_id
            assert new.epoch > old.epoch
        assert committed_values(self.client, "orders") == [b"%d" % number for number in range(7)]


def new_topic(name: str, **configs: str) -> dict[str, Any]:
    settings = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
    return {
        "name": name,
        "num_partitions": 7,
        "replication_factor": 1,
        "assignments": [],
        "configs": settings,
    }


def grow(client: BareClient, name: str) -> ErrorCode:
    wanted = [{"name": name, "count": 7, "assignments": None}]
    (result,) = client.ask(CREATE_PARTITIONS, topics=wanted, timeout=1000, validate_only=False).results
    assert result.error_message
    return ErrorCode(result.error_code)


def delete(client: BareClient, name: str) -> ErrorCode:
    (result,) = client.ask(DELETE_TOPICS, topics=[{"name": name}], timeout=1000).responses
    return ErrorCode(result.error_code)


def delete_records(client: BareClient, name: str) -> ErrorCode:
    topics = [{"name": name, "partitions": [{"partition_index": index, "offset": -1} for index in range(3)]}]
    answer = client.ask(DELETE_RECORDS, 2, topics=topics, timeout=1000)
    (code,) = {partition.error_code for partition in answer.topics[0].partitions}
    return ErrorCode(code)


def create(client: BareClient, name: str) -> ErrorCode:
    (result,) = client.ask(CREATE_TOPICS, 5, topics=[new_topic(name)], timeout=1000).topics
    return ErrorCode(result.error_code)


def reassign(client: BareClient, name: str) -> ErrorCode:
    topics = [{"name": name, "partitions": [{"partition_index": 0, "replicas": [9]}]}]
    answer = client.ask(ALTER_REASSIGNMENTS, topics=topics, timeout=1000)
    return ErrorCode(answer.responses[0].partitions[0].error_code)


def elect(client: BareClient, name: str) -> ErrorCode:
    wanted = [{"topic": name, "partitions": [0]}]
    answer = client.ask(ELECT_LEADERS, election_type=1, topic_partitions=wanted, timeout=1000)
    return ErrorCode(answer.replica_election_results[0].partition_result[0].error_code)


def replace_settings(client: BareClient, name: str) -> ErrorCode:
    resource = {"resource_type": TOPIC, "resource_name": name, "configs": []}
    (result,) = client.ask(ALTER_CONFIGS, resources=[resource], validate_only=False).responses
    return ErrorCode(result.error_code)


def alter(client: BareClient, name: str, setting: str, value: str, operation: int = SET) -> ErrorCode:
    change = {"name": setting, "config_operation": operation, "value": value}
    resource = {"resource_type": TOPIC, "resource_name": name, "configs": [change]}
    (result,) = client.ask(INCREMENTAL_ALTER_CONFIGS, resources=[resource], validate_only=False).responses
    return ErrorCode(result.error_code)


def produce(client: BareClient, name: str) -> ErrorCode:
    producer = TransactionalProducer(client, None)
    batch = producer.batch(name, 0, b"forged", is_transactional=False, producer_id=-1, producer_epoch=-1)
    return ErrorCode(client.produce(name, batch).error_code)


def harmless(setting: str, value: str) -> Callable[[BareClient, str], ErrorCode]:
    return lambda client, name: alter(client, name, setting, value)


REFUSED: Sequence[tuple[Callable[[BareClient, str], ErrorCode], ErrorCode]] = (
    (grow, ErrorCode.invalid_topic_exception),
    (delete, ErrorCode.invalid_topic_exception),
    (delete_records, ErrorCode.invalid_topic_exception),
    (produce, ErrorCode.invalid_topic_exception),
    (create, ErrorCode.topic_already_exists),
    (reassign, ErrorCode.invalid_replica_assignment),
    (elect, ErrorCode.election_not_needed),
    (replace_settings, ErrorCode.invalid_config),
    (harmless("cleanup.policy", "delete"), ErrorCode.invalid_config),
    (harmless("cleanup.policy", "compact,delete"), ErrorCode.invalid_config),
    (
        lambda client, name: alter(client, name, "cleanup.policy", "delete", APPEND),
        ErrorCode.invalid_config,
    ),
)


@pytest.mark.parametrize("name", INTERNAL)
def test_what_would_lose_the_state_of_groups_or_transactions_is_refused(name: str) -> None:
    work = Work()
    for ask, expected in REFUSED:
        assert ask(work.client, name) is expected, ask
    assert {len(work.node.node.metadata.image.topics[each].partitions) for each in INTERNAL} == {3}
    work.restart()
    work.check()


@pytest.mark.parametrize("name", INTERNAL)
def test_a_topic_that_was_grown_before_is_served_by_the_partitions_it_had(name: str) -> None:
    work = Work()
    node = work.node.node
    fresh = NewTopic("copy", 3)
    records = create_topic(node.metadata.image, fresh, node.settings.broker, node.seams.randomness)
    node.metadata.append(records, work.node.clock.now())
    grown = add_partitions(node.metadata.image, "copy", 7, None, node.seams.randomness)
    topic_id = node.metadata.image.topics[name].topic_id
    # As versions wrote it that did not refuse.
    node.metadata.append(
        [dataclasses.replace(record, topic_id=topic_id) for record in grown],  # type: ignore[call-arg]
        work.node.clock.now(),
    )
    work.node.settle()
    work.restart()
    assert any(f"{name} has had fewer partitions" in line for line in work.node.said)
    work.check()
    work.restart()
    work.check()


def test_what_a_grown_topic_has_learnt_since_counts() -> None:
    work = Work()
    stray = GROUPS[0]
    groups = work.node.node.groups
    home = next(index for index in range(3) if index != groups.partition_of(stray))
    groups._strays[stray] = home
    groups._found.clear()
    assert commit(work.client, stray, 100) is ErrorCode.none
    work.restart()
    assert committed_offset_of(work.client, stray, "orders") == 0


def test_internal_topics_made_by_clients_are_compacted_and_keep_their_shape() -> None:
    node = BareNode(SETTINGS)
    client = node.connect()
    (refused,) = client.ask(
        CREATE_TOPICS, 5, topics=[new_topic(OFFSETS, cleanup_policy="delete")], timeout=1000
    ).topics
    assert refused.error_code is ErrorCode.invalid_config
    assert create(client, OFFSETS) is ErrorCode.none
    client.create_topic("orders")
    for number, group in enumerate(GROUPS):
        assert commit(client, group, number) is ErrorCode.none
    assert node.hosted(OFFSETS, 6).log.config.cleanup_policy == {"compact"}
    client = node.kill().connect()
    assert [committed_offset_of(client, group, "orders") for group in GROUPS] == list(range(7))


def test_the_number_of_partitions_in_the_settings_counts_only_when_the_topic_is_made() -> None:
    work = Work()
    work.node.settings |= {"offsets.topic.num.partitions": "7", "transaction.state.log.num.partitions": "2"}
    work.restart()
    work.check()


@pytest.mark.parametrize("name", INTERNAL)
def test_a_stored_policy_that_would_delete_is_not_in_force(name: str) -> None:
    work = Work()
    # As Apache Kafka, and versions before, would have stored it.
    stored = Config(resource_type=TOPIC, resource_name=name, name="cleanup.policy", value="delete")
    work.node.node.metadata.append([stored], work.node.clock.now())
    work.node.settle()
    for _ in range(2):
        assert work.node.hosted(name).log.config.cleanup_policy == {"compact"}
        work.restart()
    work.check()


# Settings at their limits


def limits(setting: Setting) -> list[str]:
    if type(setting.default) is int:
        return [str(value) for value in (0, 1, 4, 1 << 20, 2**31 - 1, 2**63 - 1)]
    return [
        "true",
        "false",
        "0.0",
        "1.0",
        "gzip",
        "zstd",
        "producer",
        "LogAppendTime",
        "os",
        "compact,delete",
    ]


alterations = st.sampled_from([(name, setting) for name, setting in sorted(TOPIC_SETTINGS.items())]).flatmap(
    lambda found: st.tuples(st.sampled_from(INTERNAL), st.just(found[0]), st.sampled_from(limits(found[1])))
)


@pytest.mark.check
@settings(max_examples=10)
@given(asked=st.lists(alterations, min_size=1, max_size=5), ending=st.sampled_from(("kill", "stop")))
def test_settings_of_internal_topics_at_their_limits_lose_nothing(
    asked: list[tuple[str, str, str]], ending: str
) -> None:
    work = Work()
    work.make_small()
    for name, setting, value in asked:
        alter(work.client, name, setting, value)
    work.go_on()
    for _ in range(2):
        work.restart(ending)
        assert not [line for line in work.node.said if "coordinates nothing" in line]
        assert work.kept_positions() == work.positions
        assert committed_values(work.client, "orders") == [b"%d" % number for number in range(7)]


def test_compaction_of_internal_topics_keeps_what_counts_and_what_is_undecided() -> None:
    work = Work()
    work.make_small()
    pending = TransactionalProducer(work.node.connect(), "pending")
    assert pending.init(transaction_timeout=600_000) is ErrorCode.none
    assert pending.commit_offset("awaited", "orders", 0, 5) is ErrorCode.none
    work.go_on()
    for name in INTERNAL:
        logs = [work.node.hosted(name, index).log for index in range(3)]
        kept = sum(found.header.records_count for log in logs for found in log.batches_from(0))
        assert kept < sum(log.end_offset for log in logs) * 3 / 4, f"{name} was compacted"
    work.restart()
    pending.client = work.node.connect()
    assert committed_offset_of(work.client, "awaited", "orders") == -1
    assert pending.end(is_commit=True) is ErrorCode.none
    assert committed_offset_of(work.client, "awaited", "orders") == 5
    work.check()
