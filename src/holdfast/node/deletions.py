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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.node.directories import REFUSED_ERRNOS, LogDirectory
from holdfast.node.hosted import HostedPartition
from holdfast.node.partitions import Doomed
from holdfast.seams import FileSystem

Offsets = dict[tuple[str, int], int]


class Deletions:
    def __init__(
        self,
        fs: FileSystem,
        forget: Callable[[LogDirectory], bool],
        failed: Callable[[LogDirectory, OSError], None],
    ) -> None:
        """`forget` writes the checkpoints of a directory and tells whether they are durable."""
        self._fs = fs
        self._forget = forget
        self._failed = failed
        self._undecided: list[Doomed] = []
        """Deleted, but not durably yet."""
        self._decided: list[Doomed] = []
        """Durably deleted, and perhaps still in the checkpoints."""
        self._emptied: set[str] = set()

    def begin(self, doomed: Sequence[Doomed]) -> None:
        self._undecided += doomed

    def decide(self, doomed: Sequence[Doomed]) -> None:
        """The record that removes the topic is durable."""
        self._undecided = [each for each in self._undecided if each not in doomed]
        self._decided += doomed
        self.carry_on()

    def carry_on(self) -> None:
        """Remove what may be removed: now and then, as long as something was refused."""
        for directory in dict.fromkeys(each.directory for each in self._decided):
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
                    self._fs.remove_tree(each.path)
                    self._emptied.discard(each.path)
                    self._decided.remove(each)
                elif each.path not in self._emptied:
                    for name in self._fs.list(each.path):
                        self._fs.remove(f"{each.path}/{name}")
                    self._emptied.add(each.path)
        except OSError as error:
            if error.errno not in REFUSED_ERRNOS:
                self._failed(directory, error)

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
