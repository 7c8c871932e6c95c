"""Offsets that a log had once and has no more: found when it is opened, given up only by request.

Three things hold of every log, whatever happened to it but the loss of files:

- It begins at or below its log start.
- Each segment begins where the one before it ends. A roll begins the next segment at the log end, and a cleaned segment
  reaches to the last offset of those it replaces (see `cleaner`): compaction leaves gaps inside segments only.
- It ends at or above its recovery point.

A power failure may break the second one, and only from the recovery point on: what lies behind such a gap was never
acknowledged (see `recovery`). Everything else is a loss. The log is not opened then, until an operator has restored
the file or given the offsets up. What is given up is written down beside the log before it is used, in the format of
Kafka's checkpoints, a line `first end` for each range, so that nobody is asked twice and everybody can see it.
"""

from __future__ import annotations

from typing import Final

from holdfast.atomic import read_whole, write_atomically
from holdfast.broker.log.checkpoints import (
    OFFSET_MAX,
    Line,
    decode_checkpoint,
    encode_checkpoint,
    parse_number,
)
from holdfast.errors import CorruptLog, MissingOffsets
from holdfast.saying import Say, warn
from holdfast.seams import FileSystem

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
