"""Transactions as an administrator sees them: what coordinators remember, what partitions have open.

A transaction is known in two places. Its coordinator keeps the transactional id, its state and the partitions
it has touched; each of those partitions keeps the producer and where its open transaction begins. The two
agree, except when a marker got lost: then a partition waits for an end that nobody will ever write, and its
readers with it. That is a hanging transaction: open in a partition for longer than any may last, and not among
the partitions of its coordinator's transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import Brokers
from holdfast.admin.errors import check
from holdfast.cli.exits import CommandFailed
from holdfast.wire.api_keys import (
    DESCRIBE_PRODUCERS,
    DESCRIBE_TRANSACTIONS,
    INIT_PRODUCER_ID,
    LIST_TRANSACTIONS,
    WRITE_TXN_MARKERS,
)

Place = tuple[str, int]
"""A topic and one of its partitions."""

PARTITIONS_PER_REQUEST: Final = 500
"""A broker with very many partitions is asked about some at a time."""
FENCING_TIMEOUT_MS: Final = 1
"""The transaction time-out of the producer that takes over to fence the old one: it begins no transaction."""


class Listing(NamedTuple):
    transactional_id: str
    coordinator_id: int
    producer_id: int
    state: str


@dataclass(frozen=True)
class Transaction:
    """What its coordinator remembers of a transactional id."""

    transactional_id: str
    coordinator_id: int
    producer_id: int
    producer_epoch: int
    state: str
    timeout_ms: int
    start_time_ms: int | None
    """None when there is no open transaction."""
    places: tuple[Place, ...]

    def duration_ms(self, now_ms: int) -> int | None:
        return None if self.start_time_ms is None else max(0, now_ms - self.start_time_ms)


class ActiveProducer(NamedTuple):
    """What a partition remembers of a producer."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    start_offset: int | None
    """Where its open transaction begins; None when it has none."""

    @property
    def place(self) -> Place:
        return self.topic, self.partition


