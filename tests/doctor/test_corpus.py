"""Settings and programs with what the doctor must say about them; half of them are in order and must stay so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.doctor.client_defaults import Client
from holdfast.doctor.files import Asked, examine_files

CORPUS = Path(__file__).parent / "corpus"
CASES: list[dict[str, Any]] = [
    case
    for name in ("settings.yaml", "code.yaml", "deployed.yaml")
    for case in yaml.safe_load((CORPUS / name).read_text("utf-8"))
]


def examined(case: dict[str, Any], directory: Path) -> tuple[set[str], list[str]]:
    paths: dict[str, list[str]] = {}
    client: Client | None = None
    for kind in ("producer", "consumer", "pipeline", "broker", "code", "path"):
        part = case.get(kind)
        if part is None:
            continue
        part = part if isinstance(part, dict) else {"file": "program.py", "text": part}
        path = directory / part["file"]
        path.write_text(part["text"], encoding="utf-8")
        paths[kind] = [str(path)]
        client = Client(part["client"]) if "client" in part else client
    asked = Asked(
        paths.get("producer", ()),
        paths.get("consumer", ()),
        paths.get("pipeline", ()),
        paths.get("code", ()),
        paths.get("broker", ()),
        client,
        paths.get("path", ()),
    )
    examination = examine_files(asked).examination
    assert len(examination.gaps) == case.get("gaps", 0), examination.gaps
    found = {f"{each.id}:{each.place.line}" for each in examination.findings}
    return found, [f"{each.id} {each.where}: {each.found}" for each in examination.in_order()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_doctor_says_what_is_expected_and_nothing_else(case: dict[str, Any], tmp_path: Path) -> None:
    found, words = examined(case, tmp_path)
    assert found == set(case.get("expect", [])), words


def test_the_corpus_is_large_and_half_of_it_clean() -> None:
    clean = [case for case in CASES if not case.get("expect")]
    assert len(CASES) >= 60
    assert 2 * len(clean) >= len(CASES)
    assert len({case["name"] for case in CASES}) == len(CASES)
