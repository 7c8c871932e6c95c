"""Taking the manifest of a data directory.

`digest_ahead` reads what a running node will not change any more and remembers its digests; `take` makes the manifest
of a node that was stopped cleanly, and reads only what is not remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

from holdfast.atomic import read_whole
from holdfast.broker.log.checkpoints import encode_uuid
from holdfast.broker.log.producer_state import decode_snapshot
from holdfast.broker.log.scan import read_batches
from holdfast.broker.log.segment import SNAPSHOT_SUFFIX
from holdfast.broker.metadata.image import ClusterImage, Resource, ResourceType
from holdfast.broker.metadata.names import REQUIRED_SETTINGS
from holdfast.manifest.digesting import BlockCut, DigestCache, Progress
from holdfast.manifest.directory import FS, DataDirectories, LogFiles
from holdfast.manifest.folding import LastByKey, encode_table
from holdfast.manifest.keys_ahead import fold, fold_ahead
from holdfast.manifest.model import (
    Block,
    CommittedOffset,
    DirectoryManifest,
    GroupManifest,
    KeyTable,
    Manifest,
    PartitionManifest,
    ProducerEntry,
    ResourceSettings,
    SegmentDigest,
    TopicManifest,
    TransactionManifest,
)
from holdfast.wire.coordinator_records import (
    ConsumerGroupMetadataKey,
    CoordinatorRecord,
    GroupMetadataKey,
    OffsetCommitKey,
    OffsetCommitValue,
    TransactionLogKey,
    TransactionLogValue,
    decode_group_record,
    decode_transaction_record,
)

CONSUMER_OFFSETS: Final = "__consumer_offsets"
TRANSACTION_STATE: Final = "__transaction_state"
CLEANUP_POLICY: Final = "cleanup.policy"

KeysAhead = Callable[[str, int], str | None]
"""Where the keys of a compacted partition are that were folded ahead; None where nobody does."""
KeepTable = Callable[[str, bytes], None]
"""Takes the name of a key table and its content."""


def digest_ahead(
    directories: DataDirectories,
    cache: DigestCache,
    progress: Progress = lambda count: None,
    keys_of: KeysAhead = lambda topic, index: None,
    is_compacted: Callable[[str], bool] | None = None,
) -> int:
    """Digest what will not change any more; returns how many bytes are known then."""
    compacted = is_compacted or (lambda topic: topic_is_compacted(directories.image, topic))
    total = 0
    paths = set()
    for files in directories.partitions.values():
        for base_offset in files.segments():
            if base_offset >= directories.below(files):
                break
            path = files.segment_path(base_offset)
            paths.add(path)
            digest = cache.digest(path, base_offset, below=directories.below(files), progress=progress)
            total += digest.bytes
        state_path = keys_of(files.topic, files.index) if compacted(files.topic) else None
        if state_path is not None and directories.below(files):
            fold_ahead(files, directories.below(files), state_path)
    cache.keep_only(paths)
    return total


def take(
    directories: DataDirectories,
    cache: DigestCache,
    now_ms: int,
    keep_table: KeepTable | None = None,
    is_compacted: Callable[[str], bool] | None = None,
    progress: Progress = lambda count: None,
    keys_of: KeysAhead = lambda topic, index: None,
) -> Manifest:
    """The manifest of a stopped node. With `keep_table`, compacted partitions get a table of their keys."""
    image = directories.image
    compacted = is_compacted or (lambda topic: topic_is_compacted(image, topic))
    topics = []
    for name in sorted(image.topics):
        topic = image.topics[name]
        keep = keep_table if compacted(name) else None
        topics.append(
            TopicManifest(
                name,
                encode_uuid(topic.topic_id.bytes),
                dict(image.settings(Resource(ResourceType.TOPIC, name))),
                compacted(name),
                tuple(
                    _partition(
                        directories.partitions[name, each.index],
                        each.leader_epoch,
                        cache,
                        keep,
                        keys_of(name, each.index),
                        progress,
                    )
                    for each in topic.partitions
                    if (name, each.index) in directories.partitions
                ),
            )
        )
    return Manifest(
        cluster_id=directories.cluster_id,
        node_id=directories.node_id,
        taken_at_ms=now_ms,
        metadata_end_offset=image.last_offset + 1,
        metadata_epoch=image.last_epoch,
        next_producer_id=image.next_producer_id,
        directories=tuple(
            DirectoryManifest(encode_uuid(directories.ids[path].bytes), path) for path in directories.paths
        ),
        topics=tuple(topics),
        groups=groups_in(directories),
        transactions=transactions_in(directories),
        resources=tuple(
            ResourceSettings(int(resource.type), resource.name, dict(settings))
            for resource, settings in sorted(image.configs.items())
            if resource.type is not ResourceType.TOPIC
        ),
        features=dict(image.features),
    )


def topic_is_compacted(image: ClusterImage, topic: str, default: str = "delete") -> bool:
    settings = {**image.settings(Resource(ResourceType.TOPIC, topic)), **REQUIRED_SETTINGS.get(topic, {})}
    return "compact" in settings.get(CLEANUP_POLICY, default)


def _partition(
    files: LogFiles,
    leader_epoch: int,
    cache: DigestCache,
    keep_table: KeepTable | None,
    state_path: str | None,
    progress: Progress,
) -> PartitionManifest:
    segments: list[SegmentDigest] = [
        cache.digest(files.segment_path(base_offset), base_offset, progress=progress)
        for base_offset in files.segments()
    ]
    end_offset = segments[-1].end_offset if segments else files.log_start
    table = None
    if keep_table is not None:
        keys = fold(files, end_offset, state_path)
        name = f"keys/{files.topic}-{files.index}.keys"
        data = encode_table(keys.latest)
        keep_table(name, data)
        table = KeyTable(name, len(keys.latest), hashlib.sha256(data).hexdigest())
    log_start = max(files.log_start, segments[0].base_offset if segments else 0)
    return PartitionManifest(
        index=files.index,
        directory_id=encode_uuid(files.directory_id.bytes),
        leader_epoch=leader_epoch,
        log_start=log_start,
        end_offset=end_offset,
        segments=tuple(segments),
        producers=_producers(files, end_offset),
        key_table=table,
        head=_head(files, segments, log_start),
    )


def _head(files: LogFiles, segments: Sequence[SegmentDigest], log_start: int) -> Block | None:
    """What is left to be read of the block that the log start is in: whole batches, from the one that holds it."""
    for segment in segments:
        start, first = 0, segment.base_offset
        for block in segment.blocks:
            if first < log_start < block.offset:
                cut, found = BlockCut(start), None
                with closing(FS.open(files.segment_path(segment.base_offset), "read")) as file:
                    for batch in read_batches(file, block.position, start):
                        if batch.header.next_offset > log_start:
                            header = batch.header
                            found = cut.add(batch.data, header.next_offset, header.records_count)
                found = found or cut.finish()
                return None if found is None else found._replace(position=block.position)
            start, first = block.position, block.offset
    return None


def _producers(files: LogFiles, end_offset: int) -> tuple[ProducerEntry, ...]:
    """As the snapshot of a clean stop has them; the newest batch of each. Without one, none is promised."""
    path = files.segment_path(end_offset, SNAPSHOT_SUFFIX)
    if not FS.exists(path):
        return ()
    newest: dict[int, ProducerEntry] = {}
    for entry in decode_snapshot(read_whole(FS, path), path):
        known = newest.get(entry.producer_id)
        if known is None or entry.last_offset >= known.last_offset:
            newest[entry.producer_id] = ProducerEntry(
                entry.producer_id,
                entry.epoch,
                entry.last_sequence,
                entry.last_offset,
                entry.transaction_first_offset,
                entry.timestamp,
            )
    return tuple(newest[producer_id] for producer_id in sorted(newest))


# Coordinators: their state is the last record of each key of an internal topic


def _latest(
    directories: DataDirectories,
    topic: str,
    decode: Callable[[bytes, bytes | None], tuple[CoordinatorRecord, CoordinatorRecord | None]],
) -> list[tuple[CoordinatorRecord, CoordinatorRecord | None]]:
    found = []
    for (name, _), files in sorted(directories.partitions.items()):
        if name != topic:
            continue
        keys: LastByKey[bytes | None] = LastByKey(bytes, lambda _, record: record.value)
        for batch in files.batches(directories.below(files)):
            keys.add(batch)
        found += [decode(key, each.content) for key, each in keys.latest.items() if each.content is not None]
    return found


def groups_in(directories: DataDirectories) -> tuple[GroupManifest, ...]:
    kinds: dict[str, str] = {}
    offsets: dict[str, list[CommittedOffset]] = {}
    for key, value in _latest(directories, CONSUMER_OFFSETS, decode_group_record):
        match key, value:
            case OffsetCommitKey(), OffsetCommitValue():
                committed = CommittedOffset(key.topic, key.partition, value.offset, value.metadata)
                offsets.setdefault(key.group, []).append(committed)
            case GroupMetadataKey(), _:
                kinds.setdefault(key.group, "classic")
            case ConsumerGroupMetadataKey(), _:
                kinds[key.group_id] = "consumer"
            case _:
                pass  # members and assignments come and go with the members
    return tuple(
        GroupManifest(group, kinds.get(group, ""), tuple(sorted(offsets.get(group, ()))))
        for group in sorted(kinds.keys() | offsets.keys())
    )


def transactions_in(directories: DataDirectories) -> tuple[TransactionManifest, ...]:
    found = []
    for key, value in _latest(directories, TRANSACTION_STATE, decode_transaction_record):
        if isinstance(key, TransactionLogKey) and isinstance(value, TransactionLogValue):
            partitions = tuple(
                (each.topic, number)
                for each in value.transaction_partitions or ()
                for number in each.partition_ids
            )
            found.append(
                TransactionManifest(
                    key.transactional_id,
                    value.producer_id,
                    value.producer_epoch,
                    value.transaction_status,
                    partitions,
                )
            )
    return tuple(sorted(found, key=lambda each: each.transactional_id))
