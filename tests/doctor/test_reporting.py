"""The forms a report takes: for people, JSON, SARIF, JUnit."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.doctor import reporting
from holdfast.doctor.findings import Examination, Fix, Location, Severity, Suppressed, finding
from holdfast.doctor.reporting import Format, as_json, as_junit, as_sarif, as_text, fixes, rendered, summary


def examination() -> Examination:
    result = Examination(examined=["two files"])
    result.add(
        [
            finding("HF305", Location("c.properties", 2), "latest", severity=Severity.NOTE),
            finding("HF102", Location("p.properties", 1), "acks=1", fix=Fix("acks=all", "settings")),
            finding("HF201", Location(resource="topic orders"), "one replica", related=("HF202",)),
        ]
    )
    accepted = finding("HF106", Location("/etc/old file.properties"), "off")
    result.suppressed.append(Suppressed(accepted, "being replaced", "2027-01-01"))
    result.missed("secret.properties", "Permission denied", "permission")
    return result


def test_the_worst_comes_first_and_what_is_missing_is_named() -> None:
    lines = list(as_text(examination()))
    assert [line for line in lines if line.startswith("HF")] == [
        "HF102 error  p.properties:1",
        "HF201 warning  topic orders",
        "HF305 note  c.properties:2",
    ]
    assert "not examined: secret.properties: Permission denied" in lines
    assert lines[-1] == (
        "1 error, 1 warning, 1 note, 1 suppressed; 1 thing examined; INCOMPLETE: 1 could not be examined"
    )


def test_a_page_is_named_only_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "PAGES", frozenset())
    monkeypatch.setattr(reporting, "EXPERIMENTS", frozenset())
    assert not any("see:" in line for line in as_text(examination()))
    monkeypatch.setattr(reporting, "EXPERIMENTS", frozenset({"HF102"}))
    assert [line for line in as_text(examination()) if "see:" in line] == ["  see: holdfast lab run HF102"]


def test_a_clean_examination_says_so() -> None:
    assert summary(Examination(examined=["a", "b"])) == "nothing found; 2 things examined"


def test_fixes_stand_alone() -> None:
    assert list(fixes(examination())) == ["# HF102 p.properties:1: acks=1", "acks=all"]


def test_the_same_finding_is_told_once() -> None:
    result = examination()
    count = len(result.findings)
    result.add([finding("HF305", Location("c.properties", 2), "latest", severity=Severity.NOTE)])
    assert len(result.findings) == count


def test_json_has_stable_keys() -> None:
    document = as_json(examination())
    assert document["version"] == 1
    assert document["complete"] is False
    assert document["counts"] == {"note": 1, "warning": 1, "error": 1}
    assert document["findings"][0].keys() == {
        "id", "title", "severity", "where", "place", "found", "loses", "fix", "related", "see"
    }  # fmt: skip
    assert document["suppressed"][0]["reason"] == "being replaced"
    assert document["notExamined"] == [
        {"what": "secret.properties", "why": "Permission denied", "kind": "permission"}
    ]
    assert json.loads(rendered(examination(), Format.JSON, fail_on=Severity.ERROR)) == document


def test_sarif_has_what_readers_of_it_need() -> None:
    run: dict[str, Any] = as_sarif(examination())["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["HF102", "HF106", "HF201", "HF305"]
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    assert [result["level"] for result in run["results"]] == ["error", "warning", "note", "warning"]
    physical = run["results"][0]["locations"][0]["physicalLocation"]
    assert physical == {"artifactLocation": {"uri": "p.properties"}, "region": {"startLine": 1}}
    assert run["results"][1]["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "topic orders"
    accepted = run["results"][3]
    assert accepted["suppressions"][0]["justification"] == "being replaced (until 2027-01-01)"
    location = accepted["locations"][0]["physicalLocation"]["artifactLocation"]
    assert location == {"uri": "file:///etc/old%20file.properties"}
    assert run["invocations"][0]["executionSuccessful"] is False


def test_junit_counts_what_fails() -> None:
    suite = ElementTree.fromstring(as_junit(examination(), Severity.WARNING).partition("\n")[2])
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "5", "2", "1", "1"
    )  # fmt: skip
    assert len(suite.findall("testcase")) == 5
    assert len(suite.findall("testcase/failure")) == 2
    errors = ElementTree.fromstring(as_junit(examination(), Severity.ERROR).partition("\n")[2])
    assert errors.get("failures") == "1"
    clean = ElementTree.fromstring(as_junit(Examination()).partition("\n")[2])
    assert (clean.get("tests"), len(clean.findall("testcase"))) == ("1", 1)


@given(st.text(), st.text())
def test_whatever_a_file_holds_the_report_can_be_read(name: str, found: str) -> None:
    result = Examination()
    result.add([finding("HF102", Location(name, 1), found)])
    result.missed(name, found)
    ElementTree.fromstring(as_junit(result).partition("\n")[2])
    for output in (Format.JSON, Format.SARIF):
        text = rendered(result, output, fail_on=Severity.WARNING)
        json.loads(text.encode("utf-8", "surrogatepass"))
