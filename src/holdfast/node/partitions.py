"""The partitions this node hosts: found by name or id, opened, created, and deleted in a safe order.

A partition's directory may exist without its topic (a crash before the metadata record was durable) but a topic
never loses its directory. Deleting renames it at once, so that a new topic may have the name, and removes it later
(see `deletions`); a start that finds the topic still there renames it back. What is found without a topic was never
acknowledged to anybody; it is moved aside, not deleted, unless empty.

Making a partition flushes nothing: its first flush takes its directory and the log directory along, and until then
nothing in it was acknowledged. Thousands of partitions are made at the speed of the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from uuid import UUID

from holdfast.config.topic import TopicConfig
from holdfast.errors import CorruptLog
from holdfast.log.checkpoints import read_partition_metadata, write_partition_metadata
from holdfast.log.recovery import create_log, open_log
from holdfast.metadata.image import ClusterImage, PartitionImage, TopicImage
from holdfast.node.directories import REFUSED_ERRNOS, LogDirectory
from holdfast.node.hosted import HostedPartition, OfflinePartition
from holdfast.seams import FileSystem, Now

DELETE_MARK: Final = "-delete"
STRAY_MARK: Final = "-stray"
METADATA_TOPIC: Final = "__cluster_metadata"


class Doomed(NamedTuple):
    """A deleted partition: the directory it has left behind, and what the checkpoints said of it."""

    key: tuple[str, int]
    directory: LogDirectory
    path: str
    recovery_point: int
    start_offset: int


class Partitions:
    def __init__(
        self,
        fs: FileSystem,
        node_id: int,
        directories: list[LogDirectory],
        topic_config: Callable[[str], TopicConfig],
        say: Callable[[str], None],
        failed: Callable[[LogDirectory, OSError], None],
        report: Callable[[str, Exception], None],
    ) -> None:
        self._fs = fs
        self._node_id = node_id
        self.directories = directories
        self._topic_config = topic_config
        self._say = say
        self._failed = failed
        self._report = report
        self._hosted: dict[tuple[str, int], HostedPartition] = {}
        self._offline: dict[tuple[str, int], OfflinePartition] = {}
        self.names_by_id: dict[UUID, str] = {}
        self._leftovers: list[tuple[LogDirectory, str, str]] = []
        """Deleted partitions the start has found: where, under which name, and the path now."""
        self._taken_back: set[str] = set()
        """Paths whose deletion did not survive: a stop that was clean did not flush what it had let go of."""

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

    def is_damaged(self, topic: str, index: int) -> bool:
        """Whether a partition has a log that could not be opened: nothing that is known of it may be forgotten."""
        offline = self._offline.get((topic, index))
        return offline is not None and not offline.is_new

    @property
    def has_damaged(self) -> bool:
        return any(not offline.is_new for offline in self._offline.values())

    # Opening

    def open_existing(self, image: ClusterImage, now: Now) -> None:
        """At start: open every partition of the image where its directory is, or make it anew."""
        found = self._find_directories(image)
        self._set_aside_strays(found, image)
        self._forget_the_deleted(found)
        for topic in image.topics.values():
            for partition in topic.partitions:
                place = next(iter(found.get((topic.name, partition.index), ())), None)
                self.open(topic, partition, place, now, fresh=place is None)

    def _find_directories(self, image: ClusterImage) -> dict[tuple[str, int], list[LogDirectory]]:
        found: dict[tuple[str, int], list[LogDirectory]] = {}
        for directory in self.directories:
            if directory.offline:
                continue
            for name in self._fs.list(directory.path):
                path = f"{directory.path}/{name}"
                if name.endswith(DELETE_MARK):
                    name = self._undo_deletion(directory, name, image)
                    path = f"{directory.path}/{name}"
                topic, _, index = name.rpartition("-")
                if topic and index.isdigit() and topic != METADATA_TOPIC and self._fs.is_directory(path):
                    places = found.setdefault((topic, int(index)), [])
                    if directory not in places:
                        places.append(directory)
        return found

    def _undo_deletion(self, directory: LogDirectory, name: str, image: ClusterImage) -> str:
        """Finish an interrupted deletion; or take it back, when the record of it did not survive."""
        doomed = f"{directory.path}/{name}"
        original, _, topic_id = name.removesuffix(DELETE_MARK).rpartition(".")
        topic = image.topics_by_id.get(UUID(hex=topic_id)) if len(topic_id) == 32 else None
        if topic is None:
            self._leftovers.append((directory, original, doomed))
            return ""
        path = f"{directory.path}/{original}"
        if self._fs.exists(path):
            # A topic of the same name was made meanwhile, and the record of that did not survive either.
            self._set_aside(path)
        self._fs.rename(doomed, path)
        self._taken_back.add(path)
        self._say(f"{doomed}: its topic was not deleted after all; renamed back")
        return original

    def _forget_the_deleted(self, found: dict[tuple[str, int], list[LogDirectory]]) -> None:
        """Take out of the checkpoints what is gone, before a new partition of its name is made or opened.

        Where a deletion was interrupted, what they say is about the deleted one. Its directory goes only when they
        are durable without it, so that the next start, should this one not get that far, knows as well.
        """
        for directory in self.directories:
            if directory.offline:
                continue
            keep = {key for key, places in found.items() if directory in places}
            keep.add((METADATA_TOPIC, 0))
            for place, name, _ in self._leftovers:
                topic, _, index = name.rpartition("-")
                if place is directory and index.isdigit():
                    keep.discard((topic, int(index)))
            directory.keep_only(keep)
        leftovers, self._leftovers = self._leftovers, []
        for _, _, path in leftovers:
            self._fs.remove_tree(path)

    def _is_of(self, directory: LogDirectory, topic: TopicImage, partition: PartitionImage) -> bool:
        """Whether the directory is this topic's, not that of a deleted one of the same name."""
        path = f"{directory.path}/{topic.name}-{partition.index}"
        try:
            topic_id = read_partition_metadata(self._fs, path)
        except CorruptLog as error:
            self._say(f"{error}; taken as topic {topic.name!r} of id {topic.topic_id}")
            topic_id = None
        if topic_id is None:
            # Lost with the power before its first flush, or never written by whoever made the directory.
            write_partition_metadata(self._fs, path, topic.topic_id.bytes)
            return True
        return UUID(bytes=topic_id) == topic.topic_id

    def _set_aside_strays(
        self, found: dict[tuple[str, int], list[LogDirectory]], image: ClusterImage
    ) -> None:
        for (name, index), places in found.items():
            topic = image.topic(name)
            partition = image.partition(name, index)
            for place in list(places):
                if topic is None or partition is None or not self._is_of(place, topic, partition):
                    self._set_aside(f"{place.path}/{name}-{index}")
                    places.remove(place)

    def _set_aside(self, path: str) -> None:
        if not any(
            entry.endswith(".log") and self._fs.size(f"{path}/{entry}") for entry in self._fs.list(path)
        ):
            self._fs.remove_tree(path)
            return
        aside = self._free_name(f"{path}{STRAY_MARK}")
        self._fs.rename(path, aside)
        self._say(f"{path} belongs to no topic of this cluster; moved to {aside}")

    def _free_name(self, path: str) -> str:
        candidate, count = path, 1
        while self._fs.exists(candidate):
            count += 1
            candidate = f"{path}.{count}"
        return candidate

    def _chosen(self, partition: PartitionImage) -> LogDirectory:
        """Where the record of the partition puts it; when that directory is gone, the least loaded one."""
        wanted = partition.directory_of(self._node_id)
        for directory in self.directories:
            if not directory.offline and directory.id == wanted:
                return directory
        return self._least_loaded()

    def _least_loaded(self) -> LogDirectory:
        """B5: a new partition goes to the online directory with the fewest partitions."""
        counts = dict.fromkeys((d for d in self.directories if not d.offline), 0)
        for hosted in self._hosted.values():
            if hosted.directory in counts:
                counts[hosted.directory] += 1
        if not counts:
            raise OSError("every log directory is offline")
        return min(counts, key=lambda directory: counts[directory])

    def open(
        self,
        topic: TopicImage,
        partition: PartitionImage,
        directory: LogDirectory | None,
        now: Now,
        *,
        fresh: bool,
    ) -> None:
        """Open or create one partition. One that cannot be opened answers storage errors until restart; one that is
        new and finds no room, until `create_missing` succeeds."""
        key = (topic.name, partition.index)
        self.names_by_id[topic.topic_id] = topic.name
        place = directory
        try:
            place = place or self._chosen(partition)
            path = f"{place.path}/{topic.name}-{partition.index}"
            config = self._topic_config(topic.name)
            if fresh:
                log = create_log(self._fs, path, config, topic.topic_id.bytes, now)
            else:
                trust = place.trust(*key)
                if path in self._taken_back:
                    trust = trust._replace(clean=False)
                log = open_log(self._fs, path, config, trust, now, self._say)
        except (CorruptLog, OSError) as error:
            if key not in self._offline:
                self._say(f"partition {topic.name}-{partition.index} is offline: {error}")
            is_new = fresh and isinstance(error, OSError) and error.errno in REFUSED_ERRNOS
            self._offline[key] = OfflinePartition(
                topic.name,
                topic.topic_id,
                partition.index,
                partition.leader_epoch,
                str(error),
                place,
                is_new=is_new,
            )
            return
        if self._offline.pop(key, None) is not None:
            self._say(f"partition {topic.name}-{partition.index} is online")
        self._hosted[key] = HostedPartition(
            topic.name, topic.topic_id, partition.index, partition.leader_epoch, log, place, self._report
        )

    def create_missing(self, image: ClusterImage, now: Now) -> None:
        """Make the logs that found no room, and where they were to be: what was made of them there could be taken for
        them at the next start. The first that finds no room this time either is the last that is tried."""
        for key, offline in list(self._offline.items()):
            topic, partition = image.topic(key[0]), image.partition(*key)
            place = offline.directory
            if not offline.is_new or topic is None or partition is None or place is None or place.offline:
                continue
            self.open(topic, partition, place, now, fresh=True)
            if key in self._offline:
                return

    # Deleting

    def withdraw(self, topic: TopicImage) -> tuple[list[HostedPartition], list[Doomed]]:
        """Stop serving a topic at once and give its name back; what it leaves behind is for `Deletions`."""
        self.names_by_id.pop(topic.topic_id, None)
        gone, doomed = [], []
        for partition in topic.partitions:
            key = (topic.name, partition.index)
            offline = self._offline.pop(key, None)
            if offline is not None and offline.directory is not None:
                place = offline.directory
                points = (0, 0)
                if not offline.is_new:
                    points = (place.recovery_points.get(key, 0), place.log_starts.get(key, 0))
                doomed += self._doom(place, topic, key, *points)
            hosted = self._hosted.pop(key, None)
            if hosted is not None:
                hosted.is_deleted = True
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
        path = f"{directory.path}/{topic.name}-{key[1]}"
        if directory.offline or not self._fs.exists(path):
            return []
        aside = f"{path}.{topic.topic_id.hex}{DELETE_MARK}"
        try:
            self._fs.rename(path, aside)
        except OSError as error:
            self._failed(directory, error)
            return []
        return [Doomed(key, directory, aside, recovery_point, start_offset)]
