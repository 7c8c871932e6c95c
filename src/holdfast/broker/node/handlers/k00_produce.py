"""Produce (0), served in versions 3 to 13, advertised from 0 for librdkafka's sake.

acks=all is answered when every batch of the request is committed; acks=1 once written; acks=0 never, and an
error closes the connection. Each partition succeeds or fails by itself.

Transactional batches may have to wait for the coordinator of their transaction: see `holdfast.broker.node.enlistment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.node.context import (
    NO_RESPONSE,
    Answer,
    Fields,
    Hangup,
    Later,
    NoResponse,
    Packed,
    RequestContext,
)
from holdfast.broker.node.enlistment import Enlistment, Waiting, producers_of
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.intake import admit
from holdfast.broker.transactions.coordinator import Refusals
from holdfast.broker.transactions.model import NO_EPOCH, NO_PRODUCER_ID, ProducerIdentity
from holdfast.errors import ApiError, InvalidRecords, LogDirectoryOffline, MalformedFrame
from holdfast.seams import Now
from holdfast.wire.batch import ATTRIBUTES_LOW_BYTE, CODEC_MASK, MAGIC, MAGIC_OFFSET, TRANSACTIONAL
from holdfast.wire.codecs import Codec
from holdfast.wire.hot import PRODUCE_TOPIC_IDS, Produced, pack_produce_response

if TYPE_CHECKING:
    from holdfast.broker.node.node import Node

ACKS_ALL: Final = -1
ZSTD_VERSION: Final = 7
"""Clients that speak an older version cannot know zstd."""
NOT_FLUSHED_IN_TIME: Final = ApiError(ErrorCode.request_timed_out, "not flushed within the time-out")
INTERNAL_TOPICS: Final = frozenset(("__consumer_offsets", "__transaction_state", "__share_group_state"))


class Failed:
    __slots__ = ("code", "message", "partition", "record_indexes")

    def __init__(
        self, partition: int, code: ErrorCode, message: str | None, record_indexes: Sequence[int] = ()
    ) -> None:
        self.partition = partition
        self.code = code
        self.message = message
        self.record_indexes = record_indexes


class Uncommitted:
    """A batch that has been appended, or waits for the coordinator of its transaction, and is not committed."""

    __slots__ = ("partition", "produced")

    def __init__(self, produced: Produced) -> None:
        self.partition = produced.partition
        self.produced = produced


Outcome = Produced | Failed | Uncommitted


class Production:
    """One produce request under way: an outcome per partition, and how many are not committed yet."""

    __slots__ = ("has_failures", "later", "topics", "version", "waiting")

    def __init__(self, version: int) -> None:
        self.version = version
        self.topics: list[tuple[str | UUID, list[Outcome]]] = []
        self.waiting = 1
        """How many batches are uncommitted, and one while not all were begun; 0 when the request is over."""
        self.has_failures = False
        self.later = Later()

    def response(self) -> Fields | Packed | NoResponse | Hangup:
        if not self.has_failures:
            return Packed([pack_produce_response(self.version, self.topics)])  # type: ignore[arg-type]
        return {
            "responses": [
                {
                    ("topic_id" if isinstance(topic, UUID) else "name"): topic,
                    "partition_responses": [_fields(outcome) for outcome in outcomes],
                }
                for topic, outcomes in self.topics
            ],
            "throttle_time": 0,
        }

    def settle(self, outcomes: list[Outcome], at: int, error: Exception | None) -> None:
        """The batch of `outcomes[at]` is committed, or its outcome is unknown for good."""
        outcome = outcomes[at]
        if not isinstance(outcome, Uncommitted):
            return  # time was over before
        self.waiting -= 1
        try:
            if error is None:
                outcomes[at] = outcome.produced
            else:
                outcomes[at] = failure(outcome.partition, error)
                self.has_failures = True
            if not self.waiting:
                self.later.resolve(self.response())
        except Exception as defect:  # noqa: BLE001 - others wait for the same flush
            self.later.fail(defect)

    def time_out(self) -> None:
        """The client's patience ended before the flush did: what is not committed is reported so."""
        self.later.take(self._report_uncommitted, None)

    def _report_uncommitted(self, _event: None) -> None:
        self.has_failures = True
        self.waiting = 0
        for _, outcomes in self.topics:
            for at, outcome in enumerate(outcomes):
                if isinstance(outcome, Uncommitted):
                    outcomes[at] = failure(outcome.partition, NOT_FLUSHED_IN_TIME)
        self.later.take(lambda _: self.later.resolve(self.response()), None)


