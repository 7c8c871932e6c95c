"""Where a log keeps its leader epochs: written without anybody waiting for it.

Batches tell their epoch, and recovery reads all of the active segment. So files have to know of an epoch only when the
segment it began in is sealed. Then all epochs are written aside, to be flushed with what was sealed. Kafka's name for
the file follows when the log is closed; until then whoever opens the log takes the one of the two that knows more.
"""

from __future__ import annotations

from typing import Final

from holdfast.broker.log.leader_epochs import LEADER_EPOCH_FILE, LeaderEpochs
from holdfast.errors import CorruptLog
from holdfast.saying import Say, warn
from holdfast.seams import File, FileSystem

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
