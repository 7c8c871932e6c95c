"""A group coordinator alone in the world: its journal is a list, its clock and timers move when told.

    world = GroupWorld()
    world.topics.create("orders", 4)
    reply = world.beat("a", 0, topics=["orders"])
    world.advance(45_000)           # timers that are due run
    world.reload()                  # the coordinator dies; another is rebuilt from the journal

`reload` can keep less of the journal, or keep it compacted, to see what a start makes of it. The journal can refuse
(`journal.refuses`), as a full disk does.

A transaction coordinator alone in the world: journal, partitions and clock do only what they are told.

    world = TransactionWorld()
    alice = world.started("copy")                          # initialised, and the answer has left
    world.produce("copy", alice, ("orders", 0), "one")     # enrol, and append when the coordinator agrees
    answers = world.end("copy", alice, is_commit=True)
    world.settle()                                         # everything under way becomes durable
    world.crash(keep=0)                                    # what was not is gone; another coordinator is loaded

Answers are held back until the journal is durable, as a partition of it does. What the coordinator says about
partitions is kept as a list of data and markers for each, of which a part may be durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.assignors import Assignment
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.consumer_member import ConsumerHeartbeat, ConsumerReply
from holdfast.broker.groups.coordinator import GroupCoordinator
from holdfast.broker.groups.model import CoordinatorContext, TopicFacts
from holdfast.broker.groups.regex import Matches
from holdfast.broker.transactions.coordinator import Refusals, TransactionCoordinator
from holdfast.broker.transactions.model import (
    NEWER_PROTOCOL,
    AddPartitions,
    Decision,
    Ended,
    EndTransactionRequest,
    Initialised,
    InitProducer,
    ProducerIdentity,
    TopicPartition,
    TransactionMetadata,
)
from holdfast.config.broker import BrokerConfig
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.testing.fakes import ManualClock, SeededRandomness
from holdfast.wire.batch import Record, build_batch, iterate_records, read_header

StoredRecord = tuple[bytes, bytes | None]
_NAMESPACE = UUID("6f1d4d5e-0000-4000-8000-000000000000")
SETTINGS = {"node.id": "1", "log.dirs": "/data", "listeners": "PLAINTEXT://127.0.0.1:9092"}


class MemoryJournal:
    """A `holdfast.seams.Journal` that keeps batches in a list and is durable at once."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.refuses: ErrorCode | None = None

    def append(
        self, records: Sequence[StoredRecord], now: Now, *, producer: tuple[int, int] | None = None
    ) -> None:
        if self.refuses is not None:
            raise ApiError(self.refuses, "the journal refuses")
        if not records:
            return
        producer_id, producer_epoch = producer or (-1, -1)
        self.batches.append(
            build_batch(
                [Record(index, 0, key, value) for index, (key, value) in enumerate(records)],
                base_timestamp=now.wall_ms,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                is_transactional=producer is not None,
            )
        )

    def when_durable(self, done: Callable[[Exception | None], None]) -> None:
        done(None)

    def compact(self) -> None:
        """Keep the last record of each key, tombstones included, where it stands."""
        last: dict[bytes, int] = {}
        records = [record for batch in self.batches for record in iterate_records(batch)]
        for number, record in enumerate(records):
            last[bytes(record.key or b"")] = number
        kept = [record for number, record in enumerate(records) if last[bytes(record.key or b"")] == number]
        self.batches = [build_batch([Record(0, 0, record.key, record.value)]) for record in kept]


class ManualTimer:
    def __init__(self, action: Callable[[Now], None]) -> None:
        self.action: Callable[[Now], None] | None = action

    def cancel(self) -> None:
        self.action = None


