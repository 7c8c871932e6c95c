"""Which leader epoch wrote which part of a log: KIP-101's answer to "where did our logs part?".

A leader epoch is assigned at the offset where it begins to write and lasts until the next one begins.
Epochs and start offsets both grow strictly. An epoch that wrote nothing leaves no trace: the next one to
begin at the same offset takes its place.

The file `leader-epoch-checkpoint` is Kafka's: text lines, version 0, the count, then `epoch start-offset`
each. `EpochFiles` writes it without anybody waiting for it.

Batches tell their epoch, and recovery reads all of the active segment. So files have to know of an epoch only when
the segment it began in is sealed. Then all epochs are written aside, to be flushed with what was sealed. Kafka's
name for the file follows when the log is closed; until then whoever opens the log takes the one of the two that
knows more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.atomic import read_whole, write_atomically
from holdfast.broker.log.checkpoints import OFFSET_MAX, decode_checkpoint, encode_checkpoint, parse_number
from holdfast.errors import CorruptLog, UsageError
from holdfast.saying import Say, warn
from holdfast.seams import File, FileSystem

LEADER_EPOCH_FILE: Final = "leader-epoch-checkpoint"
UNDEFINED_EPOCH: Final = -1
UNDEFINED_EPOCH_OFFSET: Final = -1
EPOCH_MAX: Final = 2**31 - 1


class EpochStart(NamedTuple):
    epoch: int
    start_offset: int


class EpochEnd(NamedTuple):
    epoch: int
    end_offset: int


class LeaderEpochs:
    """The epochs of one log, in memory; `write` makes them durable."""

    def __init__(self, entries: Iterable[EpochStart] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for entry in entries:
            self.assign(entry.epoch, entry.start_offset)

    @property
    def entries(self) -> list[EpochStart]:
        return [EpochStart(*pair) for pair in zip(self._epochs, self._starts, strict=True)]

    @property
    def latest_epoch(self) -> int:
        """The epoch that wrote last, or −1."""
        return self._epochs[-1] if self._epochs else UNDEFINED_EPOCH

    def assign(self, epoch: int, start_offset: int) -> bool:
        """`epoch` begins to write at `start_offset`; says whether that was news.

        Entries that contradict it, later epochs or later offsets, are dropped: what they described is gone.
        """
        if epoch < 0 or start_offset < 0:
            raise UsageError(f"epoch {epoch} cannot begin at offset {start_offset}")
        if self._epochs and epoch == self._epochs[-1] and start_offset >= self._starts[-1]:
            return False
        while self._epochs and (self._epochs[-1] >= epoch or self._starts[-1] >= start_offset):
            self._epochs.pop()
            self._starts.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        return True

    def end_offset_for(self, epoch: int, log_end_offset: int) -> EpochEnd:
        """The largest epoch at or below `epoch`, and the offset at which it ended (KIP-101, KIP-320).

        The latest epoch ends where the log does. An epoch before all known ones is answered as itself, ending
        where the first known one begins. (−1, −1) means that nothing is known: an epoch above the latest,
        or no epoch at all.
        """
        if not self._epochs or epoch == UNDEFINED_EPOCH or epoch > self.latest_epoch:
            return EpochEnd(UNDEFINED_EPOCH, UNDEFINED_EPOCH_OFFSET)
        if epoch == self.latest_epoch:
            return EpochEnd(epoch, log_end_offset)
        following = bisect_right(self._epochs, epoch)
        found = self._epochs[following - 1] if following else epoch
        return EpochEnd(found, self._starts[following])

    def epoch_for(self, offset: int) -> int:
        """The epoch that wrote `offset`, or −1 when it lies before all known ones."""
        following = bisect_right(self._starts, offset)
        return self._epochs[following - 1] if following else UNDEFINED_EPOCH

    def truncate_from_end(self, end_offset: int) -> bool:
        """The log now ends at `end_offset`: forget epochs that began there or later; says whether any did."""
        kept = bisect_left(self._starts, end_offset)
        changed = kept < len(self._starts)
        del self._epochs[kept:], self._starts[kept:]
        return changed

    def truncate_from_start(self, start_offset: int) -> bool:
        """The log now begins at `start_offset`: earlier epochs go, and the one that holds it begins there."""
        following = bisect_right(self._starts, start_offset)
        if not following or (following == 1 and self._starts[0] == start_offset):
            return False
        del self._epochs[: following - 1], self._starts[: following - 1]
        self._starts[0] = start_offset
        return True

    def clear(self) -> None:
        self._epochs.clear()
        self._starts.clear()

    # ---- the file

    def to_bytes(self) -> bytes:
        return encode_checkpoint(f"{epoch} {start}" for epoch, start in self.entries)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> LeaderEpochs:
        """Read a file's content; `CorruptLog` naming `path` and the line when it cannot be right."""
        epochs = cls()
        for line in decode_checkpoint(data, path):
            epoch_text, start_text = line.fields(2)
            epoch = parse_number(epoch_text, line, EPOCH_MAX)
            start = parse_number(start_text, line, OFFSET_MAX)
            if epochs._epochs and (epoch <= epochs._epochs[-1] or start <= epochs._starts[-1]):
                raise CorruptLog(f"{line}: epoch {epoch} at {start} does not follow the line before")
            epochs.assign(epoch, start)
        return epochs

    def write(self, fs: FileSystem, path: str) -> None:
        """Replace the file, durably."""
        write_atomically(fs, path, self.to_bytes())

    @classmethod
    def read(cls, fs: FileSystem, path: str) -> LeaderEpochs:
        """The file's epochs; none when there is no file."""
        return cls.from_bytes(read_whole(fs, path), path) if fs.exists(path) else cls()


