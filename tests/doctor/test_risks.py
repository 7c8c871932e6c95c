"""The table of risks: every identifier once, with its words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.doctor.findings import Location, Severity, finding
from holdfast.doctor.reporting import what_there_is
from holdfast.doctor.risks import EXPERIMENTS, PAGES, RISKS, Risk

IDS = [
    *(f"HF{number}" for number in range(101, 110)),
    *(f"HF{number}" for number in range(201, 213)),
    *(f"HF{number}" for number in range(301, 312)),
    *(f"HF{number}" for number in range(401, 412)),
]


def test_every_risk_is_there_once_and_in_order() -> None:
    assert list(RISKS) == ["HF000", *IDS]


@pytest.mark.parametrize("risk", RISKS.values(), ids=list(RISKS))
def test_a_risk_has_its_words(risk: Risk) -> None:
    assert risk.severity in {severity.value for severity in Severity}
    assert risk.page == f"docs/risks/{risk.id}.md"
    for text in (risk.title, risk.loses, risk.remedy):
        assert text
        assert not text.endswith(".")
    assert re.match(r"[a-zA-Z]", risk.title)


def test_a_finding_takes_the_words_of_its_risk_unless_it_has_better() -> None:
    plain = finding("HF102", Location("p.properties", 3), "acks=1")
    assert (plain.severity, plain.loses) == (Severity.ERROR, RISKS["HF102"].loses)
    assert plain.where == "p.properties:3"
    other = finding("HF102", Location(resource="topic t"), "x", severity=Severity.NOTE, loses="little")
    assert (other.severity, other.loses, other.where) == (Severity.NOTE, "little", "topic t")


def test_pages_that_reports_name_exist() -> None:
    root = Path(__file__).parents[2]
    assert {risk for risk in PAGES if not (root / RISKS[risk].page).is_file()} == set()
    assert EXPERIMENTS.issubset(IDS)


def test_reports_name_what_there_is_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.doctor.reporting.PAGES", frozenset({"HF102", "HF103"}))
    monkeypatch.setattr("holdfast.doctor.reporting.EXPERIMENTS", frozenset({"HF102"}))
    assert what_there_is("HF101") == ()
    assert what_there_is("HF102") == ("holdfast lab run HF102", "docs/risks/HF102.md")
    assert what_there_is("HF103") == ("docs/risks/HF103.md",)
