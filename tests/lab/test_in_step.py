"""One identifier everywhere: risks, rules, experiments, pages and pictures are in step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.doctor import risks
from holdfast.doctor.risks import RISKS
from holdfast.lab.experiments import EXPERIMENTS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "risks"
PICTURES = ROOT / "docs" / "lab"
IDS = sorted(set(RISKS) - {"HF000"})
SECTIONS = ("In the lab", "What else must fail", "Whether you have it", "How to fix it", "What it costs")
WORDS_MIN = 10


def sections(text: str) -> dict[str, str]:
    return dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", text, re.MULTILINE))


def test_pages_experiments_and_the_doctors_lists_are_the_same() -> None:
    assert sorted(path.stem for path in PAGES.glob("HF*.md")) == IDS
    assert sorted(EXPERIMENTS) == IDS
    assert sorted(risks.PAGES) == IDS
    assert sorted(risks.EXPERIMENTS) == IDS
    assert sorted(path.stem for path in PICTURES.glob("HF*.svg")) == IDS


@pytest.mark.parametrize("risk", IDS)
def test_a_page_says_what_a_page_must(risk: str) -> None:
    text = (PAGES / f"{risk}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {risk}: {RISKS[risk].title}\n")
    assert RISKS[risk].loses in text
    assert RISKS[risk].remedy in text
    found = sections(text)
    assert tuple(found) == SECTIONS
    for title, words in found.items():
        assert len(words.split()) >= WORDS_MIN, title
    assert f"](../lab/{risk}.svg)" in found["In the lab"]
    assert f"holdfast lab run {risk}" in found["In the lab"]


def test_links_between_pages_lead_somewhere() -> None:
    for path in (*PAGES.glob("*.md"), PICTURES / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_commands_on_the_pages_exist() -> None:
    known = set(re.findall(r"^## (holdfast .+)$", (ROOT / "docs" / "CLI.md").read_text(), re.MULTILINE))
    first_words = {" ".join(title.split()[:2]) for title in known}
    named = {
        " ".join(match.split())
        for path in PAGES.glob("HF*.md")
        for match in re.findall(r"holdfast\s[a-z-]+(?:\s[a-z-]+)?", path.read_text(encoding="utf-8"))
    }
    assert named
    assert {each for each in named if " ".join(each.split()[:2]) not in first_words} == set()


def test_every_rule_of_the_doctor_is_about_a_known_risk() -> None:
    named = {
        risk
        for path in (ROOT / "src" / "holdfast" / "doctor").glob("*.py")
        for risk in re.findall(r'"(HF\d{3})"', path.read_text(encoding="utf-8"))
    }
    assert named <= set(RISKS)


def test_what_the_lab_has_shown_held() -> None:
    rows = [row for row in (PICTURES / "README.md").read_text().splitlines() if row.startswith("| [HF")]
    outcomes = {row.split("|")[3].strip().partition(",")[0] for row in rows}
    assert len(rows) >= len(IDS)
    assert outcomes == {"HELD"}
