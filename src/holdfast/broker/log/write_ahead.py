"""Space written ahead: zeros behind the last batch, so that the next flushes have only data to write.

A flush behind an append that made its file longer must also commit the file's new size and place on the disk: a
third to a half of what a small flush costs. Where zeros were written before, and flushed with an earlier group, the
batch only replaces them. Nothing rests on the zeros: every group is flushed as before, and if they never reached the
disk, or the file lost them, that flush brings the size along as it always did.

What is written ahead is no part of the log. It ends at `Segment.size`, whatever the file's length; recovery cuts off
zeros behind the last batch, since no batch begins with them (its format byte is not zero). They are given back when
the segment is sealed, when the log is closed, and when nothing was appended for a while.

It must pay, so only a log that is flushed often, by itself and in small groups gets any:

- A turn that flushes several files at once pays one commit for all of them, and their ends lie close together on the
  disk as long as they grow together; zeros in between would only push them apart.
- A group that is large against the space costs more to write twice than its commit costs.
- The space doubles each time it is used up, from `FIRST_BYTES` to the limit of the setting.
"""

from __future__ import annotations

import errno
from typing import Final

from holdfast.seams import File

FLUSHES_MIN: Final = 4
"""Small flushes in a row, by itself, before a log gets any space."""
FLUSHES_MIN_AFTER_OTHERS: Final = 40
"""The same for a log that was flushed together with others: where many are busy, some are alone now and then."""
GROUPS_MIN: Final = 32
"""How many groups the space must be good for: so many flushes share what it costs."""
FIRST_BYTES: Final = 16 * 1024
NO_ROOM_ERRNOS: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
"""A write refused for want of room."""

_PAGE_BYTES: Final = 4096
_ZEROS: Final = memoryview(bytes(64 * 1024))
_CHUNK_BYTES: Final = 1024 * 1024


class WriteAhead:
    """How much space one log deserves."""

    __slots__ = ("_flushes", "_group_bytes", "_last_bytes", "_was_used", "is_due")

    def __init__(self) -> None:
        self.is_due = False
        """Whether the log has been flushed often enough, in a way that space ahead makes cheaper."""
        self._flushes = 0
        self._group_bytes = 0
        self._last_bytes = 0
        self._was_used = False

    def flushing(self, group_bytes: int, *, apart: bool) -> None:
        """A group of appends is about to be flushed; `apart` when hardly anything else is at the same time."""
        self._was_used = True
        if not apart:
            self._flushes = FLUSHES_MIN - FLUSHES_MIN_AFTER_OTHERS
            self.is_due = False
            return
        self._flushes += 1
        self._group_bytes += (group_bytes - self._group_bytes) >> 2
        self.is_due = self._flushes >= FLUSHES_MIN

    def bytes_behind(self, end: int, limit: int, file_bytes_max: int) -> int:
        """How many zeros to write behind a batch that ends at `end` of its file, and beyond all that was ahead."""
        least = self._group_bytes * GROUPS_MIN
        if limit < least or not limit:
            return 0
        self._last_bytes = min(max(2 * self._last_bytes, FIRST_BYTES, least), limit)
        stop = (end + self._last_bytes) // _PAGE_BYTES * _PAGE_BYTES
        return max(0, min(stop, file_bytes_max) - end)

    def begin_anew(self) -> None:
        """The space is gone, or there was no room for it: it must be deserved again."""
        self._flushes = 0
        self._last_bytes = 0
        self.is_due = False

    def was_idle(self) -> bool:
        """Whether nothing was flushed since this was last asked."""
        was_used, self._was_used = self._was_used, False
        return not was_used


def zeros(length: int) -> list[memoryview]:
    """So many zero bytes, as buffers to write."""
    whole, rest = divmod(length, len(_ZEROS))
    return [_ZEROS] * whole + ([_ZEROS[:rest]] if rest else [])


def content_end(file: File, position: int, end: int) -> int:
    """Where the zeros begin that reach up to `end`, looking no further back than `position`."""
    while end > position:
        start = max(position, end - _CHUNK_BYTES)
        content = file.pread(end - start, start).rstrip(b"\0")
        if content:
            return start + len(content)
        end = start
    return position
