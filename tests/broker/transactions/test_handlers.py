"""Transactions over the wire, on a node without a shell."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_clients import (
    ADD_PARTITIONS_TO_TXN,
    DESCRIBE_TRANSACTIONS,
    LIST_TRANSACTIONS,
    TransactionalProducer,
    committed_offset_of,
    committed_values,
    described,
    read_topic,
)
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import Fault
from holdfast.wire.batch import Record, build_batch

SETTINGS = {"transaction.state.log.num.partitions": "2", "offsets.topic.num.partitions": "2"}
STATE = "__transaction_state"
DESCRIBE_PRODUCERS = 61
PROTOCOLS = pytest.mark.parametrize("is_newer", [True, False], ids=["newer", "older"])


@pytest.fixture
def node() -> BareNode:
    node = BareNode(SETTINGS)
    client = node.connect()
    for topic in ("a", "b"):
        client.create_topic(topic, 2)
    return node


@pytest.fixture
def producer(node: BareNode) -> TransactionalProducer:
    producer = TransactionalProducer(node.connect())
    assert producer.init() is ErrorCode.none
    return producer


def older(node: BareNode, transactional_id: str = "older") -> TransactionalProducer:
    producer = TransactionalProducer(node.connect(), transactional_id, is_newer=False)
    assert producer.init() is ErrorCode.none
    return producer


def ends_of_logs(node: BareNode) -> dict[str, int]:
    """How long every log is, the coordinator's included."""
    return {hosted.name: hosted.log.end_offset for hosted in node.node.partitions}


# The walk of a transaction


@PROTOCOLS
@pytest.mark.parametrize("is_commit", [True, False])
def test_a_transaction_shows_when_it_is_committed_and_never_when_it_is_aborted(
    node: BareNode, is_newer: bool, is_commit: bool
) -> None:
    producer = TransactionalProducer(node.connect(), is_newer=is_newer)
    producer.init()
    reader = node.connect()
    for number in range(3):
        assert producer.produce("a", 0, b"%d" % number) is ErrorCode.none
        assert producer.produce("b", 1, b"%d" % number) is ErrorCode.none
    assert producer.commit_offset("readers", "a", 1, 5) is ErrorCode.none
    assert committed_values(reader, "a") == []
    assert committed_offset_of(reader, "readers", "a", 1) == -1
    assert producer.end(is_commit=is_commit) is ErrorCode.none
    values = [b"0", b"1", b"2"] if is_commit else []
    assert committed_values(reader, "a") == values
    assert committed_values(reader, "b", 1) == values
    assert committed_offset_of(reader, "readers", "a", 1) == (5 if is_commit else -1)
    assert [shown.value for shown in read_topic(reader, "a", is_committed=False)] == [b"0", b"1", b"2"]


def flushes_of(node: BareNode, action: Any) -> int:
    before = node.node.commit.flushes
    action()
    return node.node.commit.flushes - before


def test_a_transaction_costs_four_flushes(node: BareNode, producer: TransactionalProducer) -> None:
    """Enrolment, data, decision, marker; the completion goes with the next enrolment."""
    producer.produce("a", 0, b"first")
    producer.end(is_commit=True)
    for _ in range(3):
        assert flushes_of(node, lambda: producer.produce("a", 0, b"1")) == 2
        assert flushes_of(node, lambda: producer.produce("a", 0, b"2")) == 1
        assert flushes_of(node, lambda: producer.end(is_commit=True)) == 2


def test_a_transaction_of_the_older_protocol_costs_four_flushes(node: BareNode) -> None:
    producer = older(node)
    producer.produce("a", 0, b"first")
    producer.end(is_commit=True)
    for _ in range(3):
        assert flushes_of(node, lambda: producer.add_partitions(("a", 0))) == 1
        assert flushes_of(node, lambda: producer.produce("a", 0, b"1")) == 1
        assert flushes_of(node, lambda: producer.end(is_commit=True)) == 2


