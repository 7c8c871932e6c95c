"""`pipeline init` writes what passes its own check."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.errors import UsageError
from holdfast.pipeline.definition.example import write_files
from holdfast.pipeline.definition.functions import load_function
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.definition.model import Python


def test_the_example_is_a_pipeline(tmp_path: Path) -> None:
    written = write_files(str(tmp_path / "new"))
    assert [Path(path).name for path in written] == [
        "orders.yaml",
        "steps.py",
        "orders.test.yaml",
        "README.md",
    ]
    loaded = load_pipeline(written[0])
    assert loaded.warnings == ()
    assert loaded.definition.name == "orders"
    assert len(Path(written[3]).read_text().splitlines()) == 3


def test_its_function_does_what_it_says(tmp_path: Path) -> None:
    definition = load_pipeline(write_files(str(tmp_path))[0]).definition
    (step,) = (step for step in definition.steps if isinstance(step, Python))
    rows = pa.RecordBatch.from_pydict({"_hf": [1, 2], "amount": [100.0, 10.0]})
    result = load_function(step, definition.directory)(rows)
    assert result.schema.names == ["_hf", "amount", "tax"]
    assert result["tax"].to_pylist() == pytest.approx([19.0, 1.9])


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("mine")
    with pytest.raises(UsageError, match=r"steps\.py: there already, and not overwritten"):
        write_files(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["steps.py"]
    assert (tmp_path / "steps.py").read_text() == "mine"