class ManualSchedule:
    """A `holdfast.seams.Schedule` whose timers run when told."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ManualTimer]] = []
        self._count = 0

    def at(self, deadline_ms: int, action: Callable[[Now], None]) -> ManualTimer:
        self._count += 1
        timer = ManualTimer(action)
        heappush(self._heap, (deadline_ms, self._count, timer))
        return timer

    @property
    def next_ms(self) -> int | None:
        while self._heap and self._heap[0][2].action is None:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run_next(self, now: Now) -> None:
        timer = heappop(self._heap)[2]
        if timer.action is not None:
            timer.action(now)


class DictTopics:
    """`holdfast.broker.groups.model.Topics` that a test makes and deletes."""

    def __init__(self, changed: Callable[[set[str]], None]) -> None:
        self._by_name: dict[str, TopicFacts] = {}
        self._tell = changed
        self._matches = Matches(self)
        self._created = 0

    def by_name(self, name: str) -> TopicFacts | None:
        return self._by_name.get(name)

    def by_id(self, topic_id: UUID) -> TopicFacts | None:
        return next((facts for facts in self._by_name.values() if facts.topic_id == topic_id), None)

    def names(self) -> Iterable[str]:
        return list(self._by_name)

    def matching(self, expression: str) -> frozenset[str]:
        return self._matches.of(expression)

    def _changed(self, names: set[str]) -> None:
        self._matches.changed(names)
        self._tell(names)

    def create(self, name: str, partitions: int) -> UUID:
        self._created += 1
        topic_id = uuid5(_NAMESPACE, f"{name}/{self._created}")
        self._by_name[name] = TopicFacts(name, topic_id, partitions)
        self._changed({name})
        return topic_id

    def grow(self, name: str, partitions: int) -> None:
        self._by_name[name] = self._by_name[name]._replace(partitions=partitions)
        self._changed({name})

    def delete(self, name: str) -> None:
        del self._by_name[name]
        self._changed({name})


class GroupWorld:
    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.clock = ManualClock()
        self.journal = MemoryJournal()
        self.schedule = ManualSchedule()
        self.settings = BrokerConfig.load({**SETTINGS, **(settings or {})})[0]
        self.overrides: dict[str, Mapping[str, str]] = {}
        self.said: list[str] = []
        self.topics = DictTopics(self._topics_changed)
        self._randomness = SeededRandomness()
        self._no_overrides: Mapping[str, str] = {}
        self.coordinator = self._new_coordinator()
        self.coordinator.loaded(self.now)

    @property
    def now(self) -> Now:
        return self.clock.now()

    def configure(self, **settings: str) -> None:
        """Settings are given with underscores for dots."""
        named = {name.replace("_", "."): value for name, value in settings.items()}
        self.settings = BrokerConfig.load({**SETTINGS, **named})[0]

    def advance(self, ms: int) -> None:
        """Let time pass; timers run when they are due, one after the other."""
        end_ms = self.now.monotonic_ms + ms
        while (due_ms := self.schedule.next_ms) is not None and due_ms <= end_ms:
            self.clock.advance(max(due_ms - self.now.monotonic_ms, 0))
            self.schedule.run_next(self.now)
        self.clock.advance(end_ms - self.now.monotonic_ms)

    def reload(self, batches: Sequence[bytes] | None = None) -> None:
        """The coordinator dies with its timers; another is rebuilt from the journal, or from what is given."""
        if batches is not None:
            self.journal.batches = list(batches)
        self.schedule = ManualSchedule()
        self.coordinator = self._new_coordinator()
        for batch in self.journal.batches:
            self.coordinator.replay(read_header(batch), list(iterate_records(batch)))
        self.coordinator.loaded(self.now)

    def _new_coordinator(self) -> GroupCoordinator:
        return GroupCoordinator(
            CoordinatorContext(
                journal=self.journal,
                schedule=self.schedule,
                randomness=self._randomness,
                topics=self.topics,
                settings=lambda: self.settings,
                overrides=lambda group_id: self.overrides.get(group_id, self._no_overrides),
                say=self.said.append,
            )
        )

    def _topics_changed(self, names: set[str]) -> None:
        self.coordinator.topics_changed(names, self.now)
        self.coordinator.topics_deleted(names, self.now)

    # The consumer protocol

    def beat(
        self,
        member_id: str,
        epoch: int,
        *,
        group: str = "group",
        topics: Sequence[str] | None = None,
        regex: str | None = None,
        owned: Assignment | None = None,
        **fields: Any,
    ) -> ConsumerReply:
        """A heartbeat; with epoch 0 a member joins, and says what a member must say then."""
        joins = epoch == 0
        if joins:
            fields.setdefault("rebalance_timeout_ms", 300_000)
            owned = owned or {}
        request = ConsumerHeartbeat(
            group,
            member_id,
            epoch,
            topic_names=None if topics is None else tuple(topics),
            topic_regex=regex,
            owned=None
            if owned is None
            else [(topic_id, sorted(partitions)) for topic_id, partitions in owned.items()],
            client_id="client",
            client_host="/10.0.0.9",
            **fields,
        )
        return self.coordinator.consumer_groups.heartbeat(request, self.now)

    def consumer_group(self, group: str = "group") -> ConsumerGroup:
        return self.coordinator.consumer_groups.find(group)


Waiter = Callable[[Exception | None], None]


class StagedJournal(MemoryJournal):
    """A `holdfast.seams.Journal` whose batches become durable when told, and of which a crash keeps a part."""

    def __init__(self) -> None:
        super().__init__()
        self.durable = 0
        """How many of the batches no crash can take."""
        self._waiters: deque[tuple[int, Waiter]] = deque()

    def append_unhurried(self, records: Sequence[StoredRecord], now: Now) -> None:
        self.append(records, now)

    def when_durable(self, done: Waiter) -> None:
        if self.durable == len(self.batches):
            done(None)
        else:
            self._waiters.append((len(self.batches), done))

    def flush(self) -> None:
        """Everything appended so far is durable, and who waits for it is told; what that appends is not."""
        self.durable = len(self.batches)
        while self._waiters and self._waiters[0][0] <= self.durable:
            self._waiters.popleft()[1](None)

    def fail(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for _, waiter in waiters:
            waiter(OSError("the flush failed"))

    def lose(self, keep: int) -> None:
        """A crash: of what was not durable the first `keep` batches are found again."""
        del self.batches[self.durable + keep :]
        self.durable = len(self.batches)
        self._waiters.clear()


class Entry(NamedTuple):
    """Data of a transaction in a partition, or the marker that ends one."""

    producer: ProducerIdentity
    value: str = ""
    is_commit: bool | None = None
    """None for data."""


class PartitionEntries:
    """One partition as the coordinator's world knows it."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.durable = 0
        self.is_offline = False

    def open_transactions(self) -> dict[int, list[Entry]]:
        """Data that no marker follows yet, by producer id."""
        undecided: dict[int, list[Entry]] = {}
        for entry in self.entries:
            if entry.is_commit is None:
                undecided.setdefault(entry.producer.producer_id, []).append(entry)
            else:
                undecided.pop(entry.producer.producer_id, None)
        return undecided

    def epoch_of(self, producer_id: int) -> int:
        epochs = [entry.producer.epoch for entry in self.entries if entry.producer.producer_id == producer_id]
        return max(epochs, default=-1)

    def outcomes(self) -> dict[str, bool | None]:
        """What became of each value: committed, aborted, or None while undecided."""
        fate: dict[str, bool | None] = {}
        undecided: dict[int, list[str]] = {}
        for entry in self.entries:
            mine = undecided.setdefault(entry.producer.producer_id, [])
            if entry.is_commit is None:
                fate[entry.value] = None
                mine.append(entry.value)
            else:
                fate.update(dict.fromkeys(mine, entry.is_commit))
                mine.clear()
        return fate