def test_a_completion_that_was_not_flushed_is_flushed_before_it_is_told(
    node: BareNode, producer: TransactionalProducer
) -> None:
    producer.produce("a", 0, b"1")
    producer.end(is_commit=True)
    client = node.connect()
    asked = client.begin(DESCRIBE_TRANSACTIONS, 0, transactional_ids=["copy"])
    assert asked not in client.correlation_ids
    node.settle()
    assert client.answer(asked).transaction_states[0].transaction_state == "CompleteCommit"
    assert flushes_of(node, lambda: described(client, "copy")) == 0


def test_producers_of_the_coordinators_partition_are_described_after_a_completion(
    node: BareNode, producer: TransactionalProducer
) -> None:
    """Its log may end with records that no flush was asked for; whoever waits for them asks."""
    producer.produce("a", 0, b"1")
    producer.end(is_commit=True)
    topics = [{"name": STATE, "partition_indexes": [0, 1]}]
    (described,) = node.connect().ask(DESCRIBE_PRODUCERS, 0, topics=topics).topics
    assert [partition.error_code for partition in described.partitions] == [ErrorCode.none] * 2
    client = node.connect()
    assert flushes_of(node, lambda: client.ask(DESCRIBE_PRODUCERS, 0, topics=topics)) == 0


def test_two_transactions_interleave(node: BareNode, producer: TransactionalProducer) -> None:
    other = older(node)
    producer.produce("a", 0, b"p1")
    other.produce("a", 0, b"o1")
    producer.produce("a", 0, b"p2")
    reader = node.connect()
    assert producer.end(is_commit=True) is ErrorCode.none
    other.produce("a", 0, b"o2")
    assert committed_values(reader, "a") == [b"p1"], "up to the other one, which is undecided"
    assert other.end(is_commit=False) is ErrorCode.none
    assert committed_values(reader, "a") == [b"p1", b"p2"]


# Produce


def test_nothing_reaches_a_log_before_the_enrolment_is_durable(
    node: BareNode, producer: TransactionalProducer
) -> None:
    asked = producer.begin_produce({("a", 0): producer.batch("a", 0, b"1")})
    node.turn()
    assert node.hosted("a").log.end_offset == 0
    assert node.flusher.run_one()
    assert node.hosted("a").log.end_offset == 1
    assert asked not in producer.client.correlation_ids, "the data itself is not durable yet"
    node.settle()
    assert producer.produced(asked) == [ErrorCode.none]


def test_pipelined_requests_keep_their_order_behind_an_enrolment(
    node: BareNode, producer: TransactionalProducer
) -> None:
    asked = [
        producer.begin_produce({("a", 0): producer.batch("a", 0, b"%d" % number)}) for number in range(5)
    ]
    node.settle()
    assert [producer.produced(one) for one in asked] == [[ErrorCode.none]] * 5
    producer.end(is_commit=True)
    assert committed_values(node.connect(), "a") == [b"0", b"1", b"2", b"3", b"4"]


def test_one_request_enrols_all_its_partitions_at_once(
    node: BareNode, producer: TransactionalProducer
) -> None:
    batches = {place: producer.batch(*place, b"1") for place in (("a", 0), ("a", 1), ("b", 0))}
    before = ends_of_logs(node)
    asked = producer.begin_produce(batches)
    node.settle()
    assert producer.produced(asked) == [ErrorCode.none] * 3
    after = ends_of_logs(node)
    written = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert {name: count for name, count in written.items() if not name.startswith(STATE)} == {
        "a-0": 1,
        "a-1": 1,
        "b-0": 1,
    }
    assert sum(count for name, count in written.items() if name.startswith(STATE)) == 1


@pytest.mark.parametrize("acks", [0, 1])
def test_fewer_acks_wait_for_the_enrolment_all_the_same(
    node: BareNode, producer: TransactionalProducer, acks: int
) -> None:
    asked = producer.begin_produce({("a", 0): producer.batch("a", 0, b"1")}, acks=acks)
    node.turn()
    assert node.hosted("a").log.end_offset == 0
    node.flusher.run_one()
    assert node.hosted("a").log.end_offset == 1
    if acks:
        assert producer.produced(asked) == [ErrorCode.none], "written, and that is enough"
    assert producer.end(is_commit=True) is ErrorCode.none
    assert committed_values(node.connect(), "a") == [b"1"]
    assert producer.client.closed == []


