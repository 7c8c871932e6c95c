"""What Apache Kafka would stumble over in the log directories of a stopped node, and what mends it.

Kafka takes every directory in `log.dirs` for a partition and ends its start at a name that is none. It reports each
segment without index files as damaged, and takes files it does not know for nothing. So whatever is not Kafka's is
moved out, into the output directory: our own files, and what strangers left there. A directory on another file system
than the output directory cannot be moved by a rename; it is refused by name.
"""

from __future__ import annotations

import os
import pwd
import resource
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from holdfast.broker.log import checkpoints
from holdfast.broker.log.segment import INDEX_SUFFIX, TIME_INDEX_SUFFIX
from holdfast.broker.node.directories import (
    DELETE_MARK,
    LOCK_FILE,
    STRAY_MARK,
    marked_name,
    parse_marked,
    parse_name,
)
from holdfast.errors import CorruptLog, UsageError
from holdfast.graduate import producers
from holdfast.graduate.changes import Made, Move, Owner
from holdfast.manifest.directory import DataDirectories
from holdfast.real import RealFileSystem

FS: Final = RealFileSystem()
LOST_AND_FOUND: Final = "lost+found"
KAFKAS_FILES: Final = frozenset(
    {
        checkpoints.META_PROPERTIES_FILE,
        checkpoints.RECOVERY_POINT_FILE,
        checkpoints.LOG_START_FILE,
        checkpoints.REPLICATION_FILE,
        checkpoints.CLEANER_FILE,
        checkpoints.CLEAN_SHUTDOWN_FILE,
        LOCK_FILE,
        "bootstrap.checkpoint",
    }
)
"""In the root of a log directory."""
KAFKAS_SUFFIXES: Final = (
    ".log",
    ".index",
    ".timeindex",
    ".txnindex",
    ".snapshot",
    ".checkpoint",
    ".deleted",
    ".cleaned",
    ".swap",
)
KAFKAS_PARTITION_FILES: Final = frozenset({"leader-epoch-checkpoint", "partition.metadata", "quorum-state"})
FURTHER_DESCRIPTORS: Final = 1_000
"""For connections, jars and the metadata log, beside one for each segment."""


@dataclass
class Look:
    """What was found: what is to be done about it, what stands in the way, and what there is to say."""

    moves: list[Move] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    new_owner: tuple[int, int] | None = None
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    segments: int = 0


def look(directories: DataDirectories, aside: str, user: str | None) -> Look:
    """Look through all log directories. What is moved out goes below `aside`."""
    found = Look()
    for number, path in enumerate(directories.paths):
        _look_at_root(found, path, f"{aside}/{number}")
    _look_at_checkpoints(found, directories)
    _look_at_producers(found, directories, aside)
    _look_at_owners(found, directories, user)
    _look_at_limits(found)
    if found.moves:
        count = sum(move.new.startswith(f"{aside}/") for move in found.moves)
        found.mended.append(f"{count} files and directories that are not Kafka's are moved to {aside}")
    if found.made:
        found.mended.append(f"{len(found.made)} index files, checkpoints and snapshots for Kafka are made")
    return found


def _look_at_root(found: Look, root: str, aside: str) -> None:
    for name in FS.list(root):
        path = f"{root}/{name}"
        if not FS.is_directory(path):
            if name not in KAFKAS_FILES:
                found.moves.append(Move(path, f"{aside}/{name}"))
            continue
        if parse_name(name) is not None:
            _look_at_partition(found, path, f"{aside}/{name}")
        elif parse_marked(name, STRAY_MARK) is not None or parse_marked(name, DELETE_MARK) is not None:
            continue
        elif name == LOST_AND_FOUND:
            found.refusals.append(
                f"{path}: Kafka takes every directory there for a partition, and ends at this one. The file system's "
                "own directory cannot be moved: put the data into a directory below the mount point"
            )
        elif name.endswith(STRAY_MARK) and (key := parse_name(name.removesuffix(STRAY_MARK))) is not None:
            found.moves.append(Move(path, _stray_path(root, path, *key)))
            found.mended.append(f"{path} gets the name that Kafka has for it")
        elif _device(path) != _device(os.path.dirname(os.path.dirname(aside))) or os.path.ismount(path):
            found.refusals.append(
                f"{path} is no partition, and Kafka ends its start at it; it is on another file system than the output "
                "directory: move it away, or give an --output on the same one"
            )
        else:
            found.moves.append(Move(path, f"{aside}/{name}"))
            found.notes.append(f"{path} is no partition: it is moved out, and nothing in it is changed")


def _stray_path(root: str, path: str, topic: str, index: int) -> str:
    try:
        topic_id = checkpoints.read_partition_metadata(FS, path)
    except (CorruptLog, OSError):
        topic_id = None
    number = int.from_bytes(topic_id or b"")
    while FS.exists(f"{root}/{marked_name(topic, index, f'{number:032x}', STRAY_MARK)}"):
        number += 1
    return f"{root}/{marked_name(topic, index, f'{number:032x}', STRAY_MARK)}"


