"""The manifest: what a data directory held when it was taken, so that it can be held against whatever has it later.

One JSON document. Records are in it by digest: a log is cut into blocks of whole batches, and each block has the
SHA-256 of its bytes as they stand in the file. Every Kafka serves batches as they are stored and keeps them so on every
replica, so the same bytes can be asked for over the wire. Compaction rewrites batches. Therefore a partition of a
compacted topic has a table of its keys as well, in a file beside the document: the last record of each key by digest.

Unknown names in a document are left alone; another major version is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from holdfast import __version__
from holdfast.errors import HoldfastError

KIND: Final = "holdfast-manifest"
VERSION: Final = 1


class ManifestError(HoldfastError):
    """A manifest cannot be read, or is none that this version knows."""


class Block(NamedTuple):
    """Whole batches in a row, from where the block before ends."""

    position: int
    """Where in the file they end."""
    offset: int
    """The offset after their last one."""
    records: int
    """How many records their headers tell of."""
    sha256: str
    """Of their bytes."""


@dataclass(frozen=True)
class SegmentDigest:
    base_offset: int
    blocks: tuple[Block, ...] = ()

    @property
    def bytes(self) -> int:
        return self.blocks[-1].position if self.blocks else 0

    @property
    def records(self) -> int:
        return sum(block.records for block in self.blocks)

    @property
    def end_offset(self) -> int:
        return self.blocks[-1].offset if self.blocks else self.base_offset


class ProducerEntry(NamedTuple):
    """What the log knows of an idempotent producer."""

    producer_id: int
    epoch: int
    last_sequence: int
    last_offset: int
    transaction_first_offset: int
    """-1 when no transaction is open."""
    timestamp_ms: int
    """When it was last heard of: Kafka forgets producers after a day."""


@dataclass(frozen=True)
class KeyTable:
    """Where the table of a compacted partition's keys is, and what it must be."""

    file: str
    """Relative to the document."""
    keys: int
    sha256: str


@dataclass(frozen=True)
class PartitionManifest:
    index: int
    directory_id: str
    leader_epoch: int
    log_start: int
    end_offset: int
    segments: tuple[SegmentDigest, ...] = ()
    producers: tuple[ProducerEntry, ...] = ()
    key_table: KeyTable | None = None
    head: Block | None = None
    """Where the log starts within a block: its batches from the one that holds the log start."""

    @property
    def records(self) -> int:
        return sum(segment.records for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True)
class TopicManifest:
    name: str
    topic_id: str
    settings: Mapping[str, str]
    is_compacted: bool
    partitions: tuple[PartitionManifest, ...] = ()


class CommittedOffset(NamedTuple):
    topic: str
    partition: int
    offset: int
    metadata: str


@dataclass(frozen=True)
class GroupManifest:
    group: str
    kind: str
    """`classic`, `consumer`, or empty where only offsets are known of it."""
    offsets: tuple[CommittedOffset, ...] = ()


@dataclass(frozen=True)
class TransactionManifest:
    transactional_id: str
    producer_id: int
    producer_epoch: int
    status: int
    """As Kafka numbers it: 0 empty, 1 ongoing, 2 and 3 prepared commit and abort, 4 and 5 completed ones."""
    partitions: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ResourceSettings:
    """Settings altered while the broker ran, of anything but a topic."""

    type: int
    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class DirectoryManifest:
    directory_id: str
    path: str


@dataclass(frozen=True)
class Manifest:
    cluster_id: str
    node_id: int
    taken_at_ms: int
    metadata_end_offset: int
    """The end of the metadata log."""
    metadata_epoch: int
    next_producer_id: int
    directories: tuple[DirectoryManifest, ...] = ()
    topics: tuple[TopicManifest, ...] = ()
    groups: tuple[GroupManifest, ...] = ()
    transactions: tuple[TransactionManifest, ...] = ()
    resources: tuple[ResourceSettings, ...] = ()
    features: Mapping[str, int] = field(default_factory=dict)

    def partitions(self) -> Iterator[tuple[TopicManifest, PartitionManifest]]:
        for topic in self.topics:
            for partition in topic.partitions:
                yield topic, partition

    @property
    def records(self) -> int:
        return sum(partition.records for _, partition in self.partitions())

    @property
    def bytes(self) -> int:
        return sum(partition.bytes for _, partition in self.partitions())


def to_json(manifest: Manifest) -> dict[str, Any]:
    content = {"kind": KIND, "version": VERSION, "holdfast": __version__, **asdict(manifest)}
    # Through JSON once, so that what is hashed is what a reader of the file will hash.
    document: dict[str, Any] = json.loads(json.dumps(content))
    return {**document, "sha256": _digest(document)}


def encode(manifest: Manifest) -> bytes:
    return json.dumps(to_json(manifest), separators=(",", ":")).encode() + b"\n"


def decode(data: bytes, path: str) -> Manifest:
    """The manifest in a file; `ManifestError` when it is none, or was changed."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise ManifestError(f"{path} is no manifest")
        if document.get("version") != VERSION:
            raise ManifestError(
                f"{path} has version {document.get('version')!r}; this holdfast reads version {VERSION}"
            )
        expected = document.pop("sha256", None)
        if expected != _digest(document):
            raise ManifestError(f"{path} was changed: its content does not have the hash that it says")
        return _manifest(document)
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path} is no manifest: {error!r}") from error


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(document: Mapping[str, Any]) -> Manifest:
    return Manifest(
        cluster_id=document["cluster_id"],
        node_id=document["node_id"],
        taken_at_ms=document["taken_at_ms"],
        metadata_end_offset=document["metadata_end_offset"],
        metadata_epoch=document["metadata_epoch"],
        next_producer_id=document["next_producer_id"],
        directories=tuple(
            DirectoryManifest(each["directory_id"], each["path"]) for each in document["directories"]
        ),
        topics=tuple(map(_topic, document["topics"])),
        groups=tuple(
            GroupManifest(
                each["group"],
                each["kind"],
                tuple(CommittedOffset(*offset) for offset in each["offsets"]),
            )
            for each in document["groups"]
        ),
        transactions=tuple(
            TransactionManifest(
                each["transactional_id"],
                each["producer_id"],
                each["producer_epoch"],
                each["status"],
                tuple((topic, partition) for topic, partition in each["partitions"]),
            )
            for each in document["transactions"]
        ),
        resources=tuple(
            ResourceSettings(each["type"], each["name"], each["settings"]) for each in document["resources"]
        ),
        features=document["features"],
    )


def _topic(document: Mapping[str, Any]) -> TopicManifest:
    return TopicManifest(
        document["name"],
        document["topic_id"],
        document["settings"],
        document["is_compacted"],
        tuple(map(_partition, document["partitions"])),
    )


def _partition(document: Mapping[str, Any]) -> PartitionManifest:
    table = document["key_table"]
    return PartitionManifest(
        index=document["index"],
        directory_id=document["directory_id"],
        leader_epoch=document["leader_epoch"],
        log_start=document["log_start"],
        end_offset=document["end_offset"],
        segments=tuple(segment_from_json(each) for each in document["segments"]),
        producers=tuple(ProducerEntry(*each) for each in document["producers"]),
        key_table=None if table is None else KeyTable(table["file"], table["keys"], table["sha256"]),
        head=None if document["head"] is None else Block(*document["head"]),
    )


def segment_from_json(document: Mapping[str, Any]) -> SegmentDigest:
    return SegmentDigest(document["base_offset"], blocks_from_json(document["blocks"]))


def blocks_from_json(blocks: Sequence[Sequence[Any]]) -> tuple[Block, ...]:
    return tuple(Block(*block) for block in blocks)
