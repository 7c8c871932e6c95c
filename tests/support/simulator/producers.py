"""Producers: one that is idempotent and never gives up, one that sends once and never asks again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support import history
from tests.support.history import Partition
from tests.support.simulator.contents import encode, make_contents
from tests.support.simulator.link import UNKNOWN_TOPIC, Client

from holdfast.wire.api_keys import INIT_PRODUCER_ID, PRODUCE
from holdfast.wire.batch import HEADER_SIZE, NO_TIMESTAMP, SEQUENCE_MAX, read_header, seal
from holdfast.wire.codecs import Codec

if TYPE_CHECKING:
    from tests.support.simulator.world import KnownPartition, World

IN_FLIGHT_MAX = 5
"""Batches of one partition sent and not acknowledged: what the broker remembers of a producer."""
_RETRIABLE = UNKNOWN_TOPIC | {
    ErrorCode.request_timed_out,
    ErrorCode.not_leader_or_follower,
    ErrorCode.leader_not_available,
    ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas,
    ErrorCode.not_enough_replicas_after_append,
}
SEQUENCE_ERRORS = frozenset(
    {
        ErrorCode.out_of_order_sequence_number,
        ErrorCode.duplicate_sequence_number,
        ErrorCode.unknown_producer_id,
        ErrorCode.invalid_producer_epoch,
    }
)


@dataclass(slots=True, eq=False)
class SimulatedBatch:
    partition: Partition
    number: int
    values: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    timestamp: int
    data: bytes
    sequence: int = -1
    in_flight: bool = False
    attempts: int = 0
    sent_as_first: bool = False
    """Every earlier batch was acknowledged when this one was last sent."""

    def sent(self, producer: str, transaction: str | None = None) -> history.BatchSent:
        """What the history is told when it leaves for the first time."""
        return history.BatchSent(
            self.partition, producer, self.number, self.values, self.keys, self.timestamp, transaction
        )


def produce_fields(
    version: int,
    acks: int,
    chosen: list[tuple[KnownPartition, bytes]],
    transactional_id: str | None = None,
) -> dict[str, Any]:
    by_topic: dict[str, dict[str, Any]] = {}
    for known, data in chosen:
        name = {"topic_id": known.topic.uuid} if version >= 13 else {"name": known.topic.name}
        topic = by_topic.setdefault(known.topic.topic_id, {**name, "partition_data": []})
        topic["partition_data"].append({"index": known.index, "records": data})
    return {
        "transactional_id": transactional_id,
        "acks": acks,
        "timeout": 30_000,
        "topic_data": list(by_topic.values()),
    }


def answers_by_index(version: int, response: Any, chosen: list[KnownPartition]) -> dict[Partition, Any]:
    """Each partition's part of a produce response."""
    found: dict[tuple[Any, int], Any] = {}
    for topic in response.responses:
        for answer in topic.partition_responses:
            found[topic.topic_id if version >= 13 else topic.name, answer.index] = answer
    return {
        known.partition: found[known.topic.uuid if version >= 13 else known.topic.name, known.index]
        for known in chosen
    }