def test_acks_0_hangs_up_when_the_coordinator_refuses(
    node: BareNode, producer: TransactionalProducer
) -> None:
    producer.produce("b", 0, b"busy")
    producer.begin_end(is_commit=True)
    producer.epoch += 5
    producer.begin_produce({("a", 0): producer.batch("a", 0, b"1")}, acks=0)
    assert producer.client.closed == [], "the coordinator's word is not durable yet"
    node.settle()
    assert len(producer.client.closed) == 1
    assert node.hosted("a").log.end_offset == 0


def test_an_answer_behind_acks_0_keeps_its_place(node: BareNode, producer: TransactionalProducer) -> None:
    producer.begin_produce({("a", 0): producer.batch("a", 0, b"1")}, acks=0)
    second = producer.begin_produce({("a", 0): producer.batch("a", 0, b"2")})
    node.settle()
    assert producer.client.correlation_ids == [second]
    assert producer.produced(second) == [ErrorCode.none]


def test_a_duplicate_is_answered_without_the_coordinator(
    node: BareNode, producer: TransactionalProducer
) -> None:
    batch = producer.batch("a", 0, b"1")
    for _ in range(2):
        asked = producer.begin_produce({("a", 0): batch})
        node.settle()
        assert producer.produced(asked) == [ErrorCode.none]
    assert node.hosted("a").log.end_offset == 1


def test_a_transaction_begins_at_sequence_0(node: BareNode, producer: TransactionalProducer) -> None:
    batch = producer.batch("a", 0, b"1", base_sequence=3)
    asked = producer.begin_produce({("a", 0): batch})
    node.settle()
    assert producer.produced(asked) == [ErrorCode.out_of_order_sequence_number]
    assert node.hosted("a").log.end_offset == 0


def test_a_batch_that_is_damaged_is_refused_after_the_enrolment(
    node: BareNode, producer: TransactionalProducer
) -> None:
    batch = bytearray(producer.batch("a", 0, b"1"))
    batch[-1] ^= 1
    asked = producer.begin_produce({("a", 0): bytes(batch)})
    node.settle()
    assert producer.produced(asked) == [ErrorCode.corrupt_message]
    assert producer.end(is_commit=True) is ErrorCode.none


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (9, ErrorCode.invalid_txn_state),
        (10, ErrorCode.invalid_txn_state),
        (11, ErrorCode.transaction_abortable),
    ],
)
def test_a_partition_that_was_not_added_is_refused_as_the_version_understands(
    node: BareNode, version: int, expected: ErrorCode
) -> None:
    producer = older(node)
    producer.add_partitions(("a", 0))
    asked = producer.begin_produce({("b", 0): producer.batch("b", 0, b"1")}, version=version)
    node.settle()
    assert producer.produced(asked) == [expected]
    assert node.hosted("b").log.end_offset == 0


def test_verification_can_be_turned_off() -> None:
    node = BareNode({**SETTINGS, "transaction.partition.verification.enable": "false"})
    node.connect().create_topic("a")
    producer = older(node)
    asked = producer.begin_produce({("a", 0): producer.batch("a", 0, b"1")}, version=11)
    node.settle()
    assert producer.produced(asked) == [ErrorCode.none]


@pytest.mark.parametrize("version", [9, 11, 12])
def test_wrong_producers_are_refused_and_change_nothing(
    node: BareNode, producer: TransactionalProducer, version: int
) -> None:
    before = ends_of_logs(node)
    for header, expected in (
        ({"producer_epoch": 7}, ErrorCode.invalid_producer_epoch),
        ({"producer_id": 4711}, ErrorCode.invalid_producer_id_mapping),
    ):
        asked = producer.begin_produce({("a", 0): producer.batch("a", 0, b"1", **header)}, version=version)
        node.settle()
        assert producer.produced(asked) == [expected]
    stranger = TransactionalProducer(node.connect(), "never seen")
    stranger.producer_id, stranger.epoch = producer.producer_id, producer.epoch
    asked = stranger.begin_produce({("a", 0): stranger.batch("a", 0, b"1")}, version=version)
    node.settle()
    assert stranger.produced(asked) == [ErrorCode.invalid_producer_id_mapping]
    assert ends_of_logs(node) == before


