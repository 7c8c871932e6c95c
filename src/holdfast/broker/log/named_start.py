"""A log start that a full disk had no room to write down, told by the name of a file.

The log start is durable in `log-start-offset-checkpoint` before a segment goes: at the next start a log that begins
above it has lost records. A full disk refuses that checkpoint, and what expires is what makes room again. A rename
needs no room: an index of the first segment to go gets the name `<start>.start`. Its content means nothing.
"""

from __future__ import annotations

from typing import Final

from holdfast.broker.log.segment import INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX, Segment, offset_name
from holdfast.seams import FileSystem

START_SUFFIX: Final = ".start"


def name_start(fs: FileSystem, first: Segment, offset: int) -> None:
    """Let the log whose first segment this is begin at `offset`, durably. Blocks for a flush of its directory."""
    directory = first.directory
    known = [f"{directory}/{name}" for name in fs.list(directory) if name.endswith(START_SUFFIX)]
    # The segment is about to go. Without its indexes it is as good, and without its file it has gone.
    files = known + [first.path(suffix) for suffix in (TIME_INDEX_SUFFIX, INDEX_SUFFIX, LOG_SUFFIX)]
    fs.rename(
        next(path for path in files if fs.exists(path)), f"{directory}/{offset_name(offset)}{START_SUFFIX}"
    )
    fs.flush_directory(directory)


def settle_start(fs: FileSystem, directory: str, checkpointed: int) -> int:
    """Where the log begins, which the checkpoint may not know; names it has caught up with are removed."""
    start = checkpointed
    for name in fs.list(directory):
        stem = name.removesuffix(START_SUFFIX)
        if stem == name or not stem.isdigit() or offset_name(int(stem)) != stem:
            continue
        if int(stem) <= checkpointed:
            fs.remove(f"{directory}/{name}")
        start = max(start, int(stem))
    return start
