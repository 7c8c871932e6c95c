"""The coordinator partitions of one internal topic: found by name, made when first needed, rebuilt at start, let go of
when lost.

`Coordination` is the same for groups and for transactions; what differs is the machine. A machine is made for one
coordinator partition, replays what the coordinator partition's log holds, is told that this was all, and from then on
appends through the coordinator partition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import NewTopic, create_topic
from holdfast.broker.node.coordinator_partition import CoordinatorPartition, partition_for, stored_batches
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import CoordinatorServices
from holdfast.broker.node.timers import Timer
from holdfast.broker.node.troubles import Kind
from holdfast.errors import ApiError, CorruptLog, InvalidRecords
from holdfast.saying import warn
from holdfast.seams import Now
from holdfast.wire.batch import BatchHeader, Record

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

        Such a name is served from where it is, unless its own partition knows it as well, which is later, or could not
        be read.
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
