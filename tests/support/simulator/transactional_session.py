"""One life of a transactional client, from its InitProducerId until it is told that it is fenced.

With the older protocol a session enrols partitions and groups itself; with the newer one (KIP-890) the broker
does, and every end of a transaction brings a new epoch. Its partitions and its coordinator have a connection
each, so that a late batch can arrive after the end of its transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support import history
from tests.support.history import Partition
from tests.support.simulator.contents import encode, make_contents
from tests.support.simulator.link import NOT_NOW, REFUSED_MEMBER, UNKNOWN_TOPIC, Link
from tests.support.simulator.producers import (
    SEQUENCE_ERRORS,
    SimulatedBatch,
    answers_by_index,
    produce_fields,
)

from holdfast.wire import api_keys

if TYPE_CHECKING:
    from tests.support.simulator.members import GroupOffsets
    from tests.support.simulator.transactional import TransactionalProducer
    from tests.support.simulator.world import KnownPartition

IN_FLIGHT_MAX = 2
_FENCED = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_id_mapping,
        ErrorCode.invalid_txn_state,
    }
)


class Session:
    """One life of a transactional client."""

    def __init__(self, owner: TransactionalProducer, number: int, implicit: bool) -> None:
        world = owner.world
        self.world = world
        self.owner = owner
        self.transactional_id = owner.name
        self.name = f"{owner.name}.{number}"
        self.is_dead = False
        self._implicit = implicit
        """The newer protocol: the broker enrols, and ends bring a new epoch."""
        self._timeout_ms = world.rng.choice((2_000, 6_000, 30_000))
        self._link = Link(world, self.name)
        self._coordinator = Link(world, f"{self.name}@coordinator")
        self._asking = False
        """A request to the coordinator is under way."""
        self._wait_until = 0
        """The step before which it does not ask again."""
        self._producer: tuple[int, int] | None = None
        self._transaction: str | None = None
        self._transactions = 0
        self._begun_at_ms = 0
        self._may_be_begun = False
        """The coordinator was asked to enrol something since the last end: it may have begun what this forgets."""
        self._number = 0
        self._queues: dict[Partition, list[SimulatedBatch]] = {}
        self._next_sequence: dict[Partition, int] = {}
        self._settled: dict[Partition, int] = {}
        self._enrolled: set[Partition | str] = set()
        """Partitions and groups the older protocol has told the coordinator of."""
        self._has_content = False
        """The coordinator knows of the transaction: something of it was acknowledged."""
        self._offsets: dict[Partition, int] = {}
        """Offsets to be sent, or sent without an answer."""
        self._must_abort = False
        self._intent: bool | None = None
        """Commit or abort, once everything is answered that goes before it."""
        self._ending: bool | None = None
        """Commit or abort, once that was asked for and until it was answered."""

    # Life

    @property
    def is_settled(self) -> bool:
        return self._producer is not None and self._transaction is None and not self._asking

    def die(self, why: str) -> None:
        """Nothing more is sent; what is on its way may still arrive."""
        if self.is_dead:
            return
        self.world.say(f"{self.name}: gone, {why}")
        self.is_dead = True

    def retire(self) -> None:
        self.is_dead = True
        self._link.retire()
        self._coordinator.retire()

    def _fenced(self, error: ErrorCode, what: str) -> None:
        """Told to go away: right if a newer session has begun, or the transaction may have timed out."""
        if not (self.owner.may_be_fenced(self) or self._may_have_timed_out):
            self.world.unexpected(f"{self.name}: {what} was answered {error.name}, and nobody fenced it")
        self.die(f"{error.name} to {what}")

    @property
    def _may_have_timed_out(self) -> bool:
        if self._transaction is None:
            return False
        return self.world.clock.now().monotonic_ms - self._begun_at_ms >= self._timeout_ms

    # Acting

    def act(self) -> bool:
        if self.is_dead or self.world.steps < self._wait_until:
            return False
        if self._producer is None:
            return self._initialise()
        if self._ending is not None:
            return self._end(self._ending)
        if self._must_abort:
            return self._end(False)
        if self._transaction is None:
            self._begin()
        if self._intent is not None:
            return self._end(self._intent)
        draw = self.world.rng.random()
        if draw < 0.4 or not self._has_content:
            return self._produce(new=True)
        if draw < 0.6:
            return self._send_offsets()
        if draw < 0.95:
            self._intent = self.world.rng.random() < 0.65
            return self._end(self._intent)
        return False

    def settle(self) -> None:
        """Bring the transaction to its end."""
        if self.is_dead or self.is_settled or self.world.steps < self._wait_until:
            return
        if self._producer is None:
            self._initialise()
        elif self._ending is not None:
            self._end(self._ending)
        elif self._must_abort or self._may_have_timed_out:
            self._end(False)
        elif any(self._queues.values()):
            self._produce(new=False)
        elif self._offsets:
            self._send_offsets()
        elif self._has_content:
            self._end(True)
        else:
            self._forget_transaction()

    def _begin(self) -> None:
        self._transactions += 1
        self._transaction = f"{self.name}#{self._transactions}"
        if not self._may_be_begun:
            self._begun_at_ms = self.world.clock.now().monotonic_ms
        self.world.observe(history.TransactionBegun(self._transaction, self.transactional_id, self.name))

    def _forget_transaction(self) -> None:
        self._transaction = None
        self._ending = self._intent = None
        self._must_abort = False
        self._has_content = False
        self._enrolled.clear()
        self._queues.clear()
        self._offsets.clear()

    def _ask(
        self,
        kind: str,
        api_key: int,
        version: int,
        fields: dict[str, Any],
        then: Callable[[Any], str],
        first: Callable[[Any | None], None] | None = None,
    ) -> None:
        """One request to the coordinator; `then` gets the answer and says how it went."""
        self._asking = True

        def answered(response: Any | None) -> None:
            self._asking = False
            if first is not None:
                first(response)
            if response is None and self._ending is not None and self.world.rng.random() < 0.4:
                self.die("the machine of its broker took it along")
            outcome = "unknown" if response is None else then(response)
            if outcome != ErrorCode.none.name:
                self._wait_until = self.world.later(8)
            self.world.count(kind, outcome)
            self.world.say(f"{self.name}: {kind}: {outcome}")

        self._coordinator.request(api_key, version, fields, answered)

    def _identity(self) -> dict[str, Any]:
        assert self._producer is not None
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self._producer[0],
            "producer_epoch": self._producer[1],
        }

    # InitProducerId

    def _initialise(self) -> bool:
        if self._asking:
            return False
        self.owner.initialising(self)
        fields = {
            "transactional_id": self.transactional_id,
            "transaction_timeout": self._timeout_ms,
            "producer_id": -1,
            "producer_epoch": -1,
        }

        def then(response: Any) -> str:
            error = response.error_code
            if error == ErrorCode.none:
                self._given(response.producer_id, response.producer_epoch)
                self.world.observe(
                    history.TransactionalIdTaken(
                        self.transactional_id, self.name, response.producer_id, response.producer_epoch
                    )
                )
            elif error == ErrorCode.producer_fenced or error == ErrorCode.invalid_producer_epoch:
                self._fenced(error, "init producer id")
            elif error not in NOT_NOW:
                self.world.refused(f"{self.name}: init producer id", error)
            return str(error.name)

        def answered(response: Any | None) -> None:
            self.owner.initialised(self, response is not None)

        version = 5 if self._implicit else self.world.rng.choice((2, 3, 4))
        self._ask("init transactional id", api_keys.INIT_PRODUCER_ID, version, fields, then, answered)
        return True

    def _given(self, producer_id: int, epoch: int) -> None:
        self.world.observe(history.ProducerIdGiven(producer_id, epoch))
        self._producer = (producer_id, epoch)
        self._next_sequence.clear()
        self._settled.clear()

    # Produce

    def _produce(self, new: bool) -> bool:
        chosen: list[tuple[KnownPartition, SimulatedBatch]] = []
        for known in self._where(new):
            queue = self._queues.setdefault(known.partition, [])
            batch = next((batch for batch in queue if not batch.in_flight), None)
            if batch is None and new and len(queue) < IN_FLIGHT_MAX:
                if not self._implicit and known.partition not in self._enrolled:
                    return self._add_partition(known)
                batch = self._make(known)
                queue.append(batch)
            if batch is not None:
                chosen.append((known, batch))
        if not chosen:
            return False
        self._send(chosen)
        return True

    def _where(self, new: bool) -> list[KnownPartition]:
        world = self.world
        for partition in [partition for partition in self._queues if not world.is_live(partition)]:
            del self._queues[partition]
            self._must_abort = True
        if not new:
            return [world.known(partition) for partition, queue in self._queues.items() if queue]
        return world.some_partitions(world.rng.choice((1, 1, 2)))

    def _make(self, known: KnownPartition) -> SimulatedBatch:
        assert self._producer is not None
        self._number += 1
        contents = make_contents(self.world, known, self.name, self._number)
        sequence = self._next_sequence.get(known.partition, 0)
        self._next_sequence[known.partition] = sequence + len(contents.values)
        timestamp = self.world.clock.now().wall_ms
        data = encode(contents, timestamp, producer=self._producer, sequence=sequence, is_transactional=True)
        return SimulatedBatch(
            known.partition, self._number, contents.values, contents.keys, timestamp, data, sequence
        )

    def _send(self, chosen: list[tuple[KnownPartition, SimulatedBatch]]) -> None:
        version = self.world.rng.choice((12, 13) if self._implicit else (9, 11))
        for known, batch in chosen:
            batch.in_flight = True
            batch.attempts += 1
            batch.sent_as_first = self._queues[known.partition][0] is batch
            if batch.attempts == 1:
                self.world.observe(batch.sent(self.name, self._transaction))
        names = ", ".join(f"{known} #{batch.number}@{batch.sequence}" for known, batch in chosen)
        self.world.say(f"{self.name}: produce {names} in {self._transaction}")
        self.world.faults.bad_moment(0.02)
        data = [(known, batch.data) for known, batch in chosen]
        fields = produce_fields(version, -1, data, self.transactional_id)
        self._link.request(api_keys.PRODUCE, version, fields, partial(self._produced, version, chosen))

    def _produced(
        self, version: int, chosen: list[tuple[KnownPartition, SimulatedBatch]], response: Any | None
    ) -> None:
        for _, batch in chosen:
            batch.in_flight = False
        if response is None:
            self.world.count("produce transactional", "unknown")
            return
        answers = answers_by_index(version, response, [known for known, _ in chosen])
        for known, batch in chosen:
            self._settle_batch(known, batch, answers[known.partition])

    def _settle_batch(self, known: KnownPartition, batch: SimulatedBatch, answer: Any) -> None:
        error = answer.error_code
        queue = self._queues.get(known.partition, [])
        self.world.say(f"{self.name}: {known} #{batch.number} {error.name} at {answer.base_offset}")
        self.world.count("produce transactional", error.name)
        if error == ErrorCode.none:
            self.world.acknowledged(
                known.partition, self.name, batch.number, batch.values, answer.base_offset, True
            )
        if batch not in queue:
            return  # given up by an abort
        if error == ErrorCode.none:
            queue.remove(batch)
            self._has_content = True
            if self._settled.get(known.partition, 0) == batch.sequence:
                self._settled[known.partition] = batch.sequence + len(batch.values)
        elif error in UNKNOWN_TOPIC:
            self.world.observe(history.PartitionMissing(self.name, known.partition))
            self._must_abort = True
        elif error in _FENCED:
            self._fenced(error, f"produce to {known}")
        elif error in SEQUENCE_ERRORS:
            if batch.sent_as_first and queue[0] is batch:
                self._out_of_sequence(known, batch, error)
        elif error not in NOT_NOW:
            self.world.refused(f"{self.name}: produce to {known}", error, known)

    def _out_of_sequence(self, known: KnownPartition, batch: SimulatedBatch, error: ErrorCode) -> None:
        if self._settled.get(known.partition) == batch.sequence and not self._may_have_timed_out:
            self.world.observe(history.SequenceRefused(known.partition, self.name, batch.number, error.name))
        self.die(f"{error.name} from {known}")

    # Enrolling, with the older protocol

    def _add_partition(self, known: KnownPartition) -> bool:
        if self._asking:
            return False
        topics = [{"name": known.topic.name, "partitions": [known.index]}]
        fields = {
            "v3_and_below_transactional_id": self.transactional_id,
            "v3_and_below_producer_id": self._identity()["producer_id"],
            "v3_and_below_producer_epoch": self._identity()["producer_epoch"],
            "v3_and_below_topics": topics,
        }

        def then(response: Any) -> str:
            error = response.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
            if error == ErrorCode.none:
                self._enrolled.add(known.partition)
                self._has_content = True
            elif error in UNKNOWN_TOPIC:
                if self.world.is_live(known.partition):
                    self.world.observe(history.PartitionMissing(self.name, known.partition))
            else:
                self._coordinator_error(error, f"add {known} to transaction")
            return str(error.name)

        version = self.world.rng.choice((0, 2, 3))
        self._may_be_begun = True
        self._ask("add partitions to txn", api_keys.ADD_PARTITIONS_TO_TXN, version, fields, then)
        return True

    def _coordinator_error(self, error: ErrorCode, what: str) -> None:
        if error in _FENCED:
            self._fenced(error, what)
        elif error not in NOT_NOW:
            self.world.refused(f"{self.name}: {what}", error)

    # Committed offsets

    def _send_offsets(self) -> bool:
        book = self.owner.book
        if self._asking or book is None:
            return False
        if not self._implicit and book.group not in self._enrolled:
            return self._add_group(book)
        if not self._offsets:
            self._offsets = book.next_offsets()
        if not self._offsets:
            return False
        assert self._transaction is not None
        commit = book.name(self.name)
        member = book.lend_member()
        fields = {
            **self._identity(),
            "group_id": book.group,
            "topics": book.to_topics(self._offsets, commit),
            "member_id": member.member_id,
            "generation_id": member.generation,
            "group_instance_id": member.instance_id,
        }
        offsets = dict(self._offsets)
        self.world.observe(
            history.OffsetsCommitSent(
                book.group, commit, offsets, member.member_id, member.generation, self._transaction
            )
        )
        self.world.say(f"{self.name}: {commit} of {book.group} {book.show(self._offsets)}")
        version = 5 if self._implicit else self.world.rng.choice((3, 4))
        then = partial(self._positions_answered, book, commit, offsets)
        self._ask("send offsets to txn", api_keys.TXN_OFFSET_COMMIT, version, fields, then)
        return True

    def _positions_answered(
        self, book: GroupOffsets, commit: str, offsets: dict[Partition, int], response: Any
    ) -> str:
        error = book.error_of(response)
        everything = tuple(offsets)
        if error == ErrorCode.none:
            self._has_content = True
            self._offsets = {}
            book.accepted(offsets)
            self.world.observe(history.OffsetsCommitAnswered(book.group, commit, accepted=everything))
        elif error in REFUSED_MEMBER:
            self.world.observe(history.OffsetsCommitAnswered(book.group, commit, refused=everything))
            self._must_abort = True
        else:
            if error in _FENCED:
                self.world.observe(history.OffsetsCommitAnswered(book.group, commit, refused=everything))
            self._coordinator_error(error, "send offsets")
        return str(error.name)

    def _add_group(self, book: GroupOffsets) -> bool:
        def then(response: Any) -> str:
            error = response.error_code
            if error == ErrorCode.none:
                self._enrolled.add(book.group)
                self._has_content = True
            else:
                self._coordinator_error(error, "add offsets to transaction")
            return str(error.name)

        version = self.world.rng.choice((2, 3, 4))
        fields = {**self._identity(), "group_id": book.group}
        self._may_be_begun = True
        self._ask("add offsets to txn", api_keys.ADD_OFFSETS_TO_TXN, version, fields, then)
        return True

    # The end

    def _end(self, commit: bool) -> bool:
        if self._asking:
            return False
        if self._ending is None and not self._may_end(commit):
            return self._finish_first(commit)
        assert self._transaction is not None
        if not commit:
            self._queues.clear()
            self._offsets = {}
        self._ending = commit
        self.world.observe(history.TransactionEndRequested(self._transaction, commit))
        self.world.say(f"{self.name}: {'commit' if commit else 'abort'} {self._transaction}")
        self.world.faults.bad_moment(0.25, self.world.rng.choice((2, 4, 7)))
        fields = {**self._identity(), "committed": commit}
        version = 5 if self._implicit else self.world.rng.choice((2, 3, 4))
        kind = "commit" if commit else "abort"
        self._ask(f"end txn: {kind}", api_keys.END_TXN, version, fields, partial(self._ended, commit))
        return True

    def _may_end(self, commit: bool) -> bool:
        """A commit waits for everything; so does an older client's abort, whose epoch stays the same."""
        if commit:
            return self._has_content and not any(self._queues.values()) and not self._offsets
        return self._implicit or (self._has_content and not any(self._queues.values()))

    def _finish_first(self, commit: bool) -> bool:
        if any(self._queues.values()):
            if self._must_abort and not commit:
                self.die("an older client cannot abort what is still on its way")
                return False
            return self._produce(new=False)
        if self._offsets and commit:
            return self._send_offsets()
        if not self._has_content:
            self._forget_transaction()
        return False

    def _ended(self, commit: bool, response: Any) -> str:
        error = response.error_code
        if error == ErrorCode.none:
            assert self._transaction is not None
            complete = not self.world.storage_trouble and self.world.absence is None
            self.world.observe(history.TransactionEnded(self._transaction, commit, complete))
            self._forget_transaction()
            self._may_be_begun = False
            if self._implicit:
                self._given(response.producer_id, response.producer_epoch)
        elif error == ErrorCode.producer_fenced and self._implicit and not self._has_content:
            # As Kafka: with the epoch of the new transaction while the last one is not complete.
            self.die("its transaction is empty, and the last one is not complete")
        else:
            self._coordinator_error(error, "end of the transaction")
        return str(error.name)
