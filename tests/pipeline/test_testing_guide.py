"""The guide to testing a pipeline holds: its cases and its program pass, on the example it speaks of."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.pipeline.definition.example import write_files
from holdfast.testing import pipelines
from holdfast.testing.pipelines import PipelineTester, differences, load_cases

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing-a-pipeline.md"


@pytest.mark.spark
def test_its_cases_and_its_program_pass(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    write_files(str(tmp_path))
    (cases,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "guide.test.yaml").write_text(cases)
    loaded = load_cases(str(tmp_path / "guide.test.yaml"))
    with PipelineTester(spark) as tester:
        for case in loaded.cases:
            assert list(differences(case, tester.run(loaded.definition, case.records))) == []
    assert [line for line in cases.splitlines() if line] == [
        line for line in (tmp_path / "orders.test.yaml").read_text().splitlines()[1:] if line
    ][: len([line for line in cases.splitlines() if line])]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipelines, "PipelineTester", lambda: PipelineTester(spark))
    space: dict[str, Any] = {}
    exec(compile(program, os.fspath(GUIDE), "exec"), space)
    space["test_a_good_order_gets_its_tax"]()
