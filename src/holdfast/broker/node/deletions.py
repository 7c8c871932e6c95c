"""Topics on their way out: their directories go once the checkpoints no longer speak of them.

A deleted partition's directory has another name from the request on, so that a new topic may have its own. But the
checkpoints know partitions by nothing else. While such a directory is there, all they say of its name is about the
deleted partition, and every start reads them so. A new one of that name has nothing in them until it is gone.

1. The record that removes the topic becomes durable. Until then a crash may bring the partition back, and the
   checkpoints go on telling of it.
2. The checkpoints are written without it.
3. Its directory is removed.

Where a full disk refuses 2, what is in the directory goes at once, for that is what makes room. The empty directory
stays as the sign for the next start, and 2 is tried again every second.

A directory that cannot be removed, being mounted or in use, stays as a sign too, and 3 is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from holdfast.broker.node.directories import OBSTINATE_ERRNOS, REFUSED_ERRNOS, LogDirectory, Offsets
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.placement import Doomed
from holdfast.saying import warn
from holdfast.seams import FileSystem

STUCK_ROUNDS: Final = 60
"""After so many rounds, one each second, directories that could not be removed are tried again."""


class Deletions:
    def __init__(
        self,
        fs: FileSystem,
        forget: Callable[[LogDirectory], bool],
        say: Callable[[str], None],
    ) -> None:
        """`forget` writes the checkpoints of a directory and tells whether they are durable."""
        self._fs = fs
        self._forget = forget
        self._say = say
        self._undecided: list[Doomed] = []
        """Deleted, but not durably yet."""
        self._decided: list[Doomed] = []
        """Durably deleted, and perhaps still in the checkpoints."""
        self._emptied: set[str] = set()
        self._stuck: set[str] = set()
        """Paths that could not be removed, said once."""
        self._rounds = 0

    def begin(self, doomed: Sequence[Doomed]) -> None:
        self._undecided += doomed

    def decide(self, doomed: Sequence[Doomed]) -> None:
        """The record that removes the topic is durable."""
        self._undecided = [each for each in self._undecided if each not in doomed]
        self._decided += doomed
        self.carry_on()

    def carry_on(self) -> None:
        """Remove what may be removed: now and then, as long as something was refused."""
        self._rounds += 1
        is_due = self._rounds % STUCK_ROUNDS == 0
        for directory in dict.fromkeys(
            each.directory for each in self._decided if is_due or each.path not in self._stuck
        ):
            if not directory.offline:
                self._remove(directory, is_forgotten=self._forget(directory))

    def _remove(self, directory: LogDirectory, *, is_forgotten: bool) -> None:
        doomed = [each for each in self._decided if each.directory is directory and not directory.offline]
        try:
            if not is_forgotten and any(each.path not in self._emptied for each in doomed):
                # Under its old name an emptied directory would be a new topic's that has lost everything.
                self._fs.flush_directory(directory.path)
            for each in doomed:
                if is_forgotten:
                    self._remove_one(each)
                elif each.path not in self._emptied:
                    for name in self._fs.list(each.path):
                        self._fs.remove(f"{each.path}/{name}")
                    self._emptied.add(each.path)
        except OSError as error:
            if error.errno not in REFUSED_ERRNOS:
                directory.take_offline(error)

    def _remove_one(self, doomed: Doomed) -> None:
        try:
            self._fs.remove_tree(doomed.path)
        except OSError as error:
            if error.errno not in OBSTINATE_ERRNOS:
                raise
            if doomed.path not in self._stuck:
                self._say(warn(f"{doomed.path} is of a deleted topic and cannot be removed now: {error}"))
            self._stuck.add(doomed.path)
            return
        self._stuck.discard(doomed.path)
        self._emptied.discard(doomed.path)
        self._decided.remove(doomed)

    # The checkpoints

    def hides(self, hosted: HostedPartition) -> bool:
        """Whether the checkpoints cannot tell of a partition yet, since they would be read as of a deleted one."""
        return any(
            each.directory is hosted.directory and each.key == (hosted.topic, hosted.index)
            for each in (*self._undecided, *self._decided)
        )

    def tell(self, directory: LogDirectory, offsets: Offsets, of: Callable[[Doomed], int]) -> Offsets:
        """The `offsets` of what is hosted, as a checkpoint must have them while there are deleted ones."""
        for each in self._undecided:
            if each.directory is directory:
                offsets[each.key] = of(each)
        for each in self._decided:
            if each.directory is directory:
                offsets.pop(each.key, None)
        return offsets
