"""Accepted findings: a reason and an end are needed, and the end is kept."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from holdfast.doctor.findings import DoctorError, Examination, Location, finding
from holdfast.doctor.suppressions import read_suppressions, suppress

ENTRY = """\
suppressions:
  - id: HF305
    where: {where}
    reason: old alerts are of no use
    expires: 2027-03-31
"""
BEFORE, ON_THE_DAY = datetime.date(2027, 3, 30), datetime.date(2027, 3, 31)


def written(directory: Path, text: str) -> str:
    path = directory / "accepted.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def examination() -> Examination:
    result = Examination()
    result.add([finding("HF305", Location("conf/alerts.properties", 3), "latest")])
    result.missed("other", "unreadable")
    return result


@pytest.mark.parametrize(
    "where", ["conf/alerts.properties", "conf/alerts.properties:3", "conf/*", "'*'"], ids=str
)
def test_an_accepted_finding_is_set_aside_with_its_reason(where: str, tmp_path: Path) -> None:
    entries = read_suppressions(written(tmp_path, ENTRY.format(where=where)))
    result = suppress(examination(), entries, BEFORE)
    assert result.findings == []
    assert [each.reason for each in result.suppressed] == ["old alerts are of no use"]
    assert not result.complete


def test_on_its_day_the_finding_counts_again_and_the_end_is_told(tmp_path: Path) -> None:
    entries = read_suppressions(written(tmp_path, ENTRY.format(where="'*'")))
    result = suppress(examination(), entries, ON_THE_DAY)
    assert [each.id for each in result.findings] == ["HF305", "HF000"]
    assert "ended on 2027-03-31" in result.findings[1].found
    assert result.suppressed == []


@pytest.mark.parametrize("where", ["conf/other.properties", "conf/alerts.properties:4", "alerts.properties"])
def test_another_place_is_not_covered_and_the_entry_is_named(where: str, tmp_path: Path) -> None:
    entries = read_suppressions(written(tmp_path, ENTRY.format(where=where)))
    result = suppress(examination(), entries, BEFORE)
    assert [each.id for each in result.findings] == ["HF305", "HF000"]
    assert "was not found" in result.findings[1].found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- {id: HF305, where: x, expires: 2027-01-01}", "has no reason"),
        ("- {id: HF305, where: x, reason: ' ', expires: 2027-01-01}", "has no reason"),
        ("- {id: HF305, where: x, reason: y}", "has no expires"),
        ("- {id: HF305, reason: y, expires: 2027-01-01}", "has no where"),
        ("- {id: HF999, where: x, reason: y, expires: 2027-01-01}", "no risk"),
        ("- {id: HF305, where: x, reason: y, expires: never}", "not a day"),
        ("- {id: HF305, where: x, reason: y, expires: 2027-01-01, until: 3}", "unknown field 'until'"),
        ("- HF305", "must have"),
        ("suppressions: all", "must be a list"),
        ("a: [", "not YAML"),
    ],
)
def test_silence_without_a_reason_or_an_end_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DoctorError, match=said):
        read_suppressions(written(tmp_path, text))


def test_an_empty_file_accepts_nothing(tmp_path: Path) -> None:
    assert read_suppressions(written(tmp_path, "suppressions:\n")) == []
