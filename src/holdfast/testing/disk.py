"""A disk in memory that forgets what was not flushed, tears writes, fails and fills up.

`SimulatedDisk` is a `holdfast.seams.FileSystem`. Under every file lie two images, in pages of 4,096
bytes: what programs see (the page cache) and what the platters hold. Under every directory lie its
entries as seen, its entries as held, and the changes between the two in order.

Rules it keeps:

- A flush of a file makes its bytes and its size durable, and not its name; a flush of a directory makes
  its entries durable, and not the bytes below. A new directory's own name lives in its parent.
- `crash()` is power loss. Of the pages not flushed any subset survives, some torn between sectors of 512
  bytes; the others hold what they held, or zeros where the file grew. Of the directory changes not
  flushed any subset survives, each whole: after a rename there is the old name or the new one.
- `kill()` is the death of the process: nothing is forgotten, but locks and handles die.
- A flush that fails marks its pages clean although some never reached the platters, as Linux does. A later
  flush does not write them again: `drop_cache`, or a crash, shows what is really there.
- Everything follows from the seed.

Faults are planned with `plan` and counted by kind in `faults`; power loss inside an operation is planned
with `lose_power_after`. `take_away` and `put_back` are what happens to disks while nobody looks: a file system that
is not mounted, a directory that was moved, a file that was removed by hand.
"""

from __future__ import annotations

import copy
import errno
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os import strerror
from typing import Literal, TypeAlias

from holdfast.atomic import flush_each
from holdfast.seams import Clock, FlushTarget, OpenMode
from holdfast.testing.disk_files import (
    PAGE_BYTES,
    PAGE_SHIFT,
    SURVIVAL,
    Change,
    Directory,
    Inode,
    Node,
    SimulatedFile,
    SimulatedLock,
    os_error,
)

UNLIMITED_BYTES = 1 << 50
NAME_BYTES_MAX = 255
"""Of one name in a directory, as on every common file system."""

Operation: TypeAlias = Literal[
    "write", "flush", "flush directory", "read", "create", "rename", "remove", "truncate"
]


class PowerLost(BaseException):
    """The power went in the middle of an operation; no program is left to handle it."""


@dataclass(slots=True)
class Fault:
    """A planned failure of one kind of operation."""

    operation: Operation
    error: int = errno.EIO
    skip: int = 0
    """How many matching operations succeed first."""
    times: int = 1
    """How many matching operations fail after that."""
    probability: float = 1.0
    path_contains: str = ""
    partial: bool = False
    """A write stores a part of its bytes before it fails."""


