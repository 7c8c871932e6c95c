"""`holdfast backup`: a running node's directories copied to a repository, while it goes on.

What is copied of a log ends at its recovery point, below which everything is flushed and never cut again. The recovery
points of one directory were noted in one moment, so that a committed offset among them is never ahead of what it is an
offset of. Of several directories the coordinators' topics are copied as of the first look, and all others as of a
second one behind the next write of the checkpoints.

Sealed segments are copied once: a file that is the one it was (by its number, and by the digest of the last block that
was copied) is copied from where the last backup ended. Where compaction or retention replaces or removes files
meanwhile, the partition is looked at again.

Copies share their blocks with the original where the file system can do that (`copy_file_range`). Every byte that is
copied is read back, its batches' checksums proven and its digest noted.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from holdfast.atomic import read_whole
from holdfast.backup.repository import (
    FS,
    Backup,
    Repository,
    StoredPartition,
    StoredSegment,
    goes_on_later,
    refuse_within,
    small_file,
    source_key,
)
from holdfast.broker.log.segment import INDEX_SUFFIXES, LOG_SUFFIX, SNAPSHOT_SUFFIX
from holdfast.broker.metadata.image import PartitionImage, TopicImage
from holdfast.broker.node.metadata_log import Quorum, encode_snapshot, load_image
from holdfast.errors import CorruptLog, DataDirectoryError
from holdfast.manifest.digesting import digest_file
from holdfast.manifest.directory import DataDirectories, LogFiles, read_directories
from holdfast.manifest.model import Block, GroupManifest
from holdfast.manifest.taking import CONSUMER_OFFSETS, TRANSACTION_STATE, groups_in
from holdfast.real import RealFile
from holdfast.seams import Now

ATTEMPTS: Final = 5
"""Looks at a partition whose files are replaced meanwhile: compaction and retention come once in many seconds."""
CHECKPOINT_ROUND_S: Final = 2.5
"""By then a running node has written the recovery points of all its directories at least once."""
COPY_BYTES: Final = 64 << 20
COORDINATOR_TOPICS: Final = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE})
NOT_CLONED_ERRNOS: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY, errno.EPERM, errno.EBADF}
)


class Replaced(Exception):
    """Files were replaced or removed while they were copied."""


class CopyResult(NamedTuple):
    backup: Backup
    copied_bytes: int


@dataclass
class Copier:
    repository: Repository
    say: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    copied_bytes: int = field(default=0, init=False)
    _known: dict[str, StoredSegment] = field(default_factory=dict, init=False)

    def back_up(self, paths: Sequence[str]) -> CopyResult:
        refuse_within(self.repository.path, paths, "the log directory")
        first = read_directories(paths, is_running=True)
        if first.node_id not in first.image.brokers:
            # An empty image must not become an empty backup.
            raise DataDirectoryError(
                f"{first.metadata.path}: no checkpoint tells how far it is flushed. A broker that has just begun notes "
                "that within a second: try again. On a directory of Apache Kafka's run `holdfast serve` once"
            )
        with goes_on_later(self.repository.path), self.repository.locked():
            self.repository.open_for(first.cluster_id, first.node_id)
            self._known = self.repository.known_segments()
            later = first
            if len(paths) > 1:
                self.sleep(CHECKPOINT_ROUND_S)
                later = read_directories(paths, is_running=True)
            partitions = []
            for topic in first.image.topics.values():
                source = first if topic.name in COORDINATOR_TOPICS else later
                for partition in topic.partitions:
                    stored = self._partition(source, topic, partition)
                    if stored is not None:
                        partitions.append(stored)
            backup = self._finish(first, partitions)
        return CopyResult(backup, self.copied_bytes)

    def _finish(self, directories: DataDirectories, partitions: list[StoredPartition]) -> Backup:
        numbers = self.repository.numbers()
        number = numbers[-1] + 1 if numbers else 1
        now_ms = time.time_ns() // 1_000_000
        quorum = Quorum()
        metadata = directories.metadata
        load_image(FS, metadata.path, metadata.batches(directories.below(metadata)), quorum)
        image = directories.image
        snapshot = encode_snapshot(image, image.last_epoch, Now(now_ms, 0), quorum)
        name = f"files/metadata/{number}.checkpoint"
        self._store(name, snapshot)
        paths = sorted(directories.paths, key=lambda path: not metadata.path.startswith(f"{path}/"))
        backup = Backup(
            number=number,
            taken_at_ms=now_ms,
            cluster_id=directories.cluster_id,
            node_id=directories.node_id,
            directories=tuple((directories.ids[path].hex, os.path.abspath(path)) for path in paths),
            metadata=name,
            metadata_sha256=hashlib.sha256(snapshot).hexdigest(),
            metadata_end_offset=image.last_offset + 1,
            metadata_epoch=image.last_epoch,
            partitions=tuple(partitions),
            groups=self._groups(directories),
        )
        self.repository.store(backup)
        self.repository.forget_progress()
        return backup

    @staticmethod
    def _groups(directories: DataDirectories) -> tuple[GroupManifest, ...]:
        for _ in range(ATTEMPTS):
            try:
                return groups_in(directories)
            except FileNotFoundError:
                continue  # compacted meanwhile
        raise DataDirectoryError(f"{CONSUMER_OFFSETS} was compacted again and again; try again later")

    # One partition

    def _partition(
        self, directories: DataDirectories, topic: TopicImage, partition: PartitionImage
    ) -> StoredPartition | None:
        files = directories.partitions.get((topic.name, partition.index))
        if files is None:
            return None  # it was made or deleted a moment ago, and nothing in it was flushed then
        for _ in range(ATTEMPTS):
            try:
                segments = self._segments(files, topic.topic_id.hex)
            except (FileNotFoundError, Replaced):
                if not os.path.isdir(files.path):
                    self.say(
                        f"{topic.name}-{partition.index} was deleted meanwhile; it is not in this backup"
                    )
                    return None
                files = _looked_at_again(directories, files)
                continue
            return StoredPartition(
                topic=topic.name,
                topic_id=topic.topic_id.hex,
                index=partition.index,
                directory=files.directory_id.hex,
                leader_epoch=partition.leader_epoch,
                log_start=max(files.log_start, min(files.segments(), default=0)),
                segments=tuple(segments),
            )
        raise DataDirectoryError(
            f"{files.path}: its segments were replaced again and again while they were copied; try again later"
        )

    def _segments(self, files: LogFiles, topic_id: str) -> list[StoredSegment]:
        bases = [base for base in files.segments() if base < files.recovery_point]
        stored = [
            self._segment(files, topic_id, base, is_sealed=base != bases[-1] or base != files.segments()[-1])
            for base in bases
        ]
        for before, after in pairwise(stored):
            if before.end_offset > after.base_offset:
                raise Replaced(files.path)
        if bases != [base for base in files.segments() if base < files.recovery_point]:
            raise Replaced(files.path)
        for segment in stored:
            if os.stat(files.segment_path(segment.base_offset)).st_ino != segment.inode:
                raise Replaced(files.path)
        return stored

    def _segment(self, files: LogFiles, topic_id: str, base_offset: int, *, is_sealed: bool) -> StoredSegment:
        with closing(FS.open(files.segment_path(base_offset), "read")) as source:
            status = os.fstat(source.fd)
            folder = f"files/{files.directory_id.hex}/{topic_id}-{files.index}"
            key = source_key(f"{folder}/x", base_offset, status.st_ino)
            known = self._known.get(key)
            if known is not None and self._is_beginning(source, known.blocks, status.st_size):
                name = known.file
            else:
                # Another file may have got the number of one that was copied before.
                name = f"{key}{LOG_SUFFIX}" if known is None else f"{key}-{time.time_ns()}{LOG_SUFFIX}"
                known = None
            blocks = self._copy(source, name, base_offset, status.st_size, known, files.recovery_point)
        if known is not None and known.small and known.blocks == blocks:
            small = dict(known.small)
        else:
            small = self._small_files(files, base_offset, name, with_indexes=is_sealed)
        segment = StoredSegment(base_offset, name, blocks, status.st_ino, small)
        self._known[key] = segment
        if segment != known:
            self.repository.note_progress(segment)
        return segment

    @staticmethod
    def _is_beginning(source: RealFile, blocks: tuple[Block, ...], size: int) -> bool:
        """Whether the last block that was copied is still what it was, where it was."""
        if not blocks:
            return True
        start = blocks[-2].position if len(blocks) > 1 else 0
        last = blocks[-1]
        data = source.pread(last.position - start, start) if last.position <= size else b""
        return hashlib.sha256(data).hexdigest() == last.sha256

    def _copy(
        self,
        source: RealFile,
        name: str,
        base_offset: int,
        size: int,
        known: StoredSegment | None,
        below: int,
    ) -> tuple[Block, ...]:
        """Copy what is new of a segment; returns the blocks of all of it that lies below the offset."""
        if known is not None and (known.end_offset == below or known.bytes == size):
            return known.blocks
        if known is not None and known.end_offset > below:
            raise CorruptLog(
                f"{source.path}: an earlier backup has it up to offset {known.end_offset}, and now it ends at {below}: "
                "the directory is an older copy of itself; choose another directory for its backups"
            )
        path = self.repository.file(name)
        FS.make_directory(os.path.dirname(path))
        start = known.bytes if known is not None else 0
        with closing(FS.open(path, "create")) as target:
            target.truncate(start)
            copy_range(source, target, start, size)
            try:
                digest = digest_file(target, base_offset, size, known.blocks if known else (), below=below)
            except CorruptLog as error:
                raise CorruptLog(f"copied from {source.path}: {error}") from error
            # Behind the recovery point there may be half a batch, and space written ahead.
            target.truncate(digest.bytes)
            target.flush()
            self.copied_bytes += digest.bytes - start
        FS.flush_directory(os.path.dirname(path))
        return digest.blocks

    def _small_files(
        self, files: LogFiles, base_offset: int, name: str, *, with_indexes: bool
    ) -> dict[str, str]:
        """Copy what a sealed segment has beside it, and what its beginning knows of producers."""
        small = {}
        for suffix in (*INDEX_SUFFIXES, SNAPSHOT_SUFFIX) if with_indexes else (SNAPSHOT_SUFFIX,):
            path = files.segment_path(base_offset, suffix)
            if FS.exists(path):
                data = read_whole(FS, path)
                self._store(small_file(name, suffix), data)
                small[suffix] = hashlib.sha256(data).hexdigest()
        return small

    def _store(self, name: str, data: bytes) -> None:
        path = self.repository.file(name)
        FS.make_directory(os.path.dirname(path))
        with closing(FS.open(path, "create")) as file:
            file.truncate(0)
            file.pwritev([data], 0)
            file.flush()
        FS.flush_directory(os.path.dirname(path))


def _looked_at_again(directories: DataDirectories, files: LogFiles) -> LogFiles:
    again = read_directories(directories.paths, is_running=True).partitions.get((files.topic, files.index))
    if again is None:
        raise FileNotFoundError(files.path)
    # The recovery point stays that of the first look: what is behind it belongs to a later moment.
    return LogFiles(
        files.topic, files.index, again.path, again.directory_id, again.log_start, files.recovery_point
    )


def copy_range(source: RealFile, target: RealFile, start: int, end: int) -> None:
    """Copy bytes from one file to the same place of another, sharing blocks where the file system can."""
    position = start
    while position < end:
        length = min(COPY_BYTES, end - position)
        try:
            copied = os.copy_file_range(source.fd, target.fd, length, position, position)
        except (OSError, AttributeError) as error:  # macOS has none
            if isinstance(error, OSError) and error.errno not in NOT_CLONED_ERRNOS:
                raise
            data = source.pread(length, position)
            copied = target.pwritev([data], position) if data else 0
        if not copied:
            return  # the file has become shorter: its space written ahead was given back
        position += copied
