"""The files of one spool: written in groups, read in order, shortened at the front.

What a caller may rely on:

- `write` returns when every message of the group is on disk, and has given each its sequence. A group the disk has no
  room for is refused whole, and nothing has changed. A flush that failed ends this store: nobody knows any more what
  the disk holds, so only opening it anew, which reads what is there, goes on.
- Opening finds the end of what was stored. A torn end, written by a group whose flush never returned, is cut off and
  said; damage in front of a later group is not an end, and is refused with the place.
- Segments go when everything in them was delivered or set aside (`trim`). Sequences go on, since every segment begins
  with the counters.

One thread writes and another reads and trims; each call takes the lock only for what they share.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from threading import Lock
from typing import Final, NamedTuple

from holdfast.client.spool import format as frames
from holdfast.client.spool.format import Body, DamagedSpool, Group, Moved, PartitionKey, Storable
from holdfast.errors import StorageError
from holdfast.seams import File, FileSystem

SEGMENT_SUFFIX: Final = ".spool"
SEGMENT_BYTES: Final = 64 * 1024 * 1024
IDLE_SEGMENT_BYTES: Final = 1024 * 1024
"""A segment whose messages are all delivered makes room for a new one from this size on."""
READ_BYTES: Final = 256 * 1024
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))


class SpoolFull(StorageError):
    """There is no room for more: the spool has reached its bound, or the disk is full. Nothing was stored."""


class SpoolFailed(StorageError):
    """The disk under the spool failed. What was reported stored is safe; nothing more is taken until it is reopened."""


class Written(NamedTuple):
    """A group on disk. Groups lie without a gap: each starts where the one before it ended."""

    start: int
    position: int
    """Where its frame stands."""
    end: int
    following: dict[PartitionKey, int]
    """The counters of what it holds, as they are after it."""


class _Segment:
    __slots__ = ("base", "file", "opening", "path", "size")

    def __init__(self, path: str, base: int, size: int, file: File | None = None) -> None:
        self.path = path
        self.base = base
        self.size = size
        self.file = file
        self.opening: int | None = None
        """Of the process that wrote it, 0 when that was an earlier version; None until somebody has looked."""

    @property
    def end(self) -> int:
        return self.base + self.size


class SpoolStore:
    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        opening: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._fs = fs
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._idle_bytes = min(IDLE_SEGMENT_BYTES, segment_bytes)
        self._say = say
        self._lock = Lock()
        self._segments: list[_Segment] = []
        self._roll_wanted = True
        self._failure: str | None = None
        self.counters: dict[PartitionKey, int] = {}
        """The next sequence of each partition, and how far undecided messages are moved; see `format`."""
        self.trimmed: dict[PartitionKey, int] = {}
        """The counters as they were at the first position there was when the store was opened."""
        self._open()
        if opening:
            # What is stored from now on belongs to this opening, and a segment to one.
            self.counters[frames.OPENING] = opening
            self._roll_wanted = True

    @property
    def start(self) -> int:
        """The first position there is."""
        return self._segments[0].base if self._segments else 0

    @property
    def end(self) -> int:
        """Everything below is stored. Applications ask: no lock is held while a signal may interrupt them."""
        return self._segments[-1].end if self._segments else 0

    # Writing

    def write(self, messages: Sequence[Storable], moved: Moved | None = None) -> Written:
        """Store a group; returns when all of it is on disk."""
        if self._failure is not None:
            raise SpoolFailed(self._failure)
        rolls = self._must_roll()
        start = position = self.end
        counters = frames.encode_counters(self.counters) if rolls else b""
        position += len(counters)
        head, body, following = frames.encode_group(messages, position, self._next_sequence, moved)
        if rolls:
            segment = self._new_segment(start)
            segment.opening = self.opening
            # Durable before the group is written: a group behind counters that cannot be read is damage, and must not
            # be what a loss of power leaves of a group that was never stored.
            self._put(segment, (counters,), is_new=True)
        else:
            segment = self._segments[-1]
        self._put(segment, (head, body), is_new=rolls)
        if rolls:
            with self._lock:
                self._segments.append(segment)
            self._roll_wanted = False
        self.counters.update(following)
        return Written(start, position, position + len(head) + len(body), following)

    def _next_sequence(self, where: PartitionKey) -> int:
        return self.counters.get(where, 0)

    def _must_roll(self) -> bool:
        return not self._segments or self._roll_wanted or self._segments[-1].size >= self._segment_bytes

    def _new_segment(self, base: int) -> _Segment:
        path = f"{self.directory}/{base:020d}{SEGMENT_SUFFIX}"
        try:
            file = self._fs.open(path, "create")
            file.truncate(0)
        except OSError as error:
            raise self._refused(error) from error
        return _Segment(path, base, 0, file)

    def _put(self, segment: _Segment, buffers: Sequence[bytes], *, is_new: bool) -> None:
        file = self._file(segment)
        try:
            file.pwritev(buffers, segment.size)
        except OSError as error:
            refused = self._refused(error)
            self._take_back(segment, is_new)
            raise refused from error
        try:
            file.flush()
            if not segment.size:
                self._fs.flush_directory(self.directory)
        except OSError as error:
            # Whatever this leaves behind, it must not look stored to whoever opens the spool next.
            self._take_back(segment, is_new)
            self._failure = f"{segment.path} could not be flushed: {error}"
            raise SpoolFailed(self._failure) from error
        with self._lock:
            segment.size += sum(map(len, buffers))

    def _take_back(self, segment: _Segment, is_new: bool) -> None:
        """Leave no trace of what was refused."""
        try:
            if is_new:
                self._fs.remove(segment.path)
            else:
                self._file(segment).truncate(segment.size)
        except OSError as error:
            self._failure = f"{segment.path} could not be cut back: {error}"

    def _refused(self, error: OSError) -> StorageError:
        if error.errno in NO_ROOM:
            return SpoolFull(f"no room on the disk of {self.directory}: {error.strerror}")
        self._failure = f"{self.directory} could not be written: {error}"
        return SpoolFailed(self._failure)

    def _file(self, segment: _Segment) -> File:
        with self._lock:
            if segment.file is None:
                segment.file = self._fs.open(segment.path, "write")
            return segment.file

    # Reading

    def read(
        self, position: int, *, max_bytes: int = READ_BYTES, until: int | None = None
    ) -> tuple[list[Group], int]:
        """Groups from `position` on, one or about `max_bytes` of them, up to `until`; and where to go on.

        `position` and `until` are places where a group starts. At `until`, or the end, there are no groups and it goes
        on where it was; there may also be none because only counters were read.
        """
        segment = self._segment_at(position)
        if segment is None or (until is not None and position >= until):
            return [], position
        at = max(position, segment.base)
        limit = (segment.end if until is None else min(segment.end, until)) - at
        file = self._file(segment)
        buffer = file.pread(min(max(max_bytes, frames.FRAME_BYTES), limit), at - segment.base)
        needed = frames.frame_length(buffer)
        if len(buffer) < needed <= limit:
            # One group is longer than what was asked for.
            buffer = file.pread(needed, at - segment.base)
        groups: list[Group] = []
        done = at
        for body in frames.whole_frames(buffer, at):
            if body.kind in frames.GROUPS:
                groups.append(frames.decode_group(body))
            done = body.end
        if done == at:
            raise DamagedSpool(damage(segment.path, at - segment.base))
        return groups, done

    @property
    def opening(self) -> int:
        """Which opening of the spool this is; 0 for one that only looks."""
        return self.counters.get(frames.OPENING, 0)

    def opening_at(self, position: int) -> int:
        """Which opening of the spool stored what stands there; 0 when an earlier version did."""
        segment = self._segment_at(position)
        if segment is None:
            return 0
        if segment.opening is None:
            segment.opening = self._first_counters(segment).get(frames.OPENING, 0)
        return segment.opening

    def counters_before(self, openings: Collection[int]) -> dict[PartitionKey, int]:
        """The counters as they were when the first of these openings began to store."""
        with self._lock:
            segments = list(self._segments)
        for segment in segments:
            if self.opening_at(segment.base) in openings:
                return self._first_counters(segment)
        return self.counters

    def _segment_at(self, position: int) -> _Segment | None:
        with self._lock:
            for segment in self._segments:
                if position < segment.end:
                    return segment
        return None

    # Shortening

    def trim(self, position: int) -> None:
        """Everything below `position` is delivered or set aside: let go of the segments that hold nothing else."""
        with self._lock:
            gone: list[_Segment] = []
            while len(self._segments) > 1 and self._segments[0].end <= position:
                gone.append(self._segments.pop(0))
            if self._segments and position >= self._segments[-1].end:
                self._roll_wanted = self._roll_wanted or self._segments[-1].size >= self._idle_bytes
        for segment in gone:
            # The file is closed with its last reference: somebody may be reading it.
            self._fs.remove(segment.path)

    def close(self) -> None:
        with self._lock:
            for segment in self._segments:
                if segment.file is not None:
                    segment.file.close()
                    segment.file = None

    # Opening

    def _open(self) -> None:
        self._segments = [
            _Segment(path, base, size) for base, path, size in list_segments(self._fs, self.directory)
        ]
        for before, after in pairwise(self._segments):
            if before.end != after.base:
                raise DamagedSpool(damage(before.path, before.size))
        while self._segments:
            last = self._segments[-1]
            if self._recover(last):
                break
            # A segment whose first group was never stored: nobody was promised anything of it.
            self._segments.pop()
            if last.file is not None:
                last.file.close()
            self._fs.remove(last.path)
        self._roll_wanted = not self._segments
        self._fs.flush_directory(self.directory)
        if self._segments:
            self.trimmed = self._first_counters(self._segments[0])

    def _first_counters(self, segment: _Segment) -> dict[PartitionKey, int]:
        for body in scan(self._file(segment), segment.base, segment.size):
            if body.kind == frames.COUNTERS:
                return frames.decode_counters(body)
            break
        raise DamagedSpool(damage(segment.path, 0))

    def _recover(self, segment: _Segment) -> bool:
        """Find the end of the last segment and its counters; false when it has not even those."""
        file = self._file(segment)
        # What a killed process wrote may be in the page cache alone; from here on it counts as stored.
        file.flush()
        counters: dict[PartitionKey, int] | None = None
        position = segment.base
        has_group = False
        for body in scan(file, segment.base, segment.size):
            if body.kind == frames.COUNTERS:
                counters = frames.decode_counters(body)
            elif body.kind in frames.GROUPS:
                if counters is None:
                    raise DamagedSpool(damage(segment.path, 0))
                counters.update(frames.counters_of(frames.decode_group(body)))
                has_group = True
            position = body.end
        self._cut(file, segment, position - segment.base)
        if counters is None or not has_group:
            return False
        self.counters = counters
        return True

    def _cut(self, file: File, segment: _Segment, size: int) -> None:
        if size == segment.size:
            return
        tail = file.pread(segment.size - size, size)
        if frames.find_group(tail, segment.base + size) is not None:
            raise DamagedSpool(damage(segment.path, size))
        self._say(
            f"{segment.path}: the last {len(tail)} bytes are of messages whose sender was never told they were stored; "
            "cut off"
        )
        file.truncate(size)
        file.flush()
        segment.size = size


def list_segments(fs: FileSystem, directory: str) -> list[tuple[int, str, int]]:
    """Position, path and size of each segment, in order. Whoever looks from outside may see one that its owner has
    delivered and removes at this moment: it holds nothing any more."""
    found: list[tuple[int, str, int]] = []
    for name in fs.list(directory):
        stem = name.removesuffix(SEGMENT_SUFFIX)
        if stem != name and stem.isdigit():
            path = f"{directory}/{name}"
            with suppress(FileNotFoundError):
                found.append((int(stem), path, fs.size(path)))
    return sorted(found)


def scan(file: File, base: int, size: int, position: int | None = None) -> Iterator[Body]:
    """Whole frames of a segment, from `position` or the beginning, up to the first place that holds none."""
    if position is None:
        position = base
    while position < base + size:
        buffer = file.pread(min(READ_BYTES, base + size - position), position - base)
        needed = frames.frame_length(buffer)
        if len(buffer) < needed <= base + size - position:
            buffer = file.pread(needed, position - base)
        before = position
        for body in frames.whole_frames(buffer, position):
            position = body.end
            yield body
        if position == before:
            return


def damage(path: str, at: int) -> str:
    return (
        f"{path}: damaged at byte {at}, in front of messages that were stored. Nothing was changed. "
        "`holdfast spool export` rescues what can be read; move the directory away to give the rest up."
    )
