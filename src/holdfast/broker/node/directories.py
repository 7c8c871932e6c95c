"""Log directories: where partitions live, and what is known about each directory as a whole.

Files in its root, in Kafka's names and formats: `meta.properties`, the lock, the offset checkpoints, the
clean-shutdown marker. One of our own, `holdfast.session`, names the boot of the machine the directory was last used
under, so that the next start can tell a killed process from a power failure (see `log.recovery`), and the run of
the broker, so that it can tell the directory from an older copy.

Names of partitions' directories, in Kafka's forms:

    topic-N                 a partition
    topic-N.<id>-delete     a deleted one that is to be removed; ours has the topic's id
    topic-N.<id>-stray      one that belongs to no topic of this cluster, kept for whoever wants to look

A name has at most 255 bytes, so with an id and a mark a long topic's name is cut, as Kafka cuts it. Cut names end
with a checksum of the whole one: the checkpoints know partitions by their whole names, and two topics must not
share one. Earlier versions left `topic-N-stray`, at which Kafka stops: such a directory is renamed at the next start.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Container, Mapping
from contextlib import closing
from typing import Final, NamedTuple, Protocol
from uuid import UUID
from zlib import crc32

from holdfast.atomic import parent_of, read_whole, write_atomically
from holdfast.broker.log import checkpoints
from holdfast.broker.log.recovery import Trust
from holdfast.broker.log.write_ahead import NO_ROOM_ERRNOS
from holdfast.errors import CorruptLog, DataDirectoryError, DataDirectoryLocked
from holdfast.saying import warn
from holdfast.seams import FileSystem, FlushTarget, Lock

NAME_BYTES_MAX: Final = 255
DELETE_MARK: Final = "-delete"
STRAY_MARK: Final = "-stray"


class Marked(NamedTuple):
    """The parts of a name with a mark."""

    topic: str
    """The topic's name, perhaps cut."""
    partition: int
    unique_id: str


def marked_name(topic: str, index: int, unique_id: str, mark: str) -> str:
    rest = f"-{index}.{unique_id}{mark}"
    room = NAME_BYTES_MAX - len(rest)
    if len(topic) > room:
        checksum = f"{crc32(topic.encode()):08x}"
        topic = topic[: room - len(checksum)] + checksum
    return topic + rest


def parse_marked(name: str, mark: str) -> Marked | None:
    stem, _, unique_id = name.removesuffix(mark).rpartition(".")
    parsed = parse_name(stem) if name.endswith(mark) else None
    return Marked(*parsed, unique_id) if parsed is not None else None


def parse_name(name: str) -> tuple[str, int] | None:
    """Topic and index of a partition's directory; None when this is no such name."""
    topic, _, index = name.rpartition("-")
    is_number = index.isdecimal() and str(int(index)) == index
    return (topic, int(index)) if topic and is_number else None


NO_DESCRIPTOR_ERRNOS: Final = frozenset((errno.EMFILE, errno.ENFILE))
"""A file could not be opened for want of descriptors: nothing was asked of the disk."""
REFUSED_ERRNOS: Final = NO_ROOM_ERRNOS | NO_DESCRIPTOR_ERRNOS
"""Refused for want of room or descriptors: nothing was promised, and the directory stays in service."""
OBSTINATE_ERRNOS: Final = frozenset(
    (errno.EBUSY, errno.EPERM, errno.EACCES, errno.ENOTEMPTY, errno.ENAMETOOLONG)
)
"""A name cannot be removed or changed: it is mounted, somebody else's, or too long. The disk itself works."""
LOCK_FILE: Final = ".lock"
SESSION_FILE: Final = "holdfast.session"
RESTORING_FILE: Final = "holdfast.restoring"
"""There while a backup is restored to the directory; see `holdfast.backup.restoring`."""
RESERVE_FILE: Final = "holdfast.reserve"
RESERVE_BYTES: Final = 1 << 20
RESERVE_STEP_BYTES: Final = 64 << 10
"""A start on a full disk needs about 30 bytes for each partition; it gives up so much of the reserve at a time."""
RECORD_SUFFIXES: Final = (".log", ".cut", ".swap", ".cleaned", ".deleted", ".checkpoint")
"""Files that may hold records: of a partition, and of the metadata log its snapshots."""

Offsets = dict[tuple[str, int], int]
"""By topic and partition, as a checkpoint has them."""


