"""What steps remember, as it lies in the pipeline's home: there, whole, and of the version that the sinks stand at.

    <home>/state/versions/<20 digits>-<digest>.json    a version: `content` has its steps, with the files of each
    <home>/state/data/…/*.parquet                      rows; pages carry checksums of their own

A version is there before any sink has its batch, and goes after the next one is; so a version above the one that a sink
names means that the pipeline has gone on since, or that the state was rebuilt. A run goes on from the one that stands
where its sinks do, whatever its number, so every version that is there has to be whole. What a state says is not looked
at: what came of it is in the sinks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.audit.model import Fate, Finding
from holdfast.pipeline.definition.fingerprint import canonical, state_marks
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.ledger import STATELESS, Entry
from holdfast.pipeline.positions import to_text

MANIFEST: Final = re.compile(r"(\d{20})-[0-9a-f]{16}\.json")


def examine_state(definition: PipelineDefinition, home: str, newest: Iterable[Entry]) -> list[Finding]:
    """What is wrong with the state that these entries, the newest of their sinks, stand at."""
    # A home from before there were digests may have been given up without a word: what its entries name is not missed.
    sealed = [entry for entry in newest if entry.content]
    wanted = {entry.state for entry in sealed if entry.state is not None and entry.state != STATELESS}
    if not wanted or not state_marks(canonical(definition)):
        return []
    root = os.path.join(home, "state")
    there = _versions(root)
    if max(there, default=-1) < max(wanted):
        return [_found(f"the state that the sinks stand at, version {max(wanted)}, is gone from {root}")]
    found = []
    for number in sorted(there):
        wrong = _damage(root, there[number])
        if wrong and number in _versions(root):
            found.append(_found(wrong))
    return found


def _found(detail: str) -> Finding:
    return Finding(Fate.ALTERED, "", detail=f"{detail}; `holdfast pipeline rebuild` makes the state again")


def _versions(root: str) -> dict[int, str]:
    """The paths of manifests by number; of two with one number, the later by name."""
    directory = os.path.join(root, "versions")
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return {}
    return {
        int(match[1]): os.path.join(directory, match[0])
        for name in names
        if (match := MANIFEST.fullmatch(name))
    }


def _damage(root: str, manifest: str) -> str:
    """What of a version is not as it was written; nothing: all is."""
    try:
        with open(manifest, encoding="utf-8") as file:
            document = json.load(file)
        content: Mapping[str, Any] = document["content"]
        if hashlib.sha256(to_text(content).encode()).hexdigest() != document["checksum"]:
            return f"{manifest} does not match its checksum"
        segments = [each for step in content["steps"].values() for each in step["segments"]]
        for segment in segments:
            rows = sum(_rows(os.path.join(root, name)) for name in segment["files"])
            if rows != segment["rows"]:
                where = os.path.dirname(os.path.join(root, segment["files"][0]))
                return f"{where} holds {rows:,} rows, and held {segment['rows']:,}"
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        return (
            f"the state of {manifest} cannot be read ({(str(error) or type(error).__name__).splitlines()[0]})"
        )
    return ""


def _rows(path: str) -> int:
    """Counted, every page against its checksum."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return sum(batch.num_rows for batch in file.iter_batches())
