"""Digests of segments, cut into blocks, and remembered from one look to the next.

A block ends with the batch that makes it `BLOCK_BYTES` or more, or with the segment. So the cut depends on the file
alone: whoever digests a log that has grown since finds the same blocks and goes on behind them. Every batch's own
checksum is proven on the way.

`DigestCache` keeps the blocks of files that were digested before, for nobody wants to read a hundred gigabytes while
the broker is stopped. A log file only grows, and one that compaction or a restored copy has put in its place is another
file: an entry counts for a file with the same number (inode) that begins with the same batch. Only what lies below the
recovery point is digested ahead, for that is never cut again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

from holdfast.atomic import write_atomically
from holdfast.broker.log.scan import ANYWHERE, read_batches
from holdfast.manifest.model import Block, SegmentDigest, blocks_from_json
from holdfast.real import RealFile, RealFileSystem
from holdfast.wire.batch import HEADER_SIZE

BLOCK_BYTES: Final = 8 << 20
"""Small enough that a deletion of records in the middle of a segment leaves little that cannot be compared."""

Progress = Callable[[int], None]
"""Takes how many bytes were read."""


def digest_file(
    file: RealFile,
    base_offset: int,
    end: int,
    known: tuple[Block, ...] = (),
    *,
    below: int = ANYWHERE,
    progress: Progress = lambda count: None,
) -> SegmentDigest:
    """The blocks of a segment's batches up to the position `end`, and below the offset `below`.

    `known` blocks are not read again. `CorruptLog` where there is no whole valid batch.
    """
    blocks = [*_whole_blocks(known)]
    start = blocks[-1].position if blocks else 0
    cut = BlockCut(start)
    reached = blocks[-1].offset if blocks else base_offset
    # Behind `below` there may be half a batch, or space written ahead.
    batches = read_batches(file, end, start) if reached < below else ()
    for batch in batches:
        if batch.header.next_offset > below:
            break
        found = cut.add(batch.data, batch.header.next_offset, batch.header.records_count)
        if found is not None:
            blocks.append(found)
            progress(found.position - start)
            start = found.position
        if batch.header.next_offset == below:
            break
    rest = cut.finish()
    if rest is not None:
        blocks.append(rest)
        progress(rest.position - start)
    return SegmentDigest(base_offset, tuple(blocks))


def _whole_blocks(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks that stay as they are when the file grows: the last may be short."""
    start = 0
    for count, block in enumerate(blocks):
        if block.position - start < BLOCK_BYTES:
            return blocks[:count]
        start = block.position
    return blocks


class BlockCut:
    """Batches in a row, cut into blocks."""

    def __init__(self, position: int) -> None:
        self._start = self._position = position
        self._hash = hashlib.sha256()
        self._offset = 0
        self._records = 0

    def add(self, data: bytes | memoryview, next_offset: int, records: int) -> Block | None:
        """One batch; returns the block that it ends."""
        self._hash.update(data)
        self._position += len(data)
        self._offset = next_offset
        self._records += records
        return self.finish() if self._position - self._start >= BLOCK_BYTES else None

    def finish(self) -> Block | None:
        """The block that was begun, if any."""
        if self._position == self._start:
            return None
        block = Block(self._position, self._offset, self._records, self._hash.hexdigest())
        self._start = self._position
        self._hash = hashlib.sha256()
        self._records = 0
        return block


class DigestCache:
    """Blocks by the path of their file, in one JSON file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._entries: dict[str, Any] = {}
        self.bytes_known = 0
        """Of the files asked for so far, how much was not read again."""
        try:
            with open(path, "rb") as file:
                document = json.loads(file.read())
            if document["version"] == 1:
                self._entries = document["files"]
        except FileNotFoundError:
            pass  # nothing was digested ahead: everything is read now
        except (ValueError, KeyError, TypeError):
            self._entries = {}  # a cache that cannot be read is none

    def digest(
        self,
        path: str,
        base_offset: int,
        *,
        below: int = ANYWHERE,
        progress: Progress = lambda count: None,
    ) -> SegmentDigest:
        with closing(RealFileSystem().open(path, "read")) as file:
            status = os.fstat(file.fd)
            head = file.pread(HEADER_SIZE, 0).hex()
            known = self._known(path, status, head)
            # A file that ends where its last block does has not grown, and its last block, however short, stays.
            is_known = bool(known) and known[-1].position == status.st_size
            kept = known if is_known else _whole_blocks(known)
            digest = (
                SegmentDigest(base_offset, known)
                if is_known
                else digest_file(file, base_offset, status.st_size, kept, below=below, progress=progress)
            )
        self.bytes_known += kept[-1].position if kept else 0
        self._entries[path] = {
            "inode": status.st_ino,
            "head": head,
            "blocks": digest.blocks,
        }
        return digest

    def _known(self, path: str, status: os.stat_result, head: str) -> tuple[Block, ...]:
        entry = self._entries.get(path)
        if entry is None or (entry["inode"], entry["head"]) != (status.st_ino, head):
            return ()
        blocks = blocks_from_json(entry["blocks"])
        return blocks if blocks and blocks[-1].position <= status.st_size else ()

    def keep_only(self, paths: set[str]) -> None:
        self._entries = {path: entry for path, entry in self._entries.items() if path in paths}

    def save(self) -> None:
        data = json.dumps({"version": 1, "files": self._entries}, separators=(",", ":")).encode()
        write_atomically(RealFileSystem(), self._path, data)
