"""From a document to a definition: read by the table, completed, checked; or every reason why not.

All findings come at once. A part that cannot be read is left out, and what the rules then say about its neighbourhood
is not repeated: it would be a consequence.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from holdfast.pipeline.definition import model
from holdfast.pipeline.definition.builder import PipelineBuilder
from holdfast.pipeline.definition.documents import Findings, Node, from_values, from_yaml
from holdfast.pipeline.definition.errors import DefinitionError, Finding, Path
from holdfast.pipeline.definition.functions import FunctionMissing, run_file
from holdfast.pipeline.definition.naming import kind_of_step
from holdfast.pipeline.definition.rules import check_rules
from holdfast.pipeline.definition.shapes import WRONG

COMPILED_SCHEMAS: Final = (".desc", ".pb", ".binpb")
"""Files of protoc's descriptor sets; a definition holds them in Base64."""


@dataclass(frozen=True)
class Loaded:
    """A definition that keeps every rule that can be checked without Spark."""

    definition: model.PipelineDefinition
    warnings: tuple[Finding, ...] = ()
    findings: Findings = field(default_factory=Findings)
    """Knows where things were written: `findings.located` gives a later finding its line."""


def load_pipeline(path: str) -> Loaded:
    """The pipeline a file defines: YAML, or Python that makes one."""
    if path.endswith(".py") or ".py:" in path:
        return complete(load_module(path), Findings(file=path))
    return load_yaml(path)


def load_module(place: str) -> model.PipelineDefinition:
    """The one `Pipeline` (or definition) that a Python file makes at its top: of `orders.py`, or of `orders.py:name`
    where the file makes several."""
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
        if isinstance(value, PipelineBuilder | model.PipelineDefinition) and not name.startswith("_")
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
    if isinstance(pipeline, PipelineBuilder):
        return pipeline.definition(directory=os.path.dirname(os.path.abspath(path)))
    return pipeline


def load_yaml(path: str) -> Loaded:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise DefinitionError([Finding((), f"this is not UTF-8 text: {error}", file=path)]) from error
    except OSError as error:
        hint = "; 'holdfast pipeline init' writes an example" if isinstance(error, FileNotFoundError) else ""
        raise DefinitionError([Finding((), f"cannot read it: {error.strerror}{hint}", file=path)]) from error
    return parse_yaml(text, file=path, directory=os.path.dirname(os.path.abspath(path)))


def parse_yaml(text: str, *, file: str | None = None, directory: str = ".") -> Loaded:
    findings = Findings(file=file)
    root = from_yaml(text, findings)
    if root is None:
        raise DefinitionError(findings.found)
    return _from_node(root, findings, directory)


def from_document(document: Any, *, directory: str = ".") -> Loaded:
    """The definition of plain Python values, in the words of YAML."""
    return _from_node(from_values(document), Findings(), directory)


def _from_node(root: Node, findings: Findings, directory: str) -> Loaded:
    if root.mark:
        findings.places[()] = root.mark
    definition = model.PIPELINE.read(root, (), findings)
    if definition is WRONG:
        raise DefinitionError(_in_order(findings.found))
    return complete(replace(definition, directory=directory), findings)


def complete(definition: model.PipelineDefinition, findings: Findings) -> Loaded:
    """Names and files filled in, rules checked."""
    definition = replace(
        definition,
        steps=_named(definition.steps),
        source=_with_schemas(definition.source, definition.directory, findings),
    )
    unreadable = [_part(finding.path) for finding in findings.found]
    found = [
        *findings.found,
        *(
            findings.located(finding)
            for finding in check_rules(definition)
            if not any(
                _same_part(path, part) for path in (finding.path, *finding.rests_on) for part in unreadable
            )
        ),
    ]
    if any(finding.level == "error" for finding in found):
        raise DefinitionError(_in_order(found))
    return Loaded(definition, tuple(found), findings)


def _in_order(found: Sequence[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: finding.mark or (0, 0))


def _part(path: Path) -> Path:
    """What an error makes doubtful: the step, the sink, the decoding it stands in."""
    return path[:2]


def _same_part(path: Path, part: Path) -> bool:
    return path[: len(part)] == part or part[: len(path)] == path


def _named(steps: Sequence[model.Step]) -> tuple[model.Step, ...]:
    """A step without a name is called by its kind and its place, counted from 1."""
    return tuple(
        replace(step, name=f"{kind_of_step(step)}-{place}") if step.name == model.UNNAMED else step
        for place, step in enumerate(steps, 1)
    )


def _with_schemas(source: model.Source, directory: str, findings: Findings) -> model.Source:
    return replace(
        source,
        value=_with_schema(source.value, directory, ("source", "value"), findings),
        key=_with_schema(source.key, directory, ("source", "key"), findings),
        values={
            topic: _with_schema(decoding, directory, ("source", "values", topic), findings)
            for topic, decoding in source.values.items()
        },
    )


def _with_schema(
    decoding: model.Decoding | model.SchemaFile, directory: str, path: Path, findings: Findings
) -> model.Decoding:
    if isinstance(decoding, model.Decoding):
        return decoding
    if decoding.decoding.schema is not None:
        findings.add((*path, "schema_file"), "the schema is given already; keep 'schema' or 'schema_file'")
    try:
        with open(os.path.join(directory, decoding.file), "rb") as file:
            content = file.read()
        compiled = decoding.file.endswith(COMPILED_SCHEMAS)
        return replace(
            decoding.decoding, schema=base64.b64encode(content).decode() if compiled else content.decode()
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        findings.add((*path, "schema_file"), f"cannot read {decoding.file!r}: {reason}")
        return decoding.decoding
