"""The metadata log: replayed at start, and shortened by a snapshot when most of it is history.

Every start adds a record per partition, so the log would grow for ever. When it holds many more records than the
image needs, a start writes the image as a snapshot, `<end offset>-<epoch>.checkpoint` in Kafka's format, and lets
the log begin there. The snapshot is durable before the new log start is, and that before any segment goes, so a
crash at any point leaves either the whole log or a snapshot with the rest of it. A snapshot without its last
record is not whole and is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final
from uuid import UUID

from holdfast.atomic import flush_each, read_whole, write_atomically
from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery import open_log
from holdfast.broker.log.segment import offset_name
from holdfast.broker.metadata import snapshot
from holdfast.broker.metadata.image import ClusterImage
from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.directories import REFUSED_ERRNOS, LogDirectory, holds_records
from holdfast.broker.node.hosted import HostedPartition
from holdfast.errors import CorruptLog, InvalidRecords
from holdfast.saying import warn
from holdfast.seams import Now
from holdfast.wire.batch import BatchHeader, Record, build_batch, check_whole, iterate_records
from holdfast.wire.control_records import ControlRecord, SnapshotFooter, SnapshotHeader, decode_control_record
from holdfast.wire.metadata_records import MetadataRecord, RemoveTopic, decode_metadata_record

if TYPE_CHECKING:
    from holdfast.broker.node.node import Node

METADATA_TOPIC_ID: Final = UUID(int=1)
"""The id Kafka reserves for the metadata topic."""
SNAPSHOT_SUFFIX: Final = ".checkpoint"
HISTORY_RECORDS_MIN: Final = 5_000
"""A log with fewer records than this is replayed in a blink, whatever it holds."""
HISTORY_FACTOR: Final = 4
"""How many times more records than its image needs a log may hold."""
RECORDS_PER_BATCH: Final = 1_000


def metadata_path(directory: LogDirectory) -> str:
    return f"{directory.path}/{METADATA_TOPIC}-0"


def find_metadata(node: Node) -> list[LogDirectory]:
    """Every online log directory that holds the metadata log, wherever it stands in `log.dirs`.

    One that is there and empty is of a first start that was interrupted, and counts when there is no other.
    """
    there = [
        each for each in node.directories if not each.offline and node.fs.is_directory(metadata_path(each))
    ]
    return [each for each in there if holds_records(node.fs, metadata_path(each))] or [
        each for each in there if each.meta is not None
    ]


def make_metadata(node: Node, directory: LogDirectory) -> None:
    """Begin a cluster's metadata log. Directories get their identity afterwards, which tells that there is a log."""
    node.fs.make_directory(metadata_path(directory))
    node.fs.flush_directory(directory.path)


def open_metadata(node: Node, directory: LogDirectory, now: Now) -> set[UUID]:
    """Rebuild the image; returns the topics whose deletion was replayed.

    Damage here leaves no cluster to serve, so it ends the start.
    """
    path = metadata_path(directory)
    trust = directory.trust(METADATA_TOPIC, 0)
    log = open_log(node.fs, path, node.topic_config(METADATA_TOPIC), trust, now, node.say)
    _load_snapshot(node, log)
    if node.image.last_offset + 1 < log.start_offset:
        raise CorruptLog(
            f"{path}: begins at offset {log.start_offset}, and no whole snapshot up to there is beside it; "
            "restore the file or the directory from a copy"
        )
    deleted: set[UUID] = set()
    replayed = _replay(node.image, log, deleted)
    epoch = max(log.epochs.latest_epoch, node.image.last_epoch) + 1
    hosted = HostedPartition(METADATA_TOPIC, METADATA_TOPIC_ID, 0, epoch, log, directory, node.report_defect)
    node.metadata = hosted
    if replayed > HISTORY_RECORDS_MIN:
        _shorten(node, hosted, replayed, now)
    return deleted


def _replay(image: ClusterImage, log: Log, deleted: set[UUID]) -> int:
    """Apply what the image does not have yet; returns how many records that were."""
    count = 0
    for found in log.batches_from(log.start_offset):
        header = found.header
        if header.is_control or header.base_offset <= image.last_offset:
            continue
        segment = log.segments[log.segment_for(header.base_offset)]
        records = _records(segment.file.pread(header.size, found.position), segment.path())
        image.apply_all(records, last_offset=header.last_offset, last_epoch=header.leader_epoch)
        deleted.update(record.topic_id for record in records if isinstance(record, RemoveTopic))
        count += len(records)
    return count


