"""The fingerprint of a definition: which rules a batch was made by.

It is the SHA-256 of the definition's canonical JSON: the same for YAML and Python that say the same, on every machine.
Left out is what cannot change a row: where files lie, how large batches are, when they run, which group shows the
lag. Secrets are in it as references, functions as their own source text; what they call is not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from holdfast.pipeline.definition.functions import source_of
from holdfast.pipeline.definition.model import PipelineDefinition, Python
from holdfast.pipeline.definition.naming import dead_letter_of, kind_of_sink, kind_of_step
from holdfast.pipeline.positions import to_text

FINGERPRINT_VERSION: Final = 1
LEFT_OUT: Final = frozenset(
    {"directory", "trigger", "home", "monitoring_group", "batch_records", "batch_bytes"}
)


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


def _step(step: Any, directory: str) -> dict[str, Any]:
    if not isinstance(step, Python):
        return dict(_plain(step))
    plain: dict[str, Any] = {
        each.name: _plain(getattr(step, each.name))
        for each in fields(step)
        if each.name not in ("file", "function")
    }
    return {**plain, "code": source_of(step, directory)}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: _plain(getattr(value, each.name))
            for each in fields(value)
            if each.name not in LEFT_OUT
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value