class TransactionAdmin:
    """What can be asked about transactions and done to them."""

    def __init__(self, brokers: Brokers) -> None:
        self.brokers = brokers

    def listings(
        self,
        *,
        states: Sequence[str] = (),
        producer_ids: Collection[int] = (),
        duration_ms: int = -1,
        pattern: str | None = None,
    ) -> list[Listing]:
        """Every transactional id that passes the filters; each coordinator knows its own, so all are asked."""
        request = {
            "state_filters": list(states),
            "producer_id_filters": list(producer_ids),
            "duration_filter": duration_ms,
            "transactional_id_pattern": pattern or None,
        }
        found: list[Listing] = []
        for broker_id in self.brokers.broker_ids():

            def ask(broker_id: int = broker_id) -> Any:
                answer = self.brokers.ask_broker(broker_id, LIST_TRANSACTIONS, request)
                invalid = answer.error_code is ErrorCode.invalid_regular_expression
                subject = f"broker {broker_id} cannot list its transactions"
                advice = "--transactional-id-pattern takes the syntax of RE2" if invalid else ""
                check(answer.error_code, subject, None, advice)
                return answer

            found += [
                Listing(each.transactional_id, broker_id, each.producer_id, each.transaction_state)
                for each in self.brokers.retried(ask).transaction_states
            ]
        return sorted(found, key=lambda each: each.transactional_id)

    def describe(self, transactional_id: str) -> Transaction | None:
        """What the coordinator remembers; None when it knows no such id."""

        def ask() -> Transaction | None:
            request = {"transactional_ids": [transactional_id]}
            answer = self.brokers.ask_coordinator(
                "transaction", transactional_id, DESCRIBE_TRANSACTIONS, request
            )
            (state,) = answer.transaction_states
            if state.error_code is ErrorCode.transactional_id_not_found:
                return None
            check(state.error_code, f"cannot describe transactional id '{transactional_id}'")
            return _transaction(state, self.brokers.coordinator_of("transaction", transactional_id))

        return self.brokers.retried(ask)

    def producers(self, places: Collection[Place], broker_id: int | None = None) -> list[ActiveProducer]:
        """The producers that partitions remember: their leaders' word, or that of one broker."""
        return self.brokers.retried(lambda: self._producers(places, broker_id))

    def _producers(self, places: Collection[Place], broker_id: int | None) -> list[ActiveProducer]:
        by_broker: dict[int, list[Place]] = {}
        for topic, partition in places:
            leader = self.brokers.leader_of(topic, partition)
            by_broker.setdefault(leader if broker_id is None else broker_id, []).append((topic, partition))
        return [
            producer
            for asked, some in by_broker.items()
            for start in range(0, len(some), PARTITIONS_PER_REQUEST)
            for producer in self._producers_on(asked, some[start : start + PARTITIONS_PER_REQUEST])
        ]

    def _producers_on(self, broker_id: int, places: Sequence[Place]) -> Iterator[ActiveProducer]:
        request = {"topics": _by_topic(places)}
        answer = self.brokers.ask_broker(broker_id, DESCRIBE_PRODUCERS, request)
        for topic in answer.topics:
            for each in topic.partitions:
                subject = f"cannot describe the producers of {topic.name}-{each.partition_index}"
                check(each.error_code, f"{subject} on broker {broker_id}", each.error_message)
                for producer in each.active_producers:
                    yield _producer(topic.name, each.partition_index, producer)

    def abort(self, place: Place, producer_id: int, producer_epoch: int, coordinator_epoch: int) -> None:
        """Write the marker that ends a transaction in one partition, as its coordinator would."""
        topic, partition = place
        marker = {
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "transaction_result": False,
            "topics": [{"name": topic, "partition_indexes": [partition]}],
            "coordinator_epoch": coordinator_epoch,
        }

        def ask() -> None:
            leader = self.brokers.leader_of(topic, partition)
            answer = self.brokers.ask_broker(leader, WRITE_TXN_MARKERS, {"markers": [marker]})
            subject = f"cannot abort the transaction of producer {producer_id} on {topic}-{partition}"
            for result in answer.markers:
                for each in result.topics:
                    for outcome in each.partitions:
                        check(outcome.error_code, subject, None, _abort_advice(outcome.error_code))

        self.brokers.retried(ask)

    def fence(self, transactional_id: str) -> tuple[int, int]:
        """Take a transactional id over: its producer is fenced, its open transaction aborted.

        The coordinator answers `concurrent_transactions` until the abort is complete.
        """

        def ask() -> tuple[int, int]:
            request = {
                "transactional_id": transactional_id,
                "transaction_timeout": FENCING_TIMEOUT_MS,
                "producer_id": -1,
                "producer_epoch": -1,
            }
            answer = self.brokers.ask_coordinator("transaction", transactional_id, INIT_PRODUCER_ID, request)
            check(answer.error_code, f"cannot abort the transaction of '{transactional_id}'")
            return answer.producer_id, answer.producer_epoch

        return self.brokers.retried(ask)

    # -------------------------------------------------------------------- hanging transactions

    def places(self, topic: str | None, partition: int | None, broker_id: int | None) -> list[Place]:
        """The partitions to search: of a topic or of all, and only those a broker keeps."""
        topics = self.brokers.partitions()
        if topic is not None and (topic not in topics or (partition or 0) not in topics[topic]):
            self.brokers.leader_of(topic, partition or 0)  # says what is wrong with it
        if broker_id is not None and broker_id not in self.brokers.broker_ids():
            ids = ", ".join(map(str, self.brokers.broker_ids()))
            raise CommandFailed(f"broker {broker_id} is not in the cluster; its brokers are {ids}")
        return [
            (name, number)
            for name, partitions in sorted(topics.items())
            for number, each in sorted(partitions.items())
            if topic in (None, name)
            and partition in (None, number)
            and (broker_id is None or broker_id in each.replica_nodes)
        ]

    def hanging(
        self, places: Collection[Place], broker_id: int | None, longest_ms: int, now_ms: int
    ) -> list[ActiveProducer]:
        """Open transactions older than any may be, that their coordinator is not going to end."""
        candidates = [
            producer
            for producer in self.producers(places, broker_id)
            if producer.start_offset is not None and now_ms - producer.last_timestamp_ms > longest_ms
        ]
        if not candidates:
            return []
        listings = self.listings(producer_ids={each.producer_id for each in candidates})
        ids = {each.producer_id: each.transactional_id for each in listings}
        known = {name: self.describe(name) for name in set(ids.values())}
        return [
            each
            for each in candidates
            if (transaction := known.get(ids.get(each.producer_id, ""))) is None
            or each.place not in transaction.places
        ]


def _abort_advice(code: ErrorCode) -> str:
    if code in (ErrorCode.invalid_producer_epoch, ErrorCode.producer_fenced):
        return "the producer has moved on: look again with 'holdfast transactions describe-producers'"
    if code is ErrorCode.transaction_coordinator_fenced:
        return "a newer coordinator has written here: pass its epoch as --coordinator-epoch"
    if code is ErrorCode.invalid_txn_state:
        return "it does not hang: its coordinator knows of it, and aborts it with --transactional-id"
    return ""


def _transaction(state: Any, coordinator_id: int) -> Transaction:
    start = state.transaction_start_time
    return Transaction(
        transactional_id=state.transactional_id,
        coordinator_id=coordinator_id,
        producer_id=state.producer_id,
        producer_epoch=state.producer_epoch,
        state=state.transaction_state,
        timeout_ms=state.transaction_timeout // timedelta(milliseconds=1),
        start_time_ms=None if start is None else round(start.timestamp() * 1000),
        places=tuple(sorted((topic.topic, each) for topic in state.topics for each in topic.partitions)),
    )


def _producer(topic: str, partition: int, state: Any) -> ActiveProducer:
    return ActiveProducer(
        topic,
        partition,
        producer_id=state.producer_id,
        producer_epoch=state.producer_epoch,
        coordinator_epoch=state.coordinator_epoch,
        last_sequence=state.last_sequence,
        last_timestamp_ms=state.last_timestamp,
        start_offset=state.current_txn_start_offset if state.current_txn_start_offset >= 0 else None,
    )


def _by_topic(places: Sequence[Place]) -> list[dict[str, Any]]:
    partitions: dict[str, list[int]] = {}
    for topic, partition in places:
        partitions.setdefault(topic, []).append(partition)
    return [{"name": topic, "partition_indexes": numbers} for topic, numbers in partitions.items()]
