"""Pipelines in files: our definitions, hop by hop, and Spark's options for Kafka.

A definition is judged by what it promises itself (`pipeline.definition.explaining`): each hop that is weaker than
exactly-once is a finding of the risk it stands for, with the setting that would make it stronger. A definition in
Python is not run: name it with --code.

A file of Spark options is a dictionary with option names, or one with sections `source`/`readStream` and
`sink`/`writeStream`.

Whether a pipeline's Python functions give the same for the same rows, their text tells, as far as it does. A batch is
recomputed after a crash. A function that asks the clock, chance or another service then computes something else. Known
calls of that kind are named with their line; a function that makes none is taken to be in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.doctor.findings import Examination, Finding, Fix, Location, Severity, finding
from holdfast.doctor.properties_files import PropertyEntry, UnreadableFile, read_entries
from holdfast.doctor.python_code import read_program
from holdfast.doctor.spark_options import Option, Options, check_source, is_temporary

if TYPE_CHECKING:
    from holdfast.pipeline.definition.explaining import Hop
    from holdfast.pipeline.definition.loading import Loaded
    from holdfast.pipeline.definition.model import Step
import ast

from holdfast.doctor.python_names import ModuleNames, calls_in

SOURCE_SECTIONS: Final = frozenset({"source", "readstream", "read", "reader"})
SINK_SECTIONS: Final = frozenset({"sink", "writestream", "write", "writer"})
REPLAYED: Final = "recomputed"
"""What a definition says about an expression that is another one in the next run."""
SPARK_WORDS: Final = frozenset({"failondataloss", "startingoffsets", "checkpointlocation", "subscribe"})


def examine_pipeline(path: str, examination: Examination) -> None:
    if path.endswith(".py") or ".py:" in path:
        examination.missed(
            path, "a pipeline in Python is not run by the doctor; name it with --code", "unsupported"
        )
        return
    try:
        entries = read_entries(path)
    except UnreadableFile as error:
        examination.missed(path, str(error).removeprefix(f"{path}: "))
        return
    if _is_definition(entries):
        _definition(path, examination)
    elif is_pipeline(entries):
        examination.examined.append(f"{path} as options of Spark")
        examination.add(check_options(path, entries))
    else:
        examination.missed(
            path, "neither a pipeline's definition (`pipeline: NAME`) nor options of Spark's Kafka source"
        )


def is_pipeline(entries: Sequence[PropertyEntry]) -> bool:
    return (
        _is_definition(entries)
        or not SPARK_WORDS.isdisjoint(map(option_name, entries))
        or any(".".join(entry.path).startswith("spark.") for entry in entries)
    )


# Our definitions


def _is_definition(entries: Sequence[PropertyEntry]) -> bool:
    return any(entry.path[0] == "pipeline" for entry in entries)


def _definition(path: str, examination: Examination) -> None:
    from holdfast.pipeline.definition.errors import DefinitionError, path_text
    from holdfast.pipeline.definition.explaining import explain
    from holdfast.pipeline.definition.loading import load_yaml

    try:
        loaded = load_yaml(path)
    except DefinitionError as error:
        for wrong in error.findings:
            line = wrong.mark.line if wrong.mark else 0
            part = path_text(wrong.path)
            if REPLAYED in wrong.message:
                examination.add([finding("HF410", Location(path, line, part), wrong.message)])
            else:
                where = f"line {line}: " if line else ""
                examination.missed(path, f"{where}{part}{': ' if part else ''}{wrong.message}")
        return
    except ModuleNotFoundError as error:  # no reason to examine nothing else
        why = f"{error.name} is not installed: pip install 'holdfast[spark]'"
        examination.missed(path, f"checking a pipeline needs what is not here: {why}")
        return
    explanation = explain(loaded.definition)
    examination.examined.append(
        f"{path} as pipeline {explanation.pipeline}: {explanation.weakest.strength.words}"
    )
    for hop in explanation.hops:
        examination.add(_weak_hop(path, hop, loaded))
    for step in loaded.definition.steps:
        _examine_function(path, step, examination)


def _weak_hop(path: str, hop: Hop, loaded: Loaded) -> Iterator[Finding]:
    from holdfast.pipeline.definition.explaining import Strength

    if hop.strength is Strength.EXACTLY_ONCE or _is_a_function(hop):
        return
    risk, severity, loses = _risk_of(hop)
    name = hop.name if hop.name.startswith(hop.kind) else f"{hop.kind} {hop.name}"
    yield finding(
        risk,
        Location(path, _line_of(hop, loaded), name),
        f"{hop.strength.words}: {hop.why}",
        severity=severity,
        loses=loses,
        fix=Fix(hop.remedy, "advice") if hop.remedy else None,
    )


def _is_a_function(hop: Hop) -> bool:
    """Weak only if its function is: that is for `_examine_function` to say."""
    from holdfast.pipeline.definition.explaining import Strength

    return hop.kind in ("python", "keyed") and hop.strength is Strength.CONDITIONAL


def _risk_of(hop: Hop) -> tuple[str, Severity, str | None]:
    if hop.kind == "source":
        return "HF402", Severity.WARNING, None
    if hop.kind == "parse":
        return "HF406", Severity.NOTE, "fields of a record that the definition does not list"
    if hop.kind == "kafka":
        return "HF109", Severity.NOTE, "nothing, but readers may see one part of a batch before the rest"
    if hop.kind == "expect":
        return "HF406", Severity.WARNING, "rows that break the rule: they are counted, and kept nowhere"
    if hop.kind == "event time":
        return "HF407", Severity.NOTE, None
    return "HF407", Severity.WARNING, "rows that come too late: they are counted, and kept nowhere"


def _line_of(hop: Hop, loaded: Loaded) -> int:
    """Where the hop is written."""
    definition = loaded.definition
    places: list[tuple[str | int, ...]] = []
    if hop.kind == "source":
        places = [("source", "starting"), ("source",)]
    elif hop.kind == "parse":
        part = hop.name.removeprefix("parse ")
        places = [("source", *part.split(".", 1), "unknown"), ("source", *part.split(".", 1))]
    elif hop.kind == "event time":
        places = [("source", "event_time"), ("source",)]
    else:
        places = [("steps", index) for index, step in enumerate(definition.steps) if step.name == hop.name]
        places += [("sinks", index) for index, sink in enumerate(definition.sinks) if sink.name == hop.name]
    for place in places:
        if place in loaded.findings.places:
            return loaded.findings.places[place].line
    return 0


def _examine_function(path: str, step: Step, examination: Examination) -> None:
    """HF410: clock, chance and other services in a function that is run again with its batch."""
    file, function = getattr(step, "file", None), getattr(step, "function", None)
    if not isinstance(file, str) or not isinstance(function, str):
        return
    shown = os.path.join(os.path.dirname(path), file)
    try:
        found = changing_calls(read_program(shown).names, function)
    except (UnreadableFile, RecursionError) as error:
        examination.missed(
            shown, f"the function of step {step.name}: {str(error).removeprefix(f'{shown}: ')}"
        )
        return
    if found is None:
        examination.missed(shown, f"no function {function}, which step {step.name} names")
    for name, line in found or ():
        place = Location(shown, line, f"step {step.name}")
        words = f"{name}() in {function}(): its answer is another one when the batch is recomputed"
        fix = Fix("derive it from the row, or use _batch_time, which is fixed with the batch", "code")
        examination.add([finding("HF410", place, words, fix=fix)])


# Spark's options


def option_name(entry: PropertyEntry) -> str:
    parts = entry.path
    if parts[0].lower() in SOURCE_SECTIONS | SINK_SECTIONS and len(parts) > 1:
        parts = parts[1:]
    if parts[0].lower() in ("options", "option") and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts).lower().removeprefix("spark.sql.streaming.")


def check_options(path: str, entries: Sequence[PropertyEntry]) -> Iterator[Finding]:
    source: Options = {}
    sink: Options = {}
    sections = {entry.path[0].lower() for entry in entries if len(entry.path) > 1}
    for entry in entries:
        name = option_name(entry)
        option = Option(entry.path[-1], entry.value, Location(path, entry.line))
        if entry.path[0].lower() in SINK_SECTIONS and len(entry.path) > 1:
            sink[name] = option
        else:
            source[name] = option
    checkpoint = sink.get("checkpointlocation") or source.get("checkpointlocation")
    if {"subscribe", "subscribepattern", "assign", "failondataloss", "startingoffsets"} & source.keys():
        batch = "endingoffsets" in source or "read" in sections
        yield from check_source(source, Location(path), streaming=not batch)
    if checkpoint is not None and isinstance(checkpoint.value, str) and is_temporary(checkpoint.value):
        yield finding(
            "HF403",
            checkpoint.place,
            f"checkpointLocation {checkpoint.value} is temporary storage: a restart empties it",
            fix=Fix("checkpointLocation: <a durable directory of its own>", "settings"),
        )
    elif checkpoint is None and sink:
        yield finding(
            "HF403",
            Location(path),
            "a sink without checkpointLocation: the query forgets where it was",
            fix=Fix("checkpointLocation: <a durable directory of its own>", "settings"),
        )


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
