"""What lies under a simulated disk, and what a process holds of it: pages and directory entries, open files and locks.

"Seen" is what programs read back at once, the page cache; "held" is what the platters keep. An `Inode` stores
the held image only of pages that differ, so a write costs its pages and a crash what was not flushed. Open files and
locks die with their process.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import strerror
from typing import TYPE_CHECKING, TypeAlias

from holdfast.atomic import parent_of
from holdfast.seams import Buffer

if TYPE_CHECKING:
    from holdfast.testing.disk import SimulatedDisk


PAGE_BYTES = 4096
PAGE_SHIFT = 12
SECTOR_BYTES = 512

SURVIVAL = (0.0, 0.0, 0.3, 0.7, 1.0)
"""How much of what was not flushed survives; one is drawn per file and per directory at each crash."""
TORN_PROBABILITY = 0.15


class Inode:
    """The content of one file: as seen, and where it differs, as held."""

    __slots__ = ("cached", "dirty", "held", "held_size", "linked", "modified_ms")

    def __init__(self, modified_ms: int) -> None:
        self.cached = bytearray()
        self.held: dict[int, bytes] = {}
        """What the platters hold of each page that differs from `cached`."""
        self.dirty: set[int] = set()
        """Pages a flush will write. A page in `held` and not in `dirty` was lost by a failed flush."""
        self.held_size = 0
        self.modified_ms = modified_ms
        self.linked = True

    def touch(self, first_page: int, end_page: int) -> None:
        """Keep the held image of pages about to change, and mark them for the next flush."""
        held, cached, held_size = self.held, self.cached, self.held_size
        for page in range(first_page, end_page):
            if page not in held:
                start = page << PAGE_SHIFT
                held[page] = (
                    bytes(cached[start : min(start + PAGE_BYTES, held_size)]) if start < held_size else b""
                )
            self.dirty.add(page)

    def write(self, data: bytes, position: int) -> None:
        if not data:
            return
        end = position + len(data)
        self.touch(position >> PAGE_SHIFT, (end + PAGE_BYTES - 1) >> PAGE_SHIFT)
        if position > len(self.cached):
            self.cached.extend(bytes(position - len(self.cached)))
        self.cached[position:end] = data

    def truncate(self, length: int) -> None:
        size = len(self.cached)
        if length >= size:
            self.cached.extend(bytes(length - size))
            return
        boundary = length >> PAGE_SHIFT
        self.touch(boundary, (size + PAGE_BYTES - 1) >> PAGE_SHIFT)
        del self.cached[length:]
        first_beyond = boundary + (1 if length & (PAGE_BYTES - 1) else 0)
        self.dirty = {page for page in self.dirty if page < first_beyond}

    def flush(self) -> None:
        for page in self.dirty:
            self.held.pop(page, None)
        self.dirty.clear()
        size = len(self.cached)
        if self.held_size > size:
            self.held = {page: image for page, image in self.held.items() if page << PAGE_SHIFT < size}
        self.held_size = size

    def fail_flush(self, rng: random.Random) -> None:
        for page in sorted(self.dirty):
            if rng.random() < 0.5:
                self.held.pop(page, None)
        self.dirty.clear()

    def drop_cache(self) -> None:
        size = len(self.cached)
        for page in [page for page in self.held if page not in self.dirty]:
            start = page << PAGE_SHIFT
            if start < size:
                length = min(PAGE_BYTES, size - start)
                self.cached[start : start + length] = self.held[page][:length].ljust(length, b"\0")
                del self.held[page]

    def crash(self, rng: random.Random, faults: Counter[str]) -> None:
        """Become what is found after power loss."""
        cached_size, held_size = len(self.cached), self.held_size
        if not self.held and cached_size == held_size:
            return
        survival = rng.choice(SURVIVAL)
        kept_end = held_size
        for page in sorted(self.held):
            start = page << PAGE_SHIFT
            if page in self.dirty and rng.random() < survival:
                kept_end = max(kept_end, min(start + PAGE_BYTES, cached_size))
                if rng.random() < TORN_PROBABILITY:
                    faults["page torn"] += 1
                    self._tear(page, rng)
                continue
            faults["page lost"] += 1
            self._restore(page)
        sizes = (held_size, cached_size, kept_end)
        size = rng.choice(sizes) if cached_size != held_size else held_size
        if len(self.cached) < size:
            self.cached.extend(bytes(size - len(self.cached)))
        del self.cached[size:]
        self.held.clear()
        self.dirty.clear()
        self.held_size = size

    def _restore(self, page: int) -> None:
        image, start = self.held[page], page << PAGE_SHIFT
        if len(self.cached) < start + len(image):
            self.cached.extend(bytes(start + len(image) - len(self.cached)))
        end = min(start + PAGE_BYTES, len(self.cached))
        self.cached[start:end] = image.ljust(end - start, b"\0")

    def _tear(self, page: int, rng: random.Random) -> None:
        start = page << PAGE_SHIFT
        end = min(start + PAGE_BYTES, len(self.cached))
        if end <= start:
            return
        old = self.held[page][: end - start].ljust(end - start, b"\0")
        new = bytes(self.cached[start:end])
        shape = rng.random()
        if shape < 0.4:
            # Any sectors in any mixture, as when the page was written before.
            for at in range(0, end - start, SECTOR_BYTES):
                if rng.random() < 0.5:
                    self.cached[start + at : min(start + at + SECTOR_BYTES, end)] = old[
                        at : at + SECTOR_BYTES
                    ]
            return
        cut = rng.randrange(0, PAGE_BYTES // SECTOR_BYTES + 1) * SECTOR_BYTES
        self.cached[start:end] = new[:cut] + old[cut:] if shape < 0.8 else old[:cut] + new[cut:]


@dataclass(slots=True, eq=False)
class Change:
    """One step from a directory's held entries to those seen. A rename belongs to both its directories."""

    removes: tuple[Directory, str] | None
    adds: tuple[Directory, str] | None
    node: Node

    def apply(self) -> None:
        if self.removes is not None:
            directory, name = self.removes
            if directory.held.get(name) is self.node:
                del directory.held[name]
        if self.adds is not None:
            directory, name = self.adds
            directory.held[name] = self.node

    def directories(self) -> list[Directory]:
        sides = [side[0] for side in (self.removes, self.adds) if side is not None]
        return sides[:1] if len(sides) == 2 and sides[0] is sides[1] else sides


