"""docs/CLI.md and the command line say the same: no flag without a line, no line without a flag."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.cli.app import COMMANDS, root
from holdfast.cli.formats import LineFormat, MessageFormat
from holdfast.cli.man import leaves
from holdfast.cli.serve import build_parser
from holdfast.errors import ExitCode

DOCUMENT = (Path(__file__).parents[2] / "docs" / "CLI.md").read_text()
SECTIONS: dict[str, str] = {
    title.strip(): text
    for title, text in re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", DOCUMENT, re.MULTILINE)
}
COMMON = "[common flags](#common-flags)"


def first_cells(section: str) -> list[str]:
    return [row.split("|")[1] for row in section.replace("\\|", "¦").splitlines() if row.startswith("| ")]


def documented_flags(section: str) -> set[str]:
    flags = {flag for cell in first_cells(section) for flag in re.findall(r"`(--[a-z.-]+)`", cell)}
    return flags | documented_flags(SECTIONS["Common flags"]) if COMMON in section else flags


def existing_flags() -> dict[str, set[str]]:
    group: Any = typer.main.get_command(root)
    found: dict[str, set[str]] = {}
    for name in COMMANDS:
        if name == "serve":
            actions = build_parser()._actions
            found["holdfast serve"] = {flag for action in actions for flag in action.option_strings} - {
                "--help",
                "-h",
            }
            continue
        for title, each in leaves(f"holdfast {name}", group.get_command(None, name)):
            found[title] = {
                flag for parameter in each.params for flag in parameter.opts if flag.startswith("-")
            }
    return found


EXISTING = existing_flags()


def test_every_command_has_its_section_and_no_section_is_left_over() -> None:
    assert {title for title in SECTIONS if title.startswith("holdfast ")} == EXISTING.keys()


@pytest.mark.parametrize("command", EXISTING)
def test_the_flags_of_a_command_are_those_documented(command: str) -> None:
    assert documented_flags(SECTIONS[command]) == EXISTING[command]


def test_every_flag_has_a_help_text() -> None:
    group: Any = typer.main.get_command(root)
    for name in COMMANDS:
        if name == "serve":
            assert all(action.help for action in build_parser()._actions)
            continue
        command = group.get_command(None, name)
        assert command.help
        for _, each in leaves(name, command):
            assert each.help
            assert [parameter.name for parameter in each.params if not parameter.help] == []


def test_the_list_of_commands_has_one_line_for_each_under_its_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        typer.main.get_command(root).main(["--help"], prog_name="holdfast")
    shown = capsys.readouterr().out
    for name, place in COMMANDS.items():
        assert re.search(rf"│ {name} +{re.escape(place.summary)} *│", shown)
        assert f"─ {place.task} ─" in shown


def test_properties_are_those_documented() -> None:
    def names(title: str) -> set[str]:
        cells = first_cells(SECTIONS[title])
        return {match[1] for cell in cells if (match := re.fullmatch(r" `([a-z.]+)` ", cell))}

    assert names("holdfast produce") == {*LineFormat.property_names()}
    assert names("holdfast consume") == {*MessageFormat.property_names()}


def test_exit_codes_are_those_documented() -> None:
    cells = first_cells(SECTIONS["Exit codes"])
    assert {int(cell) for cell in cells if cell.strip().isdecimal()} == {int(code) for code in ExitCode}


def test_environment_variables_are_those_documented() -> None:
    package = Path(exits_file()).parent.parent
    used = {
        name
        for file in package.rglob("*.py")
        if "testing" not in file.parts
        for name in re.findall(r"\"(HOLDFAST_[A-Z_]+)\"", file.read_text())
    }
    cells = first_cells(SECTIONS["Environment"])
    assert {name for cell in cells for name in re.findall(r"`(HOLDFAST_[A-Z_]+)`", cell)} == used


def exits_file() -> str:
    from holdfast.cli import exits

    return os.fspath(exits.__file__)