def test_two_producers_in_one_request_are_refused(node: BareNode, producer: TransactionalProducer) -> None:
    batches = {
        ("a", 0): producer.batch("a", 0, b"1"),
        ("b", 0): producer.batch("b", 0, b"1", producer_id=99),
    }
    asked = producer.begin_produce(batches)
    node.settle()
    assert producer.produced(asked) == [ErrorCode.invalid_producer_id_mapping] * 2


def test_a_transactional_batch_needs_a_transactional_id(
    node: BareNode, producer: TransactionalProducer
) -> None:
    producer.transactional_id = None
    asked = producer.begin_produce({("a", 0): producer.batch("a", 0, b"1")})
    node.settle()
    assert producer.produced(asked) == [ErrorCode.transactional_id_authorization_failed]


def test_a_plain_batch_of_a_transactional_producer_is_a_plain_batch(
    node: BareNode, producer: TransactionalProducer
) -> None:
    batch = build_batch([Record(0, 0, None, b"plain")], base_timestamp=1_700_000_000_000)
    asked = producer.begin_produce({("a", 0): batch})
    node.settle()
    assert producer.produced(asked) == [ErrorCode.none]
    assert committed_values(node.connect(), "a") == [b"plain"]
    assert described(node.connect(), "copy").transaction_state == "Empty"


def test_a_topic_deleted_while_its_enrolment_is_flushed_gets_nothing(
    node: BareNode, producer: TransactionalProducer
) -> None:
    asked = producer.begin_produce({("a", 0): producer.batch("a", 0, b"1")})
    client = node.connect()
    client.begin(20, 4, topic_names=["a"], timeout=1000)
    client.begin(
        19,
        5,
        topics=[
            {"name": "a", "num_partitions": 2, "replication_factor": 1, "assignments": [], "configs": []}
        ],
        timeout=1000,
    )
    node.settle()
    assert producer.produced(asked) == [ErrorCode.unknown_topic_or_partition]
    assert node.hosted("a").log.end_offset == 0


def test_a_transaction_outlives_a_topic_of_its_own(node: BareNode, producer: TransactionalProducer) -> None:
    producer.produce("a", 0, b"1")
    producer.produce("b", 0, b"1")
    node.connect().ask(20, 4, topic_names=["b"], timeout=1000)
    assert producer.end(is_commit=True) is ErrorCode.none
    assert committed_values(node.connect(), "a") == [b"1"]
    assert described(node.connect(), "copy").transaction_state == "CompleteCommit"
    producer.produce("a", 0, b"2")
    assert producer.end(is_commit=True) is ErrorCode.none


# InitProducerId


def test_no_answer_leaves_before_the_records_it_is_built_on_are_durable(node: BareNode) -> None:
    producer = TransactionalProducer(node.connect())
    asked = producer.begin_init()
    refused = producer.begin_end(is_commit=True)
    while not producer.client.correlation_ids:
        assert node.has_turn or node.flusher.jobs
        node.turn()
        node.flusher.run_one()
    state = [hosted for hosted in node.node.partitions if hosted.topic == STATE and hosted.log.end_offset]
    assert [hosted.offsets.is_committed(hosted.log.end_offset) for hosted in state] == [True]
    node.settle()
    assert producer.client.answer(asked).error_code is ErrorCode.none
    assert producer.client.answer(refused).error_code is ErrorCode.concurrent_transactions


def test_a_producer_id_is_in_no_transaction_record_before_its_block_is_durable(node: BareNode) -> None:
    metadata = node.node.metadata.hosted
    producer = TransactionalProducer(node.connect())
    producer.begin_init()
    while node.has_turn or node.flusher.jobs:
        appended = any(h.log.end_offset for h in node.node.partitions if h.topic == STATE)
        assert not appended or metadata.offsets.is_committed(metadata.log.end_offset)
        node.turn()
        node.flusher.run_one()