class Answers:
    """What was answered to a request, when it was allowed to leave."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    @property
    def only(self) -> Any:
        (answer,) = self.given
        return answer


class TransactionWorld:
    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self.clock = ManualClock()
        self.journal = StagedJournal()
        self.schedule = ManualSchedule()
        self.settings = BrokerConfig.load({**SETTINGS, **(settings or {})})[0]
        self.partitions: dict[TopicPartition, PartitionEntries] = {}
        self.said: list[str] = []
        self.next_producer_id = 1000
        self.producer_ids_wait = False
        """Whether producer ids come only with `hand_out`."""
        self._ids_awaited: deque[Callable[[int | ApiError], None]] = deque()
        self._flush_awaited: deque[Callable[[], None]] = deque()
        self.coordinator = self._new_coordinator()
        self.coordinator.loaded(self.now)

    def _new_coordinator(self) -> TransactionCoordinator:
        return TransactionCoordinator(
            self.journal, self.schedule, lambda: self.settings, self, self, self.said.append
        )

    @property
    def now(self) -> Now:
        return self.clock.now()

    # What the coordinator asks of the world

    def take(self, now: Now, done: Callable[[int | ApiError], None]) -> None:
        if self.producer_ids_wait:
            self._ids_awaited.append(done)
        else:
            self.next_producer_id += 1
            done(self.next_producer_id)

    def hand_out(self, refusal: ApiError | None = None) -> None:
        """Give everybody who waits for a producer id one, or the refusal."""
        while self._ids_awaited:
            self.next_producer_id += 1
            self._ids_awaited.popleft()(refusal or self.next_producer_id)

    def when_recorded(self, partitions: Iterable[TopicPartition], done: Waiter) -> None:
        self.journal.when_durable(done)

    def write_markers(
        self,
        decision: Decision,
        partitions: Sequence[TopicPartition],
        now: Now,
        done: Callable[[Sequence[TopicPartition]], None],
    ) -> None:
        known = [partition for partition in partitions if partition in self.partitions]
        left = [partition for partition in known if self.partitions[partition].is_offline]
        for partition in known:
            if partition not in left:
                self.partitions[partition].entries.append(
                    Entry(decision.producer, is_commit=decision.is_commit)
                )
        self._flush_awaited.append(lambda: done(left))

    # Becoming durable

    def flush_partitions(self) -> None:
        for partition in self.partitions.values():
            partition.durable = len(partition.entries)
        awaited, self._flush_awaited = self._flush_awaited, deque()
        for done in awaited:
            done()

    def settle(self) -> None:
        """Let all that is under way come to pass, and what it leads to."""
        while True:
            self.hand_out()
            before = (len(self.journal.batches), self.journal.durable)
            self.journal.flush()
            self.flush_partitions()
            if before == (len(self.journal.batches), self.journal.durable) and not self._flush_awaited:
                return

    def advance(self, ms: int) -> None:
        """Let time pass; timers run when they are due, one after the other."""
        end_ms = self.now.monotonic_ms + ms
        while (due_ms := self.schedule.next_ms) is not None and due_ms <= end_ms:
            self.clock.advance(max(due_ms - self.now.monotonic_ms, 0))
            self.schedule.run_next(self.now)
        self.clock.advance(end_ms - self.now.monotonic_ms)

    def crash(self, keep: int = 0, keep_in_partitions: int = 0) -> None:
        """The coordinator dies; another is rebuilt from what was durable and the first of what was not."""
        self.journal.lose(keep)
        for partition in self.partitions.values():
            del partition.entries[partition.durable + keep_in_partitions :]
            partition.durable = len(partition.entries)
        self._ids_awaited.clear()
        self._flush_awaited.clear()
        self.schedule = ManualSchedule()
        self.coordinator = self._new_coordinator()
        for batch in self.journal.batches:
            self.coordinator.replay(read_header(batch), list(iterate_records(batch)))
        self.coordinator.loaded(self.now)

    # Asking; answers leave when the journal is durable

    def _gate(self, answers: Answers) -> Callable[[Any], None]:
        def reply(answer: Any) -> None:
            self.journal.when_durable(lambda error: answers.given.append(answer if error is None else error))

        return reply

    def init(
        self, transactional_id: str, *, timeout_ms: int = 60_000, expected: ProducerIdentity | None = None
    ) -> Answers:
        answers = Answers()
        self.coordinator.init_producer(
            InitProducer(transactional_id, timeout_ms, expected), self.now, self._gate(answers)
        )
        return answers

    def add(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        *partitions: TopicPartition,
        client_version: int = 0,
    ) -> Answers:
        answers = Answers()
        request = AddPartitions(transactional_id, producer, frozenset(partitions), client_version)
        self._gate(answers)(self.coordinator.add_partitions(request, self.now))
        return answers

    def end(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        *,
        is_commit: bool,
        client_version: int = NEWER_PROTOCOL,
    ) -> Answers:
        answers = Answers()
        request = EndTransactionRequest(transactional_id, producer, is_commit, client_version)
        self.coordinator.end(request, self.now, self._gate(answers))
        return answers

    def produce(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        partition: TopicPartition,
        value: str,
        *,
        client_version: int = NEWER_PROTOCOL,
    ) -> Answers:
        """Ask the coordinator as the broker does, and append when it agrees; answered when that is durable."""
        answers = Answers()
        entries = self.partitions.setdefault(partition, PartitionEntries())
        request = AddPartitions(transactional_id, producer, frozenset((partition,)), client_version)

        def go_on(refusals: Refusals) -> None:
            code = refusals.get(partition, ErrorCode.none)
            if code is ErrorCode.none and producer.epoch < entries.epoch_of(producer.producer_id):
                code = ErrorCode.invalid_producer_epoch
            if code is not ErrorCode.none:
                answers.given.append(code)
                return
            entries.entries.append(Entry(producer, value))
            self._flush_awaited.append(lambda: answers.given.append(code))

        is_open = any(
            entry.producer == producer for entry in entries.open_transactions().get(producer.producer_id, ())
        )
        if is_open:
            go_on({})
        elif client_version >= NEWER_PROTOCOL:
            self.coordinator.add_before_write(request, self.now, go_on)
        else:
            self.coordinator.verify(request, go_on)
        return answers

    # Shortcuts for tests that want the answer at once

    def started(self, transactional_id: str, **options: Any) -> ProducerIdentity:
        """A producer that has been initialised."""
        answers = self.init(transactional_id, **options)
        self.settle()
        reply: Initialised = answers.only
        assert reply.error is ErrorCode.none, reply
        return ProducerIdentity(reply.producer_id, reply.producer_epoch)

    def written(self, transactional_id: str, producer: ProducerIdentity, *partitions: TopicPartition) -> None:
        """A producer that has written to partitions by the newer protocol."""
        for number, partition in enumerate(partitions):
            answers = self.produce(transactional_id, producer, partition, f"{producer} {partition} {number}")
            self.settle()
            assert answers.only is ErrorCode.none, answers.given

    def ended(
        self, transactional_id: str, producer: ProducerIdentity, *, is_commit: bool, client_version: int = 2
    ) -> Ended:
        answers = self.end(transactional_id, producer, is_commit=is_commit, client_version=client_version)
        self.settle()
        reply: Ended = answers.only
        return reply

    def metadata(self, transactional_id: str) -> TransactionMetadata:
        metadata = self.coordinator.describe(transactional_id)
        assert metadata is not None, f"{transactional_id} is not known"
        return metadata

    def markers(self, partition: TopicPartition) -> list[tuple[int, int, bool]]:
        """Producer id, epoch and outcome of each marker in a partition."""
        return [
            (*entry.producer, entry.is_commit)
            for entry in self.partitions[partition].entries
            if entry.is_commit is not None
        ]