class IdempotentProducer(Client):
    """Sends with a producer id and sequences, several batches in flight, and retries until acknowledged."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._session = 0
        self._number = 0
        self._producer_id: tuple[int, int] | None = None
        self._queues: dict[Partition, list[SimulatedBatch]] = {}
        """Batches not yet acknowledged, in sequence; at most IN_FLIGHT_MAX per partition."""
        self._next_sequence: dict[Partition, int] = {}
        self._settled: dict[Partition, int] = {}
        """Sequences below are acknowledged, without a gap. Before the first of them the broker knows nothing of
        this producer id and takes any sequence for its first."""
        self._abandoned: set[Partition] = set()
        """Where batches were given up, so that this producer id cannot go on."""
        self._first_sequence = world.rng.choice((0, 0, 0, SEQUENCE_MAX - world.rng.randrange(12)))

    @property
    def is_settled(self) -> bool:
        return not self.is_waiting and not any(self._queues.values())

    def settle(self) -> None:
        """Send again what is not acknowledged."""
        self.act(new=False)

    @property
    def _known_as(self) -> str:
        return f"{self.name}.{self._session}"

    def act(self, new: bool = True) -> bool:
        """Send one request; false when there is nothing to send."""
        if self.is_waiting:
            return False
        if self._producer_id is None or (new and self.is_settled and self.world.rng.random() < 0.03):
            self._ask_for_id()
            return True
        self._drop_deleted()
        chosen: list[tuple[KnownPartition, SimulatedBatch]] = []
        for known in self.world.some_partitions(1 if self.world.rng.random() < 0.5 else 3):
            batch = self._next_to_send(known, new)
            if batch is not None:
                chosen.append((known, batch))
        if not chosen and not new:
            chosen = self._unsent()
        if not chosen:
            return False
        self._send(chosen)
        return True

    def _ask_for_id(self) -> None:
        fields = {"transactional_id": None, "transaction_timeout": 0, "producer_id": -1, "producer_epoch": -1}
        version = self.world.rng.choice((2, 4, 5))
        self.ask("init producer id", INIT_PRODUCER_ID, version, fields, self._given)

    def _given(self, response: Any) -> None:
        if response.error_code != ErrorCode.none:
            self.world.count("init producer id", response.error_code.name)
            return
        self.world.count("init producer id", "ok")
        self.world.observe(history.ProducerIdGiven(response.producer_id, response.producer_epoch))
        self._producer_id = (response.producer_id, response.producer_epoch)
        self._session += 1
        self._number = 0
        self._next_sequence.clear()
        self._settled.clear()
        self._abandoned.clear()
        self.world.say(f"{self.name}: producer id {response.producer_id}")

    def _drop_deleted(self) -> None:
        """Nothing can come of batches for a topic that is no more."""
        for partition in [key for key in self._queues if not self.world.is_live(key)]:
            if self._queues.pop(partition):
                self._abandoned.add(partition)

    def _next_to_send(self, known: KnownPartition, new: bool) -> SimulatedBatch | None:
        if known.partition in self._abandoned:
            return None
        queue = self._queues.setdefault(known.partition, [])
        for batch in queue:
            if not batch.in_flight:
                return batch
        if not new or len(queue) >= IN_FLIGHT_MAX:
            return None
        batch = self._make(known)
        queue.append(batch)
        return batch

    def _unsent(self) -> list[tuple[KnownPartition, SimulatedBatch]]:
        chosen = []
        for partition, queue in self._queues.items():
            batch = next((batch for batch in queue if not batch.in_flight), None)
            if batch is not None:
                chosen.append((self.world.known(partition), batch))
        return chosen

    def _make(self, known: KnownPartition) -> SimulatedBatch:
        assert self._producer_id is not None
        self._number += 1
        contents = make_contents(self.world, known, self._known_as, self._number)
        sequence = self._next_sequence.get(known.partition, self._first_sequence)
        self._next_sequence[known.partition] = (sequence + len(contents.values)) % (SEQUENCE_MAX + 1)
        timestamp = self.world.clock.now().wall_ms
        codec = self.world.rng.choice((Codec.NONE, Codec.NONE, Codec.NONE, Codec.LZ4))
        data = encode(contents, timestamp, producer=self._producer_id, sequence=sequence, codec=codec)
        return SimulatedBatch(
            known.partition, self._number, contents.values, contents.keys, timestamp, data, sequence
        )

    def _send(self, chosen: list[tuple[KnownPartition, SimulatedBatch]]) -> None:
        version = self.world.produce_version()
        for known, batch in chosen:
            batch.in_flight = True
            batch.attempts += 1
            batch.sent_as_first = self._queues[known.partition][0] is batch
            if batch.attempts == 1:
                self.world.observe(batch.sent(self._known_as))
        names = ", ".join(
            f"{known} #{batch.number}@{batch.sequence}{' again' if batch.attempts > 1 else ''}"
            for known, batch in chosen
        )
        self.world.say(f"{self._known_as}: produce {names}")
        fields = produce_fields(version, -1, [(known, batch.data) for known, batch in chosen])
        self.link.request(PRODUCE, version, fields, partial(self._answered, version, chosen))

    def _answered(
        self, version: int, chosen: list[tuple[KnownPartition, SimulatedBatch]], response: Any | None
    ) -> None:
        if response is None:
            for _, batch in chosen:
                batch.in_flight = False
            self.world.count("produce idempotent", "unknown, sent again")
            return
        answers = answers_by_index(version, response, [known for known, _ in chosen])
        for known, batch in chosen:
            batch.in_flight = False
            self._settle(known, batch, answers[known.partition])

    def _settle(self, known: KnownPartition, batch: SimulatedBatch, answer: Any) -> None:
        error = answer.error_code
        queue = self._queues.get(known.partition, [])
        self.world.say(f"{self._known_as}: {known} #{batch.number} {error.name} at {answer.base_offset}")
        self.world.count("produce idempotent", error.name)
        if error == ErrorCode.none:
            self.world.acknowledged(
                known.partition, self._known_as, batch.number, batch.values, answer.base_offset, True
            )
            if self._settled.get(known.partition, self._first_sequence) == batch.sequence:
                self._settled[known.partition] = (batch.sequence + len(batch.values)) % (SEQUENCE_MAX + 1)
            if batch in queue:
                queue.remove(batch)
        elif error in UNKNOWN_TOPIC:
            self.world.observe(history.PartitionMissing(self.name, known.partition))
        elif error in SEQUENCE_ERRORS:
            if batch.sent_as_first and queue and queue[0] is batch:
                self._out_of_sequence(known, batch, error)
        elif error == ErrorCode.kafka_storage_error:
            self.world.storage_error(f"{self.name}: produce to {known}", known)
        elif error not in _RETRIABLE:
            self.world.unexpected(f"{self.name}: produce to {known} was answered {error.name}")

    def _out_of_sequence(self, known: KnownPartition, batch: SimulatedBatch, error: ErrorCode) -> None:
        """Nothing can be sent to this partition under this producer id any more."""
        if self._settled.get(known.partition) == batch.sequence:
            self.world.observe(
                history.SequenceRefused(known.partition, self._known_as, batch.number, error.name)
            )
        self._queues[known.partition].clear()
        self._abandoned.add(known.partition)


class PlainProducer(Client):
    """Sends each batch once, with acks all, 1 or 0, and takes what comes."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._number = 0

    def act(self) -> bool:
        rng = self.world.rng
        chosen = [
            (known, self._make(known)) for known in self.world.some_partitions(rng.choice((1, 1, 2, 4)))
        ]
        if not chosen:
            return False
        acks = rng.choice((-1, -1, 1, 0))
        version = self.world.produce_version()
        for _, batch in chosen:
            self.world.observe(batch.sent(self.name))
        names = ", ".join(f"{known} #{batch.number}" for known, batch in chosen)
        self.world.say(f"{self.name}: produce acks={acks} {names}")
        fields = produce_fields(version, acks, [(known, batch.data) for known, batch in chosen])
        if acks == 0:
            self.world.count("produce acks=0", "sent")
            self.link.request(PRODUCE, version, fields, None)
        else:
            self.link.request(PRODUCE, version, fields, partial(self._answered, version, acks, chosen))
        return True

    def _make(self, known: KnownPartition) -> SimulatedBatch:
        self._number += 1
        contents = make_contents(self.world, known, self.name, self._number)
        has_times = self.world.rng.random() < 0.9
        timestamp = self.world.clock.now().wall_ms if has_times else NO_TIMESTAMP
        data = encode(contents, timestamp)
        if not has_times and self.world.rng.random() < 0.5:
            # As librdkafka writes it for records without a time.
            data = seal(read_header(data)._replace(max_timestamp=0), data[HEADER_SIZE:])
        return SimulatedBatch(known.partition, self._number, contents.values, contents.keys, timestamp, data)

    def _answered(
        self,
        version: int,
        acks: int,
        chosen: list[tuple[KnownPartition, SimulatedBatch]],
        response: Any | None,
    ) -> None:
        kind = "produce acks=all" if acks == -1 else "produce acks=1"
        if response is None:
            self.world.count(kind, "unknown")
            return
        answers = answers_by_index(version, response, [known for known, _ in chosen])
        for known, batch in chosen:
            answer = answers[known.partition]
            error = answer.error_code
            self.world.say(f"{self.name}: {known} #{batch.number} {error.name} at {answer.base_offset}")
            self.world.count(kind, error.name)
            if error == ErrorCode.none:
                self.world.acknowledged(
                    known.partition, self.name, batch.number, batch.values, answer.base_offset, acks == -1
                )
            elif error in UNKNOWN_TOPIC:
                self.world.observe(history.PartitionMissing(self.name, known.partition))
                self.world.observe(history.BatchRefused(known.partition, self.name, batch.number))
            elif error == ErrorCode.kafka_storage_error:
                self.world.storage_error(f"{self.name}: produce to {known}", known)
            elif error not in _RETRIABLE:
                self.world.unexpected(f"{self.name}: produce to {known} was answered {error.name}")
