"""What opening a log does besides reading its batches.

Compactions and deletions of segments that a crash interrupted are ended when their log is opened.

A log start that a full disk had no room to write down is told by the name of a file. The log start is durable in
`log-start-offset-checkpoint` before a segment goes: at the next start a log that begins above it has lost records.
A full disk refuses that checkpoint, and what expires is what makes room again. A rename needs no room: an index of
the first segment to go gets the name `<start>.start`. Its content means nothing.

What recovery cuts off the end of a log is kept beside it for whoever wants to look, each cut in its own file.

Opening a log reads, replaces and removes its `*.snapshot` files.

Offsets that a log had once and has no more are found when it is opened, and given up only by request. Three things
hold of every log, whatever happened to it but the loss of files:

- It begins at or below its log start. - Each segment begins where the one before it ends. A roll begins the next
segment at the log end, and a cleaned segment reaches to the last offset of those it replaces (see `cleaner`):
compaction leaves gaps inside segments only. - It ends at or above its recovery point.

A power failure may break the second one, and only from the recovery point on: what lies behind such a gap was never
acknowledged (see `recovery`). Everything else is a loss. The log is not opened then, until an operator has restored
the file or given the offsets up. What is given up is written down beside the log before it is used, in the format of
Kafka's checkpoints, a line `first end` for each range, so that nobody is asked twice and everybody can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import closing
from typing import Final

from holdfast.atomic import ASIDE_SUFFIX, flush_file, read_whole, write_atomically
from holdfast.broker.log.checkpoints import (
    OFFSET_MAX,
    Line,
    decode_checkpoint,
    encode_checkpoint,
    parse_number,
)
from holdfast.broker.log.producer_state import ProducerStateMap, decode_snapshot, encode_snapshot
from holdfast.broker.log.scan import scan_headers
from holdfast.broker.log.segment import (
    CLEANED_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    INDEX_SUFFIXES,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    SUMS_SUFFIX,
    SWAP_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
    offset_name,
)
from holdfast.errors import CorruptLog, MissingOffsets
from holdfast.saying import Say, warn
from holdfast.seams import FileSystem


def finish_interrupted_work(fs: FileSystem, directory: str, say: Callable[[str], None]) -> None:
    """Complete or undo what a crash interrupted: deletions go on, swaps complete, unfinished cleaning goes.

    A `.log.swap` is a promise that everything else of the cleaned segment is on disk (see `compaction`). Until
    that file has its name, all of this may happen again.
    """
    names = fs.list(directory)
    swaps = [name for name in names if name.endswith(LOG_SUFFIX + SWAP_SUFFIX)]
    for name in swaps:
        _complete_swap(fs, directory, name)
        say(f"{directory}: completed the compaction into {name[:20]} that was interrupted")
    leftovers = [
        name
        for name in fs.list(directory)
        if name.endswith((DELETED_SUFFIX, CLEANED_SUFFIX, SWAP_SUFFIX, ASIDE_SUFFIX))
    ]
    for name in leftovers:
        if name.endswith(SWAP_SUFFIX):
            _settle_index_swap(fs, f"{directory}/{name}")
        else:
            fs.remove(f"{directory}/{name}")
    if leftovers:
        fs.flush_directory(directory)


def _complete_swap(fs: FileSystem, directory: str, swap_name: str) -> None:
    """Let a cleaned segment take the place of those inside the offsets it spans."""
    base = int(swap_name[:20])
    file = fs.open(f"{directory}/{swap_name}", "read")
    last_offset = base
    for found in scan_headers(file, 0, file.size()):
        last_offset = found.header.last_offset
    file.close()
    for name in fs.list(directory):
        stem, _, suffix = name.partition(".")
        if not stem.isdigit() or not base <= int(stem) <= last_offset:
            continue
        is_index = "." + suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, SUMS_SUFFIX)
        # Indexes are rebuilt from the batches; of the rest, the segment's own files are replaced in one step.
        if is_index or (int(stem) > base and "." + suffix in (LOG_SUFFIX, TXN_INDEX_SUFFIX, SNAPSHOT_SUFFIX)):
            fs.remove(f"{directory}/{name}")
    transactions = f"{directory}/{swap_name[:20]}{TXN_INDEX_SUFFIX}"
    for aside in (CLEANED_SUFFIX, SWAP_SUFFIX):
        if fs.exists(transactions + aside):
            fs.rename(transactions + aside, transactions)
    fs.flush_directory(directory)
    fs.rename(f"{directory}/{swap_name}", f"{directory}/{swap_name.removesuffix(SWAP_SUFFIX)}")
    fs.flush_directory(directory)


def _settle_index_swap(fs: FileSystem, path: str) -> None:
    """An index that Kafka was about to rename after its segment: of no use without rebuilding, but for one."""
    target = path.removesuffix(SWAP_SUFFIX)
    if target.endswith(TXN_INDEX_SUFFIX):
        fs.rename(path, target)
        return
    fs.remove(path)
    if target.endswith((INDEX_SUFFIX, TIME_INDEX_SUFFIX)) and fs.exists(target):
        fs.remove(target)


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
    with closing(fs.open(path, "create")) as file:
        file.pwritev([data], 0)
        file.flush()
    return path.rpartition("/")[2]


def _is_beginning(fs: FileSystem, path: str, data: bytes) -> bool:
    """Whether a file was to hold `data` and its cut was interrupted; any other holds what an earlier one cut off."""
    return fs.size(path) <= len(data) and data.startswith(read_whole(fs, path))


class Snapshots:
    def __init__(self, fs: FileSystem, directory: str, say: Say) -> None:
        self._fs = fs
        self._directory = directory
        self._say = say

    def path(self, offset: int) -> str:
        return f"{self._directory}/{offset_name(offset)}{SNAPSHOT_SUFFIX}"

    def load(self, offset: int) -> ProducerStateMap | None:
        """The state as of `offset`, if there is a file of it that is sound."""
        path = self.path(offset)
        try:
            entries = decode_snapshot(read_whole(self._fs, path), path)
        except FileNotFoundError:
            return None
        except CorruptLog as error:
            self._say(warn(f"{error}; producer state is rebuilt from the log"))
            return None
        return ProducerStateMap.from_snapshot(entries, self._directory)

    def is_durable(self, offset: int) -> bool:
        """Whether the state as of `offset` is on disk, whole; now, if not before."""
        path = self.path(offset)
        try:
            decode_snapshot(read_whole(self._fs, path), path)
        except (FileNotFoundError, CorruptLog):
            return False
        flush_file(self._fs, path)
        self._fs.flush_directory(self._directory)
        return True

    def write(self, offset: int, producers: ProducerStateMap) -> None:
        """Keep the state as of `offset`, durable but for its name: the batches it came from may be deleted one
        day."""
        file = self._fs.open(self.path(offset), "create")
        data = encode_snapshot(producers.to_snapshot())
        file.pwritev([data], 0)
        file.truncate(len(data))
        file.flush()
        file.close()

    def replace(self, offset: int, producers: ProducerStateMap) -> None:
        """Write a lost one anew. Without room for it, the next start replays once more."""
        try:
            self.write(offset, producers)
            self._fs.flush_directory(self._directory)
        except OSError as error:
            self._say(
                warn(f"{self._directory}: the state of producers at {offset} could not be written: {error}")
            )

    def remove_unused(self, used: Container[int], end_offset: int) -> None:
        """Remove what earlier stops wrote at their ends, once there is one of this end."""
        found = self._offsets()
        if end_offset not in found:
            return
        try:
            for offset in found:
                if offset != end_offset and offset not in used:
                    self._fs.remove(self.path(offset))
        except OSError as error:
            self._say(warn(f"{self._directory}: an old state of producers could not be removed: {error}"))

    def remove_above(self, offset: int) -> None:
        """Remove what may be of batches that were not flushed and are lost: their offsets are given again."""
        for found in self._offsets():
            if found > offset:
                self._fs.remove(self.path(found))

    def _offsets(self) -> list[int]:
        """The offsets there are states of producers of."""
        names = [name for name in self._fs.list(self._directory) if name.endswith(SNAPSHOT_SUFFIX)]
        stems = (name.removesuffix(SNAPSHOT_SUFFIX) for name in names)
        return [int(stem) for stem in stems if stem.isdigit() and offset_name(int(stem)) == stem]


LOST_OFFSETS_FILE: Final = "holdfast.lost-offsets"


class LostOffsets:
    """What is missing from one log, and what of it was given up."""

    def __init__(self, fs: FileSystem, directory: str, say: Say, *, accept_loss: bool) -> None:
        self._fs = fs
        self._directory = directory
        self._path = f"{directory}/{LOST_OFFSETS_FILE}"
        self._say = say
        self._accept_loss = accept_loss
        self._given_up = self._read()

    def _read(self) -> list[tuple[int, int]]:
        if not self._fs.exists(self._path):
            return []
        try:
            lines = decode_checkpoint(read_whole(self._fs, self._path), self._path)
            return [_range(line) for line in lines]
        except CorruptLog as error:
            self._say(warn(f"{error}; nothing counts as given up"))
            return []

    def check(self, first: int, end: int, reason: str) -> None:
        """The log does not have `first` up to below `end`: raise `MissingOffsets`, unless that was given up."""
        if any(low <= first and end <= high for low, high in self._given_up):
            return
        if not self._accept_loss:
            raise MissingOffsets(
                f"{self._directory}: the offsets from {first} to {end - 1} are missing: {reason}. Nothing was changed. "
                "Restore the files from a copy and start again.",
                first,
                end,
            )
        self._given_up.append((first, end))
        write_atomically(
            self._fs, self._path, encode_checkpoint(f"{low} {high}" for low, high in self._given_up)
        )
        what = f"the offsets from {first} to {end - 1} are given up"
        self._say(warn(f"{self._directory}: {what} ({reason}); {self._path} tells so"))


def _range(line: Line) -> tuple[int, int]:
    first, end = line.fields(2)
    return parse_number(first, line, OFFSET_MAX), parse_number(end, line, OFFSET_MAX)
