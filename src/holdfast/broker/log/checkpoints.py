"""The small text files of a data directory, in Kafka's formats.

In every log directory:

    recovery-point-offset-checkpoint   below this offset a partition is on disk and needs no recovery
    log-start-offset-checkpoint        the first offset a partition still offers
    replication-offset-checkpoint      high watermarks
    cleaner-offset-checkpoint          how far compaction has come
    meta.properties                    whose directory this is
    .kafka_cleanshutdown               the last stop was orderly; removed at start

In every partition directory: `partition.metadata` with the topic's id, so that a directory left over from a
deleted topic of the same name is told apart.

All are replaced as a whole (`atomic`), so half a file is never the work of a crash. Reading is strict for
the same reason: what we or Kafka could not have written is `CorruptLog`, naming file and line. An empty
checkpoint file is no entries: Kafka creates it so.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, NoReturn, TypeAlias

from holdfast.atomic import parent_of, read_whole, write_atomically
from holdfast.config.properties import parse_properties
from holdfast.errors import ConfigError, CorruptLog, UsageError
from holdfast.seams import FileSystem

RECOVERY_POINT_FILE: Final = "recovery-point-offset-checkpoint"
LOG_START_FILE: Final = "log-start-offset-checkpoint"
REPLICATION_FILE: Final = "replication-offset-checkpoint"
CLEANER_FILE: Final = "cleaner-offset-checkpoint"
META_PROPERTIES_FILE: Final = "meta.properties"
PARTITION_METADATA_FILE: Final = "partition.metadata"
CLEAN_SHUTDOWN_FILE: Final = ".kafka_cleanshutdown"

CHECKPOINT_VERSION: Final = 0
OFFSET_MAX: Final = 2**63 - 1
PARTITION_MAX: Final = 2**31 - 1
NODE_ID_MAX: Final = 2**31 - 1
UUID_BYTES: Final = 16

TopicPartition: TypeAlias = tuple[str, int]

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_CLUSTER_ID = re.compile(r"[!-~]+")
_PROPERTY_SPECIAL = re.compile(r"[\\=:#!]")


class Line(NamedTuple):
    """One line of a file, with what an error message needs to point at it."""

    path: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.number} {self.text!r}"

    def fields(self, count: int) -> list[str]:
        """The line's words, of which there must be `count`."""
        words = self.text.split(" ")
        if len(words) != count:
            self.refuse(f"{count} words expected")
        return words

    def refuse(self, reason: str) -> NoReturn:
        raise CorruptLog(f"{self}: {reason}")


def parse_number(text: str, line: Line, maximum: int) -> int:
    """A number from 0 to `maximum` as we and Java write it: no sign, no spaces, no leading zeros."""
    if _NUMBER.fullmatch(text) is None or int(text) > maximum:
        line.refuse(f"{text!r} is no number from 0 to {maximum}")
    return int(text)


# ---- checkpoint files: a version, a count, and a line per entry


def encode_checkpoint(entries: Iterable[str]) -> bytes:
    lines = list(entries)
    return "".join(f"{line}\n" for line in (CHECKPOINT_VERSION, len(lines), *lines)).encode()


def decode_checkpoint(data: bytes, path: str) -> list[Line]:
    """The entry lines; `CorruptLog` unless version, count and the last line's end are all there."""
    if not data:
        return []
    lines = _lines(data, path)
    last = lines.pop()
    if last.text:
        last.refuse("the last line is cut off")
    if len(lines) < 2:
        raise CorruptLog(f"{path}: no count of entries")
    if parse_number(lines[0].text, lines[0], PARTITION_MAX) != CHECKPOINT_VERSION:
        lines[0].refuse(f"version {CHECKPOINT_VERSION} expected")
    count = parse_number(lines[1].text, lines[1], PARTITION_MAX)
    entries = lines[2:]
    if len(entries) != count:
        lines[1].refuse(f"{len(entries)} entries follow")
    return entries


def _lines(data: bytes, path: str) -> list[Line]:
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        raise CorruptLog(f"{path}: byte {problem.start} is not text") from problem
    return [Line(path, number, line) for number, line in enumerate(text.split("\n"), start=1)]


class OffsetCheckpoint:
    """One file of an offset per partition. `read` and `write` take and give all of it."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = path

    def write(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Replace the file, durably."""
        write_atomically(self._fs, self.path, encode_offsets(offsets))

    def read(self) -> dict[TopicPartition, int]:
        """The file's offsets; none when there is no file."""
        if not self._fs.exists(self.path):
            return {}
        return decode_offsets(read_whole(self._fs, self.path), self.path)


def encode_offsets(offsets: Mapping[TopicPartition, int]) -> bytes:
    return encode_checkpoint(
        f"{topic} {partition} {offset}" for (topic, partition), offset in offsets.items()
    )


def decode_offsets(data: bytes, path: str) -> dict[TopicPartition, int]:
    offsets: dict[TopicPartition, int] = {}
    for line in decode_checkpoint(data, path):
        topic, partition_text, offset_text = line.fields(3)
        if _TOPIC.fullmatch(topic) is None:
            line.refuse(f"{topic!r} is no topic name")
        key = topic, parse_number(partition_text, line, PARTITION_MAX)
        if key in offsets:
            line.refuse("the partition has a line already")
        offsets[key] = parse_number(offset_text, line, OFFSET_MAX)
    return offsets


# ---- identifiers: 16 bytes, written as 22 characters of URL-safe base64


def encode_uuid(uuid: bytes) -> str:
    return urlsafe_b64encode(uuid).rstrip(b"=").decode()