class SilentProduction(Production):
    """One with acks=0: it gets no response, and an error closes the connection."""

    __slots__ = ()

    def response(self) -> NoResponse | Hangup:
        if self.has_failures:
            return Hangup("a produce request with acks=0 failed; closing is the only way to tell")
        return NO_RESPONSE


def handle(node: Node, context: RequestContext, request: Any, now: Now) -> Answer:
    acks = request.acks
    if acks not in (ACKS_ALL, 0, 1):
        return _refuse_all(context.version, request, ErrorCode.invalid_required_acks)
    enlistment: Enlistment | None = None
    if request.transactional_id is not None:
        producers = producers_of(request)
        if len(producers) > 1:
            return _refuse_all(context.version, request, ErrorCode.invalid_producer_id_mapping)
        producer = producers.pop() if producers else ProducerIdentity(NO_PRODUCER_ID, NO_EPOCH)
        enlistment = Enlistment(request.transactional_id, context.version, producer)
    production = Production(context.version) if acks else SilentProduction(context.version)
    by_id = context.version >= PRODUCE_TOPIC_IDS
    for topic in request.topic_data:
        if not topic.partition_data:
            continue
        outcomes: list[Outcome] = []
        name: str | None
        if by_id:
            name = node.topic_name(topic.topic_id)
            production.topics.append((topic.topic_id or UUID(int=0), outcomes))
        else:
            name = topic.name
            production.topics.append((topic.name, outcomes))
        for data in topic.partition_data:
            try:
                if name is None:
                    raise ApiError(ErrorCode.unknown_topic_id, f"no topic has the id {topic.topic_id}")
                _produce_one(node, production, outcomes, name, data, acks, now, enlistment)
            except (ApiError, InvalidRecords, LogDirectoryOffline) as error:
                outcomes.append(failure(data.index, error))
                production.has_failures = True
    if enlistment is not None and enlistment.waiting:
        _await_coordinator(node, production, enlistment, acks, now)
    production.waiting -= 1
    if not production.waiting:
        response = production.response()
        if isinstance(response, Hangup):
            raise MalformedFrame(response.reason)
        return response
    timeout_ms = int(request.timeout.total_seconds() * 1000)
    node.watch_production(production, now.monotonic_ms + timeout_ms)
    return production.later


def _await_coordinator(
    node: Node, production: Production, enlistment: Enlistment, acks: int, now: Now
) -> None:
    """Append what waits for the coordinator once it has agreed; what it refuses has failed."""

    def go_on(refusals: Refusals) -> None:
        if not production.waiting:
            return  # time is over: the client was told that nothing was stored in time, and sends again
        now = node.now()
        for waiting in enlistment.waiting:
            hosted, data, outcomes, at = waiting
            try:
                if hosted.is_deleted:
                    raise ApiError(ErrorCode.unknown_topic_or_partition, f"{hosted.name} was deleted")
                enlistment.check(refusals, (hosted.topic, hosted.index))
                _produce_one(node, production, outcomes, hosted.topic, data, acks, now, enlistment, at)
            except (ApiError, InvalidRecords, LogDirectoryOffline) as refusal:
                production.settle(outcomes, at, refusal)

    enlistment.begin(node, now, production.later.step(go_on))


