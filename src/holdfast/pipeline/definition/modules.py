"""A pipeline defined by a Python file: the one `Pipeline` (or definition) that the file makes at its top."""

from __future__ import annotations

import os

from holdfast.pipeline.definition.builder import Pipeline
from holdfast.pipeline.definition.errors import DefinitionError, Finding
from holdfast.pipeline.definition.functions import FunctionMissing, run_file
from holdfast.pipeline.definition.model import PipelineDefinition


def load_module(place: str) -> PipelineDefinition:
    """`orders.py`, or `orders.py:name` where the file makes several."""
    path, _, wanted = place.partition(".py:")
    path = path if path.endswith(".py") else f"{path}.py"
    if not os.path.exists(path):
        raise DefinitionError([Finding((), "there is no such file", file=path)])
    try:
        module = run_file(path)
    except FunctionMissing as error:
        raise DefinitionError([Finding((), str(error))]) from error
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Pipeline | PipelineDefinition) and not name.startswith("_")
    }
    if wanted:
        found = {name: value for name, value in found.items() if name == wanted}
    distinct = {id(value): value for value in found.values()}
    if len(distinct) != 1:
        names = ", ".join(found) or "none"
        what = (
            f"no pipeline is called {wanted!r}" if wanted else f"it makes {len(distinct)} pipelines ({names})"
        )
        hint = f"; name one, as {path}:NAME" if found else "; assign a Pipeline(…) to a name at its top"
        raise DefinitionError([Finding((), what + hint, file=path)])
    (pipeline,) = distinct.values()
    if isinstance(pipeline, Pipeline):
        return pipeline.definition(directory=os.path.dirname(os.path.abspath(path)))
    return pipeline