def _look_at_partition(found: Look, path: str, aside: str) -> None:
    names = set(FS.list(path))
    for name in sorted(names):
        if name.endswith(".log"):
            found.segments += 1
            stem = name.removesuffix(".log")
            missing = [
                suffix for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX) if f"{stem}{suffix}" not in names
            ]
            if missing and FS.size(f"{path}/{name}"):
                found.notes.append(
                    f"{path}/{name} has no {' and '.join(missing)}: Kafka says so and rebuilds it"
                )
            elif missing:
                found.made += [Made(f"{path}/{stem}{suffix}", "") for suffix in missing]
        elif not name.endswith(KAFKAS_SUFFIXES) and name not in KAFKAS_PARTITION_FILES:
            found.moves.append(Move(f"{path}/{name}", f"{aside}/{name}"))


def _look_at_checkpoints(found: Look, directories: DataDirectories) -> None:
    """Without high watermarks Kafka begins each at the log's start until its leader has moved it."""
    for path in directories.paths:
        if FS.exists(f"{path}/{checkpoints.REPLICATION_FILE}"):
            continue
        ends = {
            key: files.recovery_point
            for key, files in directories.partitions.items()
            if files.path.startswith(f"{path}/")
        }
        content = checkpoints.encode_offsets(ends)
        found.made.append(Made(f"{path}/{checkpoints.REPLICATION_FILE}", content.hex()))


def _look_at_producers(found: Look, directories: DataDirectories, aside: str) -> None:
    for files in directories.partitions.values():
        root, _, name = files.path.rpartition("/")
        moves, made = producers.mend(files, f"{aside}/{directories.paths.index(root)}/{name}")
        found.moves += moves
        found.made += made


def _device(path: str) -> int:
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return os.stat(path).st_dev


# Who may read it, and how much may be open


def _walk(path: str) -> Iterator[str]:
    yield path
    for directory, names, files in os.walk(path):
        yield from (os.path.join(directory, name) for name in (*names, *files))


def _path_after(path: str, moved: Mapping[str, str], directories: DataDirectories) -> str | None:
    """What a path is called when everything is moved; None where it has left the log directories."""
    for old, new in moved.items():
        if path == old or path.startswith(f"{old}/"):
            stays = new.startswith(tuple(f"{root}/" for root in directories.paths))
            return new + path[len(old) :] if stays else None
    return path


def _look_at_owners(found: Look, directories: DataDirectories, user: str | None) -> None:
    moved = {move.old: move.new for move in found.moves}
    paths = {
        path: _path_after(path, moved, directories) for root in directories.paths for path in _walk(root)
    }
    states = {after: os.lstat(path) for path, after in paths.items() if after is not None}
    if user is None:
        owners = {state.st_uid for state in states.values()}
        names = ", ".join(sorted(map(_name_of, owners)))
        found.notes.append(f"the files belong to {names}: run Kafka as that user, or say --user")
        wanted = next(iter(owners)) if len(owners) == 1 else os.geteuid()
    else:
        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise UsageError(f"--user {user}: there is no such user on this machine") from None
        wanted = entry.pw_uid
        found.owners = [
            Owner(path, state.st_uid, state.st_gid)
            for path, state in states.items()
            if (state.st_uid, state.st_gid) != (entry.pw_uid, entry.pw_gid)
        ]
        if found.owners and os.geteuid() != 0:
            found.refusals.append(
                f"{len(found.owners)} files belong to others than {user}: run this as root, which gives them to {user}"
            )
        elif found.owners:
            found.new_owner = (entry.pw_uid, entry.pw_gid)
            found.mended.append(f"{len(found.owners)} files and directories are given to {user}")
    for path, state in states.items():
        needed = stat.S_IRUSR | stat.S_IWUSR | (stat.S_IXUSR if stat.S_ISDIR(state.st_mode) else 0)
        if wanted and state.st_mode & needed != needed:
            found.refusals.append(
                f"{path} has mode {stat.S_IMODE(state.st_mode):04o}: its owner must be able to read and write it"
            )


def _name_of(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"


def _look_at_limits(found: Look) -> None:
    needed = found.segments + FURTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and needed > soft:
        can = "" if hard == resource.RLIM_INFINITY or hard >= needed else f", above this machine's {hard}"
        found.notes.append(
            f"Kafka keeps a descriptor open for each of {found.segments} segments, and {soft} are allowed here: start "
            f"it with `ulimit -n {max(100_000, 2 * needed)}`, LimitNOFILE in a unit of systemd{can}"
        )
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
            maps = int(file.read())
    except (OSError, ValueError):
        return
    if 2 * found.segments > maps * 0.8:
        found.notes.append(
            f"Kafka maps two index files for each of {found.segments} segments, and vm.max_map_count is {maps}: raise "
            f"it to {4 * found.segments} with sysctl"
        )
