"""Pipelines in files: our definitions, hop by hop, and Spark's options for Kafka.

A definition is judged by what it promises itself (`pipeline.definition.explaining`): each hop that is weaker than
exactly-once is a finding of the risk it stands for, with the setting that would make it stronger. A definition in
Python is not run: name it with --code.

A file of Spark options is a dictionary with option names, or one with sections `source`/`readStream` and
`sink`/`writeStream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.doctor.findings import Examination, Finding, Fix, Place, Severity, finding
from holdfast.doctor.properties_files import Entry, UnreadableFile, read_entries
from holdfast.doctor.spark_options import Option, Options, check_source, is_temporary

if TYPE_CHECKING:
    from holdfast.pipeline.definition.hops import Hop

SOURCE_SECTIONS: Final = frozenset({"source", "readstream", "read", "reader"})
SINK_SECTIONS: Final = frozenset({"sink", "writestream", "write", "writer"})
SPARK_WORDS: Final = frozenset(
    {"failondataloss", "startingoffsets", "checkpointlocation", "kafka.bootstrap.servers", "subscribe"}
)


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
    if any(entry.path[0] == "pipeline" for entry in entries):
        _definition(path, entries, examination)
    elif SPARK_WORDS & {_option_name(entry) for entry in entries}:
        examination.examined.append(f"{path} as options of Spark")
        examination.add(check_options(path, entries))
    else:
        examination.missed(
            path, "neither a pipeline's definition (`pipeline: NAME`) nor options of Spark's Kafka source"
        )


# Our definitions


def _definition(path: str, entries: Sequence[Entry], examination: Examination) -> None:
    from holdfast.pipeline.definition.errors import DefinitionError, path_text
    from holdfast.pipeline.definition.explaining import explain
    from holdfast.pipeline.definition.loading import load_yaml

    try:
        loaded = load_yaml(path)
    except DefinitionError as error:
        for wrong in error.findings:
            where = f"line {wrong.mark.line}: " if wrong.mark else ""
            part = path_text(wrong.path)
            examination.missed(path, f"{where}{part}{': ' if part else ''}{wrong.message}")
        return
    explanation = explain(loaded.definition)
    examination.examined.append(
        f"{path} as pipeline {explanation.pipeline}: {explanation.weakest.strength.words}"
    )
    for hop in explanation.hops:
        examination.add(_weak_hop(path, hop, entries))


def _weak_hop(path: str, hop: Hop, entries: Sequence[Entry]) -> Iterator[Finding]:
    from holdfast.pipeline.definition.hops import Strength

    if hop.strength is Strength.EXACTLY_ONCE:
        return
    risk, severity = _risk_of(
        hop, hop.strength is Strength.CONDITIONAL or hop.strength > Strength.CONDITIONAL
    )
    yield finding(
        risk,
        Place(path, _line_of(hop, entries), f"{hop.kind} {hop.name}" if hop.kind != hop.name else hop.name),
        f"{hop.strength.words}: {hop.why}",
        severity=severity,
        fix=Fix(hop.remedy, "settings") if hop.remedy else None,
    )


def _risk_of(hop: Hop, mild: bool) -> tuple[str, Severity]:
    if hop.kind == "source":
        return "HF402", Severity.WARNING
    if hop.kind == "parse":
        return "HF406", Severity.NOTE
    if hop.kind == "kafka":
        return "HF109", Severity.NOTE
    if "late" in hop.why:
        return "HF407", Severity.NOTE if mild else Severity.WARNING
    if hop.kind in ("expect", "filter"):
        return "HF406", Severity.WARNING
    return "HF410", Severity.NOTE if mild else Severity.WARNING


def _line_of(hop: Hop, entries: Sequence[Entry]) -> int:
    """Where the hop is written, as well as its name or its part tells."""
    for entry in entries:
        if hop.kind == "source" and entry.path[:2] == ("source", "starting"):
            return entry.line
        if hop.kind == "parse" and entry.path[0] == "source" and entry.path[-1] == "unknown":
            return entry.line
    return 0


# Spark's options


def _option_name(entry: Entry) -> str:
    parts = entry.path
    if parts[0].lower() in SOURCE_SECTIONS | SINK_SECTIONS and len(parts) > 1:
        parts = parts[1:]
    if parts[0].lower() in ("options", "option") and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts).lower()


def check_options(path: str, entries: Sequence[Entry]) -> Iterator[Finding]:
    source: Options = {}
    sink: Options = {}
    sections = {entry.path[0].lower() for entry in entries if len(entry.path) > 1}
    for entry in entries:
        name = _option_name(entry)
        option = Option(entry.path[-1], entry.value, Place(path, entry.line))
        if entry.path[0].lower() in SINK_SECTIONS and len(entry.path) > 1:
            sink[name] = option
        else:
            source[name] = option
    checkpoint = sink.get("checkpointlocation") or source.get("checkpointlocation")
    if {"subscribe", "subscribepattern", "assign", "failondataloss", "startingoffsets"} & source.keys():
        batch = "endingoffsets" in source or "read" in sections
        yield from check_source(source, Place(path), streaming=not batch)
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
            Place(path),
            "a sink without checkpointLocation: the query forgets where it was",
            fix=Fix("checkpointLocation: <a durable directory of its own>", "settings"),
        )
