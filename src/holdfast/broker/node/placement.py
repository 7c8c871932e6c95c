"""Where each partition is at a start: found, moved, to be made, or away.

The record of a partition names its log directory by id. What the record says and what the disks hold is brought
together here, and what was there once and is not there now is a loss until somebody says otherwise:

- Found in the recorded directory: opened there. - Found in another one, with the topic's id in it: somebody moved
it. It is opened there, and the record follows. - Not found, and the recorded directory is not online: offline,
until the directory is back. - Not found in the recorded directory, which is online: offline if a checkpoint tells
that there was something, or if the checkpoints cannot be read. Otherwise it is made. A partition's first flush
makes its directory durable, and comes before the first acknowledgement: a directory that a crash took held nothing
that anybody was told of.

`AcceptedLosses` are the words of an operator who gives something up by name. What is given up goes on behind the
offsets that the checkpoints tell of; where they are missing too, it is recreated. Where it is now is recorded durably
before the first message goes there, and a copy that comes back later is told of and not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple
from uuid import UUID

from holdfast.broker.log.checkpoints import encode_uuid, read_partition_metadata, write_partition_metadata
from holdfast.broker.metadata.image import (
    LOST_DIRECTORY,
    UNASSIGNED_DIRECTORY,
    UNKNOWN_DIRECTORY,
    ClusterImage,
    PartitionImage,
    TopicImage,
)
from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.directories import (
    DELETE_MARK,
    NAME_BYTES_MAX,
    OBSTINATE_ERRNOS,
    STRAY_MARK,
    LogDirectory,
    Marked,
    holds_records,
    marked_name,
    parse_marked,
    parse_name,
)
from holdfast.errors import CorruptLog
from holdfast.saying import warn
from holdfast.seams import FileSystem
from holdfast.wire.metadata_records import PartitionChange

Key = tuple[str, int]


class AcceptedLosses:
    """What an operator gives up by name: the id of a log directory, or a partition as `topic-N`."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._used: set[str] = set()

    def covers(self, name: str) -> bool:
        """Whether `name`, of which something is missing, was given up."""
        if name not in self._names:
            return False
        self._used.add(name)
        return True

    @property
    def unused(self) -> list[str]:
        return sorted(self._names - self._used)


def flag(name: str) -> str:
    """How an operator gives something up. With a sign of equality, for an id may begin with a dash."""
    return f"--accept-loss={name}"


class Doomed(NamedTuple):
    """A deleted partition: the directory it has left behind, and what the checkpoints said of it."""

    key: Key
    directory: LogDirectory
    path: str
    recovery_point: int
    start_offset: int


class Placement(NamedTuple):
    """Where a partition is opened or made, or why it is offline."""

    directory: LogDirectory | None = None
    reason: str = ""
    is_new: bool = False
    is_given_up: bool = False
    """It goes on behind the offsets that are missing, which are not given out again."""
    is_suspect: bool = False
    """The files came here after the last stop: that it was clean says nothing about them."""
    recorded: UUID | None = None
    """The directory's id that the record has to name, if it names another one."""


