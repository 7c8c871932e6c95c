"""Where a definition puts the rows of its sinks: two at one place would mix theirs, and one that moved is another.

Of canonical definitions, in which secrets are references.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME

PLACES: Final = {
    "parquet": ("path",),
    "delta": ("path",),
    "postgres": ("url", "schema_name", "table"),
    "kafka": ("bootstrap", "topic"),
}
"""What says where the rows of a kind of sink are."""


def place_of(sink: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a sink's rows are."""
    kind = "files" if sink["kind"] in ("parquet", "delta") else sink["kind"]
    parts = (str(sink.get(name) or "").rstrip("/") for name in PLACES[sink["kind"]])
    return (kind, *parts)


def kind_of_letters(dead_letter: Mapping[str, Any]) -> str:
    """Of which kind the sink of dead letters is."""
    return next((kind for kind in PLACES if dead_letter.get(kind)), "kafka")


def places_of(canonical: Mapping[str, Any]) -> dict[str, str]:
    """By sink, which place the definition names for it, in short."""
    dead_letter = canonical.get("dead_letter") or {}
    kind = kind_of_letters(dead_letter)
    found = {DEAD_LETTER_NAME: place_of({"kind": kind, **dead_letter.get(kind, dead_letter)})}
    found |= {sink["name"]: place_of(sink) for sink in canonical.get("sinks") or []}
    return {name: short("\n".join(place)) for name, place in found.items()}


def short(text: str) -> str:
    """Sixteen hexadecimal digits that stand for it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
