"""Transactions that are decided and not carried out: the state in which a node stops between the two writes.

`open_transactions` leaves some open, with records and a group's offset each. `decide` then appends to the
`__transaction_state` of the stopped node what its coordinator would have written next: PREPARE_COMMIT or PREPARE_ABORT,
as for a client of the older protocol or of the newer one, whose epoch rises with the decision (KIP-890). Whoever serves
the directory next has to write the markers. `assert_carried_out` asks whether it did.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from confluent_kafka import Consumer, IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.support.whole_cluster import (
    LATEST,
    TIMEOUT_S,
    WholeCluster,
    offsets_of,
    patiently,
    positions_of,
    rows,
)

from holdfast.broker.log.scan import Batch, read_batches
from holdfast.broker.transactions.model import TransactionState
from holdfast.errors import CorruptLog
from holdfast.manifest.directory import read_directories
from holdfast.manifest.taking import TRANSACTION_STATE
from holdfast.real import RealFileSystem
from holdfast.testing.engines import wait_until
from holdfast.wire.batch import Record, build_batch, parse_records, records_bytes
from holdfast.wire.coordinator_records import (
    TransactionLogKey,
    TransactionLogValue,
    decode_transaction_record,
)

FS: Final = RealFileSystem()
TOPIC: Final = "prepared"
OFFSET: Final = 17
OLDER, NEWER = 1, 2


class Decision(NamedTuple):
    is_commit: bool
    protocol: int

    @property
    def transactional_id(self) -> str:
        return f"prepared-{'commit' if self.is_commit else 'abort'}-{self.protocol}"


DECISIONS: Final = tuple(
    Decision(is_commit, protocol) for is_commit in (True, False) for protocol in (OLDER, NEWER)
)


def open_transactions(bootstrap: str, topic: str = TOPIC) -> list[Producer]:
    """One for each decision to come; the producers must live until the node has stopped."""
    cluster = WholeCluster(bootstrap)
    cluster.create(topic, len(DECISIONS))
    producers = []
    for partition, decision in enumerate(DECISIONS):
        name = decision.transactional_id
        producer = cluster.transactional(name)
        producer.begin_transaction()
        for number in range(3):
            producer.produce(topic, f"{name}-{number}".encode(), partition=partition)
        reader = Consumer({"bootstrap.servers": bootstrap, "group.id": name})
        offsets = [TopicPartition(topic, 0, OFFSET)]
        producer.send_offsets_to_transaction(offsets, reader.consumer_group_metadata(), TIMEOUT_S)
        producer.flush(TIMEOUT_S)
        reader.close()
        producers.append(producer)
    return producers


def decide(paths: Sequence[str]) -> None:
    """Append the decisions to the logs of a stopped node."""
    directories = read_directories(paths, is_running=False)
    wanted = {each.transactional_id: each for each in DECISIONS}
    for (topic, _), files in directories.partitions.items():
        if topic != TRANSACTION_STATE:
            continue
        latest: dict[str, TransactionLogValue] = {}
        end_offset = epoch = position = 0
        path = files.segment_path(files.segments()[-1])
        for batch in _whole_batches(path):
            position += batch.header.size
            end_offset, epoch = batch.header.next_offset, batch.header.leader_epoch
            for record in parse_records(records_bytes(batch.data, batch.header)):
                key, value = decode_transaction_record(record.key, record.value)
                assert isinstance(key, TransactionLogKey)
                if isinstance(value, TransactionLogValue) and key.transactional_id in wanted:
                    latest[key.transactional_id] = value
        records = [
            Record(at, 0, TransactionLogKey(transactional_id=name).encode(), _decided(value, wanted[name]))
            for at, (name, value) in enumerate(latest.items())
        ]
        if records:
            now_ms = time.time_ns() // 1_000_000
            data = build_batch(records, base_offset=end_offset, leader_epoch=epoch, base_timestamp=now_ms)
            with closing(FS.open(path, "write")) as file:
                file.truncate(position)
                file.pwritev([data], position)
                file.flush()
            for name in latest:
                del wanted[name]
    assert not wanted


def _whole_batches(path: str) -> Iterator[Batch]:
    """Up to where a killed node had space written ahead."""
    with closing(FS.open(path, "read")) as file, suppress(CorruptLog):
        yield from read_batches(file, file.size())


def _decided(value: TransactionLogValue, decision: Decision) -> bytes:
    assert value.transaction_status == TransactionState.ONGOING
    is_commit, protocol = decision
    state = TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT
    return replace(
        value,
        transaction_status=int(state),
        producer_epoch=value.producer_epoch + (1 if protocol == NEWER else 0),
        client_transaction_version=protocol,
        transaction_last_update_timestamp_ms=time.time_ns() // 1_000_000,
    ).encode()


def assert_carried_out(bootstrap: str, topic: str = TOPIC) -> None:
    """Wait until nothing is open, then: committed records and offsets are there, aborted ones are not."""
    admin = WholeCluster(bootstrap).admin
    partitions = [TopicPartition(topic, number) for number in range(len(DECISIONS))]

    def is_stable() -> bool:
        ends = (
            offsets_of(admin, partitions, LATEST, isolation)
            for isolation in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        )
        return next(ends) == next(ends)

    wait_until(lambda: patiently(is_stable), "no transaction is open", 60)
    found = [row[4].decode() for row in rows(bootstrap, partitions, "read_committed") if row[4] is not None]
    assert sorted(found) == sorted(
        f"{each.transactional_id}-{number}" for each in DECISIONS if each.is_commit for number in range(3)
    )
    for each in DECISIONS:
        expected = {f"{topic}-0": (OFFSET, "")} if each.is_commit else {}
        wait_until(
            partial(_is_at, admin, each.transactional_id, expected), f"offsets of {each.transactional_id}", 60
        )


def _is_at(admin: AdminClient, group: str, expected: dict[str, tuple[int, str]]) -> bool:
    return patiently(lambda: positions_of(admin, group)) == expected
