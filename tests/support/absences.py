"""What happens to a broker's directories while nobody looks: things are away, empty, older or exchanged, and come back.

An `Absence` knows whom it concerns: of those partitions the broker may answer errors, or refuse its start, until it is
given back. It may never answer wrongly, nor err about others. What a broker can rebuild concerns nobody.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from holdfast.atomic import parent_of
from holdfast.broker.log.checkpoints import PARTITION_METADATA_FILE
from holdfast.broker.node.directories import SESSION_FILE
from holdfast.testing.disk import Fault, Operation, SimulatedDisk
from holdfast.testing.disk_files import Directory, Inode

REBUILT: Final = (
    ".index",
    ".timeindex",
    ".snapshot",
    "leader-epoch-checkpoint",
    "recovery-point-offset-checkpoint",
)
"""How the names of files end that a broker can do without."""
UNTOLD: Final = (
    ".lock",
    ".tmp",
    ".cut",
    ".deleted",
    ".txnindex",
    ".kafka_cleanshutdown",
    "log-start-offset-checkpoint",
)
"""Files that are not taken. Without its file a log start is where the first segment begins, and nobody can tell."""


class Concern(NamedTuple):
    """Whom an absence concerns, by the names that partitions' directories have."""

    names: frozenset[str] = frozenset()
    spared: frozenset[str] | None = None
    """All but these, where not None: a partition that is gone has no name on disk."""
    may_refuse: bool = False
    """The broker need not start at all."""


class Absence(NamedTuple):
    what: str
    concern: Concern
    give_back: Callable[[], None]

    def concerns(self, partition: str) -> bool:
        names, spared, _ = self.concern
        return partition in names if spared is None else partition not in spared


