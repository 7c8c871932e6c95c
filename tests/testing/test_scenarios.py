"""The runner of scenario files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from tests.support.group_scenarios import check_scenario, parse_command, scenario_files

TEXT = """# Two and two.
add 2 2
  4

say word=hello  # a remark
  hello
quiet
"""


class Calculator:
    def execute(self, verb: str, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        if verb == "add":
            return [str(sum(map(int, words)))]
        return [options["word"]] if verb == "say" else []


def test_a_scenario_that_goes_as_written_passes(tmp_path: Path) -> None:
    path = tmp_path / "scenario.txt"
    path.write_text(TEXT)
    check_scenario(path, Calculator())
    assert scenario_files(tmp_path) == [path]


@pytest.mark.parametrize("wrong", [TEXT.replace("  4", "  5"), TEXT.replace("  4\n", ""), TEXT + "  more\n"])
def test_a_scenario_that_goes_another_way_fails_and_shows_how(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "scenario.txt"
    path.write_text(wrong)
    with pytest.raises(AssertionError, match="went another way"):
        check_scenario(path, Calculator())


def test_a_scenario_is_written_anew_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scenario.txt"
    path.write_text(TEXT.replace("  4", "  5"))
    monkeypatch.setenv("HOLDFAST_SCENARIOS", "write")
    check_scenario(path, Calculator())
    assert path.read_text() == TEXT


def test_a_directory_without_scenarios_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        scenario_files(tmp_path)


def test_commands_are_split_into_words_and_options() -> None:
    assert parse_command("join ann topics=a,b now") == ("join", ["ann", "now"], {"topics": "a,b"})