ASIDE_SUFFIX: Final = ".new"
"""Not that of `atomic`, which nobody reads."""


class EpochFiles:
    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._path = f"{directory}/{LEADER_EPOCH_FILE}"
        self._known = LeaderEpochs().entries
        """What is in a file, or will be with the next flush."""
        self._is_aside = False
        """Whether the file aside knows more than the other."""

    def read(self, say: Say) -> LeaderEpochs:
        """What the last run has written; nothing when that is damaged."""
        try:
            epochs = LeaderEpochs.read(self._fs, self._path)
        except CorruptLog as error:
            say(warn(f"{error}; leader epochs are rebuilt from the log"))
            epochs = LeaderEpochs()
        try:
            aside = LeaderEpochs.read(self._fs, self._path + ASIDE_SUFFIX)
        except CorruptLog:
            aside = LeaderEpochs()  # it was not flushed yet
        self._is_aside = aside.latest_epoch > epochs.latest_epoch
        epochs = aside if self._is_aside else epochs
        self._known = epochs.entries
        return epochs

    def write_aside(self, epochs: LeaderEpochs) -> File | None:
        """Write what no file knows yet; returns what must be flushed, after which `written_aside` is to be called."""
        if epochs.entries == self._known:
            return None
        if self._is_aside:
            # What stands there is needed until more is durable. Two changes in one run are rare enough to wait for.
            self.write(epochs)
            return None
        file = self._fs.open(self._path + ASIDE_SUFFIX, "create")
        file.truncate(0)
        file.pwritev([epochs.to_bytes()], 0)
        return file

    def written_aside(self, epochs: LeaderEpochs) -> None:
        self._known = epochs.entries
        self._is_aside = True

    def write(self, epochs: LeaderEpochs) -> None:
        """Make all of them durable under the file's own name. Blocks."""
        epochs.write(self._fs, self._path)
        self._known = epochs.entries
        self._is_aside = False

    def keep_sealed(self, epochs: LeaderEpochs, active_base: int) -> None:
        """Write at once, when a log was opened, what another recovery would not find in the active segment.

        What a killed process wrote aside was perhaps not flushed.
        """
        sealed = [epoch for epoch in epochs.entries if epoch.start_offset < active_base]
        if self._is_aside or any(epoch not in self._known for epoch in sealed):
            self.write(epochs)

    def close(self) -> None:
        if self._is_aside:
            self._fs.rename(self._path + ASIDE_SUFFIX, self._path)
            self._is_aside = False
