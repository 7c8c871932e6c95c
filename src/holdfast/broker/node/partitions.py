"""The partitions this node hosts: found by name or id, opened, created, and deleted in a safe order.

Where each one is, `placement` decides at a start. A directory may be there without its topic: a crash came before the
metadata record was durable, or the log directory was away when the topic was deleted. It is moved aside, not removed,
unless empty. Deleting renames a directory at once, so that a new topic may have the name, and removes it later (see
`Deletions`).

Making a partition flushes nothing: its first flush takes its directory and the log directory along, and until then
nothing in it was acknowledged. Thousands of partitions are made at the speed of the page cache.

Topics on their way out: their directories go once the checkpoints no longer speak of them (`Deletions`). A deleted
partition's directory has another name from the request on, so that a new topic may have its own. But the
checkpoints know partitions by nothing else. While such a directory is there, all they say of its name is about the
deleted partition, and every start reads them so. A new one of that name has nothing in them until it is gone.

1. The record that removes the topic becomes durable. Until then a crash may bring the partition back, and the
   checkpoints go on telling of it.
2. The checkpoints are written without it.
3. Its directory is removed.

Where a full disk refuses 2, what is in the directory goes at once, for that is what makes room. The empty directory
stays as the sign for the next start, and 2 is tried again every second.

A directory that cannot be removed, being mounted or in use, stays as a sign too, and 3 is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery import create_log, open_log
from holdfast.broker.metadata.image import PartitionImage, TopicImage
from holdfast.broker.node.directories import (
    DELETE_MARK,
    OBSTINATE_ERRNOS,
    REFUSED_ERRNOS,
    LogDirectory,
    Offsets,
    marked_name,
)
from holdfast.broker.node.hosted import HostedPartition, OfflinePartition
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.meter import Meter
from holdfast.broker.node.placement import AcceptedLosses, Doomed, Placement, flag, set_aside
from holdfast.broker.node.troubles import Kind, Troubles
from holdfast.errors import ApiError, CorruptLog, MissingOffsets
from holdfast.saying import Say, warn
from holdfast.seams import FileSystem, Now

STUCK_ROUNDS: Final = 60
"""After so many rounds, one each second, directories that could not be removed are tried again."""


class Deletions:
    def __init__(
        self,
        fs: FileSystem,
        forget: Callable[[LogDirectory], bool],
        say: Callable[[str], None],
    ) -> None:
        """`forget` writes the checkpoints of a directory and tells whether they are durable."""
        self._fs = fs
        self._forget = forget
        self._say = say
        self._undecided: list[Doomed] = []
        """Deleted, but not durably yet."""
        self._decided: list[Doomed] = []
        """Durably deleted, and perhaps still in the checkpoints."""
        self._emptied: set[str] = set()
        self._stuck: set[str] = set()
        """Paths that could not be removed, said once."""
        self._rounds = 0

    def begin(self, doomed: Sequence[Doomed]) -> None:
        self._undecided += doomed

    def decide(self, doomed: Sequence[Doomed]) -> None:
        """The record that removes the topic is durable."""
        self._undecided = [each for each in self._undecided if each not in doomed]
        self._decided += doomed
        self.carry_on()

    def carry_on(self) -> None:
        """Remove what may be removed: now and then, as long as something was refused."""
        self._rounds += 1
        is_due = self._rounds % STUCK_ROUNDS == 0
        for directory in dict.fromkeys(
            each.directory for each in self._decided if is_due or each.path not in self._stuck
        ):
            if not directory.offline:
                self._remove(directory, is_forgotten=self._forget(directory))

    def _remove(self, directory: LogDirectory, *, is_forgotten: bool) -> None:
        doomed = [each for each in self._decided if each.directory is directory and not directory.offline]
        try:
            if not is_forgotten and any(each.path not in self._emptied for each in doomed):
                # Under its old name an emptied directory would be a new topic's that has lost everything.
                self._fs.flush_directory(directory.path)
            for each in doomed:
                if is_forgotten:
                    self._remove_one(each)
                elif each.path not in self._emptied:
                    for name in self._fs.list(each.path):
                        self._fs.remove(f"{each.path}/{name}")
                    self._emptied.add(each.path)
        except OSError as error:
            if error.errno not in REFUSED_ERRNOS:
                directory.take_offline(error)

    def _remove_one(self, doomed: Doomed) -> None:
        try:
            self._fs.remove_tree(doomed.path)
        except OSError as error:
            if error.errno not in OBSTINATE_ERRNOS:
                raise
            if doomed.path not in self._stuck:
                self._say(warn(f"{doomed.path} is of a deleted topic and cannot be removed now: {error}"))
            self._stuck.add(doomed.path)
            return
        self._stuck.discard(doomed.path)
        self._emptied.discard(doomed.path)
        self._decided.remove(doomed)

    # The checkpoints

    def hides(self, hosted: HostedPartition) -> bool:
        """Whether the checkpoints cannot tell of a partition yet, since they would be read as of a deleted one."""
        return any(
            each.directory is hosted.directory and each.key == (hosted.topic, hosted.index)
            for each in (*self._undecided, *self._decided)
        )

    def tell(self, directory: LogDirectory, offsets: Offsets, of: Callable[[Doomed], int]) -> Offsets:
        """The `offsets` of what is hosted, as a checkpoint must have them while there are deleted ones."""
        for each in self._undecided:
            if each.directory is directory:
                offsets[each.key] = of(each)
        for each in self._decided:
            if each.directory is directory:
                offsets.pop(each.key, None)
        return offsets


@dataclass(eq=False, repr=False)
class HostedPartitions:
    _fs: FileSystem
    _metadata: MetadataLog
    directories: list[LogDirectory]
    _accepted: AcceptedLosses
    _troubles: Troubles
    _meter: Meter
    _report: Callable[[str, Exception], None]
    _say: Say
    _hosted: dict[tuple[str, int], HostedPartition] = field(default_factory=dict, init=False)
    _offline: dict[tuple[str, int], OfflinePartition] = field(default_factory=dict, init=False)
    names_by_id: dict[UUID, str] = field(default_factory=dict, init=False)
    are_open: bool = field(default=False, init=False)
    """Whether the start has opened what there is. Until then nothing that is known of a partition is forgotten."""

    def __iter__(self) -> Iterator[HostedPartition]:
        return iter(self._hosted.values())

    def __len__(self) -> int:
        return len(self._hosted)

    def get(self, topic: str, index: int) -> HostedPartition | None:
        return self._hosted.get((topic, index))

    def offline_reason(self, topic: str, index: int) -> str | None:
        """Why a partition that exists cannot be served, or None."""
        offline = self._offline.get((topic, index))
        return offline.reason if offline is not None else None

    def leader_of(self, topic: str, index: int) -> HostedPartition:
        """The partition, online and led here, or the protocol's error."""
        hosted = self._hosted.get((topic, index))
        if hosted is None:
            reason = self.offline_reason(topic, index)
            if reason is not None:
                raise ApiError(ErrorCode.kafka_storage_error, reason)
            raise ApiError(
                ErrorCode.unknown_topic_or_partition, f"this node hosts no partition {topic}-{index}"
            )
        directory = hosted.directory
        if directory.offline:
            raise ApiError(ErrorCode.kafka_storage_error, f"{directory.path} is offline: {directory.failure}")
        return hosted

    def topic_name(self, topic_id: UUID) -> str | None:
        return self.names_by_id.get(topic_id)

    def in_directory(self, directory: LogDirectory) -> list[HostedPartition]:
        """What has its files there, the metadata log too."""
        hosted = [partition for partition in self if partition.directory is directory]
        if self._metadata.is_open and self._metadata.hosted.directory is directory:
            hosted.append(self._metadata.hosted)
        return hosted

    def ends_in(self, directory: LogDirectory) -> Offsets:
        """Where the logs there end; once all is flushed, their high watermarks."""
        return {
            (partition.topic, partition.index): partition.log.end_offset
            for partition in self
            if partition.directory is directory
        }

    def is_damaged(self, topic: str, index: int) -> bool:
        """Whether a partition has a log that could not be opened: nothing that is known of it may be forgotten."""
        offline = self._offline.get((topic, index))
        return offline is not None and not offline.is_new

    def has_damaged(self, directory: LogDirectory) -> bool:
        return any(each.directory is directory and not each.is_new for each in self._offline.values())

    # Opening

    def open_placed(self, placements: Mapping[tuple[str, int], Placement], now: Now) -> None:
        """At start: open every partition of the image where it was found, or make it where it never was."""
        for topic in self._metadata.image.topics.values():
            for partition in topic.partitions:
                placement = placements[topic.name, partition.index]
                place = placement.directory
                if placement.reason:
                    self._put_offline(topic, partition, OfflinePartition(placement.reason, place, None))
                elif place is not None and place.offline:
                    reason = f"{place.path} is offline: {place.failure}"
                    self._put_offline(topic, partition, OfflinePartition(reason, place, None))
                else:
                    self.open(topic, partition, placement, now)
        self.are_open = True

    def create(self, topic: TopicImage, partition: PartitionImage, now: Now) -> None:
        """Make a partition where its record says, which names no directory that was offline when it was made."""
        wanted = partition.directory_of(self._metadata.settings.broker.node_id)
        place = next((each for each in self.directories if not each.offline and each.id == wanted), None)
        if place is None:
            reason = "its log directory is offline"
            self._put_offline(topic, partition, OfflinePartition(reason, None, None))
        else:
            self.open(topic, partition, Placement(place, is_new=True), now)

    def open(self, topic: TopicImage, partition: PartitionImage, placement: Placement, now: Now) -> None:
        """Open or create one partition. One that cannot be opened answers storage errors until restart; one that
        finds no room, until `open_refused` succeeds."""
        key = (topic.name, partition.index)
        self.names_by_id[topic.topic_id] = topic.name
        place = placement.directory
        assert place is not None
        try:
            if placement.is_new:
                log = self._make_log(topic, partition, place, now)
            else:
                log = self._open_log(topic, partition, placement, place, now)
        except (CorruptLog, OSError) as error:
            retried = REFUSED_ERRNOS | (OBSTINATE_ERRNOS if placement.is_new else frozenset())
            is_refused = isinstance(error, OSError) and error.errno in retried
            offline = OfflinePartition(str(error), place, placement if is_refused else None)
            self._put_offline(topic, partition, offline)
            return
        self._offline.pop(key, None)
        name = f"{topic.name}-{partition.index}"
        self._troubles.end(Kind.PARTITION_OFFLINE, name, f"partition {name} is online")
        self._hosted[key] = HostedPartition(
            topic.name,
            topic.topic_id,
            partition.index,
            partition.leader_epoch,
            log,
            place,
            self._report,
            self._meter.traffic_of(topic.name),
        )

    def _make_log(self, topic: TopicImage, partition: PartitionImage, place: LogDirectory, now: Now) -> Log:
        place.require_in_place()
        path = f"{place.path}/{topic.name}-{partition.index}"
        if self._fs.exists(path):
            set_aside(self._fs, path, self._say)
        return create_log(
            self._fs, path, self._metadata.settings.topic(topic.name), topic.topic_id.bytes, now
        )

    def _open_log(
        self,
        topic: TopicImage,
        partition: PartitionImage,
        placement: Placement,
        place: LogDirectory,
        now: Now,
    ) -> Log:
        name = f"{topic.name}-{partition.index}"
        trust = place.trust(topic.name, partition.index)
        if placement.is_suspect:
            trust = trust._replace(clean=False)
        path, config = f"{place.path}/{name}", self._metadata.settings.topic(topic.name)
        try:
            return open_log(self._fs, path, config, trust, now, self._say, accept_loss=placement.is_given_up)
        except MissingOffsets as error:
            if placement.is_given_up or not self._accepted.covers(name):
                advice = f"Or go on without them with {flag(name)}: none of these offsets is given again."
                raise MissingOffsets(f"{error} {advice}", error.first, error.end) from error
        except CorruptLog as error:
            if placement.is_given_up or not self._accepted.covers(name):
                raise CorruptLog(f"{error} Or give all its messages up with {flag(name)}.") from error
            set_aside(self._fs, path, self._say, f"is given up, as --accept-loss says: {error}")
        return self._open_log(topic, partition, placement._replace(is_given_up=True), place, now)

    def _put_offline(self, topic: TopicImage, partition: PartitionImage, offline: OfflinePartition) -> None:
        key = (topic.name, partition.index)
        name = f"{topic.name}-{partition.index}"
        self.names_by_id[topic.topic_id] = topic.name
        self._troubles.begin(Kind.PARTITION_OFFLINE, name, f"partition {name} is offline: {offline.reason}")
        self._offline.pop(key, None)
        self._offline[key] = offline

    def open_refused(self, now: Now) -> list[HostedPartition]:
        """Try again what found no room, and where it was to be: what was made of it there could be taken for it at
        the next start. The first that is refused this time too ends the round, and is the last of the next."""
        image = self._metadata.image
        opened = []
        for key, offline in list(self._offline.items()):
            topic, partition = image.topic(key[0]), image.partition(*key)
            placement = offline.placement
            if topic is None or partition is None or placement is None:
                continue
            if placement.directory is None or placement.directory.offline:
                continue
            self.open(topic, partition, placement, now)
            if key in self._offline:
                break
            opened.append(self._hosted[key])
        return opened

    def has_refused(self, directory: LogDirectory) -> bool:
        """Whether some log of this directory could not be opened yet for want of room or descriptors."""
        return any(
            each.directory is directory and each.placement is not None and not each.is_new
            for each in self._offline.values()
        )

    # Deleting

    def withdraw(self, topic: TopicImage) -> tuple[list[HostedPartition], list[Doomed]]:
        """Stop serving a topic at once and give its name back; what it leaves behind is for `Deletions`."""
        self.names_by_id.pop(topic.topic_id, None)
        self._meter.forget_topic(topic.name)
        gone, doomed = [], []
        for partition in topic.partitions:
            key = (topic.name, partition.index)
            offline = self._offline.pop(key, None)
            self._troubles.forget(f"{topic.name}-{partition.index}")
            if offline is not None and offline.directory is not None:
                place = offline.directory
                points = (0, 0)
                if not offline.is_new:
                    points = (place.recovery_points.get(key, 0), place.log_starts.get(key, 0))
                doomed += self._doom(place, topic, key, *points)
            hosted = self._hosted.pop(key, None)
            if hosted is not None:
                hosted.is_deleted = True
                self._meter.elsewhere.messages_in += hosted.log.appended_messages
                self._meter.elsewhere.bytes_in += hosted.log.appended_bytes
                gone.append(hosted)
                log = hosted.log
                doomed += self._doom(hosted.directory, topic, key, log.recovery_point, log.start_offset)
        return gone, doomed

    def _doom(
        self,
        directory: LogDirectory,
        topic: TopicImage,
        key: tuple[str, int],
        recovery_point: int,
        start_offset: int,
    ) -> list[Doomed]:
        """Give the name back. What is not removed until then, the next start does."""
        name = f"{topic.name}-{key[1]}"
        path = f"{directory.path}/{name}"
        aside = f"{directory.path}/{marked_name(*key, topic.topic_id.hex, DELETE_MARK)}"
        if directory.offline:
            # When it is back, the id in it tells that it is of no topic any more.
            self._say(f"{path} is of a deleted topic, and stays until {directory.path} is online again")
            return []
        try:
            if self._fs.exists(path):
                self._fs.rename(path, aside)
            elif recovery_point or start_offset:
                # It was missing. What the checkpoints tell of it must not be taken for a new one of its name.
                self._fs.make_directory(aside)
                self._fs.flush_directory(directory.path)
            else:
                return []
        except OSError as error:
            if error.errno in REFUSED_ERRNOS | OBSTINATE_ERRNOS:
                text = f"{path} is of a deleted topic, and cannot be renamed: {error}"
                self._say(warn(f"{text}; the next start tries again"))
            else:
                directory.take_offline(error)
            return []
        return [Doomed(key, directory, aside, recovery_point, start_offset)]
