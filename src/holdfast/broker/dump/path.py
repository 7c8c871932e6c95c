"""Any file of a log directory as a stream of events: what it holds and what is wrong with it.

    .log .checkpoint .cut        record batches                        batches
    .index .timeindex .txnindex  index entries, checked against .log   indexes
    .snapshot                    producers
    leader-epoch-checkpoint, partition.metadata, meta.properties, *-offset-checkpoint

A directory stands for the files in it. Reading is all that happens here; a file is opened for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final

from holdfast.atomic import read_whole
from holdfast.broker.dump.batches import DumpOptions, Event, dump_batches, finding
from holdfast.broker.dump.decoders import url_safe
from holdfast.broker.dump.indexes import OFFSETS, TIMES, TRANSACTIONS, IndexKind, dump_index
from holdfast.broker.log.checkpoints import (
    CLEANER_FILE,
    LOG_START_FILE,
    META_PROPERTIES_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    REPLICATION_FILE,
    decode_meta_properties,
    decode_offsets,
    decode_partition_metadata,
)
from holdfast.broker.log.leader_epochs import LEADER_EPOCH_FILE, LeaderEpochs
from holdfast.broker.log.producer_state import decode_snapshot
from holdfast.broker.log.recovery_steps import CUT_SUFFIX
from holdfast.errors import ConfigError, CorruptLog, UsageError
from holdfast.seams import FileSystem

SEGMENT_FILE: Final = re.compile(
    r"(?P<offset>\d{20})(?P<epoch>-\d{10})?(?:\.\d+)?\."
    r"(?P<kind>log|index|timeindex|txnindex|snapshot|checkpoint|cut)"
    r"(?P<stage>\.deleted|\.cleaned|\.swap|\.part)?"
)
"""Names of a partition's files; a stage is a file on its way in or out. Later cuts of a segment are numbered."""
OFFSET_CHECKPOINTS: Final = (RECOVERY_POINT_FILE, LOG_START_FILE, REPLICATION_FILE, CLEANER_FILE)


def dump_path(fs: FileSystem, path: str, options: DumpOptions) -> Iterator[Event]:
    """The events of one file, or of every file in a directory that we know how to read."""
    if not fs.exists(path):
        raise UsageError(f"{path}: there is no such file")
    if not fs.is_directory(path):
        yield from _dump_file(fs, path, options)
        return
    for name in fs.list(path):
        inside = f"{path.rstrip('/')}/{name}"
        # What recovery cut off is no part of the log any more: shown when it is asked for by name.
        if not fs.is_directory(inside) and _reader(name) is not None and not name.endswith(CUT_SUFFIX):
            yield from _dump_file(fs, inside, options)


def _dump_file(fs: FileSystem, path: str, options: DumpOptions) -> Iterator[Event]:
    name = path.rpartition("/")[2]
    reader = _reader(name)
    if reader is None:
        raise UsageError(
            f"{path}: no file of a log has such a name; there are .log, .index, .timeindex, .txnindex, "
            f".snapshot, .checkpoint, {CUT_SUFFIX}, {LEADER_EPOCH_FILE}, {PARTITION_METADATA_FILE} and the checkpoints"
        )
    match = SEGMENT_FILE.fullmatch(name)
    yield {
        "type": "file",
        "path": path,
        "kind": match["kind"] if match else name,
        "start_offset": int(match["offset"]) if match else None,
        "epoch": int(match["epoch"][1:]) if match and match["epoch"] else None,
    }
    yield from reader(fs, path, options)


Reader = Callable[[FileSystem, str, DumpOptions], Iterator[Event]]


def _reader(name: str) -> Reader | None:
    match = SEGMENT_FILE.fullmatch(name)
    if match is not None:
        return _SEGMENT_READERS[match["kind"]]
    return _SMALL_READERS.get(name)


def _base_offset(path: str) -> int:
    return int(path.rpartition("/")[2][:20])