@pytest.mark.parametrize("version", range(6))
def test_a_fenced_init_is_told_as_the_version_understands(node: BareNode, version: int) -> None:
    producer = TransactionalProducer(node.connect())
    assert producer.init(version) is ErrorCode.none
    if version >= 3:
        fenced = {"producer_id": producer.producer_id, "producer_epoch": 9}
        expected = ErrorCode.producer_fenced if version >= 4 else ErrorCode.invalid_producer_epoch
        assert producer.init(version, **fenced) is expected


@pytest.mark.parametrize("fields", [{"producer_id": 5}, {"producer_epoch": 5}])
@pytest.mark.parametrize("transactional_id", ["copy", None])
def test_half_an_identity_is_no_request(
    node: BareNode, transactional_id: str | None, fields: dict[str, int]
) -> None:
    producer = TransactionalProducer(node.connect(), transactional_id)
    assert producer.init(**fields) is ErrorCode.invalid_request


@pytest.mark.parametrize("timeout_ms", [-1, 0, 900_001])
def test_time_outs_out_of_range_are_refused(node: BareNode, timeout_ms: int) -> None:
    producer = TransactionalProducer(node.connect())
    assert producer.init(transaction_timeout=timeout_ms) is ErrorCode.invalid_transaction_timeout


def test_an_empty_transactional_id_is_no_request(node: BareNode) -> None:
    nobody = TransactionalProducer(node.connect(), "")
    assert nobody.init() is ErrorCode.invalid_request
    nobody.producer_id, nobody.epoch = 1, 0
    assert nobody.add_partitions(("a", 0)) is ErrorCode.invalid_request
    assert nobody.end(is_commit=True) is ErrorCode.invalid_request
    assert nobody.add_offsets("readers") is ErrorCode.invalid_request
    assert described(nobody.client, "").error_code is ErrorCode.invalid_request


def test_an_idempotent_producer_needs_no_coordinator(node: BareNode) -> None:
    producer = TransactionalProducer(node.connect(), None)
    assert producer.init() is ErrorCode.none
    assert node.node.metadata.image.topic(STATE) is None
    batch = producer.batch("a", 0, b"1", is_transactional=False)
    asked = producer.begin_produce({("a", 0): batch})
    node.settle()
    assert producer.produced(asked) == [ErrorCode.none]


def test_the_second_producer_fences_the_first(node: BareNode, producer: TransactionalProducer) -> None:
    producer.produce("a", 0, b"lost")
    second = TransactionalProducer(node.connect())
    first_try = second._wait(second.begin_init())
    assert first_try.error_code is ErrorCode.concurrent_transactions
    assert second.init() is ErrorCode.none
    assert producer.produce("a", 0, b"late") is ErrorCode.invalid_producer_epoch
    assert producer.end(is_commit=True) is ErrorCode.producer_fenced
    assert producer.end(is_commit=True, version=1) is ErrorCode.invalid_producer_epoch
    assert producer.commit_offset("readers", "a", 0, 3) is ErrorCode.invalid_producer_epoch
    second.produce("a", 0, b"kept")
    second.end(is_commit=True)
    assert committed_values(node.connect(), "a") == [b"kept"]


# AddPartitionsToTxn


@pytest.mark.parametrize("version", range(6))
def test_one_unknown_partition_keeps_all_out(
    node: BareNode, producer: TransactionalProducer, version: int
) -> None:
    partitions = [("a", 0), ("a", 9), ("nowhere", 0), (STATE, 0)]
    results = add_partitions(producer, partitions, version)
    internal = ErrorCode.topic_authorization_failed if version < 4 else ErrorCode.operation_not_attempted
    assert results == {
        ("a", 0): ErrorCode.operation_not_attempted,
        ("a", 9): ErrorCode.unknown_topic_or_partition,
        ("nowhere", 0): ErrorCode.unknown_topic_or_partition,
        (STATE, 0): internal,
    }
    assert described(node.connect(), "copy").transaction_state == "Empty"


