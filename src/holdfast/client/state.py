"""Handlers that remember: state that is exactly as old as the committed offset.

    def average(message: Message, state: State) -> list[Output]:
        total, count = json.loads(state.get(message.key) or b"[0, 0]")
        total, count = total + float(message.value), count + 1
        state[message.key] = json.dumps([total, count]).encode()
        return [Output("averages", b"%f" % (total / count), key=message.key)]

    StatefulProcessor(
        "localhost:9092", group="averages", topics=["readings"], directory="/var/lib/averages"
    ).run(average)

What a handler changes goes into a changelog, a compacted topic, in the transaction that holds its outputs and the
committed offsets of its messages (see `processor`): after a crash, state, outputs and committed offsets are all before
it, or all after it. Each partition has its own state, and a message sees that of its partition alone: what is counted
under one key must have that key as the message key.

On disk, in `directory`, is a cache of the changelog, which saves reading all of it at every start (see `changelog`).
It is never needed: without it, or with an old one, the changelog is read before the first message.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Required, TypeAlias, TypedDict, Unpack

from confluent_kafka import KafkaException

from holdfast.client.changelog import (
    DELETIONS_KEPT_MS,
    CacheTaken,
    Changelogs,
    Extent,
    Restoration,
    RestoreTarget,
    StateCache,
    StateLost,
)
from holdfast.client.consuming.assignment import LostOffsets
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.messages import Message, check_handler
from holdfast.client.metrics import Metrics
from holdfast.client.process import say
from holdfast.client.processor import Outcome, Output, Processor, made
from holdfast.client.retries import RetryPolicy
from holdfast.client.spool.format import PartitionKey

if TYPE_CHECKING:
    from holdfast.client.tracing import Tracing

STEP_SECONDS: Final = 0.1
RETRY_SECONDS: Final = 1.0


class _Unchanged:
    """The open transaction has not touched it."""


_UNCHANGED: Final = _Unchanged()


class State(MutableMapping[bytes, bytes]):
    """The state of one partition as a handler sees it: the cache, under what the open transaction has changed."""

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache
        self.changed: dict[bytes, bytes | None] = {}
        self.last_offset = -1
        """Of the changes of the open transaction in the changelog, as far as is known."""
        self._before: dict[bytes, bytes | _Unchanged | None] = {}
        """What the message that is being handled has changed, as it was before."""

    def begin_message(self) -> None:
        self._before.clear()

    def take_message_back(self) -> None:
        """Nothing since the message began has happened."""
        for key, value in self._before.items():
            if isinstance(value, _Unchanged):
                del self.changed[key]
            else:
                self.changed[key] = value
        self._before.clear()

    def _change(self, key: bytes, value: bytes | None) -> None:
        if key not in self._before:
            self._before[key] = self.changed.get(key, _UNCHANGED)
        self.changed[key] = value

    def __getitem__(self, key: bytes) -> bytes:
        value = self.changed[key] if key in self.changed else self.cache.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        if not isinstance(key, bytes) or not isinstance(value, bytes):
            raise TypeError("keys and values of state are bytes: they travel as messages")
        self._change(key, value)

    def __delitem__(self, key: bytes) -> None:
        self[key]
        self._change(key, None)

    def __iter__(self) -> Iterator[bytes]:
        gone = {key for key, value in self.changed.items() if value is None}
        known = {key for key in self.cache.all_keys() if key not in gone}
        yield from sorted(known | (self.changed.keys() - gone))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def delivered(self, error: Any, message: Any) -> None:
        if error is None:
            self.last_offset = max(self.last_offset, message.offset())

    def forget_changes(self) -> None:
        self.changed = {}
        self._before = {}
        self.last_offset = -1


StatefulTransform: TypeAlias = Callable[[Message, State], Outcome]


class ProcessorOptions(TypedDict, total=False):
    """What a `Processor` takes besides the brokers' address, for whoever hands it on."""

    group: Required[str]
    topics: Required[Sequence[str]]
    commit_seconds: float
    commit_messages: int
    retry: RetryPolicy | None
    dead_letter_topic: Callable[[str], str]
    dead_letter_dialect: Dialect
    create_topics: bool
    lost_offsets: LostOffsets
    marks_topic: str | None
    config: Mapping[str, Any] | None
    producer_config: Mapping[str, Any] | None
    unsafe: Collection[str]
    metrics: Metrics | None
    tracing: Tracing | None


class StatefulProcessor(Processor):
    def __init__(self, bootstrap: str, *, directory: str, **options: Unpack[ProcessorOptions]) -> None:
        """As `Processor`, whose arguments it takes; the changelog of a topic is `<group>-<topic>-changelog`, made when
        it is missing.

        A transform that fails has changed nothing.
        """
        super().__init__(bootstrap, **options)
        self._directory = directory

    def run(self, transform: StatefulTransform) -> None:  # type: ignore[override]  # its transforms get the state too
        """Process until stopped. Without `retry` an exception of `transform` takes the open transaction back and is
        raised."""
        check_handler(transform, iterates=True)
        states = States(self._group, self._directory, self._consumer_settings)
        for topic in self._topics:
            states.changelogs.ensure(states.changelog(topic), topic)

        def with_state(message: Message) -> Outcome:
            state = states.of(message)
            state.begin_message()
            try:
                outcome = transform(message, state)
                return made(outcome)
            except Exception:
                state.take_message_back()
                raise

        try:
            self._run(with_state, states)
        finally:
            states.close()