class DirectoryFailures(Protocol):
    """Whom a directory tells of the errors of its disk."""

    def refused(self, directory: LogDirectory, error: OSError) -> None: ...

    def failed(self, directory: LogDirectory, error: OSError) -> None: ...


def holds_records(fs: FileSystem, path: str) -> bool:
    """Whether a partition's directory has anything in it that could be records."""
    return any(name.endswith(RECORD_SUFFIXES) and fs.size(f"{path}/{name}") for name in fs.list(path))


class BrokerRun(NamedTuple):
    """One run of the broker, as its log directories remember it: what tells a directory from an older copy of it."""

    boot_id: str
    broker_epoch: int = -1
    directories: frozenset[UUID] = frozenset()
    """In the directory of the metadata log: which ones began this session before it."""


def encode_session(session: BrokerRun) -> bytes:
    directories = " ".join(sorted(each.hex for each in session.directories))
    return f"{session.boot_id}\n{session.broker_epoch}\n{directories}\n".encode()


def decode_session(data: bytes) -> BrokerRun:
    """Earlier versions wrote the boot's id alone; of a damaged file no more than that is believed."""
    boot_id, *rest = data.decode("utf-8", "replace").split("\n")
    try:
        epoch, directories = rest[:2]
        return BrokerRun(boot_id, int(epoch), frozenset(UUID(hex=each) for each in directories.split()))
    except ValueError:
        return BrokerRun(boot_id)


