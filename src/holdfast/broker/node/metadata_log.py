"""The metadata log and the image that is built from it: replayed at start, and shortened by a snapshot when most of
it is history.

A change is applied to the image when its record is appended, and every response that is built while some change is
not durable waits: see `MetadataLog.is_durable`.

Every start adds a record per partition, so the log would grow for ever. When it holds many more records than the
image needs, a start writes the image as a snapshot, `<end offset>-<epoch>.checkpoint` in Kafka's format, and lets
the log begin there. The snapshot is durable before the new log start is, and that before any segment goes, so a
crash at any point leaves either the whole log or a snapshot with the rest of it. A snapshot without its last
record is not whole and is not used.

Apache Kafka may have written the log and its snapshots before us, or in between: its control records tell who votes
(`Quorum`), and `quorum-state` beside the log which epoch it has promised to leave behind.

`Settings` are those in force: of the broker, and of each topic. The image tells what was altered while running.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.atomic import flush_each, read_whole, write_atomically
from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery import open_log
from holdfast.broker.log.scan import Batch
from holdfast.broker.log.segment import LOG_SUFFIX, offset_name
from holdfast.broker.metadata import snapshot
from holdfast.broker.metadata.image import (
    ClusterImage,
    CountedRecords,
    Resource,
    ResourceType,
    TopicImage,
    UnknownMetadata,
)
from holdfast.broker.metadata.names import METADATA_TOPIC, REQUIRED_SETTINGS
from holdfast.broker.node.directories import REFUSED_ERRNOS, LogDirectory, holds_records
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.other_writer import QUORUM_STATE_FILE, OtherWriter, put_back_appended
from holdfast.broker.partition.offsets import CommitWaiter
from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig
from holdfast.errors import ApiError, CorruptLog, InvalidRecords
from holdfast.saying import Say, warn
from holdfast.seams import FileSystem, Now
from holdfast.wire.batch import BatchHeader, Record, build_batch, check_whole, iterate_records
from holdfast.wire.control_records import (
    ControlRecord,
    KRaftVersion,
    LeaderChange,
    SnapshotFooter,
    SnapshotHeader,
    Voters,
    decode_control_record,
)
from holdfast.wire.metadata_records import (
    Config,
    MetadataRecord,
    Partition,
    PartitionChange,
    RegisterBroker,
    RemoveTopic,
    Topic,
    decode_metadata_record,
)


class Settings:
    def __init__(self, config: BrokerConfig, altered: Callable[[Resource], Mapping[str, str]]) -> None:
        self.broker = config
        self._altered = altered
        self._topics: dict[str, TopicConfig] = {}

    def topic(self, topic: str) -> TopicConfig:
        config = self._topics.get(topic)
        if config is None:
            altered = self._altered(Resource(ResourceType.TOPIC, topic))
            config = self._topics[topic] = self.broker.topic_config(
                {**altered, **REQUIRED_SETTINGS.get(topic, {})}
            )
        return config

    def forget_topic(self, topic: str) -> None:
        self._topics.pop(topic, None)

    def reload(self) -> None:
        """Take the image's settings of this broker into force; topics resolve theirs afresh."""
        self.broker = self.broker.with_dynamic(
            self._altered(Resource(ResourceType.BROKER, str(self.broker.node_id))),
            self._altered(Resource(ResourceType.BROKER, "")),
        )
        self._topics.clear()


METADATA_TOPIC_ID: Final = UUID(int=1)
"""The id Kafka reserves for the metadata topic."""
SNAPSHOT_SUFFIX: Final = ".checkpoint"
HISTORY_RECORDS_MIN: Final = 5_000
"""A log with fewer records than this is replayed in a blink, whatever it holds."""
HISTORY_FACTOR: Final = 4
"""How many times more records than its image needs a log may hold."""
RECORDS_PER_BATCH: Final = 1_000
TopicsBefore = dict[UUID, TopicImage | None]


@dataclass(slots=True)
class Quorum:
    """What the control records of the log say of those who vote in it. We write none."""

    voters: frozenset[int] = frozenset()
    kept: dict[type[ControlRecord], ControlRecord] = field(default_factory=dict)
    """The last KRaftVersion and Voters, without which Apache Kafka would find no voters: snapshots keep them."""
    led_epochs: set[int] = field(default_factory=set)
    """Epochs that began with a LeaderChange, and so were Apache Kafka's."""
    registered_in: dict[int, int] = field(default_factory=dict)
    """The epoch in which each broker last registered, as far as the log goes back."""

    def take(self, epoch: int, batch: bytes) -> None:
        for record in iterate_records(batch):
            match decode_control_record(record.key or b"", record.value or b""):
                case LeaderChange() as change:
                    self.led_epochs.add(epoch)
                    self.voters = frozenset(voter.voter_id for voter in change.voters)
                case KRaftVersion() as version:
                    self.kept[KRaftVersion] = version
                case Voters() as changed:
                    self.kept[Voters] = changed
                    self.voters = frozenset(voter.voter_id for voter in changed.voters)

    def registered_with_kafka(self, broker_id: int) -> bool:
        """Whether it was Apache Kafka, as far as the log tells, that the broker was last registered by."""
        epoch = self.registered_in.get(broker_id)
        return epoch is None or epoch in self.led_epochs