@dataclass(slots=True, eq=False)
class Directory:
    entries: dict[str, Node] = field(default_factory=dict)
    held: dict[str, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def flush(self) -> None:
        """Make every pending change durable; a rename takes with it what came before it on its other side."""
        while self.pending:
            change = self.pending[0]
            for other in change.directories():
                while other is not self and other.pending and change in other.pending:
                    earlier = other.pending.pop(0)
                    if earlier is change:
                        break
                    earlier.apply()
            change.apply()
            self.pending.pop(0)


Node: TypeAlias = Inode | Directory


class StaleHandle(OSError):
    """A file that was opened before the crash or kill: its process is no more."""


class SimulatedFile:
    """One open file of a `SimulatedDisk`."""

    __slots__ = ("_disk", "_generation", "_inode", "_open", "_path", "_writable")

    def __init__(self, disk: SimulatedDisk, path: str, inode: Inode, writable: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._writable = writable
        self._generation = disk.generation
        self._open = True

    @property
    def path(self) -> str:
        return self._path

    def _check(self, writing: bool = False) -> None:
        if self._generation != self._disk.generation:
            raise StaleHandle(errno.ESTALE, "opened before the crash", self._path)
        if not self._open or (writing and not self._writable):
            raise os_error(errno.EBADF, self._path)

    def pread(self, length: int, position: int) -> bytes:
        self._check()
        if self._disk.unreadable:
            self._disk.look(self._path)
        if self._disk.watched:
            self._disk.before("read", self._path)
        return bytes(self._inode.cached[position : position + length])

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._check(writing=True)
        data = b"".join(buffers)
        self._disk.write(self._inode, self._path, data, position)
        return len(data)

    def size(self) -> int:
        self._check()
        return len(self._inode.cached)

    def is_at_path(self) -> bool:
        self._check()
        return self._disk.find(self._path) is self._inode

    def truncate(self, length: int) -> None:
        self._check(writing=True)
        self._disk.truncate(self._inode, self._path, length)

    def flush(self) -> None:
        self._check()
        self._disk.flush_inode(self._inode, self._path)

    def drop_cache(self) -> None:
        self._check()
        self._inode.drop_cache()

    def close(self) -> None:
        self._open = False


class SimulatedLock:
    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._directory = disk.find(parent_of(path))

    def is_in_place(self) -> bool:
        return self._disk.find(parent_of(self._path)) is self._directory

    def release(self) -> None:
        if self._disk.locks.get(self._path) is self:
            del self._disk.locks[self._path]


def os_error(code: int, path: str) -> OSError:
    return OSError(code, strerror(code), path)