class LogDirectory:
    def __init__(self, fs: FileSystem, path: str, failures: DirectoryFailures) -> None:
        self._fs = fs
        self.path = path
        self._failures = failures
        self.offline = False
        self.failure: str | None = None
        self.meta: checkpoints.MetaProperties | None = None
        self.is_blank = False
        """There is no identity in it and nothing else of ours. Whether it is new, or a place where a disk is not
        mounted, only the others can tell: nothing is written there before `prepare`."""
        self.has_new_id = False
        """Its identity named no id of the directory, so that it got one now."""
        self.was_clean = False
        self.was_kafkas = False
        """Apache Kafka ran here since our last run. It compacts above its recovery points, and notes the start of a log
        only where that is inside a segment."""
        self.session = BrokerRun("")
        """The last one that began here."""
        self.torn_tail_expected = False
        self.recovery_points: Offsets = {}
        """As the file on disk has them, for certain: what compaction may rely on."""
        self.recovery_points_known = True
        """Whether that file was there and whole, or the directory is new. If not, compaction may have been
        anywhere."""
        self.log_starts: Offsets = {}
        self.log_starts_known = True
        self._lock: Lock | None = None
        self.is_closed = False
        self.is_in_session = False
        self.is_untidy = False
        """A full disk refused a checkpoint that tells of what is there and of nothing else."""

    @property
    def id(self) -> UUID:
        assert self.meta is not None
        return UUID(bytes=self.meta.directory_id)

    def refuses(self, error: OSError) -> bool:
        """Whether the disk refused a write for want of room or descriptors: the operator is told, and the directory
        stays in service. Any other error takes the directory offline until restart."""
        if error.errno in REFUSED_ERRNOS:
            self._failures.refused(self, error)
            return True
        self.take_offline(error)
        return False

    def take_offline(self, error: OSError) -> None:
        """Whatever waits for this directory learns that its outcome is unknown."""
        self._failures.failed(self, error)

    def require_in_place(self) -> None:
        """Raise where the path leads to nothing or to another directory now: what is made there is not kept here."""
        if self._lock is not None and not self._lock.is_in_place():
            raise OSError(
                errno.ENOENT, "was moved, mounted over, removed or replaced while in use", self.path
            )

    def open(self, boot_id: str, say: Callable[[str], None]) -> None:
        """Lock the directory and read what the last run left. Nothing is changed before `use_up_clean_marker`."""
        fs = self._fs
        if fs.exists(self.path) and not fs.is_directory(self.path):
            raise DataDirectoryError(f"{self.path} is not a directory")
        if not self._is_missing(RESTORING_FILE):
            raise DataDirectoryError(
                f"a backup was being restored to {self.path}, and that did not end; run `holdfast restore` again"
            )
        if not self._is_missing(checkpoints.META_PROPERTIES_FILE):
            self._take(boot_id, say)
        elif self.holds_partitions():
            raise CorruptLog(
                f"{self.path} holds partitions and no {checkpoints.META_PROPERTIES_FILE}, which says whose they are; "
                "restore the file from a copy, or write one with cluster.id, node.id and version=1"
            )
        else:
            self.is_blank = True

    def holds_partitions(self, besides: str = "") -> bool:
        """Whether there are records of any partition, `besides` the directory of that name."""
        fs = self._fs
        names = fs.list(self.path) if fs.exists(self.path) else []
        paths = [f"{self.path}/{name}" for name in names if parse_name(name) is not None and name != besides]
        return any(fs.is_directory(path) and holds_records(fs, path) for path in paths)

    def folds_case(self) -> bool:
        """Whether names that differ in case alone are one here, as on macOS: its lock file answers to both."""
        return self._fs.exists(f"{self.path}/{LOCK_FILE.upper()}")

    def prepare(self, boot_id: str, say: Callable[[str], None]) -> None:
        """Make and lock a blank directory. It has no identity until `write_meta`."""
        if not self._fs.exists(self.path):
            self._make()
        self._take(boot_id, say)
        self.is_blank = False

    def _take(self, boot_id: str, say: Callable[[str], None]) -> None:
        fs = self._fs
        try:
            self._lock = fs.lock(f"{self.path}/{LOCK_FILE}")
        except BlockingIOError:
            raise DataDirectoryLocked(
                f"{self.path} is in use by another broker (its lock file {LOCK_FILE} is held); "
                "stop that one first or choose another data directory"
            ) from None
        self.meta = checkpoints.read_meta_properties(fs, self.path)
        if self.meta is not None:
            # A start that died may have left the name in memory alone, and the metadata log will rest on it.
            fs.flush_directory(self.path)
        recovery_points = self._read(checkpoints.RECOVERY_POINT_FILE, say)
        self.recovery_points_known = recovery_points is not None or self.meta is None
        self.recovery_points = recovery_points or {}
        log_starts = self._read(checkpoints.LOG_START_FILE, say)
        self.log_starts = log_starts or {}
        self.log_starts_known = log_starts is not None or self.meta is None
        path = f"{self.path}/{SESSION_FILE}"
        self.session = decode_session(read_whole(fs, path)) if fs.exists(path) else BrokerRun("")
        self.torn_tail_expected = self.session.boot_id != boot_id
        self.was_clean = checkpoints.read_clean_shutdown(fs, self.path) is not None

    def use_up_clean_marker(self) -> None:
        """The directory is about to be changed."""
        checkpoints.remove_clean_shutdown(self._fs, self.path)

    def _make(self) -> None:
        """Make the directory and what is missing above it, each durable in its parent."""
        missing = []
        path = self.path.rstrip("/")
        while path not in (".", "/") and not self._fs.exists(path):
            missing.append(path)
            path = parent_of(path)
        self._fs.make_directory(self.path)
        for path in reversed(missing):
            self._fs.flush_directory(parent_of(path))

    def begin_session(self, session: BrokerRun) -> None:
        """Every log here is recovered: from now on this boot's page cache holds what is written."""
        write_atomically(self._fs, f"{self.path}/{SESSION_FILE}", encode_session(session))
        self.is_in_session = True

    # Room for a start on a full disk, which writes before retention can make some

    def keep_reserve(self) -> tuple[FlushTarget, ...]:
        """Fill the reserve, where there is room to spare; returns what has to be flushed then."""
        path = f"{self.path}/{RESERVE_FILE}"
        size = self._fs.size(path) if self._fs.exists(path) else 0
        if size >= RESERVE_BYTES or self._free_bytes() < 8 * RESERVE_BYTES:
            return ()
        file = self._fs.open(path, "create")
        file.pwritev([bytes(RESERVE_BYTES - size)], size)
        return file, self.path

    def _free_bytes(self) -> int:
        try:
            return self._fs.free_bytes(self.path)
        except OSError:
            return 0  # nobody knows, and a reserve is not worth a failure

    def give_up_reserve(self) -> bool:
        """Give up a part of the reserve; whether there was any left."""
        path = f"{self.path}/{RESERVE_FILE}"
        size = self._fs.size(path) if self._fs.exists(path) else 0
        if size:
            with closing(self._fs.open(path, "write")) as file:
                file.truncate(max(0, size - RESERVE_STEP_BYTES))
                file.flush()
        return size > 0

    @property
    def checkpoints_known(self) -> bool:
        return self.recovery_points_known and self.log_starts_known

    def keep_only(
        self, partitions: Container[tuple[str, int]], moved: Mapping[tuple[str, int], tuple[int, int]]
    ) -> None:
        """Forget, durably, what the checkpoints say of other partitions: new ones may have their names.

        `moved` are recovery point and log start of partitions that have come here.
        """
        points = {key: offset for key, offset in self.recovery_points.items() if key in partitions}
        points |= {key: point for key, (point, _) in moved.items()}
        starts = {key: offset for key, offset in self.log_starts.items() if key in partitions}
        starts |= {key: start for key, (_, start) in moved.items() if start}
        # An unknown file stays unknown until every log is open and it can be written anew.
        try:
            if self.recovery_points_known and (
                points != self.recovery_points or self._is_missing(checkpoints.RECOVERY_POINT_FILE)
            ):
                self.write_checkpoint(checkpoints.RECOVERY_POINT_FILE, points)
            if self.log_starts_known and (
                starts != self.log_starts or self._is_missing(checkpoints.LOG_START_FILE)
            ):
                self.write_checkpoint(checkpoints.LOG_START_FILE, starts)
        except OSError as error:
            if error.errno not in REFUSED_ERRNOS:
                raise
            self.is_untidy = True
        self.recovery_points, self.log_starts = points, starts

    def _is_missing(self, name: str) -> bool:
        return not self._fs.exists(f"{self.path}/{name}")

    def trust(self, topic: str, index: int) -> Trust:
        """What the last run left to say about a partition."""
        key = (topic, index)
        return Trust(
            clean=self.was_clean,
            recovery_point=self.recovery_points.get(key, 0),
            start_offset=self.log_starts.get(key, 0),
            torn_tail_expected=self.torn_tail_expected,
            recovery_point_known=self.recovery_points_known,
            start_offset_known=self.log_starts_known and not self.was_kafkas,
            has_gaps_anywhere=self.was_kafkas,
        )

    def _read(self, name: str, say: Callable[[str], None]) -> Offsets | None:
        path = f"{self.path}/{name}"
        # We never write an empty file: that is one whose content was lost.
        if not self._fs.exists(path) or not self._fs.size(path):
            return None
        try:
            return checkpoints.OffsetCheckpoint(self._fs, path).read()
        except CorruptLog as error:
            # Without a recovery point everything is verified; without a log start, the first segment is it.
            say(warn(f"{error}; it is rebuilt"))
            return None

    def write_meta(self, meta: checkpoints.MetaProperties) -> None:
        checkpoints.write_meta_properties(self._fs, self.path, meta)
        self.meta = meta

    def write_checkpoint(self, name: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Durable when it returns. Blocks for two flushes of a small file."""
        checkpoints.OffsetCheckpoint(self._fs, f"{self.path}/{name}").write(offsets)

    def fail(self, error: Exception) -> None:
        """Take the directory out of service. Without its session file the next start does not trust the cache.

        Removing a file works where writing one does not: the disk may be full as well.
        """
        self.offline = True
        self.failure = str(error)
        session = f"{self.path}/{SESSION_FILE}"
        try:
            if self._fs.exists(session):
                self._fs.remove(session)
                self._fs.flush_directory(self.path)
        except OSError as also:
            self.failure = f"{error} (and {also})"

    def close_cleanly(
        self,
        recovery_points: Offsets,
        log_starts: Offsets,
        high_watermarks: Offsets,
        broker_epoch: int | None,
    ) -> None:
        """Without an epoch no marker is left, and the next start believes nothing above the recovery points.

        The high watermarks are for an Apache Kafka that goes on here.
        """
        self.is_closed = True
        self.write_checkpoint(checkpoints.RECOVERY_POINT_FILE, recovery_points)
        self.write_checkpoint(checkpoints.LOG_START_FILE, log_starts)
        self.write_checkpoint(checkpoints.REPLICATION_FILE, high_watermarks)
        if broker_epoch is not None:
            checkpoints.write_clean_shutdown(self._fs, self.path, broker_epoch)
        self.release()

    def release(self) -> None:
        self.is_closed = True
        if self._lock is not None:
            self._lock.release()
            self._lock = None
