"""The layers of docs/ARCHITECTURE.md hold, and a violation planted in a copy of the package is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FOR_TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    "
"""Before an import that only the type checker sees: it is bound like any other."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package and its contracts."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path / "src" / "holdfast"


def check(directory: Path) -> subprocess.CompletedProcess[str]:
    """What `make contracts` does, on the package in `directory`."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--config", "pyproject.toml"]
    environment = {**os.environ, "PYTHONPATH": str(directory / "src"), "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_contracts_hold() -> None:
    checked = check(ROOT)
    assert checked.returncode == 0, checked.stdout
    assert "0 broken" in checked.stdout


@pytest.mark.check
def test_an_untouched_copy_holds_as_well(package: Path) -> None:
    checked = check(package.parent.parent)
    assert checked.returncode == 0, checked.stdout


VIOLATIONS = [
    ("wire/varint.py", "import holdfast.broker.log.scan", "Imports point downwards"),
    (
        "broker/log/scan.py",
        "from holdfast.broker.node.timers import Timers",
        "Inside the broker",
    ),
    (
        "broker/log/scan.py",
        "import holdfast.broker.partition.offsets",
        "Inside the broker",
    ),
    ("broker/node/timers.py", "import holdfast.broker.server.run", "Inside the broker"),
    ("broker/log/scan.py", "import holdfast.broker.dump.path", "Inside the broker"),
    (
        "broker/node/intake.py",
        "import holdfast.broker.node.handlers.produce",
        "Nothing imports request",
    ),
    ("broker/log/scan.py", f"{FOR_TYPES}import holdfast.broker.node.timers", "Inside the broker"),
    ("broker/groups/model.py", f"{FOR_TYPES}import holdfast.broker.metadata.image", "Inside the broker"),
    ("broker/node/timers.py", "import holdfast.broker.dump.path", "Inside the broker"),
    ("broker/node/timers.py", "import holdfast.real", "Pure packages"),
    ("real.py", "import holdfast.testing.fakes", "Imports point downwards"),
    ("testing/fakes.py", "import holdfast.cli.output", "Imports point downwards"),
    ("config/values.py", "import holdfast.wire.varint", "Imports point downwards"),
    ("seams.py", "import holdfast.config.values", "Imports point downwards"),
    ("pipeline/state/store.py", "import holdfast.pipeline.engine.running", "Inside the pipeline"),
    ("pipeline/core/sql.py", "import holdfast.pipeline.definition.model", "Inside the pipeline"),
    ("pipeline/engine/home.py", "import holdfast.pipeline.operations.rebuilding", "Inside the pipeline"),
    ("pipeline/sinks/base.py", f"{FOR_TYPES}import holdfast.pipeline.state.store", "Inside the pipeline"),
    ("wire/codecs.py", "import holdfast.broker.server.run", "What must run on Apache Kafka"),
    ("client/__init__.py", "import holdfast.broker.log.scan", "What must run on Apache Kafka"),
    ("broker/log/scan.py", "import os", "Pure packages"),
    ("broker/node/timers.py", "import time", "Pure packages"),
    ("broker/node/timers.py", "from asyncio import sleep", "Pure packages"),
    ("broker/metadata/names.py", "import random", "Pure packages"),
    ("broker/partition/offsets.py", "import threading", "Pure packages"),
]


def plant(package: Path, module: str, line: str) -> None:
    path = package / module
    path.write_text(f"{path.read_text(encoding='utf-8')}\n\n{line}\n", encoding="utf-8")


def broken_by(directory: Path) -> tuple[list[str], str]:
    """The contracts that do not hold, and everything that is said."""
    checked = check(directory)
    assert checked.returncode != 0
    return [text for text in checked.stdout.splitlines() if " BROKEN" in text], checked.stdout


@pytest.mark.check
def test_every_planted_violation_is_found_beside_the_others(package: Path) -> None:
    for module, line, _ in VIOLATIONS:
        plant(package, module, line)
    broken, said = broken_by(package.parent.parent)
    for module, line, contract in VIOLATIONS:
        importer = "holdfast." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        imported = re.findall(r"(?:from|import) ([\w.]+)", line)
        assert any(text.startswith(contract) for text in broken), said
        assert any(f"{importer} -> {each}" in said for each in imported), (importer, line, said)


@pytest.mark.long
@pytest.mark.parametrize(("module", "line", "contract"), VIOLATIONS)
def test_a_planted_violation_is_found(package: Path, module: str, line: str, contract: str) -> None:
    plant(package, module, line)
    broken, said = broken_by(package.parent.parent)
    assert any(text.startswith(contract) for text in broken), said
