"""The state of a pipeline that its sinks stand at: there and whole, or a finding."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.audit.state_files import examine_state
from holdfast.pipeline.definition.model import Dedupe, EventTime, PipelineDefinition, Source
from holdfast.pipeline.ledger import STATELESS, Content, Entry
from holdfast.pipeline.positions import BatchRange, Positions, to_text

DEFINITION = PipelineDefinition(
    "shop",
    Source(("orders",), event_time=EventTime("at", "1m")),
    steps=(Dedupe("once", key=("id",), within="1h"),),
)
ENTRY = Entry(
    "shop", "files", 3, BatchRange({}), Positions({}), 0, "f", state=7, content=Content("k", 0, 0, 0, {})
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    segment = tmp_path / "state" / "data" / "b1" / "once-0"
    segment.mkdir(parents=True)
    table = pa.table({"id": pa.array(range(1000)), "_until": pa.array([5] * 1000)})
    pq.write_table(
        table, segment / "part-0.parquet", compression="none", write_page_checksum=True, use_dictionary=False
    )
    (tmp_path / "state" / "versions").mkdir()
    publish(tmp_path, 7)
    return tmp_path


def publish(home: Path, number: int) -> Path:
    segment = {
        "files": ["data/b1/once-0/part-0.parquet"],
        "rows": 1000,
        "bytes": 1,
        "low_ms": 5,
        "high_ms": 5,
        "tier": 0,
    }
    content: dict[str, Any] = {
        "number": number,
        "positions": Positions({}).as_json(),
        "steps": {"once": {"fingerprint": "", "segments": [segment], "notes": {}}},
    }
    checksum = hashlib.sha256(to_text(content).encode()).hexdigest()
    path = home / "state" / "versions" / f"{number:020d}-{'0' * 16}.json"
    path.write_text(json.dumps({"format": 1, "checksum": checksum, "content": content}))
    return path


def findings(home: Path, *entries: Entry) -> list[str]:
    return [each.detail for each in examine_state(DEFINITION, str(home), entries or [ENTRY])]


def test_a_state_that_is_whole_is_fine(home: Path) -> None:
    assert findings(home) == []
    assert findings(home, replace(ENTRY, state=None), replace(ENTRY, state=STATELESS)) == []
    shutil.rmtree(home / "state")
    assert examine_state(replace(DEFINITION, steps=()), str(home), [ENTRY]) == [], "nothing remembers"


def flip(home: Path) -> None:
    path = home / "state/data/b1/once-0/part-0.parquet"
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)


def rewrite(home: Path) -> None:
    path = home / "state/data/b1/once-0/part-0.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)


def edit(home: Path) -> None:
    path = next((home / "state/versions").iterdir())
    path.write_text(path.read_text().replace('"tier": 0', '"tier": 1'))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda home: shutil.rmtree(home / "state"), "version 7, is gone"),
        (lambda home: shutil.rmtree(home / "state" / "data"), "cannot be read"),
        (lambda home: next((home / "state/versions").iterdir()).unlink(), "version 7, is gone"),
        (lambda home: next((home / "state/versions").iterdir()).write_text("{"), "cannot be read"),
        (flip, "cannot be read"),
        (rewrite, "holds 999 rows, and held 1,000"),
        (edit, "does not match its checksum"),
    ],
    ids=["all", "data", "version", "cut", "flipped", "rewritten", "edited"],
)
def test_one_that_is_not_is_found(home: Path, damage: Callable[[Path], None], word: str) -> None:
    damage(home)
    [detail] = findings(home)
    assert word in detail
    assert "holdfast pipeline rebuild" in detail


def test_a_pipeline_that_has_gone_on_since_has_let_go_of_it(home: Path) -> None:
    next((home / "state/versions").iterdir()).unlink()
    publish(home, 8)
    assert findings(home) == []


def test_one_that_was_rebuilt_has_a_number_of_its_own_and_is_looked_at_too(home: Path) -> None:
    next((home / "state/versions").iterdir()).unlink()
    publish(home, 9)
    flip(home)
    [detail] = findings(home)
    assert "cannot be read" in detail
