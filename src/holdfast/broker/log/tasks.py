"""What the background process can be asked to do, by name: JSON-like arguments in, a JSON-like answer out.

    compact   a round of `cleaner`: writes `.cleaned` files beside the segments
    scrub     a stretch of the scrub: reads
    remove    delete files that were renamed out of the way: freeing a large file takes time

Anything that goes wrong is raised as `HoldfastError` or `OSError`; the caller reports its text.

The scrub looks for damage where nobody has read for long: the checksum of every batch, a stretch at a time.
Recovery proves what lies above the recovery point. Below it a bit may rot for months before a consumer finds it;
the scrub finds it while another copy of the data may still exist. It reads a bounded number of bytes per call, so
that whoever calls it sets the pace, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from holdfast.broker.log.cleaner import Round, clean
from holdfast.broker.log.scan import VerifiedScan
from holdfast.errors import UsageError
from holdfast.seams import FileSystem


class Scrubbed(NamedTuple):
    position: int
    """Where the next call goes on."""
    next_offset: int
    is_finished: bool
    """Nothing is left to check in this file."""
    damage: str | None


def scrub(
    fs: FileSystem,
    path: str,
    position: int,
    end: int,
    next_offset: int,
    bytes_max: int,
    *,
    drop_cache: bool,
) -> Scrubbed:
    """Check the batches from `position` up to `end`, stopping after about `bytes_max` bytes.

    With `drop_cache` the disk is asked, not the page cache. A file that is gone has nothing to check:
    retention took it.
    """
    try:
        file = fs.open(path, "read")
    except FileNotFoundError:
        return Scrubbed(position, next_offset, True, None)
    try:
        if drop_cache and position == 0:
            file.drop_cache()
        scan = VerifiedScan(file, position, next_offset, end)
        stop = position + bytes_max
        for found in scan:
            if found.position + found.header.size >= stop:
                next_position = found.position + found.header.size
                return Scrubbed(next_position, found.header.next_offset, next_position >= end, None)
    finally:
        file.close()
    if scan.damage is None:
        return Scrubbed(scan.position, scan.next_offset, True, None)
    damage = f"{path}: damaged at {scan.damage.position} (offset {scan.next_offset}): {scan.damage.reason}"
    return Scrubbed(end, scan.next_offset, True, damage)


def run(fs: FileSystem, task: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out one task."""
    try:
        action = _TASKS[task]
    except KeyError:
        raise UsageError(f"there is no task {task!r}; there are {', '.join(_TASKS)}") from None
    return action(fs, arguments)


def _compact(fs: FileSystem, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return clean(fs, Round.from_json(arguments)).to_json()


def _scrub(fs: FileSystem, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return scrub(fs, **arguments)._asdict()


def _remove(fs: FileSystem, arguments: Mapping[str, Any]) -> dict[str, Any]:
    removed = 0
    for path in arguments["paths"]:
        try:
            fs.remove(path)
        except FileNotFoundError:
            continue  # gone with its directory, or replaced by a newer file of that name
        removed += 1
    return {"removed": removed}


_TASKS: Final[Mapping[str, Callable[[FileSystem, Mapping[str, Any]], dict[str, Any]]]] = {
    "compact": _compact,
    "scrub": _scrub,
    "remove": _remove,
}
