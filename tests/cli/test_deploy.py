"""Boards and alarms: well formed, and every series they use is one that a component shows.

A scrape of a running broker shows each of its families: that is tested with its endpoint, and the audits' with theirs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli.metric_tables import COMPONENTS

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = sorted((DEPLOY / "prometheus").glob("*.yaml"))
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
SERIES = {
    name
    for families in COMPONENTS.values()
    for family in families.values()
    for name in (
        [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]
        if family.kind == "histogram"
        else [family.name]
    )
}
LABELS = {label for families in COMPONENTS.values() for each in families.values() for label in each.labels}
WORDS = LABELS | {
    *("sum", "by", "rate", "increase", "time", "and", "on", "le", "histogram_quantile", "predict_linear"),
}
DURATION = re.compile(r"\d+[smhd]")


def rules() -> list[dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def board_expressions() -> list[str]:
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in BOARDS]
    return [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    """Whatever stands for a series: not in quotes, no word of the language, no label, no duration."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    return {name for name in re.findall(r"[a-zA-Z_][a-zA-Z0-9_]*", bare) if name not in WORDS}


@pytest.mark.parametrize("expression", [*board_expressions(), *(rule["expr"] for rule in rules())])
def test_an_expression_is_balanced_and_uses_series_that_exist(expression: str) -> None:
    names = names_in(expression)
    assert names
    assert names - SERIES == set()
    for opening, closing in ("()", "[]", "{}"):
        assert expression.count(opening) == expression.count(closing)
    for span in re.findall(r"\[([^\]]*)\]", expression):
        assert DURATION.fullmatch(span)
    # A counter alone tells nothing: it begins at 0 with each start.
    for name in names:
        if name.endswith(("_total", "_bucket")):
            assert re.search(rf"(rate|increase)\({name}", expression)


def test_an_unknown_series_would_be_found() -> None:
    assert names_in('sum by (topic) (rate(holdfast_nothing_total{topic!="x"}[5m]))') == {
        "holdfast_nothing_total"
    }


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_has_what_prometheus_asks_for(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"[A-Z][A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    assert DURATION.fullmatch(rule.get("for", "1m"))
    used = set(re.findall(r"\$labels\.([a-z_]+)", rule["annotations"]["summary"]))
    assert used <= LABELS


def test_alerts_are_named_once() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_board_places_its_panels_without_overlap(path: Path) -> None:
    board = json.loads(path.read_text(encoding="utf-8"))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    assert board["uid"].startswith("holdfast-")
