"""A coordinator's partitions: the journal its machine writes, and the gate its answers pass.

Groups and transactions are each spread over the partitions of an internal topic, by the hash of their name. One
coordinator partition is one such partition: a machine, and the log it is rebuilt from. What the machine says is held
back until everything the log held when it was said is durable, so that no answer, reads included, tells what a crash
could take back.

A coordinator partition whose log has failed answers COORDINATOR_NOT_AVAILABLE until the next start rebuilds it from
what the disk has kept.

The coordinator partitions of one internal topic are found by name, made when first needed, rebuilt at start, let go
of when lost. `Coordination` is the same for groups and for transactions; what differs is the machine. A machine is
made for one coordinator partition, replays what the coordinator partition's log holds, is told that this was all,
and from then on appends through the coordinator partition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import NewTopic, create_topic
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.context import Answer, Fields, Later
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import CoordinatorServices
from holdfast.broker.node.timers import Timer
from holdfast.broker.node.troubles import Kind
from holdfast.errors import ApiError, CorruptLog, InvalidRecords, LogDirectoryOffline
from holdfast.saying import warn
from holdfast.seams import Now
from holdfast.wire.batch import BatchHeader, Record, build_batch, iterate_records, read_header

Refusal = Callable[[ErrorCode], Fields]
"""The answer of an API that says nothing but this error."""


class CoordinatorPartition:
    """A `Journal` on a hosted partition."""

    def __init__(self, commit: GroupCommit, hosted: HostedPartition) -> None:
        self._commit = commit
        self.hosted = hosted
        self._has_unhurried = False
        """Whether the log ends with records that no flush was asked for."""

    # The journal

    def append(
        self,
        records: Sequence[tuple[bytes, bytes | None]],
        now: Now,
        *,
        producer: tuple[int, int] | None = None,
    ) -> None:
        if records:
            self._write(records, now, producer)
            self._has_unhurried = False
            self._commit.appended(self.hosted)

    def append_unhurried(self, records: Sequence[tuple[bytes, bytes | None]], now: Now) -> None:
        """Append what nobody waits for: it becomes durable with what is appended next, or when an answer needs it."""
        self._write(records, now, None)
        if self.hosted.flushes_in_groups:
            self._has_unhurried = True
        else:
            self._commit.appended(self.hosted)

    def _write(
        self, records: Sequence[tuple[bytes, bytes | None]], now: Now, producer: tuple[int, int] | None
    ) -> None:
        self.require_online()
        producer_id, producer_epoch = producer or (-1, -1)
        batch = build_batch(
            [Record(index, 0, key, value) for index, (key, value) in enumerate(records)],
            base_timestamp=now.wall_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            is_transactional=producer is not None,
        )
        hosted = self.hosted
        limit = min(hosted.log.config.max_message_bytes, hosted.log.config.segment_bytes)
        if len(batch) > limit:
            raise ApiError(
                ErrorCode.message_too_large,
                f"{len(batch)} bytes in {hosted.topic}, whose batches have at most {limit}",
            )
        header = read_header(batch)
        if producer is not None:
            hosted.log.producers.check(header, is_client=False)
        try:
            hosted.append(header, batch, now)
        except ApiError as error:
            raise ApiError(ErrorCode.coordinator_not_available, error.message) from error

    def when_durable(self, done: Callable[[Exception | None], None]) -> None:
        if self._has_unhurried:
            self._has_unhurried = False
            self._commit.request(self.hosted)
        self.hosted.offsets.when_committed(self.hosted.log.end_offset, done)

    @property
    def is_durable(self) -> bool:
        offsets = self.hosted.offsets
        return offsets.failure is None and offsets.is_committed(self.hosted.log.end_offset)

    def require_online(self) -> None:
        if self.hosted.offline or self.hosted.is_deleted or self.hosted.offsets.failure is not None:
            raise ApiError(
                ErrorCode.coordinator_not_available,
                f"{self.hosted.name} is offline, and the coordinator it belongs to with it",
            )

    # The gate

    def answer(self, fields: Fields, refusal: Refusal) -> Answer:
        """What the machine has said just now, when it may leave."""
        if self.is_durable:
            return fields
        later = Later()
        self.release(later, fields, refusal)
        return later

    def release(self, later: Later, fields: Fields, refusal: Refusal) -> None:
        """Resolve a parked response with what the machine has said just now, once that is durable."""

        def pass_gate(error: Exception | None) -> None:
            later.resolve(fields if error is None else refusal(outcome_unknown(error)))

        self.when_durable(later.step(pass_gate))


def outcome_unknown(error: Exception) -> ErrorCode:
    """What a client is told whose request may or may not have been carried out: to ask for the coordinator again."""
    if isinstance(error, LogDirectoryOffline):
        return ErrorCode.coordinator_not_available
    return error.code if isinstance(error, ApiError) else ErrorCode.coordinator_not_available


def stored_batches(hosted: HostedPartition) -> Iterator[tuple[BatchHeader, list[Record]]]:
    """Everything a coordinator partition is rebuilt from, in order: at start, when all of it is durable."""
    log = hosted.log
    for found in log.batches_from(log.start_offset):
        header = found.header
        segment = log.segments[log.segment_for(header.base_offset)]
        yield header, list(iterate_records(segment.file.pread(header.size, found.position)))


def partition_for(key: str, partitions: int) -> int:
    """Which partition of an internal topic coordinates `key`: the hash of a Java string, as every Kafka has it."""
    value = 0
    data = key.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(data), 2):
        value = (31 * value + (data[at] << 8 | data[at + 1])) & 0xFFFFFFFF
    signed = value - (1 << 32) if value >> 31 else value
    # Java's smallest integer has no positive counterpart; Kafka takes 0 for it.
    return 0 if value == 1 << 31 else abs(signed) % partitions


SEGMENT_BYTES_MIN: Final = 1 << 20
"""Of any topic; the settings for internal topics allow less."""
REMEMBERED_MAX: Final = 100_000
"""Names whose coordinator is remembered: clients choose them, so there is a bound; about 20 MB."""


class Machine(Protocol):
    def names(self) -> Collection[str]:
        """Whom it coordinates: groups or transactional ids."""
        ...

    def replay(self, header: BatchHeader, records: Sequence[Record]) -> None:
        """Take one stored batch, a control batch too, into the state."""
        ...

    def loaded(self, now: Now) -> None:
        """That was everything: begin what time drives."""
        ...

    def unload(self) -> None:
        """The coordinator partition is gone: answer whoever waits, and let time drive nothing any more."""
        ...


MachineT = TypeVar("MachineT", bound=Machine)


class Coordinator(NamedTuple, Generic[MachineT]):
    """One coordinator partition with its machine."""

    journal: CoordinatorPartition
    machine: MachineT


class InternalTopic(NamedTuple):
    """How the topic that holds the state is made when it is first needed."""

    name: str
    partitions: int
    segment_bytes: int
    configs: tuple[tuple[str, str], ...]


class ProvenSchedule:
    """The broker's timers as a machine sees them: what they make expire goes by the time that is proven."""

    def __init__(self, node: CoordinatorServices) -> None:
        self._node = node

    def at(self, deadline_ms: int, action: Callable[[Now], None]) -> Timer:
        return self._node.timers.at(deadline_ms, lambda: action(self._node.wall_clock.proven()))