def metadata_path(directory: LogDirectory) -> str:
    return f"{directory.path}/{METADATA_TOPIC}-0"


def find_metadata(fs: FileSystem, directories: Iterable[LogDirectory]) -> list[LogDirectory]:
    """Every online log directory that holds the metadata log, wherever it stands in `log.dirs`.

    One that is there and empty is of a first start that was interrupted, and counts when there is no other.
    """
    there = [each for each in directories if not each.offline and fs.is_directory(metadata_path(each))]
    return [each for each in there if holds_records(fs, metadata_path(each))] or [
        each for each in there if each.meta is not None
    ]


def make_metadata(fs: FileSystem, directory: LogDirectory) -> None:
    """Begin a cluster's metadata log. Directories get their identity afterwards, which tells that there is a log."""
    fs.make_directory(metadata_path(directory))
    fs.flush_directory(directory.path)


class MetadataLog:
    def __init__(
        self,
        fs: FileSystem,
        config: BrokerConfig,
        request_flush: Callable[[HostedPartition], None],
        report: Callable[[str, Exception], None],
        say: Say,
    ) -> None:
        self._fs = fs
        self._request_flush = request_flush
        self._report = report
        self._say = say
        self.image = ClusterImage()
        self.settings = Settings(config, lambda resource: self.image.settings(resource))
        self._hosted: HostedPartition | None = None
        self._other_writer: OtherWriter | None = None
        self.quorum = Quorum()
        self.is_in_transaction = False
        """Whether the log ended inside a transaction of Apache Kafka's, of which nothing counts."""
        self.is_durable = True
        """Whether everything the image shows is durable. While it is not, responses wait: see `when_durable`."""
        self.on_change: Callable[[Set[Resource], TopicsBefore, Now], None] = lambda *_: None
        """Takes whether settings have changed, and the topics that records are about as they were before."""

    @property
    def is_open(self) -> bool:
        return self._hosted is not None

    @property
    def hosted(self) -> HostedPartition:
        """The log as a partition of this broker, once the start has opened it."""
        assert self._hosted is not None
        return self._hosted

    def open(
        self, directory: LogDirectory, move_start: Callable[[HostedPartition, int], None], now: Now
    ) -> set[UUID]:
        """Rebuild the image; returns the topics whose deletion was replayed.

        Damage here leaves no cluster to serve, so it ends the start.
        """
        path = metadata_path(directory)
        put_back_appended(self._fs, path, self._say)
        # Kafka's checkpoints leave this log out. Whether its beginning is there, the snapshots tell.
        trust = directory.trust(METADATA_TOPIC, 0)._replace(start_offset_known=False)
        log = open_log(self._fs, path, self.settings.topic(METADATA_TOPIC), trust, now, self._say)
        self._load_snapshot(log)
        if self.image.last_offset + 1 < log.start_offset:
            raise CorruptLog(
                f"{path}: begins at offset {log.start_offset}, and no whole snapshot up to there is beside it; "
                "restore the file or the directory from a copy"
            )
        deleted: set[UUID] = set()
        counted = CountedRecords()
        replayed = _replay(self.image, log, deleted, counted, self.quorum)
        self.is_in_transaction = counted.is_in_transaction
        epoch = 1 + max(
            log.epochs.latest_epoch, self.image.last_epoch, _promised_epoch(self._fs, path, self._say)
        )
        self._hosted = HostedPartition(
            METADATA_TOPIC, METADATA_TOPIC_ID, 0, epoch, log, directory, self._report
        )
        self._other_writer = OtherWriter(self._fs, log)
        if replayed > HISTORY_RECORDS_MIN and not self.is_in_transaction:
            self._shorten(replayed, move_start, now)
        return deleted

    # Changes

    def append(self, records: Sequence[MetadataRecord], now: Now) -> None:
        """Append changes, apply them, and hold responses back until they are durable."""
        if not records:
            return
        metadata = self.hosted
        self.require_alone()
        if metadata.offline:
            raise ApiError(ErrorCode.kafka_storage_error, "the metadata log is offline")
        batch = build_batch(
            [Record(index, 0, None, record.encode()) for index, record in enumerate(records)],
            base_timestamp=now.wall_ms,
        )
        stored = metadata.append(check_whole(batch), batch, now)
        assert self._other_writer is not None
        self._other_writer.note(stored, batch, now)
        before = {
            record.topic_id: self.image.topics_by_id.get(record.topic_id)
            for record in records
            if isinstance(record, Topic | Partition | PartitionChange | RemoveTopic)
        }
        self.image.apply_all(records, last_offset=stored.last_offset, last_epoch=metadata.leader_epoch)
        self.is_durable = False
        metadata.offsets.when_committed(stored.next_offset, lambda error: self._committed())
        self._request_flush(metadata)
        altered = {
            Resource(ResourceType(record.resource_type), record.resource_name)
            for record in records
            if isinstance(record, Config)
        }
        self.on_change(altered, before, now)

    def require_alone(self) -> None:
        """Take the log offline where another program writes to it."""
        if self._other_writer is None or self.hosted.offline or self.hosted.directory.is_closed:
            return
        try:
            self._other_writer.require_none()
        except OSError as error:
            self.hosted.directory.refuses(error)

    def signs_of_another(self) -> tuple[int, int, int] | None:
        """What changes as long as another program, which has been found, writes to the log; None if none has been."""
        other = self._other_writer
        return other.signs() if other is not None and other.is_found else None

    def _committed(self) -> None:
        self.is_durable = self.hosted.offsets.is_committed(self.hosted.log.end_offset)

    def when_durable(self, waiter: CommitWaiter) -> None:
        """Call `waiter(None)` once everything the image shows is durable, or with the error that ended it."""
        self.hosted.offsets.when_committed(self.hosted.log.end_offset, waiter)

    # Snapshots

    def _load_snapshot(self, log: Log) -> None:
        for end_offset, name in _snapshots(self._fs, log.directory):
            path = f"{log.directory}/{name}"
            if end_offset > log.end_offset:
                self._say(warn(f"{path}: stands for offsets the log does not have; not used"))
                continue
            image = ClusterImage()
            try:
                epoch = _apply_snapshot(image, read_whole(self._fs, path), path, self.quorum)
            except (CorruptLog, InvalidRecords) as error:
                self._say(warn(f"{path}: {error}; not used"))
                continue
            image.last_offset, image.last_epoch = end_offset - 1, epoch
            self.image = image
            return

    def _shorten(self, replayed: int, move_start: Callable[[HostedPartition, int], None], now: Now) -> None:
        needed = sum(1 for _ in snapshot.records(self.image))
        if replayed <= HISTORY_FACTOR * needed:
            return
        log = self.hosted.log
        epoch = self.image.last_epoch
        path = f"{log.directory}/{offset_name(log.end_offset)}-{epoch:010d}{SNAPSHOT_SUFFIX}"
        older = _snapshots(self._fs, log.directory)
        try:
            write_atomically(self._fs, path, encode_snapshot(self.image, epoch, now, self.quorum))
            log.roll(now)
        except OSError as error:
            if error.errno not in REFUSED_ERRNOS:
                raise
            self._say(warn(f"the metadata log could not be shortened, the next start tries again: {error}"))
            return
        flush_each(self._fs, log.begin_flush().targets)
        log.advance_recovery_point(log.end_position)
        move_start(self.hosted, log.end_offset)
        for _, name in older:
            self._fs.remove(f"{log.directory}/{name}")
        self._say(
            f"the metadata log's {replayed} records were history for the most part: {needed} are in {path}"
        )


