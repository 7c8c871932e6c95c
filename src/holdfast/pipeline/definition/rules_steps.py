"""Rules of steps, each for itself and in its place among the others."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from holdfast.pipeline.definition.errors import Finding, Path, nearest
from holdfast.pipeline.definition.functions import functions_of
from holdfast.pipeline.definition.model import Expect, Filter, Keyed, PipelineDefinition, Python, Sql, Step
from holdfast.pipeline.definition.naming import kind_of_step
from holdfast.pipeline.definition.sql_words import problems_of_expression, problems_of_query


def check_steps(definition: PipelineDefinition) -> Iterator[Finding]:
    expanding = [
        (index, step)
        for index, step in enumerate(definition.steps)
        if isinstance(step, Sql | Python) and step.expand
    ]
    for index, surplus in expanding[1:]:
        where: Path = ("steps", index, kind_of_step(surplus), "expand")
        first = expanding[0][1].name
        yield Finding(where, f"{first!r} expands already, and one step of a pipeline may; join the two")
    for index, step in enumerate(definition.steps):
        path: Path = ("steps", index, kind_of_step(step))
        for inner, message in _step(step, definition.directory):
            yield Finding((*path, inner), message)


def _step(step: Step, directory: str) -> Iterator[tuple[str, str]]:
    match step:
        case Expect():
            yield from (("that", problem) for problem in problems_of_expression(step.that))
        case Filter():
            yield from (("where", problem) for problem in problems_of_expression(step.where))
        case Sql():
            yield from (("query", problem) for problem in problems_of_query(step.query))
        case Python() | Keyed():
            yield from _function(step, directory)


def _function(step: Python | Keyed, directory: str) -> Iterator[tuple[str, str]]:
    if not isinstance(step.function, str):
        if step.file is not None:
            yield "file", "the function itself is given; leave 'file' out"
        return
    if step.file is None:
        module, _, name = step.function.replace(":", ".").rpartition(".")
        try:
            known = bool(module) and importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            known = False
        if not known:
            yield (
                "function",
                f"{step.function!r}: there is no such module; give 'file', or write module:function",
            )
        elif not name.isidentifier():
            yield "function", f"{step.function!r} names no function"
        return
    path = os.path.join(directory, step.file)
    try:
        names = functions_of(path)
    except SyntaxError as error:
        yield "file", f"{step.file}:{error.lineno}: this is not Python: {error.msg}"
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield "file", f"cannot read {step.file!r}: {reason}"
        return
    if step.function.split(".")[0] not in names:
        yield "function", f"{step.file} has no function {step.function!r}{nearest(step.function, names)}"