class Coordination(Generic[MachineT]):
    def __init__(
        self,
        node: CoordinatorServices,
        describe_topic: Callable[[], InternalTopic],
        make: Callable[[CoordinatorPartition], MachineT],
    ) -> None:
        self._node = node
        self._describe_topic = describe_topic
        self._make = make
        self._coordinators: dict[int, Coordinator[MachineT]] = {}
        self._found: dict[str, Coordinator[MachineT]] = {}
        """By name: the hash over a name costs more than the rest of a heartbeat. Each use checks it."""
        self._damaged: dict[int, str] = {}
        """Why a coordinator partition could not be rebuilt."""
        self._strays: dict[str, int] = {}
        """Names that are found in other partitions than their hash leads to."""

    @property
    def topic(self) -> str:
        return self._describe_topic().name

    # Life

    def load(self, now: Now) -> None:
        """At start, when every partition is open: rebuild each coordinator partition that has a past."""
        topic = self._node.metadata.image.topic(self.topic)
        if topic is None:
            return
        names: dict[int, Collection[str]] = {}
        for partition in topic.partitions:
            hosted = self._node.partitions.get(topic.name, partition.index)
            if hosted is None:
                continue
            if hosted.log.end_offset == hosted.log.start_offset:
                names[partition.index] = ()
                continue
            try:
                names[partition.index] = self._open(partition.index, now).machine.names()
            except ApiError as error:
                # The other coordinator partitions serve; this one tells whoever asks for it.
                self._say_offline(hosted, error)
        self._find_strays(len(topic.partitions), names)

    def opened(self, hosted: HostedPartition, now: Now) -> None:
        """A partition that could not be opened at the start is there now."""
        if hosted.topic == self.topic:
            try:
                self.at(hosted.index, now)
            except ApiError as error:
                self._say_offline(hosted, error)

    def _say_offline(self, hosted: HostedPartition, error: ApiError) -> None:
        text = f"{hosted.name} coordinates nothing: {error.message}"
        self._node.troubles.begin(Kind.COORDINATOR_OFFLINE, hosted.name, text)

    def _find_strays(self, partitions: int, names: Mapping[int, Collection[str]]) -> None:
        """A topic that was grown, by an earlier version or by Apache Kafka, still has names where they were before.

        Such a name is served from where it is, unless its own partition knows it as well, which is later, or could
        not be read.
        """
        for index, found in names.items():
            for name in found:
                home = partition_for(name, partitions)
                if home != index and name not in names.get(home, found):
                    self._strays[name] = index
        if self._strays:
            text = (
                f"{self.topic} has had fewer partitions: {len(self._strays)} names, {min(self._strays)!r} among them, "
                "are served from the partitions they were in"
            )
            self._node.say(warn(text))

    def ensure_topic(self, now: Now) -> None:
        """Make the internal topic if it is not there. It is not for users to choose its shape by accident."""
        wanted = self._describe_topic()
        if self._node.metadata.image.topic(wanted.name) is not None:
            return
        configs = (*wanted.configs, ("segment.bytes", str(max(wanted.segment_bytes, SEGMENT_BYTES_MIN))))
        new = NewTopic(wanted.name, wanted.partitions, 1, (), configs)
        try:
            records = create_topic(
                self._node.metadata.image,
                new,
                self._node.metadata.settings.broker,
                self._node.seams.randomness,
            )
            self._node.metadata.append(records, now)
        except ApiError as error:
            self._node.troubles.begin(
                Kind.COORDINATOR_OFFLINE, wanted.name, f"{wanted.name} cannot be made: {error.message}"
            )
            raise ApiError(ErrorCode.coordinator_not_available, error.message) from error
        self._node.troubles.end(Kind.COORDINATOR_OFFLINE, wanted.name, f"{wanted.name} is made")

    # Finding

    def partition_of(self, key: str) -> int:
        topic = self._node.metadata.image.topic(self.topic)
        if topic is None:
            raise ApiError(ErrorCode.coordinator_not_available, f"{self.topic} does not exist yet")
        stray = self._strays.get(key)
        return partition_for(key, len(topic.partitions)) if stray is None else stray

    def find(self, key: str, now: Now) -> Coordinator[MachineT]:
        """Who coordinates `key`, making the internal topic when it is missing; or the protocol's error."""
        found = self._remembered(key)
        if found is None:
            self.ensure_topic(now)
            found = self._look_up(key, now)
        return found

    def known(self, key: str, now: Now) -> Coordinator[MachineT]:
        """The same for a name that cannot be new: nothing is made."""
        return self._remembered(key) or self._look_up(key, now)

    def _remembered(self, key: str) -> Coordinator[MachineT] | None:
        found = self._found.get(key)
        if found is None or found.journal.hosted.is_deleted:
            return None
        found.journal.require_online()
        return found

    def _look_up(self, key: str, now: Now) -> Coordinator[MachineT]:
        found = self.at(self.partition_of(key), now)
        if len(self._found) >= REMEMBERED_MAX:
            self._found.clear()
        self._found[key] = found
        return found

    def forget_found(self) -> None:
        """The internal topic has changed."""
        self._found.clear()

    def at(self, index: int, now: Now) -> Coordinator[MachineT]:
        known = self._coordinators.get(index)
        if known is not None and not known.journal.hosted.is_deleted:
            known.journal.require_online()
            return known
        return self._open(index, now)

    def known_at(self, index: int) -> Coordinator[MachineT] | None:
        """The coordinator of a partition if it has anything to say about it."""
        return self._coordinators.get(index)

    def __iter__(self) -> Iterator[Coordinator[MachineT]]:
        """Every coordinator partition that holds something and is online."""
        for known in list(self._coordinators.values()):
            hosted = known.journal.hosted
            if not (hosted.is_deleted or hosted.offline):
                yield known

    def untold(self) -> list[str]:
        """Coordinator partitions of which nobody here can tell what they hold: offline, or not to be rebuilt."""
        topic = self._node.metadata.image.topic(self.topic)
        found = []
        for partition in topic.partitions if topic is not None else ():
            hosted = self._node.partitions.get(self.topic, partition.index)
            if hosted is None or hosted.offline or partition.index in self._damaged:
                found.append(f"{self.topic}-{partition.index}")
        return found

    def _open(self, index: int, now: Now) -> Coordinator[MachineT]:
        gone = self._coordinators.pop(index, None)
        if gone is not None:
            gone.machine.unload()
        try:
            hosted = self._node.partitions.leader_of(self.topic, index)
        except ApiError as error:
            raise ApiError(ErrorCode.coordinator_not_available, error.message) from error
        if index in self._damaged:
            raise ApiError(ErrorCode.coordinator_not_available, self._damaged[index])
        journal = CoordinatorPartition(self._node.commit, hosted)
        machine = self._make(journal)
        try:
            for header, records in stored_batches(hosted):
                machine.replay(header, records)
        except OSError as error:
            hosted.directory.refuses(error)
            raise ApiError(
                ErrorCode.coordinator_not_available, f"{hosted.name} could not be read: {error}"
            ) from error
        except (CorruptLog, InvalidRecords) as error:
            # To go on with a part of what was stored would take committed offsets and transactions back.
            self._damaged[index] = f"{hosted.name} holds what no coordinator wrote: {error}"
            raise ApiError(ErrorCode.coordinator_not_available, self._damaged[index]) from error
        coordinator = self._coordinators[index] = Coordinator(journal, machine)
        self._node.troubles.end(Kind.COORDINATOR_OFFLINE, hosted.name, f"{hosted.name} coordinates again")
        machine.loaded(now)
        return coordinator
