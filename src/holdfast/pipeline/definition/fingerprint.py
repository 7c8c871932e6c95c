"""The fingerprint of a definition: which rules a batch was made by.

It is the SHA-256 of the definition's canonical JSON: the same for YAML and Python that say the same, on every machine.
Left out is what cannot change a row: where files lie, how large batches are, when they run, which group shows the
lag. Secrets are in it as references, functions as their own source text; what they call is not looked at. Words that
were added to the language later are left out where they are not used, so that a definition from before has the
fingerprint it had.

A stateful step has a fingerprint of its own, which stands beside its state: a state is of use to a step only if
the rows that reach it, and what it does with them, are the same. It counts how records are decoded and when they
happened; every step before it that changes or removes rows, in their order, whatever they are called; and the step
itself, its name included. It does not count topics, sinks, steps behind it, rules that only warn, how often a lookup's
table is read again, nor other steps that let the rows pass unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from holdfast.pipeline.definition.functions import source_of
from holdfast.pipeline.definition.model import DeltaSink, Keyed, PipelineDefinition, Python
from holdfast.pipeline.definition.naming import dead_letter_of, kind_of_sink, kind_of_step
from holdfast.pipeline.positions import to_text

FINGERPRINT_VERSION: Final = 1
EARLIER: Final = "earlier"
"""In the home's `definition.json`: marks of the definitions that ran, by fingerprint."""
LEFT_OUT: Final = frozenset(
    {"directory", "trigger", "home", "monitoring_group", "batch_records", "batch_bytes", "unordered"}
    | {"compact"}
)
ADDED: Final[Mapping[str, Any]] = {
    "event_time": None,
    "values": {},
    "rows": "",
    "order_by": None,
    "parquet": None,
    "delta": None,
    "postgres": None,
}
"""Words of the source, of sinks and of dead letters that version 1 began without, with what they are when they are not
used."""
ADDED_TO_DELTA: Final[Mapping[str, Any]] = {"mode": "append", "key": [], "delete_when": None}
"""Words that PostgreSQL sinks had from the beginning."""

STATEFUL: Final = frozenset({"dedupe", "window", "keyed", "join"})
WITH_OWN_ROWS: Final = frozenset({"window", "keyed", "join"})


def fingerprint(definition: PipelineDefinition) -> str:
    """64 hexadecimal digits; of a definition whose secrets are not expanded."""
    return hashlib.sha256(to_text(canonical(definition)).encode()).hexdigest()


def canonical(definition: PipelineDefinition) -> dict[str, Any]:
    """The definition as plain values, by name; everything that stands in its fingerprint."""
    return {
        "version": FINGERPRINT_VERSION,
        "name": definition.name,
        "source": _plain(definition.source),
        "steps": [
            {"kind": kind_of_step(step), **_step(step, definition.directory)} for step in definition.steps
        ],
        "sinks": [{"kind": kind_of_sink(sink), **_plain(sink)} for sink in definition.sinks],
        "dead_letter": _plain(dead_letter_of(definition)),
        "spark": dict(definition.spark),
    }


def state_marks(document: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprints of all stateful steps, by name; of a canonical definition, which may be a kept one."""
    source = {name: document["source"].get(name) for name in ("value", "key", "values", "event_time")}
    marks: dict[str, str] = {}
    before: list[dict[str, Any]] = []
    for step in document["steps"]:
        if step["kind"] in STATEFUL:
            mark = {"version": FINGERPRINT_VERSION, "source": source, "before": before, "step": step}
            marks[step["name"]] = hashlib.sha256(to_text(mark).encode()).hexdigest()
        if step["kind"] not in WITH_OWN_ROWS and step.get("otherwise") != "warn":
            before = [*before, {key: each for key, each in step.items() if key not in ("name", "refresh")}]
    return marks


def content_marks(document: Mapping[str, Any]) -> dict[str, str]:
    """By sink, a mark of everything that its rows follow from; of a canonical definition. Two definitions with the same
    mark make the same rows of a record."""
    source = {name: document["source"].get(name) for name in ("value", "key", "values")}
    steps = [
        {key: each for key, each in step.items() if key not in ("name", "refresh")}
        for step in document["steps"]
        if step["kind"] not in WITH_OWN_ROWS and step.get("otherwise") != "warn"
    ]
    return {
        sink["name"]: hashlib.sha256(
            to_text({"source": source, "steps": steps, "sink": sink}).encode()
        ).hexdigest()
        for sink in document["sinks"]
    }


def marks_of(document: Mapping[str, Any]) -> dict[str, dict[str, dict[str, str]]]:
    """What stands of a canonical definition beside the one that follows it, by its fingerprint."""
    mark = hashlib.sha256(to_text(document).encode()).hexdigest()
    return {mark: {"state": state_marks(document), "content": content_marks(document)}}


def _step(step: Any, directory: str) -> dict[str, Any]:
    """`kind` says which step it is; what windows and joins call so themselves is their `form`."""
    plain = {"form" if name == "kind" else name: each for name, each in _plain(step).items()}
    if isinstance(step, Python | Keyed):
        del plain["file"], plain["function"]
        plain["code"] = source_of(step, directory)
    return plain


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, bool, float):  # most are
        return value
    if is_dataclass(value) and not isinstance(value, type):
        plain = {
            each.name: _plain(getattr(value, each.name))
            for each in fields(value)
            if each.name not in LEFT_OUT
        }
        added = {**ADDED, **ADDED_TO_DELTA} if isinstance(value, DeltaSink) else ADDED
        return {name: each for name, each in plain.items() if name not in added or each != added[name]}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value
