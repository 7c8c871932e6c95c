"""Where backups of one node are kept: files that several backups share, and a document for each backup.

    holdfast-backup.json     whose backups these are
    lock                     held by the process that writes here
    progress.jsonl           what an interrupted backup had copied
    backups/<n>.json         a backup: which files, how much of each, and what must be in them
    files/<directory>/...    the files, by log directory, topic id and partition

Rules kept:

- A file below `files/` only grows, and only behind what any backup refers to. A backup refers to a beginning of it,
  with digests. So an older backup stays whole whatever becomes of a newer one.
- A backup exists when its document does. All that it refers to was flushed before.
- A segment that compaction has replaced is another file here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from holdfast import __version__
from holdfast.atomic import write_atomically
from holdfast.errors import HoldfastError, UsageError
from holdfast.manifest.model import Block, CommittedOffset, GroupManifest, blocks_from_json
from holdfast.real import RealFileSystem

KIND: Final = "holdfast-backup"
VERSION: Final = 1
IDENTITY_FILE: Final = "holdfast-backup.json"
PROGRESS_FILE: Final = "progress.jsonl"
FS: Final = RealFileSystem()


class BackupError(HoldfastError):
    """A backup cannot be read, or is not what it was when it was made."""


@dataclass(frozen=True)
class StoredSegment:
    """A segment: a beginning of a file of the repository."""

    base_offset: int
    file: str
    """Below the repository."""
    blocks: tuple[Block, ...]
    inode: int
    """Of the file that it was copied from: whether that is still the same one."""
    small: Mapping[str, str]
    """Suffix and SHA-256 of the small files that belong to it; they are beside `file`."""

    @property
    def bytes(self) -> int:
        return self.blocks[-1].position if self.blocks else 0

    @property
    def end_offset(self) -> int:
        return self.blocks[-1].offset if self.blocks else self.base_offset


@dataclass(frozen=True)
class StoredPartition:
    topic: str
    topic_id: str
    """As 32 hexadecimal digits."""
    index: int
    directory: str
    """The id of its log directory, as 32 hexadecimal digits."""
    leader_epoch: int
    log_start: int
    segments: tuple[StoredSegment, ...]

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.index}"

    @property
    def end_offset(self) -> int:
        return self.segments[-1].end_offset if self.segments else self.log_start

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True)
class Backup:
    number: int
    taken_at_ms: int
    cluster_id: str
    node_id: int
    directories: tuple[tuple[str, str], ...]
    """Id and path of each log directory; the first holds the metadata log."""
    metadata: str
    """The cluster's metadata as a snapshot in Kafka's format, below the repository."""
    metadata_sha256: str
    metadata_end_offset: int
    metadata_epoch: int
    partitions: tuple[StoredPartition, ...]
    groups: tuple[GroupManifest, ...]

    @property
    def bytes(self) -> int:
        return sum(partition.bytes for partition in self.partitions)


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def segment_from_json(document: Mapping[str, Any]) -> StoredSegment:
    return StoredSegment(
        document["base_offset"],
        document["file"],
        blocks_from_json(document["blocks"]),
        document["inode"],
        document["small"],
    )


def _backup_from_json(document: Mapping[str, Any]) -> Backup:
    partitions = tuple(
        StoredPartition(**{**each, "segments": tuple(map(segment_from_json, each["segments"]))})
        for each in document["partitions"]
    )
    groups = tuple(
        GroupManifest(each["group"], each["kind"], tuple(CommittedOffset(*one) for one in each["offsets"]))
        for each in document["groups"]
    )
    directories = tuple((each[0], each[1]) for each in document["directories"])
    fields = {name: document[name] for name in Backup.__dataclass_fields__}
    return Backup(**{**fields, "partitions": partitions, "groups": groups, "directories": directories})


class Repository:
    def __init__(self, path: str) -> None:
        self.path = path

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    # Whose it is

    def open_for(self, cluster_id: str, node_id: int) -> None:
        """Begin the repository, or make sure that it is this node's."""
        identity = self.file(IDENTITY_FILE)
        if not os.path.exists(identity):
            # What an interrupted beginning leaves is nobody's.
            begun = {"lock", "backups", "files"}
            names = os.listdir(self.path) if os.path.isdir(self.path) else []
            if any(name not in begun and not name.startswith(IDENTITY_FILE) for name in names):
                raise UsageError(
                    f"{self.path} is no repository of backups, and not empty; choose another directory"
                )
            for name in ("backups", "files"):
                FS.make_directory(self.file(name))
            content = {"kind": KIND, "version": VERSION, "cluster_id": cluster_id, "node_id": node_id}
            write_atomically(FS, identity, json.dumps(content).encode() + b"\n")
            FS.flush_directory(os.path.dirname(os.path.abspath(self.path)))
            return
        found = self._identity()
        if (found["cluster_id"], found["node_id"]) != (cluster_id, node_id):
            raise UsageError(
                f"{self.path} has backups of node {found['node_id']} of cluster {found['cluster_id']}, and this is "
                f"node {node_id} of cluster {cluster_id}; choose another directory"
            )

    def _identity(self) -> Mapping[str, Any]:
        path = self.file(IDENTITY_FILE)
        try:
            with open(path, "rb") as file:
                document: Mapping[str, Any] = json.loads(file.read())
            if document["kind"] != KIND or document["version"] != VERSION:
                raise BackupError(f"{path}: not a repository of version {VERSION}")
        except FileNotFoundError:
            raise UsageError(f"{self.path} has no backups: there is no {path}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise BackupError(f"{path} cannot be read: {error!r}") from error
        return document

    @contextmanager
    def locked(self) -> Iterator[None]:
        os.makedirs(self.path, exist_ok=True)
        with open(self.file("lock"), "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another backup to {self.path} is under way") from None
            yield

    # Backups

    def numbers(self) -> list[int]:
        self._identity()
        names = os.listdir(self.file("backups"))
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())

    def load(self, number: int | None = None) -> Backup:
        """A backup by its number, or the newest."""
        numbers = self.numbers()
        if not numbers:
            raise UsageError(f"{self.path} has no finished backup")
        if number is not None and number not in numbers:
            raise UsageError(f"{self.path} has no backup {number}; it has {', '.join(map(str, numbers))}")
        path = self.file(f"backups/{number if number is not None else numbers[-1]}.json")
        try:
            with open(path, "rb") as file:
                document = json.loads(file.read())
            if document.pop("sha256") != _digest(document):
                raise BackupError(f"{path} was changed: its content does not have the hash that it says")
            return _backup_from_json(document)
        except (ValueError, KeyError, TypeError) as error:
            raise BackupError(f"{path} cannot be read: {error!r}") from error

    def store(self, backup: Backup) -> None:
        content = {"kind": KIND, "version": VERSION, "holdfast": __version__, **asdict(backup)}
        document = json.loads(json.dumps(content))
        data = json.dumps({**document, "sha256": _digest(document)}, separators=(",", ":")).encode()
        write_atomically(FS, self.file(f"backups/{backup.number}.json"), data + b"\n")

    # What was copied so far

    def known_segments(self) -> dict[str, StoredSegment]:
        """What the last backup, and an interrupted one after it, have copied, by the file that it was copied from."""
        numbers = self.numbers()
        partitions = self.load(numbers[-1]).partitions if numbers else ()
        segments = [segment for partition in partitions for segment in partition.segments]
        lines: list[str] = []
        if os.path.exists(self.file(PROGRESS_FILE)):  # a backup was interrupted
            with open(self.file(PROGRESS_FILE), encoding="utf-8") as file:
                lines = file.readlines()
        for line in lines:
            try:
                segments.append(segment_from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError):
                continue  # it was being written: what it tells of is copied again
        return {source_key(segment.file, segment.base_offset, segment.inode): segment for segment in segments}

    def note_progress(self, segment: StoredSegment) -> None:
        """Remember a segment, which is flushed, for a backup that goes on where this one is interrupted."""
        with open(self.file(PROGRESS_FILE), "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(segment), separators=(",", ":")) + "\n")

    def forget_progress(self) -> None:
        if os.path.exists(self.file(PROGRESS_FILE)):
            FS.remove(self.file(PROGRESS_FILE))

    def remove(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` backups, and the files that no other one refers to."""
        gone = self.numbers()[:-keep]
        for number in gone:
            FS.remove(self.file(f"backups/{number}.json"))
        FS.flush_directory(self.file("backups"))
        left = [self.load(number) for number in self.numbers()]
        used = {backup.metadata for backup in left}
        for backup in left:
            for partition in backup.partitions:
                for segment in partition.segments:
                    used.add(segment.file)
                    used.update(small_file(segment.file, suffix) for suffix in segment.small)
        for folder, _, names in os.walk(self.file("files"), topdown=False):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.relpath(path, self.path) not in used:
                    FS.remove(path)
            if folder != self.file("files") and not os.listdir(folder):
                os.rmdir(folder)
        return gone


@contextmanager
def goes_on_later(path: str) -> Iterator[None]:
    """Whatever the disk refuses is said with where, and that nothing has to be copied again."""
    try:
        yield
    except OSError as error:
        raise BackupError(
            f"{error.filename or path}: {error.strerror or error}. It is not finished: run it again when that is "
            "mended, and it goes on where it was"
        ) from error


def refuse_within(path: str, others: Iterable[str], what: str) -> None:
    """`UsageError` where `path` is, or lies in, one of these directories."""
    for other in others:
        if f"{os.path.realpath(path)}/".startswith(f"{os.path.realpath(other)}/"):
            raise UsageError(f"{path} lies in {what} {other}: choose another directory")


def small_file(segment_file: str, suffix: str) -> str:
    """Where a small file of a segment is, beside it."""
    return segment_file.removesuffix(".log") + suffix


def source_key(segment_file: str, base_offset: int, inode: int) -> str:
    """Names the file that a segment was copied from, as long as its number is not given to another one."""
    return f"{os.path.dirname(segment_file)}/{base_offset:020d}-{inode}"
