"""Pipelines: what a definition promises, and functions that compute something else when a batch is recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.doctor.files import Asked, examine_files
from holdfast.doctor.findings import Examination

DEFINITION = """\
pipeline: orders
source:
  topics: [orders]
  value: {format: json, unknown: reject, fields: {id: long}}
steps:
  - %s
sinks:
  - parquet: {path: out/orders}
"""
PYTHON = DEFINITION % "python: {name: tax, file: steps.py, function: with_tax, schema: {id: long}}"


def examined(directory: Path, definition: str, steps: str = "") -> Examination:
    (directory / "orders.yaml").write_text(definition)
    (directory / "steps.py").write_text(steps)
    return examine_files(Asked(pipelines=[str(directory / "orders.yaml")])).examination


@pytest.mark.parametrize(
    "body",
    [
        "import time\n\ndef with_tax(rows):\n    return rows, time.time()\n",
        "from datetime import datetime\n\ndef with_tax(rows):\n    return datetime.now()\n",
        "import numpy as np\n\ndef with_tax(rows):\n    return np.random.rand()\n",
        "import requests\n\ndef with_tax(rows):\n    return requests.get('http://rates')\n",
        "from uuid import uuid4\n\ndef helper():\n    return uuid4()\n\ndef with_tax(rows):\n    return helper()\n",
    ],
)
def test_clock_chance_and_services_are_named_in_a_step(body: str, tmp_path: Path) -> None:  # HF410
    examination = examined(tmp_path, PYTHON, body)
    assert [found.id for found in examination.findings] == ["HF410"]
    (found,) = examination.findings
    line = body.splitlines()[found.place.line - 1]
    assert found.found.split("()")[0].rpartition(".")[2] in line
    assert examination.complete


@pytest.mark.parametrize(
    "body",
    [
        "def with_tax(rows):\n    return rows\n",
        "import time\n\ndef other():\n    return time.time()\n\ndef with_tax(rows):\n    return rows\n",
        "def with_tax(rows):\n    return with_tax(rows)\n",
    ],
)
def test_a_function_that_gives_the_same_is_in_order(body: str, tmp_path: Path) -> None:
    examination = examined(tmp_path, PYTHON, body)
    assert examination.findings == []
    assert examination.complete


def test_a_function_that_is_not_there_is_a_gap(tmp_path: Path) -> None:
    examination = examined(tmp_path, PYTHON, "def another(rows):\n    return rows\n")
    assert examination.findings == []
    assert not examination.complete


def test_chance_in_sql_is_a_finding_with_its_line(tmp_path: Path) -> None:  # HF410
    examination = examined(tmp_path, DEFINITION % "sql: {name: s, query: 'SELECT *, rand() AS r FROM input'}")
    assert [(found.id, found.place.line) for found in examination.findings] == [("HF410", 6)]


def test_rows_that_are_dropped_are_named(tmp_path: Path) -> None:
    examination = examined(tmp_path, DEFINITION % "expect: {name: e, that: id > 0, else: drop}")
    assert [(found.id, found.place.line) for found in examination.findings] == [("HF406", 6)]
    assert "kept nowhere" in examination.findings[0].loses


def test_a_file_that_is_neither_is_told(tmp_path: Path) -> None:
    examination = examined(tmp_path, "name: x\n")
    assert [gap.why[:7] for gap in examination.gaps] == ["neither"]