def _records(batch: bytes, path: str) -> list[MetadataRecord]:
    records: list[MetadataRecord] = []
    try:
        for record in iterate_records(batch):
            if record.value is None:
                raise CorruptLog(f"{path}: a metadata record without content")
            records.append(decode_metadata_record(record.value))
    except InvalidRecords as error:
        advice = "restore the file or the directory from a copy"
        raise CorruptLog(f"{path}: a batch of metadata is damaged: {error}; {advice}") from error
    return records


# Snapshots


def _snapshots(node: Node, log: Log) -> list[tuple[int, str]]:
    """End offset and name of each snapshot file, newest first."""
    found = []
    for name in node.fs.list(log.directory):
        stem = name.removesuffix(SNAPSHOT_SUFFIX)
        if stem != name and stem[:20].isdigit():
            found.append((int(stem[:20]), name))
    return sorted(found, reverse=True)


def _load_snapshot(node: Node, log: Log) -> None:
    for end_offset, name in _snapshots(node, log):
        path = f"{log.directory}/{name}"
        if end_offset > log.end_offset:
            node.say(warn(f"{path}: stands for offsets the log does not have; not used"))
            continue
        image = ClusterImage()
        try:
            epoch = _apply_snapshot(image, read_whole(node.fs, path), path)
        except (CorruptLog, InvalidRecords) as error:
            node.say(warn(f"{path}: {error}; not used"))
            continue
        image.last_offset, image.last_epoch = end_offset - 1, epoch
        node.image = image
        return


def _apply_snapshot(image: ClusterImage, data: bytes, path: str) -> int:
    """Apply a whole snapshot; returns the epoch of its last record."""
    epoch = 0
    is_whole = False
    for header, batch in _batches(data):
        epoch = header.leader_epoch
        if header.is_control:
            is_whole = any(
                isinstance(decode_control_record(record.key or b"", record.value or b""), SnapshotFooter)
                for record in iterate_records(batch)
            )
        else:
            image.apply_all(_records(batch, path))
    if not is_whole:
        raise CorruptLog("the snapshot has no end")
    return epoch


def _batches(data: bytes) -> Iterator[tuple[BatchHeader, bytes]]:
    position = 0
    while position < len(data):
        header = check_whole(data, position)
        yield header, data[position : position + header.size]
        position += header.size


def encode_snapshot(image: ClusterImage, epoch: int, now: Now) -> bytes:
    """The image as Kafka's snapshot file: a header, the records in batches, a footer."""
    encoded = [record.encode() for record in snapshot.records(image)]
    parts = [_control_batch(SnapshotHeader(last_contained_log_timestamp=now.wall_ms), 0, epoch, now)]
    offset = 1
    for first in range(0, len(encoded), RECORDS_PER_BATCH):
        chunk = encoded[first : first + RECORDS_PER_BATCH]
        records = [Record(index, 0, None, value) for index, value in enumerate(chunk)]
        parts.append(build_batch(records, base_offset=offset, leader_epoch=epoch, base_timestamp=now.wall_ms))
        offset += len(chunk)
    parts.append(_control_batch(SnapshotFooter(), offset, epoch, now))
    return b"".join(parts)


def _control_batch(record: ControlRecord, offset: int, epoch: int, now: Now) -> bytes:
    return build_batch(
        [Record(0, 0, record.encode_key(), record.encode_value())],
        base_offset=offset,
        leader_epoch=epoch,
        base_timestamp=now.wall_ms,
        is_control=True,
    )


def _shorten(node: Node, hosted: HostedPartition, replayed: int, now: Now) -> None:
    needed = _count(snapshot.records(node.image))
    if replayed <= HISTORY_FACTOR * needed:
        return
    log = hosted.log
    epoch = node.image.last_epoch
    path = f"{log.directory}/{offset_name(log.end_offset)}-{epoch:010d}{SNAPSHOT_SUFFIX}"
    older = _snapshots(node, log)
    try:
        write_atomically(node.fs, path, encode_snapshot(node.image, epoch, now))
        log.roll(now)
    except OSError as error:
        if error.errno not in REFUSED_ERRNOS:
            raise
        node.say(warn(f"the metadata log could not be shortened, the next start tries again: {error}"))
        return
    flush_each(node.fs, log.begin_flush().targets)
    log.flushed(log.end_position)
    node.move_log_start(hosted, log.end_offset)
    for _, name in older:
        node.fs.remove(f"{log.directory}/{name}")
    node.say(f"the metadata log's {replayed} records were history for the most part: {needed} are in {path}")


def _count(records: Iterable[MetadataRecord]) -> int:
    return sum(1 for _ in records)