class SimulatedDisk:
    """A `holdfast.seams.FileSystem` in memory; see the module's rules."""

    def __init__(self, seed: int | random.Random = 0, clock: Clock | None = None) -> None:
        self.rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        self.clock = clock
        self.faults: Counter[str] = Counter()
        """How often each kind of fault really hit."""
        self.operations: Counter[str] = Counter()
        self.capacity_bytes: int | None = None
        self.generation = 0
        """Rises at every crash and kill; a handle of an earlier one is stale."""
        self.locks: dict[str, SimulatedLock] = {}
        self.watched = False
        """Some fault may hit: operations must ask `before`."""
        self.used_bytes = 0
        self._root = Directory()
        self.unreadable: set[str] = set()
        """Paths that the disk can no longer look at, with everything below them."""
        self.unwritable: set[str] = set()
        """Directories that are read-only, with everything below them."""
        self._plans: list[Fault] = []
        self._read_only = False
        self._operations_until_power_loss: int | None = None

    # What a test does to the disk.

    def plan(self, fault: Fault) -> Fault:
        """Make coming operations fail; `fault.times` counts down to zero as it hits."""
        self._plans.append(fault)
        self.watched = True
        return fault

    def clear_faults(self) -> None:
        """Forget planned faults, limits and the read-only state; what was damaged stays so."""
        self._plans.clear()
        self.unreadable.clear()
        self.unwritable.clear()
        self._read_only = False
        self._operations_until_power_loss = None
        self.capacity_bytes = None
        self.watched = False

    @property
    def read_only(self) -> bool:
        return self._read_only

    @read_only.setter
    def read_only(self, value: bool) -> None:
        self._read_only = value
        self.watched = value or bool(self._plans) or self._operations_until_power_loss is not None

    def forbid_changes(self, directory: str) -> None:
        """Turn one directory read-only."""
        self.unwritable.add(directory)
        self.watched = True

    def lose_power_after(self, operations: int) -> None:
        """Raise `PowerLost` inside a later change of the disk, and in all after it until `crash`."""
        self._operations_until_power_loss = operations
        self.watched = True

    def prepare(self, path: str) -> None:
        """A durable directory with durable parents, as an operator provides it."""
        self.make_directory(path)
        parts = _parts(path)
        for depth in range(len(parts)):
            directory = self._walk(parts[:depth])
            assert isinstance(directory, Directory)
            directory.flush()

    def take_away(self, path: str) -> Node:
        """Remove a file, or a directory with all that is in it, durably; what it held had been flushed."""
        node = self.find(path)
        if node is None:
            raise os_error(errno.ENOENT, path)
        for below in self._nodes(node):
            below.flush()
        self.put_back(path, None)
        return node

    def put_back(self, path: str, node: Node | None) -> None:
        """Let `path` be what was taken away somewhere, durably, whatever stands there now."""
        parent, name = self._parent(path)
        parent.flush()
        for entries in (parent.entries, parent.held):
            if node is None:
                entries.pop(name, None)
            else:
                entries[name] = node
        self._count_bytes()

    def crash(self) -> None:
        """Power loss, and power back: the disk as found then. Handles and locks are dead, plans forgotten."""
        self.faults["power loss"] += 1
        self.clear_faults()
        self.kill_handles()
        self._crash_directory(self._root)
        for node in self._nodes(self._root):
            if isinstance(node, Inode):
                node.crash(self.rng, self.faults)
        self._count_bytes()

    def _count_bytes(self) -> None:
        self.used_bytes = 0
        for node in self._nodes(self._root):
            if isinstance(node, Inode):
                node.linked = True
                self.used_bytes += len(node.cached)

    def kill(self) -> None:
        """The process dies, the machine does not."""
        self.faults["process kill"] += 1
        self.kill_handles()

    def kill_handles(self) -> None:
        self.generation += 1
        self.locks.clear()

    def copy(self, seed: int | None = None) -> SimulatedDisk:
        """An independent disk in the same state, to see other outcomes of the same crash."""
        clock, self.clock = self.clock, None
        try:
            twin = copy.deepcopy(self)
        finally:
            self.clock = clock
        twin.clock = clock
        if seed is not None:
            twin.rng = random.Random(seed)
        return twin

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Damage a durable byte. Readers see it once the page leaves the cache: `drop_cache` or `crash`."""
        inode = self._inode(path)
        page = position >> PAGE_SHIFT
        start = page << PAGE_SHIFT
        image = inode.held.get(page)
        if image is None:
            image = bytes(inode.cached[start : min(start + PAGE_BYTES, inode.held_size)])
        damaged = bytearray(image)
        damaged[position - start] ^= 1 << bit
        inode.held[page] = bytes(damaged)
        self.faults["bit flip"] += 1

    def held(self, path: str) -> bytes:
        """What the platters hold of a file now, whether or not its name is durable."""
        inode = self._inode(path)
        content = bytearray(inode.cached[: inode.held_size].ljust(inode.held_size, b"\0"))
        for page, image in inode.held.items():
            start = page << PAGE_SHIFT
            if start < inode.held_size:
                length = min(PAGE_BYTES, inode.held_size - start)
                content[start : start + length] = image[:length].ljust(length, b"\0")
        return bytes(content)

    def walk(self, path: str) -> Iterator[tuple[str, Node]]:
        """Everything below a directory, with its path."""
        for name, node in sorted(self._directory(path).entries.items()):
            below = f"{path.rstrip('/')}/{name}"
            yield below, node
            if isinstance(node, Directory):
                yield from self.walk(below)

    def set_modified_ms(self, path: str, modified_ms: int) -> None:
        self._inode(path).modified_ms = modified_ms

    # What open files ask of the disk.

    def before(self, operation: Operation, path: str) -> Fault | None:
        """Let planned faults hit; a partial write is returned, for the caller to carry out."""
        if operation != "read":
            self._spend_power()
            if self._is_read_only(path):
                self.faults["read-only"] += 1
                raise os_error(errno.EROFS, path)
        for fault in self._plans:
            if fault.operation != operation or fault.path_contains not in path:
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            if fault.probability < 1.0 and self.rng.random() >= fault.probability:
                continue
            fault.times -= 1
            if fault.times <= 0:
                self._plans.remove(fault)
            self.faults[f"{operation} failed" if not fault.partial else "write cut short"] += 1
            if fault.partial or operation == "flush":
                return fault
            raise os_error(fault.error, path)
        return None

    def _is_read_only(self, path: str) -> bool:
        return self._read_only or any(path == top or path.startswith(f"{top}/") for top in self.unwritable)

    def _spend_power(self) -> None:
        left = self._operations_until_power_loss
        if left is None:
            return
        if left <= 0:
            self._operations_until_power_loss = -1
            raise PowerLost
        self._operations_until_power_loss = left - 1

    def write(self, inode: Inode, path: str, data: bytes, position: int) -> None:
        self.operations["write"] += 1
        error = 0
        if self.watched:
            fault = self.before("write", path)
            if fault is not None:
                error = fault.error
                data = data[: self.rng.randrange(0, len(data) + 1)]
        growth = max(0, position + len(data) - len(inode.cached))
        if self.capacity_bytes is not None and growth > self.capacity_bytes - self.used_bytes:
            self.faults["disk full"] += 1
            error = errno.ENOSPC
            data = data[: max(0, self.capacity_bytes - self.used_bytes + len(data) - growth)]
        before = len(inode.cached)
        inode.write(data, position)
        self._account(inode, before)
        if error:
            raise os_error(error, path)

    def truncate(self, inode: Inode, path: str, length: int) -> None:
        self.operations["truncate"] += 1
        if self.watched:
            self.before("truncate", path)
        before = len(inode.cached)
        inode.truncate(length)
        self._account(inode, before)

    def _account(self, inode: Inode, size_before: int) -> None:
        if inode.linked:
            self.used_bytes += len(inode.cached) - size_before
        if self.clock is not None:
            inode.modified_ms = self.clock.now().wall_ms

    def flush_inode(self, inode: Inode, path: str) -> None:
        self.operations["flush"] += 1
        if self.watched:
            fault = self.before("flush", path)
            if fault is not None:
                inode.fail_flush(self.rng)
                raise os_error(fault.error, path)
        inode.flush()

    # holdfast.seams.FileSystem

    def open(self, path: str, mode: OpenMode) -> SimulatedFile:
        node = self.find(path)
        if isinstance(node, Directory):
            raise os_error(errno.EISDIR, path)
        if node is None:
            if mode != "create":
                raise os_error(errno.ENOENT, path)
            node = self._create(path)
        elif mode != "read" and self._is_read_only(path):
            raise os_error(errno.EROFS, path)
        return SimulatedFile(self, path, node, mode != "read")

    def _create(self, path: str) -> Inode:
        parent, name = self._parent(path)
        if self.watched:
            self.before("create", path)
        _check_name(name, path)
        inode = Inode(self._wall_ms())
        parent.entries[name] = inode
        parent.pending.append(Change(None, (parent, name), inode))
        return inode

    def exists(self, path: str) -> bool:
        return self.find(path) is not None

    def is_directory(self, path: str) -> bool:
        return isinstance(self.find(path), Directory)

    def size(self, path: str) -> int:
        return len(self._inode(path).cached)

    def modified_ms(self, path: str) -> int:
        return self._inode(path).modified_ms

    def list(self, directory: str) -> list[str]:
        return sorted(self._directory(directory).entries)

    def make_directory(self, path: str) -> None:
        directory = self._root
        for part in _parts(path):
            node = directory.entries.get(part)
            if node is None:
                if self.watched:
                    self.before("create", path)
                _check_name(part, path)
                node = Directory()
                directory.entries[part] = node
                directory.pending.append(Change(None, (directory, part), node))
            elif not isinstance(node, Directory):
                raise os_error(errno.ENOTDIR, path)
            directory = node

    def rename(self, old: str, new: str) -> None:
        source, old_name = self._parent(old)
        target, new_name = self._parent(new)
        node = source.entries.get(old_name)
        if node is None:
            raise os_error(errno.ENOENT, old)
        if self.watched:
            self.before("rename", new)
        _check_name(new_name, new)
        replaced = target.entries.get(new_name)
        if replaced is node:
            return
        if isinstance(replaced, Directory) and replaced.entries:
            raise os_error(errno.ENOTEMPTY, new)
        if replaced is not None:
            self._unlink(replaced)
        del source.entries[old_name]
        target.entries[new_name] = node
        change = Change((source, old_name), (target, new_name), node)
        for directory in change.directories():
            directory.pending.append(change)

    def remove(self, path: str) -> None:
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            raise os_error(errno.ENOENT, path)
        if isinstance(node, Directory):
            raise os_error(errno.EISDIR, path)
        self._remove_entry(parent, name, node, path)

    def remove_tree(self, path: str) -> None:
        parent, name = self._parent(path)
        directory = self._directory(path)
        for child, node in sorted(directory.entries.items()):
            if isinstance(node, Directory):
                self.remove_tree(f"{path}/{child}")
            else:
                self._remove_entry(directory, child, node, f"{path}/{child}")
        self._remove_entry(parent, name, directory, path)

    def _remove_entry(self, parent: Directory, name: str, node: Node, path: str) -> None:
        if self.watched:
            self.before("remove", path)
        del parent.entries[name]
        parent.pending.append(Change((parent, name), None, node))
        self._unlink(node)

    def _unlink(self, node: Node) -> None:
        if isinstance(node, Inode):
            node.linked = False
            self.used_bytes -= len(node.cached)

    def flush_directory(self, path: str) -> None:
        directory = self._directory(path)
        self.operations["flush directory"] += 1
        if self.watched:
            self.before("flush directory", path)
        directory.flush()

    def flush_many(self, targets: Sequence[FlushTarget]) -> None:
        flush_each(self, targets)

    def flush_all(self, path: str) -> None:
        """Every file and every directory below the root, files first."""
        self._flush_below(self._directory("/"), "")

    def _flush_below(self, directory: Directory, path: str) -> None:
        for name in self.list(path or "/"):
            below = f"{path}/{name}"
            node = self.find(below)
            if isinstance(node, Inode):
                self.flush_inode(node, below)
            elif isinstance(node, Directory):
                self._flush_below(node, below)
        self.flush_directory(path or "/")

    def free_bytes(self, path: str) -> int:
        if self.capacity_bytes is None:
            return UNLIMITED_BYTES
        return max(0, self.capacity_bytes - self.used_bytes)

    def lock(self, path: str) -> SimulatedLock:
        if path in self.locks:
            raise BlockingIOError(errno.EAGAIN, strerror(errno.EAGAIN), path)
        self.open(path, "create").close()
        lock = SimulatedLock(self, path)
        self.locks[path] = lock
        return lock

    # Walking.

    def _wall_ms(self) -> int:
        return self.clock.now().wall_ms if self.clock is not None else 0

    def _walk(self, parts: Sequence[str]) -> Node | None:
        node: Node | None = self._root
        for part in parts:
            if not isinstance(node, Directory):
                return None
            node = node.entries.get(part)
        return node

    def find(self, path: str) -> Node | None:
        """What a path leads to now."""
        self.look(path)
        return self._walk(_parts(path))

    def look(self, path: str) -> None:
        """Fail where the disk cannot look any more."""
        if any(path == lost or path.startswith(f"{lost}/") for lost in self.unreadable):
            self.faults["unreadable"] += 1
            raise os_error(errno.EIO, path)

    def _inode(self, path: str) -> Inode:
        node = self.find(path)
        if node is None:
            raise os_error(errno.ENOENT, path)
        if isinstance(node, Directory):
            raise os_error(errno.EISDIR, path)
        return node

    def _directory(self, path: str) -> Directory:
        node = self.find(path)
        if node is None:
            raise os_error(errno.ENOENT, path)
        if not isinstance(node, Directory):
            raise os_error(errno.ENOTDIR, path)
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        parts = _parts(path)
        if not parts:
            raise os_error(errno.EINVAL, path)
        node = self._walk(parts[:-1])
        if node is None:
            raise os_error(errno.ENOENT, path)
        if not isinstance(node, Directory):
            raise os_error(errno.ENOTDIR, path)
        return node, parts[-1]

    # Crashing.

    def _crash_directory(self, top: Directory) -> None:
        """Settle every pending change below `top`, in what is held or may come to be held, then show that."""
        seen: dict[int, Directory] = {}
        stack = [top]
        while stack:
            directory = stack.pop()
            if id(directory) in seen:
                continue
            seen[id(directory)] = directory
            below = [
                *directory.entries.values(),
                *directory.held.values(),
                *(c.node for c in directory.pending),
            ]
            stack.extend(node for node in below if isinstance(node, Directory))
        for directory in seen.values():
            self._settle(directory)
        for directory in seen.values():
            directory.entries = dict(directory.held)

    def _settle(self, directory: Directory) -> None:
        survival = self.rng.choice(SURVIVAL)
        for change in directory.pending:
            survives = self.rng.random() < survival
            if survives:
                change.apply()
            else:
                self.faults["directory change lost"] += 1
            for other in change.directories():
                if other is not directory:
                    other.pending.remove(change)
        directory.pending.clear()

    def _nodes(self, top: Node) -> Iterator[Node]:
        seen: set[int] = set()
        stack: list[Node] = [top]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            if isinstance(node, Directory):
                stack.extend(node.entries[name] for name in sorted(node.entries, reverse=True))


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part and part != ".")


def _check_name(name: str, path: str) -> None:
    if len(name.encode()) > NAME_BYTES_MAX:
        raise os_error(errno.ENAMETOOLONG, path)
