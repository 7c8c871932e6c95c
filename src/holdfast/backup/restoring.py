"""`holdfast restore`: log directories made from a backup, verified, that cannot be taken for what was lost.

Messages that were written after the backup are gone, and their offsets are free again. Whoever has seen them must be
able to tell. So a restored cluster differs from the one that was backed up:

- Every partition's leader epoch is raised by `EPOCHS_SKIPPED`, above any that the lost cluster had reached. A client
  that holds an offset of a lost message holds the epoch it was written in, asks where that ended (KIP-320), and finds
  the cut.
- No producer id is given out that the lost cluster has given out.
- With `skip_offsets` each partition goes on so many offsets behind its restored end: none is given twice, whoever has
  stored it and however. A batch without records stands for the offsets between, as compaction leaves them: whoever
  reads there comes to the end of it.

Positions outside the cluster are looked for by `outside`.

A directory has an identity, by which a broker knows it, only when everything else in it is on disk; until then
`holdfast.restoring` is there and says which backup it is. A restore that was interrupted is run again: what is there
and right is not copied again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from holdfast.atomic import read_whole, write_atomically
from holdfast.backup.copying import COORDINATOR_TOPICS, copy_range
from holdfast.backup.repository import (
    FS,
    Backup,
    BackupError,
    Repository,
    StoredPartition,
    StoredSegment,
    goes_on_later,
    refuse_within,
    small_file,
)
from holdfast.broker.log import checkpoints
from holdfast.broker.log.leader_epochs import LEADER_EPOCH_FILE, LeaderEpochs
from holdfast.broker.log.scan import walk_headers
from holdfast.broker.log.segment import LOG_SUFFIX, offset_name
from holdfast.broker.metadata.image import ClusterImage
from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.directories import RESTORING_FILE
from holdfast.broker.node.metadata_log import SNAPSHOT_SUFFIX, Quorum, encode_snapshot, read_snapshot
from holdfast.errors import CorruptLog, UsageError
from holdfast.manifest.digesting import digest_file
from holdfast.real import RealFile
from holdfast.seams import Now
from holdfast.wire.batch import NO_TIMESTAMP, build_batch

EPOCHS_SKIPPED: Final = 10_000
"""Above any epoch of the lost cluster: each start and each election raised one by 1."""
PRODUCER_IDS_SKIPPED: Final = 1_000_000_000
"""Above any id that the lost cluster has given out since: a million blocks of them."""
LEADER_EPOCH_MAX: Final = 2**31 - 1


@dataclass
class Restorer:
    repository: Repository
    backup: Backup
    targets: Sequence[str]
    """In the order of the backup's directories."""
    skip_offsets: int
    say: Callable[[str], None]
    copied_bytes: int = field(default=0, init=False)
    _is_going_on: bool = field(default=False, init=False)
    """An earlier restore of this backup to these directories was interrupted."""

    def restore(self) -> None:
        with goes_on_later(", ".join(self.targets)):
            self._restore()

    def _restore(self) -> None:
        for target in self.targets:
            refuse_within(target, [self.repository.path], "the repository")
        if len(self.targets) != len(self.backup.directories):
            raise UsageError(
                f"the backup is of {len(self.backup.directories)} log directories "
                f"({', '.join(path for _, path in self.backup.directories)}): name as many to restore to, in this order"
            )
        image, quorum = self._image()
        for target in self.targets:
            self._claim(target)
        paths = {
            directory_id: path
            for (directory_id, _), path in zip(self.backup.directories, self.targets, strict=True)
        }
        for partition in self.backup.partitions:
            self._partition(partition, f"{paths[partition.directory]}/{partition.name}")
        self._metadata(image, quorum, f"{self.targets[0]}/{METADATA_TOPIC}-0")
        for directory_id, path in paths.items():
            self._checkpoints(directory_id, path)
        for directory_id, path in paths.items():
            meta = checkpoints.MetaProperties(
                self.backup.cluster_id, self.backup.node_id, UUID(hex=directory_id).bytes
            )
            checkpoints.write_meta_properties(FS, path, meta)
        # Last that of the metadata log, by which an interrupted restore is known.
        for path in reversed(self.targets):
            FS.remove(f"{path}/{RESTORING_FILE}")
            FS.flush_directory(path)

    def goes_on_at(self) -> dict[tuple[str, int], int]:
        """The first offset that each restored partition gives out."""
        return {(each.topic, each.index): self._goes_on_at(each) for each in self.backup.partitions}

    def _claim(self, target: str) -> None:
        """Take a directory that is empty, or that an interrupted restore of this backup has begun."""
        content = json.dumps({"cluster_id": self.backup.cluster_id, "number": self.backup.number}).encode()
        mark = f"{target}/{RESTORING_FILE}"
        if FS.exists(mark) and read_whole(FS, mark) != content:
            raise UsageError(f"{target}: another backup was being restored there; empty it first")
        if target == self.targets[0]:
            self._is_going_on = FS.exists(mark)
        is_begun = FS.exists(mark) or self._is_going_on
        # What an interrupted beginning leaves is nobody's.
        names = os.listdir(target) if os.path.isdir(target) else []
        if not is_begun and any(
            name != "lost+found" and not name.startswith(RESTORING_FILE) for name in names
        ):
            raise UsageError(f"{target} is not empty; a backup is restored to an empty directory")
        FS.make_directory(target)
        write_atomically(FS, mark, content)
        FS.flush_directory(os.path.dirname(os.path.abspath(target)))

    # Partitions

    def _partition(self, partition: StoredPartition, path: str) -> None:
        FS.make_directory(path)
        checkpoints.write_partition_metadata(FS, path, UUID(hex=partition.topic_id).bytes)
        epochs = LeaderEpochs()
        for segment in partition.segments:
            self._segment(segment, path, epochs)
        if epochs.entries:
            epochs.write(FS, f"{path}/{LEADER_EPOCH_FILE}")
        end, goes_on_at = partition.end_offset, self._goes_on_at(partition)
        if goes_on_at > end:
            # Of the restored epoch: where somebody stands among these offsets, nothing was cut that it has not seen.
            left_out = build_batch(
                (),
                base_offset=end,
                last_offset_delta=goes_on_at - end - 1,
                leader_epoch=max(epochs.latest_epoch, 0),
                base_timestamp=NO_TIMESTAMP,
            )
            for base_offset, data in ((end, left_out), (goes_on_at, b"")):
                with closing(FS.open(f"{path}/{offset_name(base_offset)}{LOG_SUFFIX}", "create")) as file:
                    file.pwritev([data], 0)
                    file.truncate(len(data))
                    file.flush()
        FS.flush_directory(path)

    def _goes_on_at(self, partition: StoredPartition) -> int:
        """The first offset that the restored partition gives out."""
        is_skipped = partition.segments and partition.topic not in COORDINATOR_TOPICS
        return partition.end_offset + (self.skip_offsets if is_skipped else 0)

    def _segment(self, segment: StoredSegment, path: str, epochs: LeaderEpochs) -> None:
        target_path = f"{path}/{offset_name(segment.base_offset)}{LOG_SUFFIX}"
        with closing(FS.open(target_path, "create")) as target:
            if target.size() != segment.bytes or not self._is_right(target, segment):
                with closing(FS.open(self.repository.file(segment.file), "read")) as source:
                    target.truncate(0)
                    copy_range(source, target, 0, segment.bytes)
                self.copied_bytes += segment.bytes
                if not self._is_right(target, segment):
                    raise BackupError(
                        f"{self.repository.file(segment.file)} is not what was backed up: its digests differ. Restore "
                        "an older backup, or that file from a copy"
                    )
            target.flush()
            for found in walk_headers(target, segment.bytes):
                if found.header.leader_epoch > epochs.latest_epoch:
                    epochs.assign(found.header.leader_epoch, found.header.base_offset)
        for suffix, expected in segment.small.items():
            source_path = self.repository.file(small_file(segment.file, suffix))
            data = read_whole(FS, source_path)
            if hashlib.sha256(data).hexdigest() != expected:
                self.say(f"{source_path} is not what was backed up; the broker makes it anew")
                continue
            write_atomically(FS, f"{path}/{offset_name(segment.base_offset)}{suffix}", data)

    @staticmethod
    def _is_right(target: RealFile, segment: StoredSegment) -> bool:
        try:
            return digest_file(target, segment.base_offset, segment.bytes).blocks == segment.blocks
        except CorruptLog:
            return False

    # The cluster

    def _image(self) -> tuple[ClusterImage, Quorum]:
        path = self.repository.file(self.backup.metadata)
        data = read_whole(FS, path)
        if hashlib.sha256(data).hexdigest() != self.backup.metadata_sha256:
            raise BackupError(
                f"{path} is not what was backed up: its digest differs. Restore an older backup"
            )
        quorum = Quorum()
        image, _ = read_snapshot(data, path, quorum)
        return image, quorum

    def _metadata(self, image: ClusterImage, quorum: Quorum, path: str) -> None:
        for topic in list(image.topics.values()):
            partitions = tuple(
                replace(each, leader_epoch=min(each.leader_epoch + EPOCHS_SKIPPED, LEADER_EPOCH_MAX - 1))
                for each in topic.partitions
            )
            image.topics[topic.name] = image.topics_by_id[topic.topic_id] = replace(
                topic, partitions=partitions
            )
        image.next_producer_id += PRODUCER_IDS_SKIPPED
        epoch, end = self.backup.metadata_epoch, self.backup.metadata_end_offset
        FS.make_directory(path)
        snapshot = encode_snapshot(image, epoch, Now(time.time_ns() // 1_000_000, 0), quorum)
        write_atomically(FS, f"{path}/{offset_name(end)}-{epoch:010d}{SNAPSHOT_SUFFIX}", snapshot)
        with closing(FS.open(f"{path}/{offset_name(end)}{LOG_SUFFIX}", "create")) as file:
            file.flush()
        FS.flush_directory(path)

    def _checkpoints(self, directory_id: str, path: str) -> None:
        here = [each for each in self.backup.partitions if each.directory == directory_id]
        # Everything was verified and flushed: the next start verifies the last segment of each log and no more.
        points = {(each.topic, each.index): self._goes_on_at(each) for each in here}
        starts = {(each.topic, each.index): each.log_start for each in here if each.log_start}
        if path == self.targets[0]:
            points[METADATA_TOPIC, 0] = starts[METADATA_TOPIC, 0] = self.backup.metadata_end_offset
        checkpoints.OffsetCheckpoint(FS, f"{path}/{checkpoints.RECOVERY_POINT_FILE}").write(points)
        checkpoints.OffsetCheckpoint(FS, f"{path}/{checkpoints.LOG_START_FILE}").write(starts)
