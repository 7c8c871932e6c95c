"""Whether a pipeline's Python functions give the same for the same rows, as far as their text tells.

A batch is made again after a crash. A function that asks the clock, chance or another service then computes something
else. Known calls of that kind are named with their line; a function that makes none is taken to be in order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from holdfast.doctor.python_names import ModuleNames, calls_in

CHANGING: Final = frozenset(
    {
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.perf_counter",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
        "datetime.date.today",
        "pandas.Timestamp.now",
        "pandas.Timestamp.today",
        "pandas.Timestamp.utcnow",
        "uuid.uuid1",
        "uuid.uuid4",
        "os.urandom",
        "os.getpid",
        "urllib.request.urlopen",
        "socket.gethostname",
    }
)
CHANGING_PACKAGES: Final = (
    "random.",
    "secrets.",
    "numpy.random.",
    "requests.",
    "httpx.",
    "httpx2.",
    "aiohttp.",
)


def changing_calls(names: ModuleNames, function: str) -> list[tuple[str, int]] | None:
    """Calls whose answer differs from run to run, with their lines; None when there is no such function."""
    made = [
        node
        for node in names.tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == function
    ]
    if len(made) != 1:
        return None
    return list(_changing(names, made[0], {function}))


def _changing(names: ModuleNames, node: ast.AST, seen: set[str]) -> Iterator[tuple[str, int]]:
    """In the function itself, and in those of the same file that it calls."""
    for call in calls_in(node):
        meaning = names.meaning(call.func)
        if meaning in CHANGING or meaning.startswith(CHANGING_PACKAGES):
            yield meaning, call.lineno
        elif meaning and meaning not in seen:
            for other in names.tree.body:
                if isinstance(other, (ast.FunctionDef, ast.AsyncFunctionDef)) and other.name == meaning:
                    seen.add(meaning)
                    yield from _changing(names, other, seen)
