"""The example pipelines: their results are what the generator knows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.postgres import NoPostgres, PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
NAMES = ("activity", "changes", "logs", "payments")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_pipelines", EXAMPLES / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])]
)
def test_an_example_finds_what_was_generated(
    program: ModuleType,
    name: str,
    tmp_path: Path,
    holdfast_broker: BrokerProcess,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        if name == "changes":
            try:
                server = stack.enter_context(PostgresServer())
            except NoPostgres as missing:
                pytest.skip(str(missing))
            monkeypatch.setenv("DATABASE_URL", server.url)
        is_right = program.run(name, 400, 7, tmp_path, holdfast_broker.bootstrap_servers, spark)
    told = capsys.readouterr().out
    assert is_right, told
    assert "should be" not in told
    assert "1 batches" in told


def test_the_program_tells_how_it_is_run() -> None:
    told = subprocess.run(
        [sys.executable, str(EXAMPLES / "run.py"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(name in told for name in NAMES)


def test_every_definition_says_at_its_top_what_it_shows() -> None:
    for name in NAMES:
        assert (EXAMPLES / f"{name}.yaml").read_text().startswith("# ")
