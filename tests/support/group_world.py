"""A group coordinator alone in the world: its journal is a list, its clock and timers move when told.

    world = GroupWorld()
    world.topics.create("orders", 4)
    reply = world.beat("a", 0, topics=["orders"])
    world.advance(45_000)           # timers that are due run
    world.reload()                  # the coordinator dies; another is rebuilt from the journal

`reload` can keep less of the journal, or keep it compacted, to see what a start makes of it. The journal can refuse
(`journal.refuses`), as a full disk does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any
from uuid import UUID, uuid5

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.assignors import Assignment
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.consumer_member import ConsumerHeartbeat, ConsumerReply
from holdfast.broker.groups.coordinator import GroupCoordinator
from holdfast.broker.groups.model import CoordinatorContext, TopicFacts
from holdfast.broker.groups.regex import Matches
from holdfast.config.broker import BrokerConfig
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.testing.clock import ManualClock
from holdfast.testing.fakes import SeededRandomness
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