@pytest.mark.parametrize("version", range(6))
def test_a_fenced_producer_adds_nothing(
    node: BareNode, producer: TransactionalProducer, version: int
) -> None:
    producer.epoch += 1
    expected = ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch
    assert add_partitions(producer, [("a", 0)], version) == {("a", 0): expected}


def add_partitions(
    producer: TransactionalProducer,
    partitions: list[tuple[str, int]],
    version: int,
    *,
    verify_only: bool = False,
) -> dict[tuple[str, int], ErrorCode]:
    if version < 4:
        asked = producer.begin_add_partitions(*partitions, version=version)
        producer.client.node.settle()
        topics = producer.client.answer(asked).results_by_topic_v3_and_below
    else:
        transaction = {
            "transactional_id": producer.transactional_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch,
            "verify_only": verify_only,
            "topics": [{"name": name, "partitions": [index]} for name, index in partitions],
        }
        answer = producer.client.ask(ADD_PARTITIONS_TO_TXN, version, transactions=[transaction])
        topics = answer.results_by_transaction[0].topic_results
    return {
        (topic.name, result.partition_index): ErrorCode(result.partition_error_code)
        for topic in topics
        for result in topic.results_by_partition
    }


def test_what_brokers_ask_each_other_is_answered(node: BareNode, producer: TransactionalProducer) -> None:
    assert add_partitions(producer, [("a", 0)], 4) == {("a", 0): ErrorCode.none}
    looked_at = add_partitions(producer, [("a", 0), ("b", 0)], 5, verify_only=True)
    assert looked_at == {("a", 0): ErrorCode.none, ("b", 0): ErrorCode.transaction_abortable}
    assert described(node.connect(), "copy").transaction_state == "Ongoing"


# Positions


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (0, ErrorCode.invalid_txn_state),
        (3, ErrorCode.invalid_txn_state),
        (4, ErrorCode.transaction_abortable),
        (5, ErrorCode.none),
    ],
)
def test_committed_offsets_need_a_group_that_was_added_unless_the_broker_adds_it(
    node: BareNode, producer: TransactionalProducer, version: int, expected: ErrorCode
) -> None:
    asked = producer.begin_commit_offset("readers", "a", 0, 5, version=version)
    node.settle()
    answer = producer.client.answer(asked)
    assert answer.topics[0].partitions[0].error_code is expected


def test_committed_offsets_of_unknown_partitions_are_refused(
    node: BareNode, producer: TransactionalProducer
) -> None:
    assert producer.commit_offset("readers", "nowhere", 0, 5) is ErrorCode.unknown_topic_or_partition
    assert producer.commit_offset("readers", "a", 9, 5) is ErrorCode.unknown_topic_or_partition
    assert producer.commit_offset("", "a", 0, 5) is ErrorCode.invalid_group_id
    assert described(node.connect(), "copy").transaction_state == "Empty"


def test_a_generation_of_nobody_is_refused(node: BareNode, producer: TransactionalProducer) -> None:
    code = producer.commit_offset("readers", "a", 0, 5, generation_id=4, member_id="nobody")
    assert code is ErrorCode.illegal_generation
    assert producer.end(is_commit=True) is ErrorCode.none
    assert committed_offset_of(node.connect(), "readers", "a") == -1


# Looking


def listed(node: BareNode, version: int = 2, **filters: Any) -> list[str]:
    answer = node.connect().ask(LIST_TRANSACTIONS, version, **filters)
    assert answer.error_code is ErrorCode.none
    return sorted(state.transactional_id for state in answer.transaction_states)


def test_listing_filters(node: BareNode, producer: TransactionalProducer) -> None:
    producer.produce("a", 0, b"1")
    node.clock.advance(5_000)
    other = older(node, "other")
    assert listed(node) == listed(node, 0) == ["copy", "other"]
    assert listed(node, state_filters=["Ongoing"]) == ["copy"]
    assert listed(node, state_filters=["Ongoing", "Empty"]) == ["copy", "other"]
    assert listed(node, producer_id_filters=[other.producer_id]) == ["other"]
    assert listed(node, state_filters=["Ongoing"], duration_filter=4_999) == ["copy"]
    assert listed(node, state_filters=["Ongoing"], duration_filter=5_000) == []
    assert listed(node, transactional_id_pattern="c.*") == ["copy"]
    assert listed(node, transactional_id_pattern="c") == [], "the whole id must match"
    assert listed(node, transactional_id_pattern="") == ["copy", "other"]


