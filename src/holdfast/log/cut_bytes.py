"""What recovery cuts off the end of a log is kept beside it for whoever wants to look, each cut in its own file."""

from __future__ import annotations

from typing import Final

from holdfast.atomic import read_whole
from holdfast.log.segment import Segment
from holdfast.seams import FileSystem

CUT_SUFFIX: Final = ".cut"
CUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Kept of a cut tail: more than any tail a crash can leave behind unflushed in practice."""


def keep_cut_bytes(fs: FileSystem, segment: Segment, position: int, end: int) -> str:
    """Write what will be cut off a segment to a file, durably but for its name, which is returned."""
    data = segment.file.pread(min(end - position, CUT_BYTES_MAX), position)
    path, count = segment.path(CUT_SUFFIX), 1
    while fs.exists(path) and not _is_beginning(fs, path, data):
        count += 1
        path = segment.path(f".{count}{CUT_SUFFIX}")
    file = fs.open(path, "create")
    try:
        file.pwritev([data], 0)
        file.flush()
    finally:
        file.close()
    return path.rpartition("/")[2]


def _is_beginning(fs: FileSystem, path: str, data: bytes) -> bool:
    """Whether a file was to hold `data` and its cut was interrupted; any other holds what an earlier one cut off."""
    return fs.size(path) <= len(data) and data.startswith(read_whole(fs, path))
