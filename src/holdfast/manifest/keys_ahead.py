"""The keys of a compacted partition, folded ahead while the broker runs.

Folding decodes every record, and is the slowest thing that a manifest asks for. So the state of the fold up to the
recovery point is kept: the last record of each key, and the records of transactions that were open there. Whoever goes
on reads what came behind. The state counts while the log begins with the same files, by number (inode) and first batch
header; compaction puts others in their place, and then the partition is folded anew.
"""

from __future__ import annotations

import json
import os
import struct
from contextlib import closing
from typing import Any, Final

from holdfast.atomic import write_atomically
from holdfast.manifest.directory import FS, LogFiles
from holdfast.manifest.folding import (
    LastByKey,
    Latest,
    RecordDigest,
    decode_table,
    encode_table,
    keys_of_log,
)
from holdfast.wire.batch import HEADER_SIZE

_LENGTH: Final = struct.Struct(">I")
_PENDING: Final = struct.Struct(">q16sq16s?")


def fold(files: LogFiles, below: int, state_path: str | None) -> LastByKey[RecordDigest]:
    """The keys of the log below an offset, going on from a state that was kept, where it still counts."""
    keys, start = _load(files, below, state_path)
    for batch in files.batches(below, start):
        keys.add(batch)
    return keys


def fold_ahead(files: LogFiles, below: int, state_path: str) -> None:
    """Fold, and keep the state."""
    keys = fold(files, below, state_path)
    head = json.dumps({"version": 1, "end": below, "files": _identities(files, below)}).encode()
    table = encode_table(keys.latest)
    pending = b"".join(
        _PENDING.pack(producer_id, key, each.offset, *each.content)
        for producer_id, key, each in keys.pending()
    )
    parts = (head, table, pending)
    data = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    os.makedirs(os.path.dirname(state_path), exist_ok=True)
    write_atomically(FS, state_path, data)


def _load(files: LogFiles, below: int, state_path: str | None) -> tuple[LastByKey[RecordDigest], int]:
    keys = keys_of_log()
    if state_path is None or not os.path.exists(state_path):
        return keys, 0
    with open(state_path, "rb") as file:
        data = file.read()
    try:
        parts = []
        position = 0
        while position < len(data):
            (length,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size + length
            parts.append(data[position - length : position])
        head, table, pending = parts
        told: dict[str, Any] = json.loads(head)
        if told["version"] != 1 or told["end"] > below or told["files"] != _identities(files, told["end"]):
            return keys, 0
        keys.latest.update(decode_table(table, state_path))
        for producer_id, key, offset, *content in _PENDING.iter_unpack(pending):
            keys.add_pending(producer_id, key, Latest(offset, RecordDigest(*content)))
    except (ValueError, KeyError, struct.error):
        return keys_of_log(), 0  # what cannot be read was not folded ahead
    return keys, int(told["end"])


def _identities(files: LogFiles, below: int) -> list[list[Any]]:
    """The files that hold offsets below one, each by what tells it from another in its place."""
    found: list[list[Any]] = []
    for base_offset in files.segments():
        if base_offset >= below:
            break
        with closing(FS.open(files.segment_path(base_offset), "read")) as file:
            found.append([base_offset, os.fstat(file.fd).st_ino, file.pread(HEADER_SIZE, 0).hex()])
    return found
