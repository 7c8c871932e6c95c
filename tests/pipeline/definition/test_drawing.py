"""A definition as a picture: everything it names is there, nothing of it is taken for markup."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.drawing import draw
from holdfast.pipeline.definition.loading import load_pipeline

SVG = "{http://www.w3.org/2000/svg}"
EXAMPLES = Path(__file__).parents[3] / "examples" / "pipelines"


def boxes(svg: str) -> dict[str, tuple[int, int]]:
    """By the words of its title, where a box stands."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        assert title is not None
        assert rect is not None
        found[title.text or ""] = (int(rect.attrib["x"]), int(rect.attrib["y"]))
    return found


@pytest.mark.parametrize("name", ["activity", "changes", "logs", "payments"])
def test_every_step_side_output_and_sink_has_a_box_of_its_own(name: str) -> None:
    definition = load_pipeline(str(EXAMPLES / f"{name}.yaml")).definition
    found = boxes(draw(definition))
    for step in definition.steps:
        assert any(title.split(":")[0].endswith(step.name) for title in found)
    for sink in definition.sinks:
        assert any(title.startswith(f"{sink.name}: ") for title in found)
        if sink.rows:
            assert any(title.startswith(f"{sink.rows}: ") for title in found)
    assert any(title.startswith("dead-letter: ") for title in found)
    assert len(set(found.values())) == len(found), "two boxes at one place"


def test_texts_are_escaped_and_secrets_are_not_shown() -> None:
    pipeline = (
        Pipeline("p")
        .read("t", value="text")
        .filter("_value < '<script>' AND 1 < 2", name="few")
        .write("postgres", url="postgresql://me:hidden@db/shop", table="t")
    )
    svg = draw(pipeline.definition())
    assert "<script>" not in svg
    assert "hidden" not in svg
    assert any("<script>" in title for title in boxes(svg))