class States:
    """The states of the partitions that are ours: what goes along with the transactions of a processor's run."""

    def __init__(self, group: str, directory: str, settings: Mapping[str, Any]) -> None:
        self._group = group
        self._directory = os.path.join(directory, group)
        self.changelogs = Changelogs(settings)
        self._restoration = Restoration(settings)
        self._states: dict[PartitionKey, State] = {}
        self._given: set[PartitionKey] = set()
        """Partitions whose cache is not open yet."""
        self._restoring: dict[PartitionKey, PartitionKey] = {}
        """By the partition of the changelog: which partition waits for it."""
        self._open_at = 0.0
        self._failing: set[PartitionKey] = set()
        """Of those given, whose changelog or cache could not be had at the last attempt."""
        self._noted: dict[PartitionKey, Extent | None] = {}
        """What stood beside the committed offset that each partition of ours began at."""
        self._extents: dict[PartitionKey, Extent] = {}
        """What each partition's changelog is known to hold."""

    def changelog(self, topic: str) -> str:
        return f"{self._group}-{topic}-changelog"

    def of(self, message: Message) -> State:
        return self._states[message.topic, message.partition]

    # What a processor tells

    def given(self, keys: Collection[PartitionKey]) -> None:
        """Partitions were assigned; none of their messages comes before they are ready."""
        self.let_go(keys)
        self._given.update(keys)

    def noted(self, key: PartitionKey, note: str) -> None:
        """What it gave to be stored beside the committed offset that a partition begins at; nothing is stored beside a
        first one."""
        self._noted[key] = Extent.decode(note)

    def note(self, key: PartitionKey) -> str:
        """The metadata to commit with an offset."""
        extent, noted = self._extents.get(key), self._noted.get(key)
        if extent is None:
            return "" if noted is None else noted.encode()
        reached = self._states[key].cache.position
        return extent._replace(end=max(reached, noted.end if noted is not None else 0)).encode()

    def prepare(self) -> Collection[PartitionKey]:
        """Get on with making partitions ready, for a moment; returns those that became ready."""
        key: PartitionKey | None = None
        try:
            if self._given and time.monotonic() >= self._open_at:
                # Those that failed come last: they hold nobody back.
                for key in sorted(self._given, key=lambda each: (each in self._failing, each)):
                    self._open(key)
                    self._failing.discard(key)
            key = None
            finished = self._restoration.step(STEP_SECONDS)
        except (KafkaException, CacheTaken) as error:
            which = "state" if key is None else f"the state of {key[0]}-{key[1]}"
            say(f"{which} cannot be restored: {error}; trying again")
            self._open_at = time.monotonic() + RETRY_SECONDS
            if key is not None:
                self._failing.add(key)
            self.given(list(self._restoring.values()) if key is None else [key])
            return ()
        return [self._restoring.pop(each) for each in finished]

    def _open(self, key: PartitionKey) -> None:
        topic, partition = key
        changelog = self.changelog(topic)
        extent = self.changelogs.extent(changelog, topic, partition)
        self._check(key, extent, self._noted.get(key))
        cache = StateCache(
            os.path.join(self._directory, f"{topic}-{partition}.sqlite"),
            extent.topic_id,
            age_ms_max=min(DELETIONS_KEPT_MS, int(self.changelogs.setting(changelog, "delete.retention.ms")))
            // 2,
        )
        self._states[key] = State(cache)
        if cache.position:
            # The cache is never ahead of its changelog.
            self._check(key, extent, extent._replace(end=cache.position))
        if cache.position < extent.first:
            cache.throw_away()
        self._extents[key] = extent
        self._restoration.add(changelog, partition, RestoreTarget(cache, extent.first, extent.end))
        self._restoring[changelog, partition] = key
        self._given.discard(key)

    def _check(self, key: PartitionKey, now: Extent, before: Extent | None) -> None:
        what = None if before is None else now.lost_since(before)
        if what is not None:
            raise StateLost(
                f"the state of {key[0]}-{key[1]} in group '{self._group}' is lost, at least in part: its changelog "
                f"'{self.changelog(key[0])}' {what}. Bring the changelog back, or decide to go on without: delete "
                f"{self._directory}, and set the group's committed offsets anew with `holdfast groups reset-offsets`, "
                "--to-earliest to compute the state again, --to-current to go on with what is left"
            )

    def changes(self) -> Iterable[tuple[Output, Callable[[Any, Any], None]]]:
        """What the open transaction is to hold besides its outputs, and who wants to know where each went."""
        for (topic, partition), state in self._states.items():
            for key, value in state.changed.items():
                yield Output(self.changelog(topic), value, key=key, partition=partition), state.delivered

    def committed(self) -> Collection[PartitionKey]:
        """The transaction was committed; returns partitions that have to be made ready again."""
        taken: list[PartitionKey] = []
        for key, state in self._states.items():
            if not state.changed:
                continue
            try:
                state.cache.apply(state.changed.items(), max(state.cache.position, state.last_offset + 1))
            except CacheTaken as error:
                say(f"{error}; the state is restored again if the partition is still ours")
                taken.append(key)
            state.forget_changes()
        return taken

    def taken_back(self) -> None:
        """Nothing since the last commit has happened."""
        for state in self._states.values():
            state.forget_changes()

    def let_go(self, keys: Collection[PartitionKey]) -> None:
        """Partitions were taken away."""
        for key in keys:
            self._given.discard(key)
            self._extents.pop(key, None)
            state = self._states.pop(key, None)
            place = (self.changelog(key[0]), key[1])
            self._restoring.pop(place, None)
            self._restoration.drop(*place)
            if state is not None:
                state.cache.close()

    def close(self) -> None:
        self.let_go(list(self._states))
        self._restoration.close()
