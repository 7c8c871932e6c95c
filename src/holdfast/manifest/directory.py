"""A data directory as its files describe it, read and not changed.

Whoever looks at a stopped node's directories sees all that is in them. Beside a running node only what lies below the
recovery points is sure to stay, and `read` with `is_running` goes no further, the metadata log included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from holdfast.broker.log import checkpoints
from holdfast.broker.log.scan import ANYWHERE, Batch, read_batches
from holdfast.broker.log.segment import LOG_SUFFIX
from holdfast.broker.metadata.image import ClusterImage
from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.directories import parse_name
from holdfast.broker.node.metadata_log import load_image
from holdfast.errors import DataDirectoryError
from holdfast.real import RealFileSystem

METADATA_DIRECTORY: Final = f"{METADATA_TOPIC}-0"
FS: Final = RealFileSystem()

Key = tuple[str, int]


@dataclass(frozen=True)
class LogFiles:
    """The files of one partition."""

    topic: str
    index: int
    path: str
    directory_id: UUID
    log_start: int
    recovery_point: int

    def segments(self) -> list[int]:
        """Base offsets, in order."""
        stems = [name.removesuffix(LOG_SUFFIX) for name in FS.list(self.path) if name.endswith(LOG_SUFFIX)]
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def segment_path(self, base_offset: int, suffix: str = LOG_SUFFIX) -> str:
        return f"{self.path}/{base_offset:020d}{suffix}"

    def batches(self, below: int = ANYWHERE, start: int = 0) -> Iterator[Batch]:
        """Every batch from an offset on that ends below another, in order. What a batch's data shows holds until the
        next one."""
        bases = self.segments()
        for base_offset, next_base in zip(bases, [*bases[1:], ANYWHERE], strict=True):
            if base_offset >= below:
                return
            if next_base <= start:
                continue
            with closing(FS.open(self.segment_path(base_offset), "read")) as file:
                for batch in read_batches(file, file.size()):
                    if batch.header.next_offset > below:
                        return
                    if batch.header.next_offset > start:
                        yield batch
                    if batch.header.next_offset == below:
                        return


@dataclass(frozen=True)
class DataDirectories:
    """All log directories of one node."""

    paths: tuple[str, ...]
    is_running: bool
    cluster_id: str
    node_id: int
    ids: Mapping[str, UUID]
    """By path."""
    image: ClusterImage
    metadata: LogFiles
    partitions: Mapping[Key, LogFiles]
    """Of the topics that there are."""

    def below(self, files: LogFiles) -> int:
        """Up to which offset what is read is sure to stay."""
        return files.recovery_point if self.is_running else ANYWHERE


def read_directories(paths: Sequence[str], *, is_running: bool) -> DataDirectories:
    """What `log.dirs` hold. All that the node used must be among them."""
    metas = {path: _meta(path) for path in paths}
    if len({meta.cluster_id for meta in metas.values()}) > 1:
        raise DataDirectoryError(f"{', '.join(paths)} belong to different clusters")
    cluster_id, node_id, _ = next(iter(metas.values()))
    ids = {path: UUID(bytes=meta.directory_id or bytes(16)) for path, meta in metas.items()}
    found: dict[Key, list[LogFiles]] = {}
    for path in paths:
        for files in _look(path, ids[path]):
            found.setdefault((files.topic, files.index), []).append(files)
    metadata = found.pop((METADATA_TOPIC, 0), [])
    if len(metadata) != 1:
        raise DataDirectoryError(
            f"{', '.join(paths)}: {len(metadata)} hold a metadata log ({METADATA_DIRECTORY}), and one must; are these "
            "all the log directories of one node?"
        )
    below = metadata[0].recovery_point if is_running else ANYWHERE
    image = load_image(FS, metadata[0].path, metadata[0].batches(below))
    registered = image.brokers.get(node_id)
    missing = set(registered.log_dirs if registered is not None else ()) - set(ids.values())
    if missing:
        names = ", ".join(checkpoints.encode_uuid(each.bytes) for each in sorted(missing))
        raise DataDirectoryError(f"log directory {names} of this node is not among {', '.join(paths)}")
    partitions = {}
    for topic in image.topics.values():
        for partition in topic.partitions:
            if node_id not in partition.replicas:
                continue
            key = (topic.name, partition.index)
            recorded = partition.directory_of(node_id)
            places = [each for each in found.get(key, ()) if each.directory_id == recorded]
            if not places and not is_running:
                raise DataDirectoryError(
                    f"{topic.name}-{partition.index} is not in the log directory that the metadata log names, "
                    f"{checkpoints.encode_uuid(recorded.bytes)}; start holdfast once, which says what is missing"
                )
            if places:
                partitions[key] = places[0]
    return DataDirectories(tuple(paths), is_running, cluster_id, node_id, ids, image, metadata[0], partitions)


def _meta(path: str) -> checkpoints.MetaProperties:
    if not FS.is_directory(path):
        raise DataDirectoryError(f"there is no directory {path}")
    meta = checkpoints.read_meta_properties(FS, path)
    if meta is None:
        raise DataDirectoryError(
            f"{path} has no {checkpoints.META_PROPERTIES_FILE}: it is no log directory of holdfast or Kafka"
        )
    return meta


def _look(path: str, directory_id: UUID) -> Iterator[LogFiles]:
    points = checkpoints.OffsetCheckpoint(FS, f"{path}/{checkpoints.RECOVERY_POINT_FILE}").read()
    starts = checkpoints.OffsetCheckpoint(FS, f"{path}/{checkpoints.LOG_START_FILE}").read()
    for name in FS.list(path):
        key = parse_name(name)
        if key is None or not FS.is_directory(f"{path}/{name}"):
            continue
        yield LogFiles(*key, f"{path}/{name}", directory_id, starts.get(key, 0), points.get(key, 0))
