"""What the background process can be asked to do, by name: JSON-like arguments in, a JSON-like answer out.

    compact   a round of `cleaner`: writes `.cleaned` files beside the segments
    scrub     a stretch of `scrub`: reads
    remove    delete files that were renamed out of the way: freeing a large file takes time

Anything that goes wrong is raised as `HoldfastError` or `OSError`; the caller reports its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.broker.log.cleaner import Round, clean
from holdfast.broker.log.scrub import scrub
from holdfast.errors import UsageError
from holdfast.seams import FileSystem


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