class Survey:
    """One look at all directories, at a start."""

    def __init__(
        self,
        fs: FileSystem,
        node_id: int,
        directories: Iterable[LogDirectory],
        image: ClusterImage,
        deleted: Container[UUID],
        accepted: AcceptedLosses,
        say: Callable[[str], None],
        failed: Callable[[LogDirectory, OSError], None],
    ) -> None:
        """`deleted` are the topics whose deletion the metadata log tells of."""
        self._fs = fs
        self._deleted = deleted
        self._node_id = node_id
        self._directories = list(directories)
        self._image = image
        self._accepted = accepted
        self._say = say
        self._failed = failed
        self._found: dict[Key, list[LogDirectory]] = {}
        self._taken_back: set[str] = set()
        """Paths whose deletion did not survive: a stop that was clean did not flush what it had let go of."""
        self._about_others: set[tuple[LogDirectory, Key]] = set()
        """Where a directory's checkpoints tell of a deleted partition, not of the one that has its name now. Its
        files are still there, and a new one's first flush would have made durable that they were renamed."""
        self._replaced: set[tuple[LogDirectory, Key]] = set()
        """Where the files of a partition should be, and another's are. They stay as they are: perhaps it is the id
        that is damaged."""
        self.doomed: list[Doomed] = []
        """Deleted partitions that an earlier run did not remove."""
        self.placements: dict[Key, Placement] = {}
        for directory in self._online():
            self._guarded(directory, self._look)
        self._load = Counter(directory for places in self._found.values() for directory in places)
        for topic, partition in self._partitions():
            self.placements[topic.name, partition.index] = self._place(topic, partition)
        for directory in self._online():
            self._guarded(directory, self._tidy_checkpoints)

    def _online(self) -> list[LogDirectory]:
        return [directory for directory in self._directories if not directory.offline]

    def _guarded(self, directory: LogDirectory, action: Callable[[LogDirectory], None]) -> None:
        try:
            action(directory)
        except OSError as error:
            self._failed(directory, error)

    def _partitions(self) -> Iterator[tuple[TopicImage, PartitionImage]]:
        for topic in self._image.topics.values():
            for partition in topic.partitions:
                yield topic, partition

    # Looking

    def _look(self, directory: LogDirectory) -> None:
        for name in self._fs.list(directory.path):
            if name.endswith(DELETE_MARK):
                name = self._undo_deletion(directory, name)
            elif name.endswith(STRAY_MARK) and parse_marked(name, STRAY_MARK) is None:
                self._name_stray(f"{directory.path}/{name}")
            key = parse_name(name)
            path = f"{directory.path}/{name}"
            if key is None or key[0] == METADATA_TOPIC or not self._fs.is_directory(path):
                continue
            places = self._found.setdefault(key, [])
            if directory in places:
                continue  # renamed back a moment ago
            if self._is_ours(directory, key):
                places.append(directory)
            elif self._is_in_place_of(directory, key):
                self._replaced.add((directory, key))
            else:
                self._about_others.add((directory, key))
                self._set_aside(path)

    def _set_aside(self, path: str) -> None:
        try:
            set_aside(self._fs, path, self._say)
        except OSError as error:
            if error.errno not in OBSTINATE_ERRNOS:
                raise
            self._say(warn(f"{path} belongs to no topic of this cluster and cannot be moved aside: {error}"))

    def _name_stray(self, path: str) -> None:
        """Give a stray of an earlier version a name that Apache Kafka does not stop at."""
        partition = path.removesuffix(STRAY_MARK)
        if parse_name(partition.rpartition("/")[2]) is None or not self._fs.is_directory(path):
            return
        try:
            self._fs.rename(path, _stray_path(self._fs, partition, content=path))
        except OSError as error:
            if error.errno not in OBSTINATE_ERRNOS:
                raise
            self._say(warn(f"{path} is nobody's partition and cannot be renamed: {error}"))

    def _undo_deletion(self, directory: LogDirectory, name: str) -> str:
        """Finish an interrupted deletion later; or take it back, when the record of it did not survive."""
        parsed = parse_marked(name, DELETE_MARK)
        if parsed is None:
            return ""
        path = f"{directory.path}/{name}"
        topic = (
            self._image.topics_by_id.get(UUID(hex=parsed.unique_id)) if is_hex_id(parsed.unique_id) else None
        )
        if topic is None:
            key = self._key_of(directory, name, parsed)
            self.doomed.append(Doomed(key, directory, path, 0, 0))
            self._about_others.add((directory, key))
            return ""
        original = f"{topic.name}-{parsed.partition}"
        restored = f"{directory.path}/{original}"
        if self._fs.exists(restored):
            # A topic of the same name was made meanwhile, and the record of that did not survive either.
            set_aside(self._fs, restored, self._say)
        self._fs.rename(path, restored)
        self._taken_back.add(restored)
        self._say(warn(f"{path}: its topic was not deleted after all; renamed back"))
        return original

    def _key_of(self, directory: LogDirectory, name: str, parsed: Marked) -> Key:
        """The partition whose deletion made this name. Behind a cut one only a partition is of interest that the
        checkpoints tell of, or that a topic has now."""
        if len(name) == NAME_BYTES_MAX:
            present = ((topic.name, partition.index) for topic, partition in self._partitions())
            for key in (*directory.recovery_points, *directory.log_starts, *present):
                if key[1] == parsed.partition and marked_name(*key, parsed.unique_id, DELETE_MARK) == name:
                    return key
        return parsed.topic, parsed.partition

    def _is_ours(self, directory: LogDirectory, key: Key) -> bool:
        """Whether a directory is the topic's of today, not that of a deleted one of the same name."""
        topic, partition = self._image.topic(key[0]), self._image.partition(*key)
        if topic is None or partition is None:
            return False
        path = f"{directory.path}/{topic.name}-{partition.index}"
        is_recorded = partition.directory_of(self._node_id) == directory.id
        try:
            topic_id = read_partition_metadata(self._fs, path)
        except (CorruptLog, OSError) as error:
            if isinstance(error, OSError) and not is_recorded:
                raise
            rewritten = "and the broker writes the file again" if is_recorded else "which places it elsewhere"
            self._say(warn(f"damaged: {error}; the cluster's metadata decides whose it is, {rewritten}"))
            topic_id = None
        if topic_id is not None:
            return UUID(bytes=topic_id) == topic.topic_id
        if not is_recorded:
            return False
        # Lost with the power before its first flush, or never written by whoever made the directory.
        try:
            write_partition_metadata(self._fs, path, topic.topic_id.bytes)
        except OSError as error:
            self._say(warn(f"{path}: its partition.metadata could not be written: {error}"))
        return True

    def _is_in_place_of(self, directory: LogDirectory, key: Key) -> bool:
        """Whether a directory that is not ours is where ours was, and no deleted topic of this cluster left it."""
        partition = self._image.partition(*key)
        if partition is None or partition.directory_of(self._node_id) != directory.id:
            return False
        found = read_partition_metadata(self._fs, f"{directory.path}/{key[0]}-{key[1]}")
        return found is not None and UUID(bytes=found) not in self._deleted

    # Deciding

    def _place(self, topic: TopicImage, partition: PartitionImage) -> Placement:
        key = (topic.name, partition.index)
        name = f"{topic.name}-{partition.index}"
        recorded_id = partition.directory_of(self._node_id)
        recorded = next((each for each in self._online() if each.id == recorded_id), None)
        places = [place for place in self._found.get(key, ()) if not place.offline]
        if recorded is not None and recorded in places:
            for other in places:
                if other is not recorded:
                    text = f"{other.path}/{name} is another copy of {name}, which is in {recorded.path}"
                    self._say(warn(f"{text}; it is not used, and may be removed"))
            return Placement(recorded, is_suspect=f"{recorded.path}/{name}" in self._taken_back)
        if len(places) > 1:
            paths = " and ".join(f"{place.path}/{name}" for place in places)
            return Placement(
                reason=f"{paths} both claim to be it; move all but one out of the log directories"
            )
        if places:
            self._say(f"{name} was found in {places[0].path}, not where it is recorded; the record follows")
            return Placement(places[0], is_suspect=True, recorded=places[0].id)
        reason = self._missing(key, recorded_id, recorded)
        is_to_go = not reason or self._accepted.covers(name)
        if recorded is not None and (recorded, key) in self._replaced and is_to_go:
            self._set_aside(f"{recorded.path}/{name}")
        if not reason:
            if recorded is not None:
                return Placement(recorded, is_new=True)
            place = self._least_loaded()
            return Placement(place, is_new=True, recorded=place.id)
        if self._is_given_up(name, recorded_id, is_away=recorded is None):
            if recorded is not None and (recorded.recovery_points.get(key) or recorded.log_starts.get(key)):
                return Placement(recorded, is_given_up=True)
            place = recorded or self._least_loaded()
            self._say(warn(f"{name} is recreated, empty, in {place.path}, as --accept-loss says: {reason}"))
            return Placement(place, is_new=True, recorded=place.id)
        is_unknown = recorded is not None and not recorded.checkpoints_known
        advice = f"restore it, or give its messages up with {flag(name)}"
        if recorded is None and recorded_id != LOST_DIRECTORY:
            advice = f"bring it back, or give up everything in it with {flag(encode_uuid(recorded_id.bytes))}"
        # Once the checkpoints are written anew they no longer tell that they were unknown: the record does.
        return Placement(recorded, f"{reason}; {advice}", recorded=LOST_DIRECTORY if is_unknown else None)

    def _least_loaded(self) -> LogDirectory:
        place = min(self._online(), key=lambda each: self._load[each])
        self._load[place] += 1
        return place

    def _missing(self, key: Key, recorded_id: UUID, recorded: LogDirectory | None) -> str:
        """Why a partition that was found nowhere must have been somewhere; empty when it never was."""
        if recorded_id == LOST_DIRECTORY:
            return "its directory was missing at an earlier start"
        if recorded_id in (UNKNOWN_DIRECTORY, UNASSIGNED_DIRECTORY) and not any(
            each.offline
            or not each.checkpoints_known
            or key in each.recovery_points
            or key in each.log_starts
            for each in self._directories
        ):
            return ""  # Apache Kafka with several directories says later which one it has chosen
        if recorded is None:
            offline = [each.path for each in self._directories if each.offline]
            return (
                f"its log directory, of id {encode_uuid(recorded_id.bytes)}, is not among log.dirs or not online"
                + (f", perhaps {' or '.join(offline)}, of which the log tells more" if offline else "")
            )
        path = f"{recorded.path}/{key[0]}-{key[1]}"
        flushed, start = recorded.recovery_points.get(key, 0), recorded.log_starts.get(key, 0)
        if (recorded, key) in self._about_others:
            return ""
        if (recorded, key) in self._replaced and (flushed or start or not recorded.checkpoints_known):
            return f"{path} holds another topic's id (in partition.metadata), and its own files are missing"
        if flushed or start:
            return f"{path} is missing, and everything below offset {max(flushed, start)} had been flushed"
        if not recorded.checkpoints_known:
            return (
                f"{path} is missing, and the checkpoints, which would tell whether it held anything, are lost"
            )
        return ""

    def _is_given_up(self, name: str, recorded_id: UUID, *, is_away: bool) -> bool:
        return self._accepted.covers(name) or (
            is_away and self._accepted.covers(encode_uuid(recorded_id.bytes))
        )

    # Making it so

    def changes(self) -> Iterator[PartitionChange]:
        """The records by which the image follows what was found."""
        for topic, partition in self._partitions():
            recorded = self.placements[topic.name, partition.index].recorded
            if recorded is not None and recorded != partition.directory_of(self._node_id):
                directories = list(partition.directories)
                directories[partition.replicas.index(self._node_id)] = recorded
                yield PartitionChange(
                    partition_id=partition.index, topic_id=topic.topic_id, directories=tuple(directories)
                )

    def _tidy_checkpoints(self, directory: LogDirectory) -> None:
        """Let the checkpoints of a directory tell of what is there or was there, and of nothing else.

        Where a deletion was interrupted, what they say is about the deleted partition. Of one that is new they have
        nothing to tell; of one that was moved here they tell what they did where it was.
        """
        keep = {(METADATA_TOPIC, 0)}
        moved: dict[Key, tuple[int, int]] = {}
        for topic, partition in self._partitions():
            key = (topic.name, partition.index)
            placement = self.placements[key]
            if placement.directory in (directory, None) and not placement.is_new:
                keep.add(key)
            if placement.directory is directory and placement.is_suspect and placement.recorded is not None:
                moved[key] = self._offsets_of_moved(directory, key, partition)
        keep -= {each.key for each in self.doomed if each.directory is directory}
        directory.keep_only(keep, moved)

    def _offsets_of_moved(
        self, directory: LogDirectory, key: Key, partition: PartitionImage
    ) -> tuple[int, int]:
        """Recovery point and log start of a partition that was moved here: what the checkpoints said where it was.

        Compaction leaves the last segment alone. So every gap it made is below the beginning of that segment, and
        must be below the recovery point.
        """
        recorded_id = partition.directory_of(self._node_id)
        told = [
            each
            for each in self._online()
            if each.id == recorded_id or (each is directory and key in directory.recovery_points)
        ]
        names = self._fs.list(f"{directory.path}/{key[0]}-{key[1]}")
        stems = [name.removesuffix(".log") for name in names if name.endswith(".log")]
        begins = [int(stem) for stem in stems if stem.isdecimal()] or [0]
        return (
            max(max(begins), *(each.recovery_points.get(key, 0) for each in told), 0),
            max((each.log_starts.get(key, 0) for each in told), default=min(begins)),
        )


def is_hex_id(text: str) -> bool:
    return len(text) == 32 and not set(text) - set("0123456789abcdef")


def set_aside(
    fs: FileSystem, path: str, say: Callable[[str], None], why: str = "belongs to no topic of this cluster"
) -> None:
    """Make room for a partition of this name: what is there belongs to nobody. It is kept, unless it is empty."""
    if not holds_records(fs, path):
        fs.remove_tree(path)
        return
    aside = _stray_path(fs, path)
    fs.rename(path, aside)
    say(warn(f"{path} {why}; moved to {aside}"))


def _stray_path(fs: FileSystem, path: str, content: str = "") -> str:
    """A free name for what is nobody's partition `path`; its files are there, or in `content`."""
    directory, _, name = path.rpartition("/")
    key = parse_name(name)
    assert key is not None
    try:
        topic_id = read_partition_metadata(fs, content or path)
    except (CorruptLog, OSError):
        topic_id = None
    number = UUID(bytes=topic_id).int if topic_id is not None else 0
    while True:
        aside = f"{directory}/{marked_name(*key, f'{number:032x}', STRAY_MARK)}"
        if not fs.exists(aside):
            return aside
        number += 1