def _log_beside(path: str) -> str:
    """The log an index belongs to: the same name up to the kind, the same stage behind it."""
    directory, slash, name = path.rpartition("/")
    offset, _, stage = name.split(".", 2) if name.count(".") > 1 else (*name.split("."), "")
    return f"{directory}{slash}{offset}.log{'.' + stage if stage else ''}"


def _dump_log(fs: FileSystem, path: str, options: DumpOptions) -> Iterator[Event]:
    with closing(fs.open(path, "read")) as file:
        yield from dump_batches(file, _base_offset(path), options, is_active=_is_active(fs, path))


def _is_active(fs: FileSystem, path: str) -> bool:
    """Whether no segment follows this one in its directory."""
    directory, slash, name = path.rpartition("/")
    logs = [other for other in fs.list(directory + slash or ".") if other.endswith(".log")]
    return name.endswith(".log") and name == max(logs, default=name)


def _dump_snapshot_of_metadata(fs: FileSystem, path: str, options: DumpOptions) -> Iterator[Event]:
    """A snapshot of the metadata log begins its own count of offsets at zero."""
    with closing(fs.open(path, "read")) as file:
        yield from dump_batches(file, 0, options)


def _dump_index(kind: IndexKind, fs: FileSystem, path: str, options: DumpOptions) -> Iterator[Event]:
    return dump_index(kind, fs, path, _base_offset(path), _log_beside(path), options)


def _small(decode: Callable[[bytes, str], Iterator[Event]]) -> Reader:
    """A reader of a file that is either whole and right, or one finding."""

    def read(fs: FileSystem, path: str, options: DumpOptions) -> Iterator[Event]:
        try:
            events = list(decode(read_whole(fs, path), path))
        except (CorruptLog, ConfigError) as problem:
            yield finding(path, str(problem).removeprefix(f"{path}: "))
            return
        if not (options.verify or options.verify_index_only or options.index_sanity_check):
            yield from events

    return read


def _producers(data: bytes, path: str) -> Iterator[Event]:
    for entry in decode_snapshot(data, path):
        fields: dict[str, Any] = entry._asdict()
        open_from = fields["transaction_first_offset"]
        yield {"type": "producer", **fields, "transaction_first_offset": None if open_from < 0 else open_from}


def _epochs(data: bytes, path: str) -> Iterator[Event]:
    for epoch, start_offset in LeaderEpochs.from_bytes(data, path).entries:
        yield {"type": "leader_epoch", "epoch": epoch, "start_offset": start_offset}


def _partition_metadata(data: bytes, path: str) -> Iterator[Event]:
    yield {"type": "partition_metadata", "topic_id": url_safe(decode_partition_metadata(data, path))}


def _meta_properties(data: bytes, path: str) -> Iterator[Event]:
    fields: dict[str, Any] = decode_meta_properties(data, path)._asdict()
    plain = {name: url_safe(value) if isinstance(value, bytes) else value for name, value in fields.items()}
    yield {"type": "meta_properties", **plain}


def _offsets(data: bytes, path: str) -> Iterator[Event]:
    for (topic, partition), offset in sorted(decode_offsets(data, path).items()):
        yield {"type": "offset_checkpoint", "topic": topic, "partition": partition, "offset": offset}


_SEGMENT_READERS: Final[Mapping[str, Reader]] = {
    "log": _dump_log,
    "cut": _dump_log,
    "checkpoint": _dump_snapshot_of_metadata,
    "index": partial(_dump_index, OFFSETS),
    "timeindex": partial(_dump_index, TIMES),
    "txnindex": partial(_dump_index, TRANSACTIONS),
    "snapshot": _small(_producers),
}
_SMALL_READERS: Final[Mapping[str, Reader]] = {
    LEADER_EPOCH_FILE: _small(_epochs),
    PARTITION_METADATA_FILE: _small(_partition_metadata),
    META_PROPERTIES_FILE: _small(_meta_properties),
    **{name: _small(_offsets) for name in OFFSET_CHECKPOINTS},
}
