"""What recovery cuts off the end of a log is kept beside it for whoever wants to look, each cut in its own file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.atomic import read_whole
from holdfast.broker.log.segment import INDEX_SUFFIXES, LOG_SUFFIX, Segment
from holdfast.seams import FileSystem

CUT_SUFFIX: Final = ".cut"
CUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Kept of a cut tail: more than any tail a crash can leave behind unflushed in practice."""

ZEROS_KEPT: Final = 512
"""Kept of the zeros behind a cut tail: the end of its last batch may be among them, what was written ahead is not."""


def cut_off(
    fs: FileSystem, segment: Segment, position: int, zeros_from: int, following: Sequence[Segment]
) -> list[str]:
    """Let the file of `segment` end at `position`, and remove the segments behind it. Blocks.

    What is cut off is kept, up to the zeros at its end; returns the names of the files that hold it.
    """
    kept = []
    if zeros_from > position:
        kept_end = min(segment.file.size(), zeros_from + ZEROS_KEPT)
        kept.append(keep_cut_bytes(fs, segment, position, kept_end))
    segment.file.truncate(position)
    segment.file.flush()
    for gone in following:
        if gone.file.size():
            kept.append(keep_cut_bytes(fs, gone, 0, gone.file.size()))
        remove_files(fs, gone)
    if kept or following:
        fs.flush_directory(segment.directory)
    return kept


def remove_files(fs: FileSystem, segment: Segment) -> None:
    """Everything of a segment but the state of producers at its beginning."""
    segment.close()
    for path in map(segment.path, (LOG_SUFFIX, *INDEX_SUFFIXES)):
        if fs.exists(path):
            fs.remove(path)


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