def test_listing_names_the_states_it_does_not_know(node: BareNode, producer: TransactionalProducer) -> None:
    answer = node.connect().ask(LIST_TRANSACTIONS, 2, state_filters=["Ongoing", "ongoing", "Lost"])
    assert list(answer.unknown_state_filters) == ["ongoing", "Lost"]
    assert list(answer.transaction_states) == []


def test_listing_refuses_what_is_no_expression(node: BareNode) -> None:
    answer = node.connect().ask(LIST_TRANSACTIONS, 2, transactional_id_pattern="(")
    assert answer.error_code is ErrorCode.invalid_regular_expression


def test_describing(node: BareNode, producer: TransactionalProducer) -> None:
    producer.produce("b", 1, b"1")
    producer.produce("a", 0, b"1")
    state = described(node.connect(), "copy")
    assert (state.error_code, state.transaction_state) == (ErrorCode.none, "Ongoing")
    assert (state.producer_id, state.producer_epoch) == (producer.producer_id, producer.epoch)
    assert [(topic.topic, topic.partitions) for topic in state.topics] == [("a", (0,)), ("b", (1,))]
    assert described(node.connect(), "never seen").error_code is ErrorCode.transactional_id_not_found


# Time and trouble


def test_a_transaction_that_times_out_lets_readers_go_on(
    node: BareNode, producer: TransactionalProducer
) -> None:
    producer.produce("a", 0, b"1")
    client = node.connect()
    client.produce("a", build_batch([Record(0, 0, None, b"plain")], base_timestamp=1_700_000_000_000))
    assert committed_values(client, "a") == []
    for _ in range(8):
        node.advance(10_000)
        node.settle()
    assert committed_values(client, "a") == [b"plain"]
    assert producer.end(is_commit=True) is ErrorCode.invalid_txn_state


def test_a_full_disk_refuses_and_changes_nothing(node: BareNode, producer: TransactionalProducer) -> None:
    producer.produce("a", 0, b"1")
    node.disk.plan(Fault("write", errno.ENOSPC, times=1))
    assert producer.produce("b", 0, b"1") is ErrorCode.not_enough_replicas, "no room for the enrolment"
    node.disk.clear_faults()
    producer.sequences["b", 0] = 0
    assert producer.produce("b", 0, b"1") is ErrorCode.none
    assert producer.end(is_commit=True) is ErrorCode.none
    assert committed_values(node.connect(), "b") == [b"1"]


def test_a_marker_that_finds_no_room_follows_when_there_is_some(
    node: BareNode, producer: TransactionalProducer
) -> None:
    producer.produce("a", 0, b"1")
    node.disk.plan(Fault("write", errno.ENOSPC, skip=1, times=1))
    assert producer.end(is_commit=True) is ErrorCode.none, "the decision stands"
    assert described(node.connect(), "copy").transaction_state == "PrepareCommit"
    assert committed_values(node.connect(), "a") == []
    node.disk.clear_faults()
    node.advance(1_000)
    node.settle()
    assert committed_values(node.connect(), "a") == [b"1"]
    assert described(node.connect(), "copy").transaction_state == "CompleteCommit"


def test_a_failed_flush_of_a_decision_is_told_as_unknown_and_the_next_start_knows(
    node: BareNode, producer: TransactionalProducer
) -> None:
    producer.produce("a", 0, b"1")
    asked = producer.begin_end(is_commit=True)
    node.turn()
    node.disk.plan(Fault("flush", errno.EIO))
    node.settle()
    assert producer.ended(asked) is ErrorCode.coordinator_not_available
    assert node.hosted("a").log.end_offset == 1, "no marker"
    assert producer.end(is_commit=True) is ErrorCode.coordinator_not_available
    again = node.lose_power()
    producer.client = again.connect()
    assert producer.end(is_commit=True) is ErrorCode.none
    assert committed_values(again.connect(), "a") == [b"1"]
