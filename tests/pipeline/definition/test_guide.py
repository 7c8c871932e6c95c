"""Every example of the guide is a definition that loads; what it says of settings is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.definition.table import PIPELINE, SINK, SOURCE, STEP

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "pipeline.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
YAML_BLOCKS = [text for language, text in BLOCKS if language == "yaml"]
PYTHON_BLOCKS = [text for language, text in BLOCKS if language == "python"]
LEAST = {"pipeline": "p", "source": {"topics": "t"}, "sinks": [{"parquet": "out"}]}


def whole(text: str) -> str:
    """The example with what it leaves out."""
    given = yaml.load(text, Loader=yaml.BaseLoader)
    missing: dict[str, Any] = {key: value for key, value in LEAST.items() if key not in given}
    return text + yaml.safe_dump(missing) if missing else text


@pytest.mark.parametrize("text", YAML_BLOCKS)
def test_every_example_loads(text: str, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(PYTHON_BLOCKS[1])
    parse_yaml(whole(text), directory=str(tmp_path))


def test_the_first_example_and_its_python_are_the_same_pipeline() -> None:
    names: dict[str, Any] = {}
    exec(PYTHON_BLOCKS[0], names)
    pipeline = names["orders"]
    assert isinstance(pipeline, Pipeline)
    assert fingerprint(pipeline.definition()) == fingerprint(parse_yaml(YAML_BLOCKS[0]).definition)


def test_the_guide_shows_every_kind_and_key() -> None:
    shown = set(re.findall(r"[a-z_]+", GUIDE))
    kinds = {*STEP.kinds, *SINK.kinds, *PIPELINE.names, *SOURCE.names}
    assert kinds - shown == set()
