"""What is deployed: boards and alarms, units of systemd, the container.

Boards and alarms are well formed, and every series they use is one that a component shows. A scrape of a running broker
shows each of its families: that is tested with its endpoint, and the audits' with theirs. Units and container are held
against the commands that they start; systemd itself looks at the units where it is installed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from holdfast.broker.server.run import load_config
from holdfast.cli.metric_tables import COMPONENTS
from holdfast.cli.serve import parse_options

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


# ------------------------------------------------------------------------ systemd

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
TARGETS: Final = ("sysinit", "basic", "shutdown", "network-online")
"""What the units name of a system's own."""


def settings_of(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_restarts_what_failed_or_is_stuck_and_nothing_that_must_be_mended(unit: Path) -> None:
    settings = settings_of(unit)
    assert settings["Type"] == ["notify"]  # which each of the three commands speaks
    assert settings["WatchdogSec"]
    assert settings["Restart"] == ["on-failure"]
    assert settings["RestartPreventExitStatus"] == ["2"]
    assert settings["StartLimitIntervalSec"] == ["0"]
    (command,) = settings["ExecStart"]
    assert shlex.split(command)[0] == "/opt/holdfast/bin/holdfast"


def test_the_brokers_unit_leaves_it_what_it_needs() -> None:
    settings = settings_of(DEPLOY / "systemd" / "holdfast.service")
    assert "ProcSubset" not in settings  # the boot id: /proc/sys
    assert settings["TimeoutStartSec"] == ["infinity"]  # recovery
    denied = [each for line in settings["SystemCallFilter"] for each in line.split() if line[0] == "~"]
    assert not {"@resources", "@ipc", "@sync"} & {each.lstrip("~") for each in denied}
    (command,) = settings["ExecStart"]
    assert parse_options(shlex.split(command)[2:]).config_path == "/etc/holdfast/server.properties"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_a_unit(unit: Path, tmp_path: Path) -> None:
    places = {
        name: tmp_path / name for name in ("etc/systemd/system", "usr/lib/systemd/system", "opt/holdfast/bin")
    }
    etc, lib, programs = places.values()
    for place in places.values():
        place.mkdir(parents=True)
    for name in TARGETS:
        (lib / f"{name}.target").write_text("[Unit]\n")
    for each in UNITS:
        shutil.copy(each, etc)
    (programs / "holdfast").write_text("#!/bin/sh\n")
    (programs / "holdfast").chmod(0o755)
    named = unit.name.replace("@.", "@orders.")
    command = ["systemd-analyze", "verify", "--man=no", f"--root={tmp_path}", named]
    looked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (looked.returncode, looked.stdout + looked.stderr) == (0, "")


# ------------------------------------------------------------------------ the container

CONTAINER = DEPLOY / "container"


def instructions() -> dict[str, list[str]]:
    text = (CONTAINER / "Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
    found: dict[str, list[str]] = {}
    for name, rest in re.findall(r"^([A-Z]+) (.*)$", text, re.MULTILINE):
        found.setdefault(name, []).append(rest.strip())
    return found


def services() -> dict[str, Any]:
    named: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    return named


def test_the_image_serves_as_nobody_in_particular_and_is_asked_whether_it_is_ready() -> None:
    said = instructions()
    assert said["USER"] == ["10001:10001"]
    name, *arguments = json.loads(said["CMD"][0])
    assert name == "serve"
    config, _ = load_config(parse_options(arguments))
    assert config.holdfast_metrics_listener == "0.0.0.0:9404"
    assert config.log_dirs == tuple(said["VOLUME"])
    assert "http://127.0.0.1:9404/readyz" in said["HEALTHCHECK"][0]


def test_composed_services_are_confined_and_the_brokers_settings_are_right() -> None:
    for service in services().values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["restart"] == "unless-stopped"
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    broker = services()["broker"]
    config, _ = load_config(parse_options(broker["command"][1:]))
    told = {
        listener.name: (listener.advertised_host, listener.advertised_port) for listener in config.listeners
    }
    assert told == {"HOST": ("localhost", 9092), "INSIDE": ("broker", 19092)}
    assert f"--bootstrap-server={':'.join(map(str, told['INSIDE']))}" in services()["exporter"]["command"]


def test_the_image_is_built_from_what_the_wheel_needs() -> None:
    root = DEPLOY.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    taken = (CONTAINER / "Containerfile.dockerignore").read_text(encoding="utf-8").split()
    wanted = [
        "pyproject.toml",
        "hatch_build.py",
        "src",
        "requirements/base.txt",
        project["readme"],
        *project["license-files"],
    ]
    for name in wanted:
        assert (root / name).exists()
        assert f"!{name}" in taken
    assert (CONTAINER / services()["broker"]["build"]["context"]).resolve() == root