def decode_uuid(text: str, line: Line) -> bytes:
    try:
        uuid = urlsafe_b64decode(text.encode("ascii") + b"==")
    except (Base64Error, UnicodeEncodeError):
        uuid = b""
    if len(uuid) != UUID_BYTES or encode_uuid(uuid) != text:
        line.refuse(f"{text!r} is no identifier of {UUID_BYTES} bytes in base64")
    return uuid


# ---- meta.properties


class MetaProperties(NamedTuple):
    """Whose directory this is. A node refuses one that belongs to another cluster or node."""

    cluster_id: str
    node_id: int
    directory_id: bytes | None


def encode_meta_properties(meta: MetaProperties) -> bytes:
    if _CLUSTER_ID.fullmatch(meta.cluster_id) is None:
        raise UsageError(f"cluster id {meta.cluster_id!r} is not made of printable ASCII characters")
    lines = ["#", "cluster.id=" + _PROPERTY_SPECIAL.sub(r"\\\g<0>", meta.cluster_id)]
    if meta.directory_id is not None:
        lines.append(f"directory.id={encode_uuid(meta.directory_id)}")
    # The version comes last, and must be there: a file that was cut is missed for it.
    lines += [f"node.id={meta.node_id}", "version=1"]
    return "".join(f"{line}\n" for line in lines).encode()


def decode_meta_properties(data: bytes, path: str) -> MetaProperties:
    """Kafka's version 1 of the file: cluster id and node id must be there, the directory's id may."""
    try:
        found = parse_properties(data, path)
    except ConfigError as problem:
        raise CorruptLog(str(problem)) from problem

    def value_of(name: str) -> Line:
        if name not in found:
            raise CorruptLog(f"{path}: {name} is missing")
        return Line(path, found.lines[name], found[name])

    version = value_of("version")
    if version.text != "1":
        version.refuse("version 1 expected")
    cluster_id = value_of("cluster.id")
    if _CLUSTER_ID.fullmatch(cluster_id.text) is None:
        cluster_id.refuse("a cluster id is made of printable ASCII characters")
    node_id = value_of("node.id")
    directory_id = None
    if "directory.id" in found:
        line = value_of("directory.id")
        directory_id = decode_uuid(line.text, line)
    return MetaProperties(cluster_id.text, parse_number(node_id.text, node_id, NODE_ID_MAX), directory_id)


def write_meta_properties(fs: FileSystem, log_directory: str, meta: MetaProperties) -> None:
    write_atomically(fs, f"{log_directory}/{META_PROPERTIES_FILE}", encode_meta_properties(meta))


def read_meta_properties(fs: FileSystem, log_directory: str) -> MetaProperties | None:
    """None when the directory is new."""
    path = f"{log_directory}/{META_PROPERTIES_FILE}"
    return decode_meta_properties(read_whole(fs, path), path) if fs.exists(path) else None


# ---- partition.metadata


def encode_partition_metadata(topic_id: bytes) -> bytes:
    return f"version: 0\ntopic_id: {encode_uuid(topic_id)}".encode()


def decode_partition_metadata(data: bytes, path: str) -> bytes:
    """The topic's id."""
    lines = _lines(data, path)
    while len(lines) > 2 and not lines[-1].text:
        lines.pop()
    if len(lines) != 2:
        raise CorruptLog(f"{path}: two lines expected, {len(lines)} found")
    version_line, topic_line = lines
    parse_number(_value_after("version: ", version_line), version_line, PARTITION_MAX)
    topic_id = decode_uuid(_value_after("topic_id: ", topic_line), topic_line)
    if not any(topic_id):
        topic_line.refuse("the topic's id is zero")
    return topic_id


def _value_after(prefix: str, line: Line) -> str:
    if not line.text.startswith(prefix):
        line.refuse(f"{prefix!r} expected")
    return line.text.removeprefix(prefix)


def write_partition_metadata(fs: FileSystem, partition_directory: str, topic_id: bytes) -> None:
    path = f"{partition_directory}/{PARTITION_METADATA_FILE}"
    write_atomically(fs, path, encode_partition_metadata(topic_id))


def read_partition_metadata(fs: FileSystem, partition_directory: str) -> bytes | None:
    """The topic's id, or None when the file is missing, or all that a power failure before its first flush left."""
    path = f"{partition_directory}/{PARTITION_METADATA_FILE}"
    data = read_whole(fs, path) if fs.exists(path) else b""
    return decode_partition_metadata(data, path) if data.strip(b"\0") else None


# ---- .kafka_cleanshutdown


def write_clean_shutdown(fs: FileSystem, log_directory: str, broker_epoch: int) -> None:
    """The last act of an orderly stop, when everything else is durable."""
    content = json.dumps({"version": 0, "brokerEpoch": broker_epoch}, separators=(",", ":"))
    write_atomically(fs, f"{log_directory}/{CLEAN_SHUTDOWN_FILE}", content.encode())


def read_clean_shutdown(fs: FileSystem, log_directory: str) -> int | None:
    """The broker epoch in the marker, −1 when it names none; None without a marker, or with one that cannot be read:
    recovery is the safe answer."""
    path = f"{log_directory}/{CLEAN_SHUTDOWN_FILE}"
    return decode_clean_shutdown(read_whole(fs, path)) if fs.exists(path) else None


def remove_clean_shutdown(fs: FileSystem, log_directory: str) -> None:
    """Remove the marker, durably.

    It must be gone before anything is written: a marker that outlives a crash would let recovery be skipped.
    """
    path = f"{log_directory}/{CLEAN_SHUTDOWN_FILE}"
    if fs.exists(path):
        fs.remove(path)
        fs.flush_directory(parent_of(path))


def decode_clean_shutdown(data: bytes) -> int | None:
    """The broker epoch in a marker, −1 when it names none, None when this is no marker."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("version") != 0:
        return None
    epoch = content.get("brokerEpoch", -1)
    return epoch if type(epoch) is int else None
