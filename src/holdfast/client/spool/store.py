"""The files of one spool: written in groups, read in order, shortened at the front.

What a caller may rely on:

- `write` returns when every message of the group is on disk, and then gives each its position and sequence. A group
  the disk has no room for is refused whole, and nothing has changed. A flush that failed ends this store: nobody knows
  any more what the disk holds, so only opening it anew, which reads what is there, goes on.
- Opening finds the end of what was stored. A torn end, written by a group whose flush never returned, is cut off and
  said; damage in front of a later group is not an end, and is refused with the place.
- Segments go when everything in them was delivered or set aside (`trim`). Sequences go on, since every segment begins
  with the counters.

One thread writes and another reads and trims; each call takes the lock only for what they share.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Final, NamedTuple

from holdfast.client.spool import format as frames
from holdfast.client.spool.format import Body, DamagedSpool, Entry, Message, PartitionKey
from holdfast.errors import StorageError
from holdfast.seams import Buffer, File, FileSystem

SEGMENT_SUFFIX: Final = ".spool"
SEGMENT_BYTES: Final = 64 * 1024 * 1024
IDLE_SEGMENT_BYTES: Final = 1024 * 1024
"""A segment whose messages are all delivered makes room for a new one from this size on."""
READ_BYTES: Final = 256 * 1024
NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_GROUP_MARK: Final = frames.encode_group(0)[:4]


class SpoolFull(StorageError):
    """There is no room for more: the spool has reached its bound, or the disk is full. Nothing was stored."""


class SpoolFailed(StorageError):
    """The disk under the spool failed. What was reported stored is safe; nothing more is taken until it is reopened."""


class Group(NamedTuple):
    """Messages that were stored together."""

    start: int
    """The position of its mark: where the group before it ended."""
    end: int
    entries: list[Entry]


class _Segment:
    __slots__ = ("base", "file", "path", "size")

    def __init__(self, path: str, base: int, size: int, file: File | None = None) -> None:
        self.path = path
        self.base = base
        self.size = size
        self.file = file

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
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._fs = fs
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._say = say
        self._lock = Lock()
        self._segments: list[_Segment] = []
        self._roll_wanted = True
        self._failure: str | None = None
        self.counters: dict[PartitionKey, int] = {}
        """The next sequence of each partition."""
        self._open()

    @property
    def start(self) -> int:
        """The first position there is."""
        with self._lock:
            return self._segments[0].base if self._segments else 0

    @property
    def end(self) -> int:
        """Everything below is stored."""
        with self._lock:
            return self._segments[-1].end if self._segments else 0

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._segments[-1].end - self._segments[0].base if self._segments else 0

    # Writing

    def write(self, messages: Sequence[Message]) -> Group:
        """Store one message or more; returns when all of them are on disk."""
        if self._failure is not None:
            raise SpoolFailed(self._failure)
        rolls = self._must_roll()
        position = self.end
        # The mark of the group stands in front of everything else that is written with it.
        pieces = [frames.encode_group(position)]
        if rolls:
            pieces.append(frames.encode_counters(self.counters))
        entries = self._encode(messages, position + sum(map(len, pieces)), pieces)
        segment = self._new_segment(position) if rolls else self._segments[-1]
        self._put(segment, b"".join(pieces), is_new=rolls)
        for entry in entries:
            message = entry.message
            self.counters[message.topic, message.partition] = entry.sequence + 1
        return Group(position, entries[-1].end, entries)

    def _must_roll(self) -> bool:
        return not self._segments or self._roll_wanted or self._segments[-1].size >= self._segment_bytes

    def _encode(self, messages: Sequence[Message], position: int, pieces: list[bytes]) -> list[Entry]:
        """Frames behind `pieces`, numbered from the counters, which stay as they are until the frames are stored."""
        entries: list[Entry] = []
        counters: dict[PartitionKey, int] = {}
        for message in messages:
            key = (message.topic, message.partition)
            sequence = counters.get(key)
            if sequence is None:
                sequence = self.counters.get(key, 0)
            counters[key] = sequence + 1
            encoded = frames.encode_message(message, sequence)
            pieces.append(encoded)
            entries.append(Entry(position, position + len(encoded), sequence, message))
            position += len(encoded)
        return entries

    def _new_segment(self, base: int) -> _Segment:
        path = f"{self.directory}/{base:020d}{SEGMENT_SUFFIX}"
        try:
            file = self._fs.open(path, "create")
            file.truncate(0)
        except OSError as error:
            raise self._refused(error) from error
        return _Segment(path, base, 0, file)

    def _put(self, segment: _Segment, data: bytes, *, is_new: bool) -> None:
        file = self._file(segment)
        try:
            file.pwritev([data], segment.size)
        except OSError as error:
            refused = self._refused(error)
            self._take_back(segment, is_new)
            raise refused from error
        try:
            file.flush()
            if is_new:
                self._fs.flush_directory(self.directory)
        except OSError as error:
            self._failure = f"{segment.path} could not be flushed: {error}"
            raise SpoolFailed(self._failure) from error
        with self._lock:
            segment.size += len(data)
            if is_new:
                self._segments.append(segment)
        if is_new:
            self._roll_wanted = False

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
        if segment.file is None:
            segment.file = self._fs.open(segment.path, "write")
        return segment.file

    # Reading

    def read(self, position: int, max_bytes: int = READ_BYTES) -> tuple[list[Entry], int]:
        """Messages from `position` on, about `max_bytes` of them, and where to go on; none at the end."""
        segment = self._segment_at(position)
        if segment is None:
            return [], position
        limit = segment.end - max(position, segment.base)
        want = min(max(max_bytes, frames.FRAME_BYTES), limit)
        at = max(position, segment.base)
        file = self._file(segment)
        buffer = file.pread(want, at - segment.base)
        needed = frames.frame_length(buffer)
        if want < needed <= limit:
            # One message is longer than what was asked for.
            buffer = file.pread(needed, at - segment.base)
        entries: list[Entry] = []
        done = at
        for body in _whole_frames(buffer, at):
            if body.kind == frames.MESSAGE:
                entries.append(frames.decode_message(body))
            done = body.end
        if done == at:
            raise DamagedSpool(_damage(segment.path, at - segment.base))
        return entries, done

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
                self._roll_wanted = self._roll_wanted or self._segments[-1].size >= IDLE_SEGMENT_BYTES
        for segment in gone:
            if segment.file is not None:
                segment.file.close()
            self._fs.remove(segment.path)

    def close(self) -> None:
        with self._lock:
            for segment in self._segments:
                if segment.file is not None:
                    segment.file.close()
                    segment.file = None

    # Opening

    def _open(self) -> None:
        for name in self._fs.list(self.directory):
            stem = name.removesuffix(SEGMENT_SUFFIX)
            if stem != name and stem.isdigit():
                path = f"{self.directory}/{name}"
                self._segments.append(_Segment(path, int(stem), self._fs.size(path)))
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

    def _recover(self, segment: _Segment) -> bool:
        """Find the end of the last segment and its counters; false when it has not even those."""
        file = self._file(segment)
        # What a killed process wrote may be in the page cache alone; from here on it counts as stored.
        file.flush()
        counters: dict[PartitionKey, int] | None = None
        position = segment.base
        for body in self._scan(file, segment):
            if body.kind == frames.COUNTERS:
                counters = frames.decode_counters(body)
            elif body.kind == frames.MESSAGE:
                if counters is None:
                    raise DamagedSpool(_damage(segment.path, 0))
                entry = frames.decode_message(body)
                counters[entry.message.topic, entry.message.partition] = entry.sequence + 1
            position = body.end
        self._cut(file, segment, position - segment.base)
        if counters is None:
            return False
        self.counters = counters
        return True

    def _scan(self, file: File, segment: _Segment) -> Iterator[Body]:
        """Whole frames up to the first place that holds none."""
        position = segment.base
        while position < segment.end:
            buffer = file.pread(min(READ_BYTES, segment.end - position), position - segment.base)
            needed = frames.frame_length(buffer)
            if len(buffer) < needed <= segment.end - position:
                buffer = file.pread(needed, position - segment.base)
            before = position
            for body in _whole_frames(buffer, position):
                position = body.end
                yield body
            if position == before:
                return

    def _cut(self, file: File, segment: _Segment, size: int) -> None:
        if size == segment.size:
            return
        tail = file.pread(segment.size - size, size)
        if _later_group(tail, segment.base + size):
            raise DamagedSpool(_damage(segment.path, size))
        self._say(
            f"{segment.path}: the last {len(tail)} bytes are of messages whose sender was never told they were stored; "
            "cut off"
        )
        file.truncate(size)
        file.flush()
        segment.size = size


def _whole_frames(buffer: Buffer, base: int) -> Iterator[Body]:
    at = 0
    while (body := frames.read_frame(buffer, at, base)) is not None:
        yield body
        at = body.end - base


def _later_group(tail: bytes, base: int) -> bool:
    """Whether a group begins behind the first byte of `tail`: then what is in front of it had been flushed."""
    at = tail.find(_GROUP_MARK, 1)
    while at >= 0:
        body = frames.read_frame(tail, at, base)
        if body is not None and body.kind == frames.GROUP and frames.decode_group(body) == base + at:
            return True
        at = tail.find(_GROUP_MARK, at + 1)
    return False


def _damage(path: str, at: int) -> str:
    return (
        f"{path}: damaged at byte {at}, in front of messages that were stored. Nothing was changed. "
        "`holdfast spool export` rescues what can be read; move the directory away to give the rest up."
    )
