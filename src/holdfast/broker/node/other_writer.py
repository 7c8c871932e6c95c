"""Apache Kafka started by mistake on a directory in use: noticed, and nothing that was acknowledged is lost.

Kafka opens the metadata log, elects itself and appends its first records there before it tries the lock of the
directory, finds it taken, and ends. It had read the log's end before that. What we append in between, it writes over;
what it appended, our next append would write over. So before each append, and once a second, the log's file must be as
long as we have made it, and `quorum-state`, which Kafka replaces before it appends, as it was. If not, the broker
stops: whoever appended last, the other knows nothing of it.

Until the other program has ended, the directory stays locked: a Kafka that got the lock would serve what it has read,
without what we appended since. While a controller of Kafka's lives it writes twice a second: silence tells that it is
gone.

What we have appended lately may have been written over by then, or may be in a moment. It goes into
`holdfast.appended` beside the log's directory, durably, and the next start puts it back where it stood. What stood
there instead is kept in a `*.cut` file: nobody was ever told of it, for a Kafka without the lock serves nobody. What
Kafka wrote behind our last record stays, and is replayed like the rest.
"""

from __future__ import annotations

import errno
from collections import deque
from contextlib import closing
from typing import Final, NamedTuple

from holdfast.atomic import read_whole, write_atomically
from holdfast.broker.log.leader_epochs import LEADER_EPOCH_FILE
from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery_steps import keep_cut_bytes
from holdfast.broker.log.segment import INDEX_SUFFIXES, LOG_SUFFIX, Segment
from holdfast.errors import CorruptLog, InvalidRecords
from holdfast.saying import Say, warn
from holdfast.seams import FileSystem, Now
from holdfast.wire.batch import OFFSET_AND_EPOCH, BatchHeader, check_whole

QUORUM_STATE_FILE: Final = "quorum-state"
"""Written by Apache Kafka before it leads an epoch; we never write it."""
APPENDED_FILE: Final = "holdfast.appended"
KEPT_MS: Final = 120_000
"""How long a Kafka may take from reading the log's end to its first append, with much to spare."""
KEPT_BYTES_MAX: Final = 16 << 20
"""Of a burst of changes the last ones are kept: more than a controller takes in while Kafka starts."""


class _Appended(NamedTuple):
    at_ms: int
    base_offset: int
    batch: bytes


class OtherWriter:
    def __init__(self, fs: FileSystem, log: Log) -> None:
        self._fs = fs
        self._log = log
        self._state = self._look()
        self._appended: deque[_Appended] = deque()
        self._appended_bytes = 0
        self.is_found = False

    def _look(self) -> tuple[int, int]:
        path = f"{self._log.directory}/{QUORUM_STATE_FILE}"
        return (self._fs.size(path), self._fs.modified_ms(path)) if self._fs.exists(path) else (-1, -1)

    def signs(self) -> tuple[int, int, int]:
        """What changes with everything that another program writes."""
        return (self._fs.size(self._log.active.path()), *self._look())

    def note(self, stored: BatchHeader, batch: bytes, now: Now) -> None:
        """A batch was appended, with this header."""
        head = OFFSET_AND_EPOCH.pack(stored.base_offset, stored.batch_length, stored.leader_epoch)
        self._appended.append(_Appended(now.monotonic_ms, stored.base_offset, head + batch[len(head) :]))
        self._appended_bytes += len(batch)
        while (
            self._appended[0].at_ms < now.monotonic_ms - KEPT_MS
            or self._appended_bytes > KEPT_BYTES_MAX
            or self._appended[0].base_offset < self._log.active.base_offset
        ) and len(self._appended) > 1:
            self._appended_bytes -= len(self._appended.popleft().batch)

    def require_none(self) -> None:
        """Raise `OSError` where somebody else writes to the log; what was appended lately is safe then."""
        active = self._log.active
        expected = active.ahead_end if active.has_space_ahead else active.size
        found = active.file.size()
        signs = []
        if found != expected:
            signs.append(f"{active.path()} has {found} bytes instead of {expected}")
        if self._look() != self._state:
            signs.append(f"{self._log.directory}/{QUORUM_STATE_FILE} was written")
        if not signs:
            return
        self.is_found = True
        if self._appended:
            path = f"{self._log.directory}/{APPENDED_FILE}"
            write_atomically(self._fs, path, b"".join(each.batch for each in self._appended))
        raise OSError(
            errno.EBUSY,
            f"another program writes to the metadata log, which is in use: {' and '.join(signs)}. Apache Kafka was "
            "probably started on this directory. Make sure that it has ended, then start this broker again: nothing "
            "that was acknowledged is lost",
            self._log.directory,
        )


def put_back_appended(fs: FileSystem, directory: str, say: Say) -> None:
    """Put what the last run had appended to the metadata log back, where another program has written over it."""
    path = f"{directory}/{APPENDED_FILE}"
    if not fs.exists(path):
        return
    data = read_whole(fs, path)
    first = check_whole(data).base_offset
    bases = [
        int(name[:20]) for name in fs.list(directory) if name.endswith(LOG_SUFFIX) and name[:20].isdigit()
    ]
    if not bases or min(bases) > first:
        raise CorruptLog(f"{path}: begins at offset {first}, and no segment of the log has that")
    base = max(base for base in bases if base <= first)
    segment = Segment(fs, directory, base, 0, 0)
    content = read_whole(fs, segment.path())
    position = _position_of(content, first)
    if content[position : position + len(data)] != data:
        kept = keep_cut_bytes(fs, segment, position, len(content))
        for name in (*map(segment.path, INDEX_SUFFIXES), f"{directory}/{LEADER_EPOCH_FILE}"):
            if fs.exists(name):
                fs.remove(name)  # they tell of what is cut off; opening the log makes them again
        with closing(fs.open(segment.path(), "write")) as file:
            file.truncate(position)
            file.pwritev([data], position)
            file.flush()
        say(
            warn(
                f"{segment.path()}: another program had written over what was acknowledged from offset {first} on. "
                f"It is put back; what stood there is in {kept}"
            )
        )
    segment.close()
    fs.flush_directory(directory)
    fs.remove(path)
    fs.flush_directory(directory)


def _position_of(content: bytes, offset: int) -> int:
    """Where the batch of `offset` stands or has stood: behind the last whole one in front of it."""
    position = 0
    while position < len(content):
        try:
            header = check_whole(content, position)
        except InvalidRecords:
            break
        if header.base_offset >= offset:
            break
        position += header.size
    return position