class Environment:
    """Takes things from the log directories of a disk, by chance."""

    def __init__(self, disk: SimulatedDisk, rng: random.Random, directories: Sequence[str]) -> None:
        self._disk = disk
        self._rng = rng
        self._directories = directories
        self._copies: dict[str, bytes] = {}
        self.only = ""
        """What files that are taken have in their names."""

    def remember(self) -> None:
        """Keep a copy of every file as it is now."""
        self._copies = {path: self._content(path) for path in self._files()}

    def take(self, kinds: Sequence[str] = ()) -> Absence | None:
        """Take something of one of these KINDS; None when there is nothing of that kind."""
        return _TAKE[self._rng.choice(kinds or KINDS)](self)

    # Directories

    def _directory_away(self) -> Absence:
        path = self._some_directory()
        concern = self._whole(path)
        node = self._disk.take_away(path)
        return Absence(f"{path} is away", concern, lambda: self._disk.put_back(path, node))

    def _some_directory(self) -> str:
        return self._rng.choice([path for path in self._directories if self._disk.exists(path)])

    def _directory_empty(self) -> Absence:
        absence = self._directory_away()
        path = absence.what.split()[0]
        self._disk.prepare(path)
        return absence._replace(what=f"{path} is an empty directory")

    def _directory_unreadable(self) -> Absence:
        path = self._some_directory()
        concern = self._whole(path)
        self._disk.unreadable.add(path)
        return Absence(f"{path} cannot be read", concern, lambda: self._disk.unreadable.discard(path))

    def _directory_read_only(self) -> Absence:
        path = self._some_directory()
        self._disk.forbid_changes(path)
        return Absence(f"{path} is read-only", self._whole(path), lambda: self._disk.unwritable.discard(path))

    def _directory_failing(self) -> Absence:
        """It can be looked at, and some way into the start nothing more can be done with it."""
        path = self._some_directory()
        operation: Operation = self._rng.choice(("write", "create", "rename", "flush", "flush directory"))
        self._disk.plan(
            Fault(operation, path_contains=f"{path}/", skip=self._rng.randrange(6), times=1 << 30)
        )
        return Absence(f"{path} fails", self._whole(path), self._disk.clear_faults)

    def _directories_swapped(self) -> Absence | None:
        if len(self._directories) < 2:
            return None
        first, second = self._rng.sample(self._directories, 2)

        def swap() -> None:
            one, other = self._disk.take_away(first), self._disk.take_away(second)
            self._disk.put_back(first, other)
            self._disk.put_back(second, one)

        swap()
        return Absence(f"{first} and {second} are exchanged", Concern(), swap)

    def _disk_full(self) -> Absence:
        """There is room for a little or for nothing; what needs more may be refused, but not a start."""
        self._disk.capacity_bytes = self._disk.used_bytes + self._rng.choice((0, 0, 1_000))

        def give_back() -> None:
            self._disk.capacity_bytes = None

        return Absence("/ is full", Concern(spared=frozenset()), give_back)

    # What is in them

    def _partition_missing(self) -> Absence | None:
        paths = [path for path, node in self._below() if isinstance(node, Directory) and _is_partition(path)]
        return self._missing(self._rng.choice(paths)) if paths else None

    def _file_missing(self) -> Absence | None:
        path = self._one_of(self._files())
        return self._missing(path) if path else None

    def _one_of(self, paths: Sequence[str]) -> str:
        """A path, each kind of file as likely as any other; none when there is none."""
        kinds: dict[str, list[str]] = {}
        for path in paths:
            name = path.rpartition("/")[2]
            kinds.setdefault(name.partition(".")[2] if name[0].isdigit() else name, []).append(path)
        return self._rng.choice(kinds[self._rng.choice(sorted(kinds))]) if kinds else ""

    def _missing(self, path: str) -> Absence:
        concern = self._concern(path)
        node = self._disk.take_away(path)

        def give_back() -> None:
            if not self._disk.exists(parent_of(path)):
                return  # its topic was deleted
            if path.endswith(SESSION_FILE):
                return  # every start writes its own, and a failed directory's is removed for good
            if not self._disk.exists(path) or (not path.endswith(REBUILT) and self._is_empty(path)):
                self._disk.put_back(path, node)

        return Absence(f"{path} is missing", concern, give_back)

    def _file_empty(self) -> Absence | None:
        path = self._one_of([path for path in self._files() if self._disk.size(path)])
        return self._replaced(path, b"", "empty") if path else None

    def _file_flipped(self) -> Absence | None:
        """Not in logs of clients' records: offsets are under no checksum, and only the scrub reads what is sent."""
        files = [path for path in self._files() if self._disk.size(path)]
        path = self._one_of([path for path in files if "/__" in path or not path.endswith(".log")])
        if not path:
            return None
        data = bytearray(self._content(path))
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return self._replaced(path, bytes(data), "damaged")

    def _file_older(self) -> Absence | None:
        path = self._one_of([path for path in self._files() if self._has_older(path)])
        return self._replaced(path, self._copies[path], "an older copy") if path else None

    def _has_older(self, path: str) -> bool:
        """Whether there is another copy, and not of a deleted topic of that name."""
        identity = f"{parent_of(path)}/{PARTITION_METADATA_FILE}"
        is_same = not self._disk.exists(identity) or self._copies.get(identity) == self._content(identity)
        return is_same and self._copies.get(path, self._content(path)) != self._content(path)

    def _replaced(self, path: str, data: bytes, what: str) -> Absence:
        content = self._content(path)
        self._write(path, data)

        def give_back() -> None:
            if self._disk.exists(path) and self._content(path) == data:
                self._write(path, content)

        return Absence(f"{path} is {what}", self._concern(path), give_back)

    def _is_empty(self, path: str) -> bool:
        if not self._disk.is_directory(path):
            return not self._disk.size(path)
        return not any(
            self._disk.size(f"{path}/{name}") for name in self._disk.list(path) if name.endswith(".log")
        )

    def _content(self, path: str) -> bytes:
        file = self._disk.open(path, "read")
        return file.pread(file.size(), 0)

    def _write(self, path: str, data: bytes) -> None:
        file = self._disk.open(path, "write")
        file.truncate(0)
        file.pwritev([data], 0)
        file.flush()

    # Whom it concerns

    def _below(self) -> Iterator[tuple[str, Directory | Inode]]:
        return ((path, node) for top in self._directories for path, node in self._disk.walk(top))

    def _files(self) -> list[str]:
        return [
            path
            for path, node in self._below()
            if isinstance(node, Inode) and self.only in path and not path.endswith(UNTOLD)
        ]

    def _whole(self, directory: str) -> Concern:
        others = [name for top in self._directories if top != directory for name in self._disk.list(top)]
        return Concern(
            spared=frozenset(filter(_is_partition, others)),
            may_refuse=any(map(_is_metadata, self._disk.list(directory))),
        )

    def _concern(self, path: str) -> Concern:
        directory = next(top for top in self._directories if path.startswith(f"{top}/"))
        below = path.removeprefix(f"{directory}/").split("/")[0]
        if path.endswith(REBUILT):
            return Concern()
        if _is_metadata(path):
            return Concern(spared=frozenset(), may_refuse=True)
        if _is_partition(below):
            return Concern(frozenset({below}))
        return self._whole(directory)._replace(may_refuse=True)


def _is_partition(path: str) -> bool:
    topic, _, index = path.rpartition("/")[2].rpartition("-")
    return bool(topic) and index.isdigit()


def _is_metadata(path: str) -> bool:
    return "__cluster_metadata-0" in path


_TAKE: Final[dict[str, Callable[[Environment], Absence | None]]] = {
    "away": Environment._directory_away,
    "empty": Environment._directory_empty,
    "unreadable": Environment._directory_unreadable,
    "read-only": Environment._directory_read_only,
    "failing": Environment._directory_failing,
    "swapped": Environment._directories_swapped,
    "full": Environment._disk_full,
    "partition": Environment._partition_missing,
    "file missing": Environment._file_missing,
    "file empty": Environment._file_empty,
    "file older": Environment._file_older,
    "file flipped": Environment._file_flipped,
}
KINDS: Final = tuple(_TAKE)