def _snapshots(fs: FileSystem, path: str) -> list[tuple[int, str]]:
    """End offset and name of each snapshot file, newest first."""
    found = []
    for name in fs.list(path):
        stem = name.removesuffix(SNAPSHOT_SUFFIX)
        if stem != name and stem[:20].isdigit():
            found.append((int(stem[:20]), name))
    return sorted(found, reverse=True)


def _promised_epoch(fs: FileSystem, path: str, say: Say) -> int:
    """The epoch of Apache Kafka's last election, in which it may have written nothing yet; -1 without one."""
    state = f"{path}/{QUORUM_STATE_FILE}"
    if not fs.exists(state):
        return -1
    try:
        return int(json.loads(read_whole(fs, state))["leaderEpoch"])
    except (ValueError, KeyError, TypeError) as error:
        say(warn(f"{state}: cannot be read ({error!r}); the log's own epochs have to do"))
        return -1


def load_image(
    fs: FileSystem, directory: str, batches: Iterable[Batch], quorum: Quorum | None = None
) -> ClusterImage:
    """The image that the files of a metadata log describe, and `batches` of it; nothing is changed.

    `quorum` learns who votes. Raises `UnknownMetadata` for a record that this version does not know.
    """
    image, quorum, counted = ClusterImage(), quorum or Quorum(), CountedRecords()
    for end_offset, name in _snapshots(fs, directory):
        path = f"{directory}/{name}"
        found = ClusterImage()
        try:
            epoch = _apply_snapshot(found, read_whole(fs, path), path, quorum)
        except UnknownMetadata:
            raise
        except (CorruptLog, InvalidRecords):
            continue  # not whole: an older one and the log behind it are
        image = found
        image.last_offset, image.last_epoch = end_offset - 1, epoch
        break
    for batch in batches:
        _replay_batch(image, batch.header, bytes(batch.data), directory, counted, quorum)
    return image


