"""Produce (0), served in versions 3 to 13, advertised from 0 for librdkafka's sake.

The usual request takes a shorter way (`holdfast.broker.node.usual_produce`). Both let batches in through
`Intake.accept_batch`. Transactional batches may have to wait for the coordinator of their transaction: see
`holdfast.broker.node.production`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.node.context import Answer, Fields, Hangup, RequestContext, Session
from holdfast.broker.node.intake import require_client_topic
from holdfast.broker.node.meter import Refused
from holdfast.broker.node.production import (
    ACKS_ALL,
    BatchOutcome,
    FailedBatch,
    Production,
    SilentProduction,
    TransactionalBatches,
    UncommittedBatch,
    WaitingBatch,
    failure,
    outcome_fields,
    producers_of,
)
from holdfast.broker.node.services import DataServices
from holdfast.broker.transactions.coordinator import Refusals
from holdfast.broker.transactions.model import NO_EPOCH, NO_PRODUCER_ID, ProducerIdentity
from holdfast.errors import ApiError, InvalidRecords, LogDirectoryOffline, MalformedFrame
from holdfast.seams import Now
from holdfast.wire.apis import PRODUCE
from holdfast.wire.batch import ATTRIBUTES_LOW_BYTE, CODEC_MASK, MAGIC, MAGIC_OFFSET, TRANSACTIONAL
from holdfast.wire.codecs import Codec
from holdfast.wire.hot import PRODUCE_TOPIC_IDS, Produced

ZSTD_VERSION: Final = 7
"""Clients that speak an older version cannot know zstd."""
REFUSALS: Final = (ApiError, InvalidRecords, LogDirectoryOffline)


def produce(node: DataServices, context: RequestContext, request: Any, now: Now) -> Answer:
    acks = request.acks
    if acks not in (ACKS_ALL, 0, 1):
        return _refuse_all(context.version, request, ErrorCode.invalid_required_acks)
    transactional: TransactionalBatches | None = None
    if request.transactional_id is not None:
        producers = producers_of(request)
        if len(producers) > 1:
            return _refuse_all(context.version, request, ErrorCode.invalid_producer_id_mapping)
        producer = producers.pop() if producers else ProducerIdentity(NO_PRODUCER_ID, NO_EPOCH)
        transactional = TransactionalBatches(request.transactional_id, context.version, producer)
    production = Production(context.version) if acks else SilentProduction(context.version)
    producing = Producing(node, context.session, production, acks, transactional)
    by_id = context.version >= PRODUCE_TOPIC_IDS
    for topic in request.topic_data:
        if not topic.partition_data:
            continue
        outcomes: list[BatchOutcome] = []
        name: str | None
        if by_id:
            name = node.partitions.topic_name(topic.topic_id)
            production.topics.append((topic.topic_id or UUID(int=0), outcomes))
        else:
            name = topic.name
            production.topics.append((topic.name, outcomes))
        for data in topic.partition_data:
            try:
                if name is None:
                    raise ApiError(ErrorCode.unknown_topic_id, f"no topic has the id {topic.topic_id}")
                producing.produce_one(outcomes, name, data, now)
            except REFUSALS as error:
                outcomes.append(failure(data.index, error))
                production.has_failures = True
    if transactional is not None and transactional.waiting:
        producing.await_coordinator(transactional, now)
    production.waiting -= 1
    if not production.waiting:
        response = production.response()
        if isinstance(response, Hangup):
            for topic, outcomes in production.topics:
                for outcome in outcomes:
                    if isinstance(outcome, FailedBatch):
                        where = f"{topic}-{outcome.partition}"
                        refusal = Refused(outcome.code, topic, where, outcome.message)
                        node.meter.refused(context.session, PRODUCE, refusal)
            raise MalformedFrame(response.reason)
        return response
    timeout_ms = int(request.timeout.total_seconds() * 1000)
    node.intake.park(production, now.monotonic_ms + timeout_ms)
    return production.later


@dataclass(slots=True)
class Producing:
    """One request on its general way."""

    node: DataServices
    session: Session
    production: Production
    acks: int
    transactional: TransactionalBatches | None

    def await_coordinator(self, transactional: TransactionalBatches, now: Now) -> None:
        """Append what waits for the coordinator once it has agreed; what it refuses has failed."""
        production = self.production

        def go_on(refusals: Refusals) -> None:
            if not production.waiting:
                return  # time is over: the client was told that nothing was stored in time, and sends again
            now = self.node.seams.clock.now()
            for hosted, data, outcomes, at in transactional.waiting:
                try:
                    if hosted.is_deleted:
                        raise ApiError(ErrorCode.unknown_topic_or_partition, f"{hosted.name} was deleted")
                    transactional.check(refusals, (hosted.topic, hosted.index))
                    self.produce_one(outcomes, hosted.topic, data, now, at)
                except REFUSALS as refusal:
                    production.settle(outcomes, at, refusal)

        transactional.begin(self.node.transactions, now, production.later.step(go_on))

    def produce_one(
        self, outcomes: list[BatchOutcome], topic: str, data: Any, now: Now, at: int = -1
    ) -> None:
        """Append one batch. `at` is its place among the outcomes when it had to wait, and counts as waiting still."""
        index = data.index
        hosted = self.node.partitions.leader_of(topic, index)
        require_client_topic(topic)
        records = data.records
        if not records:
            raise ApiError(ErrorCode.invalid_record, "the partition has no record batch")
        if len(records) > ATTRIBUTES_LOW_BYTE and records[MAGIC_OFFSET] == MAGIC:
            attributes = records[ATTRIBUTES_LOW_BYTE]
            if attributes & CODEC_MASK == Codec.ZSTD and self.production.version < ZSTD_VERSION:
                raise ApiError(
                    ErrorCode.unsupported_compression_type, f"zstd needs produce version {ZSTD_VERSION}"
                )
            if attributes & TRANSACTIONAL:
                if self.transactional is None:
                    raise ApiError(
                        ErrorCode.transactional_id_authorization_failed,
                        "a transactional batch without transactional id",
                    )
                if self.transactional.must_wait(hosted, records):
                    self.transactional.waiting.append(WaitingBatch(hosted, data, outcomes, len(outcomes)))
                    outcomes.append(UncommittedBatch(Produced(index, -1, -1, -1)))
                    self.production.waiting += 1
                    return
        accepted = self.node.intake.accept_batch(self.session, hosted, records, now)
        hosted.traffic.produces += 1
        start_offset = hosted.log.start_offset
        if isinstance(accepted, Duplicate):
            produced = Produced(index, accepted.first_offset, accepted.timestamp, start_offset)
            end_offset = accepted.last_offset + 1
        else:
            log_append_time = accepted.max_timestamp if accepted.is_log_append_time else -1
            produced = Produced(index, accepted.base_offset, log_append_time, start_offset)
            end_offset = hosted.log.end_offset
        if at < 0:
            at = len(outcomes)
            outcomes.append(UncommittedBatch(produced))
            self.production.waiting += 1
        else:
            outcomes[at] = UncommittedBatch(produced)
        if self.acks == ACKS_ALL:
            hosted.offsets.when_committed(
                end_offset, lambda error: self.production.settle(outcomes, at, error)
            )
        else:
            self.production.settle(outcomes, at, None)


def _refuse_all(version: int, request: Any, code: ErrorCode) -> Fields:
    by_id = version >= PRODUCE_TOPIC_IDS
    return {
        "responses": [
            {
                ("topic_id" if by_id else "name"): topic.topic_id if by_id else topic.name,
                "partition_responses": [
                    outcome_fields(FailedBatch(data.index, code, None)) for data in topic.partition_data
                ],
            }
            for topic in request.topic_data
        ],
    }
