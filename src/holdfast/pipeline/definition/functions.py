"""Functions of `python` and `keyed` steps: found, loaded, and told apart by their source.

A step names its function by a file beside the definition, by `module:function`, or is given the function itself. A
file's module, and those beside it that it imports, are not left among the imported ones: Spark then sends its functions
to workers by value, so that a worker elsewhere does not need the files, and two pipelines of one process do not get
each other's `helpers`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from holdfast.errors import UsageError
from holdfast.pipeline.definition.model import Keyed, Python


class FunctionMissing(UsageError):
    """A Python step whose function cannot be had; the message says why."""


def load_function(step: Python | Keyed, directory: str) -> Callable[..., Any]:
    """The function of a step, ready to be called."""
    if not isinstance(step.function, str):
        return step.function
    if step.file is not None:
        module = run_file(os.path.join(directory, step.file))
        name, where = step.function, step.file
    else:
        where, name = module_of(step.function)
        if not where:
            raise FunctionMissing(
                f"step {step.name!r}: {step.function!r} names no module; write module:function, or give 'file'"
            )
        try:
            module = importlib.import_module(where)
        except Exception as error:
            raise FunctionMissing(f"step {step.name!r}: cannot import {where}: {_cause(error)}") from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise FunctionMissing(f"step {step.name!r}: {where} has no function {name!r}")
    found: Callable[..., Any] = function
    return found


def module_of(function: str) -> tuple[str, str]:
    """The module and the name of `module:function`."""
    module, _, name = function.replace(":", ".").rpartition(".")
    return module, name


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module is; nothing when there is none."""
    try:
        return importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return None


def run_file(path: str, name: str | None = None) -> ModuleType:
    """The module a file makes; its neighbours can be imported while it runs."""
    name = name or f"_holdfast_{os.path.splitext(os.path.basename(path))[0]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FunctionMissing(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    beside = os.path.dirname(os.path.abspath(path))
    before = set(sys.modules)
    sys.path.insert(0, beside)
    sys.modules[name] = module  # dataclasses and typing look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise FunctionMissing(f"cannot run {path}: {_cause(error)}") from error
    finally:
        sys.modules.pop(name, None)
        sys.path.remove(beside)
        for neighbour in set(sys.modules) - before:
            if _lies_in(sys.modules[neighbour], beside):
                del sys.modules[neighbour]
    return module


def _lies_in(module: ModuleType, directory: str) -> bool:
    """Whether a module is the author's own; what is installed below the directory is not."""
    file = getattr(module, "__file__", None)
    if not file or not os.path.abspath(file).startswith(directory + os.sep):
        return False
    return not {"site-packages", "dist-packages"} & set(os.path.abspath(file).split(os.sep))


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


def name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def source_of(step: Python | Keyed, directory: str) -> str:
    """The text of a step's function: the same whether it is named by its file or given; code is not run for it."""
    if isinstance(step.function, str):
        return _source_of_named(step, directory)
    function = inspect.unwrap(step.function)
    name = name_of(function)
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file and os.path.exists(file):
        found = _definition_in(file, name)
        if found is not None:
            return found
    try:
        return textwrap.dedent(inspect.getsource(function)).strip()
    except (OSError, TypeError):
        return f"{getattr(function, '__module__', '')}:{name}"


def _source_of_named(step: Python | Keyed, directory: str) -> str:
    assert isinstance(step.function, str)
    if step.file is not None:
        found = _definition_in(os.path.join(directory, step.file), step.function)
        return found if found is not None else f"{step.file}:{step.function}"
    module, name = module_of(step.function)
    spec = spec_of(module)
    found = _definition_in(spec.origin, name) if spec and spec.origin else None
    return found if found is not None else step.function


def functions_of(path: str) -> list[str]:
    """Names that a Python file defines at its top; raises OSError, SyntaxError."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names.extend(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.extend(alias.asname or alias.name for alias in node.names)
    return names


def _definition_in(path: str, name: str) -> str | None:
    """The lines that define this name in a file, decorators included."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        body: list[ast.stmt] = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):
        return None
    found: ast.FunctionDef | ast.ClassDef | None = None
    for part in name.split("."):
        if part == "<locals>":
            continue
        found = next(
            (node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part),
            None,
        )
        if found is None:
            return None
        body = found.body
    assert found is not None
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    lines = text.splitlines()[first - 1 : found.end_lineno]
    return textwrap.dedent("\n".join(lines)).strip()