def _produce_one(
    node: Node,
    production: Production,
    outcomes: list[Outcome],
    topic: str,
    data: Any,
    acks: int,
    now: Now,
    enlistment: Enlistment | None,
    at: int = -1,
) -> None:
    """Append one batch. `at` is its place among the outcomes when it had to wait, and counts as waiting still."""
    index = data.index
    hosted = node.leader_of(topic, index)
    if topic in INTERNAL_TOPICS:
        raise ApiError(ErrorCode.invalid_topic_exception, f"clients may not write to {topic}")
    records = data.records
    if not records:
        raise ApiError(ErrorCode.invalid_record, "the partition has no record batch")
    if len(records) > ATTRIBUTES_LOW_BYTE and records[MAGIC_OFFSET] == MAGIC:
        attributes = records[ATTRIBUTES_LOW_BYTE]
        if attributes & CODEC_MASK == Codec.ZSTD and production.version < ZSTD_VERSION:
            raise ApiError(
                ErrorCode.unsupported_compression_type, f"zstd needs produce version {ZSTD_VERSION}"
            )
        if attributes & TRANSACTIONAL:
            if enlistment is None:
                raise ApiError(
                    ErrorCode.transactional_id_authorization_failed,
                    "a transactional batch without transactional id",
                )
            if enlistment.must_wait(hosted, records):
                enlistment.waiting.append(Waiting(hosted, data, outcomes, len(outcomes)))
                outcomes.append(Uncommitted(Produced(index, -1, -1, -1)))
                production.waiting += 1
                return
    admitted = admit(hosted, records, now)
    log = hosted.log
    if isinstance(admitted, Duplicate):
        produced = Produced(index, admitted.first_offset, admitted.timestamp, log.start_offset)
        end_offset = admitted.last_offset + 1
    else:
        header, batch = admitted
        try:
            stored = log.append(header, batch, hosted.leader_epoch, now)
        except OSError as error:
            raise write_failed(node, hosted, error) from error
        log_append_time = stored.max_timestamp if stored.is_log_append_time else -1
        produced = Produced(index, stored.base_offset, log_append_time, log.start_offset)
        end_offset = log.end_offset
        node.commit.appended(hosted)
    if at < 0:
        at = len(outcomes)
        outcomes.append(Uncommitted(produced))
        production.waiting += 1
    else:
        outcomes[at] = Uncommitted(produced)
    if acks == ACKS_ALL:
        hosted.offsets.when_committed(end_offset, lambda error: production.settle(outcomes, at, error))
    else:
        production.settle(outcomes, at, None)


def write_failed(node: Node, hosted: HostedPartition, error: OSError) -> ApiError:
    """Want of room or descriptors refuses the batch and nothing else; anything else takes the directory offline."""
    node.refused(hosted.directory, error)
    return ApiError(ErrorCode.kafka_storage_error, f"{hosted.name} could not be written: {error}")


def failure(index: int, error: Exception) -> Failed:
    if isinstance(error, ApiError):
        return Failed(index, error.code, error.message)
    if isinstance(error, InvalidRecords):
        return Failed(index, error.code, error.message, error.record_indexes)
    return Failed(index, ErrorCode.kafka_storage_error, str(error))


def _fields(outcome: Outcome) -> Fields:
    assert not isinstance(outcome, Uncommitted)
    if isinstance(outcome, Failed):
        errors = [
            {"batch_index": index, "batch_index_error_message": outcome.message}
            for index in outcome.record_indexes
        ]
        return {
            "index": outcome.partition,
            "error_code": outcome.code,
            "base_offset": -1,
            "log_append_time": -1,
            "log_start_offset": -1,
            "record_errors": errors,
            "error_message": outcome.message,
        }
    return {
        "index": outcome.partition,
        "error_code": 0,
        "base_offset": outcome.base_offset,
        "log_append_time": outcome.log_append_time,
        "log_start_offset": outcome.log_start_offset,
    }


def _refuse_all(version: int, request: Any, code: ErrorCode) -> Fields:
    by_id = version >= PRODUCE_TOPIC_IDS
    return {
        "responses": [
            {
                ("topic_id" if by_id else "name"): topic.topic_id if by_id else topic.name,
                "partition_responses": [
                    _fields(Failed(data.index, code, None)) for data in topic.partition_data
                ],
            }
            for topic in request.topic_data
        ],
        "throttle_time": 0,
    }
