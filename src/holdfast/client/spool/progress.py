"""How far a spool was delivered, kept beside it in the file `progress`.

It may lie behind the truth, never ahead of it: what it does not know is sent again, recognisable by its `hf-id`. So it
is replaced in one step but not flushed while delivering goes on, and a file that is missing or damaged counts as one
that knows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct, error
from typing import Final, NamedTuple

from holdfast.atomic import ASIDE_SUFFIX, read_whole, write_atomically
from holdfast.client.spool import format as frames
from holdfast.client.spool.format import MOVED, UNDECIDED, DamagedSpool, PartitionKey
from holdfast.seams import FileSystem

PROGRESS_FILE: Final = "progress"
WAITING_FILE: Final = "waiting.json"
"""What waits and why, for whoever looks from outside."""
_POSITION: Final = Struct(">q")


class Progress(NamedTuple):
    prefix: int
    """Every message in front of this position is delivered or set aside."""
    confirmed: dict[PartitionKey, int]
    """The sequence of the first message of each partition, -1 for undecided ones, that is neither."""


NOTHING: Final = Progress(0, {})


def encode_progress(progress: Progress) -> bytes:
    return frames.frame(_POSITION.pack(progress.prefix)) + frames.encode_counters(progress.confirmed)


def decode_progress(data: bytes) -> Progress:
    head = frames.read_frame(data, 0, 0)
    body = frames.read_frame(data, head.end, 0) if head is not None else None
    if head is None or body is None:
        raise DamagedSpool("the progress of a spool cannot be read")
    try:
        (prefix,) = _POSITION.unpack(head.data)
    except error as problem:
        raise DamagedSpool(f"the progress of a spool cannot be read: {problem}") from problem
    return Progress(prefix, frames.decode_counters(body))


def read_progress(fs: FileSystem, directory: str) -> Progress:
    path = f"{directory}/{PROGRESS_FILE}"
    if not fs.exists(path):
        return NOTHING
    try:
        return decode_progress(read_whole(fs, path))
    except DamagedSpool:
        return NOTHING


def write_progress(fs: FileSystem, directory: str, progress: Progress, *, durably: bool) -> None:
    path = f"{directory}/{PROGRESS_FILE}"
    data = encode_progress(progress)
    if durably:
        write_atomically(fs, path, data)
        return
    aside = path + ASIDE_SUFFIX
    file = fs.open(aside, "create")
    try:
        file.truncate(0)
        file.pwritev([data], 0)
    finally:
        file.close()
    fs.rename(aside, path)


def messages_left(counters: Mapping[PartitionKey, int], confirmed: Mapping[PartitionKey, int]) -> int:
    """How many messages of those counted are not confirmed."""
    left = 0
    for where, following in stored(counters).items():
        left += max(0, following - confirmed.get(where, 0))
    return left


def merged(first: Progress, second: Progress) -> Progress:
    """What either of two knows to be done."""
    confirmed = dict(first.confirmed)
    for where, following in second.confirmed.items():
        if following > confirmed.get(where, 0):
            confirmed[where] = following
    return Progress(max(first.prefix, second.prefix), confirmed)


def stored(counters: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
    """The counters of messages."""
    return {where: following for where, following in counters.items() if where[1] >= UNDECIDED and where[0]}


def moved(counters: Mapping[PartitionKey, int]) -> dict[PartitionKey, int]:
    """What is done of undecided messages, by the moves of earlier versions."""
    return {
        (topic, UNDECIDED): through for (topic, line), through in counters.items() if line == MOVED and topic
    }


class Notes:
    """What a spool writes down beside its messages: how far they are delivered, and what waits and why."""

    def __init__(self, fs: FileSystem, directory: str, counted: Progress) -> None:
        self._fs = fs
        self._directory = directory
        self.progress = merged(read_progress(fs, directory), counted)
        """What is done, and confirmed by the right cluster."""
        self._said_waiting = "?"

    def write(self, progress: Progress, *, durably: bool) -> None:
        write_progress(self._fs, self._directory, progress, durably=durably)
        self.progress = progress

    def note_waiting(self, said: str) -> None:
        """Have whoever looks at the spool from outside know what waits; nothing does when it is empty."""
        if said == self._said_waiting:
            return
        path = f"{self._directory}/{WAITING_FILE}"
        if said:
            write_atomically(self._fs, path, said.encode())
        elif self._fs.exists(path):
            self._fs.remove(path)
        self._said_waiting = said
