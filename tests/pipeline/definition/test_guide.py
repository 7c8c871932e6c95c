"""Every example of the guides is a definition that loads; what they say of settings is so."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.definition.model import PIPELINE, SINK, SOURCE, STEP
from holdfast.pipeline.keyed import KeyState

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
GUIDE = (GUIDES / "pipeline.md").read_text()
MEMORY = (GUIDES / "stateful-pipelines.md").read_text()


def blocks(guide: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


YAML_BLOCKS = blocks(GUIDE, "yaml")
PYTHON_BLOCKS = blocks(GUIDE, "python")
LEAST = {"pipeline": "p", "source": {"topics": "t"}, "sinks": [{"parquet": "out"}]}
FIELDS = {
    "id": "long",
    "customer": "string",
    "sku": "string",
    "card": "string",
    "amount": "double",
    "at": "timestamp",
}
WITH_TIME = {
    **LEAST,
    "source": {"topics": "t", "value": {"format": "json", "fields": FIELDS}, "event_time": "at"},
}


def whole(text: str, least: dict[str, Any]) -> str:
    """The example with what it leaves out."""
    given = yaml.load(text, Loader=yaml.BaseLoader)
    missing: dict[str, Any] = {key: value for key, value in least.items() if key not in given}
    return text + yaml.safe_dump(missing) if missing else text


@pytest.mark.parametrize("text", YAML_BLOCKS)
def test_every_example_loads(text: str, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(PYTHON_BLOCKS[1] + PYTHON_BLOCKS[2])
    parse_yaml(whole(text, LEAST), directory=str(tmp_path))


@pytest.mark.parametrize("text", blocks(MEMORY, "yaml"))
def test_every_example_with_a_memory_loads(text: str, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(blocks(MEMORY, "python")[1])
    parse_yaml(whole(text, WITH_TIME), directory=str(tmp_path))


@pytest.mark.parametrize(("guide", "name"), [(GUIDE, "orders"), (MEMORY, "shop")])
def test_the_first_example_and_its_python_are_the_same_pipeline(guide: str, name: str) -> None:
    names: dict[str, Any] = {}
    exec(blocks(guide, "python")[0], names)
    pipeline = names[name]
    assert isinstance(pipeline, Pipeline)
    assert fingerprint(pipeline.definition()) == fingerprint(parse_yaml(blocks(guide, "yaml")[0]).definition)


def test_the_guides_function_finds_what_it_says() -> None:
    names: dict[str, Any] = {}
    exec(blocks(MEMORY, "python")[1], names)
    alarms, state = names["alarms"], KeyState(("card-1",))
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

    def pay(amount: float, seconds: int) -> Any:
        row = {"amount": amount, "at": at + datetime.timedelta(seconds=seconds)}
        return alarms(("card-1",), row, state)

    assert pay(0.5, 0) is None
    assert state.timer == at + datetime.timedelta(minutes=1)
    assert pay(900.0, 30) == {"card": "card-1", "amount": 900.0, "at": at + datetime.timedelta(seconds=30)}
    assert pay(900.0, 40) is None
    assert pay(0.5, 100) is None
    assert alarms(("card-1",), None, state) is None
    assert pay(900.0, 130) is None


def test_the_guides_show_every_kind_and_key() -> None:
    shown = set(re.findall(r"[a-z_]+", GUIDE + MEMORY))
    kinds = {*STEP.kinds, *SINK.kinds, *PIPELINE.names, *SOURCE.names}
    keys = {key for record in STEP.kinds.values() for key in record.names}
    assert (kinds | keys) - shown == set()