def read_snapshot(data: bytes, path: str, quorum: Quorum) -> tuple[ClusterImage, int]:
    """The image in a whole snapshot, and the epoch of its last record."""
    image = ClusterImage()
    return image, _apply_snapshot(image, data, path, quorum)


def readable_batches(fs: FileSystem, path: str) -> Iterator[Batch]:
    """The batches of a metadata log up to the first damage; nothing is changed."""
    for name in fs.list(path):
        if name.endswith(LOG_SUFFIX) and name[:20].isdigit():
            try:
                for header, batch in _batches(read_whole(fs, f"{path}/{name}")):
                    yield Batch(header, memoryview(batch))
            except InvalidRecords:
                return


def _replay(
    image: ClusterImage, log: Log, deleted: set[UUID], counted: CountedRecords, quorum: Quorum
) -> int:
    """Apply what the image does not have yet; returns how many records that were."""
    count = 0
    for found in log.batches_from(log.start_offset):
        segment = log.segments[log.segment_for(found.header.base_offset)]
        batch = segment.file.pread(found.header.size, found.position)
        records = _replay_batch(image, found.header, batch, segment.path(), counted, quorum)
        deleted.update(record.topic_id for record in records if isinstance(record, RemoveTopic))
        count += len(records)
    return count


def _replay_batch(
    image: ClusterImage,
    header: BatchHeader,
    batch: bytes,
    path: str,
    counted: CountedRecords,
    quorum: Quorum,
) -> list[MetadataRecord]:
    """Apply a batch of the log unless the image has it already; returns the records that count by now."""
    if header.base_offset <= image.last_offset:
        return []
    if header.is_control:
        quorum.take(header.leader_epoch, batch)
        image.apply_all((), last_offset=header.last_offset, last_epoch=header.leader_epoch)
        return []
    records = counted.take(_records(batch, path))
    image.apply_all(records, last_offset=header.last_offset, last_epoch=header.leader_epoch)
    for record in records:
        if isinstance(record, RegisterBroker):
            quorum.registered_in[record.broker_id] = header.leader_epoch
    return records


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


def _apply_snapshot(image: ClusterImage, data: bytes, path: str, quorum: Quorum) -> int:
    """Apply a whole snapshot; returns the epoch of its last record."""
    epoch = 0
    is_whole = False
    voted = Quorum()
    for header, batch in _batches(data):
        epoch = header.leader_epoch
        if header.is_control:
            voted.take(epoch, batch)
            is_whole = any(
                isinstance(decode_control_record(record.key or b"", record.value or b""), SnapshotFooter)
                for record in iterate_records(batch)
            )
        else:
            image.apply_all(_records(batch, path))
    if not is_whole:
        raise CorruptLog("the snapshot has no end")
    quorum.voters, quorum.kept = voted.voters, voted.kept
    return epoch


def _batches(data: bytes) -> Iterator[tuple[BatchHeader, bytes]]:
    position = 0
    while position < len(data):
        header = check_whole(data, position)
        yield header, data[position : position + header.size]
        position += header.size


def encode_snapshot(image: ClusterImage, epoch: int, now: Now, quorum: Quorum | None = None) -> bytes:
    """The image as Kafka's snapshot file: a header with who votes, the records in batches, a footer."""
    encoded = [record.encode() for record in snapshot.records(image)]
    kept = quorum.kept if quorum is not None else {}
    head = [
        SnapshotHeader(last_contained_log_timestamp=now.wall_ms),
        *(kept[kind] for kind in (KRaftVersion, Voters) if kind in kept),
    ]
    parts = [_control_batch(head, 0, epoch, now)]
    offset = len(head)
    for first in range(0, len(encoded), RECORDS_PER_BATCH):
        chunk = encoded[first : first + RECORDS_PER_BATCH]
        records = [Record(index, 0, None, value) for index, value in enumerate(chunk)]
        parts.append(build_batch(records, base_offset=offset, leader_epoch=epoch, base_timestamp=now.wall_ms))
        offset += len(chunk)
    parts.append(_control_batch([SnapshotFooter()], offset, epoch, now))
    return b"".join(parts)


def _control_batch(records: Sequence[ControlRecord], offset: int, epoch: int, now: Now) -> bytes:
    return build_batch(
        [
            Record(index, 0, record.encode_key(), record.encode_value())
            for index, record in enumerate(records)
        ],
        base_offset=offset,
        leader_epoch=epoch,
        base_timestamp=now.wall_ms,
        is_control=True,
    )
