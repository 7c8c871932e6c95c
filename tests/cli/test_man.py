"""The manual page has every command and flag, is roff that groff takes, and shells complete the same."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.cli.test_docs import EXISTING

from holdfast.cli.man import page
from holdfast.errors import ExitCode

Run = Callable[..., subprocess.CompletedProcess[bytes]]


def test_the_manual_has_every_command_with_its_flags_and_every_exit_code() -> None:
    text = page().replace("\\-", "-")
    sections = dict(re.findall(r"^\.SS (.+)\n((?:(?!^\.S[SH] ).*\n)*)", text, re.MULTILINE))
    assert sections.keys() == EXISTING.keys()
    for command, flags in EXISTING.items():
        shown = set(re.findall(r"--?[a-z][\w.-]*", " ".join(re.findall(r"\\fB(.+?)\\fR", sections[command]))))
        assert flags <= shown, command
    codes = re.findall(r"^\.B (\d+)$", text.partition(".SH EXIT STATUS")[2], re.MULTILINE)
    assert [int(code) for code in codes] == sorted(ExitCode)


def test_the_manual_is_plain_roff() -> None:
    text = page()
    assert text.isascii()
    known = (".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".I", ".nf", ".fi")
    assert [
        line for line in text.splitlines() if line[:1] in (".", "'") and line.split()[0] not in known
    ] == []
    if shutil.which("groff"):
        shown = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z"], input=text, capture_output=True, text=True, timeout=60
        )
        assert (shown.returncode, shown.stderr) == (0, "")


COMPLETIONS = (
    ("holdfast to", "topics"),
    ("holdfast topics cre", "create"),
    ("holdfast topics create --part", "--partitions"),
    ("holdfast serve --data", "--data-dir"),
    ("holdfast topics list --output js", "json"),
)


@pytest.mark.parametrize(("typed", "completed"), COMPLETIONS)
def test_bash_completes_commands_flags_and_words(run_anywhere: Run, typed: str, completed: str) -> None:
    words = typed.split()
    found = run_anywhere(
        env={
            "_HOLDFAST_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(words) - 1),
        }
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.decode().split() == [completed]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_the_command(run_anywhere: Run, shell: str) -> None:
    script = run_anywhere(env={"_HOLDFAST_COMPLETE": f"source_{shell}"}).stdout.decode()
    assert f"_HOLDFAST_COMPLETE=complete_{shell}" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script.encode(), timeout=60).returncode == 0


PROGRAM = """\
import sys
import typer
from holdfast.cli.app import root
group = typer.main.get_command(root)
context = group.make_context("holdfast", ["version"], resilient_parsing=True)
print([each.value for each in group.shell_complete(context, "pro")])
print("holdfast.cli.produce" in sys.modules)
"""


def test_completing_a_name_imports_no_command() -> None:
    """A shell asks at every key: the list of commands comes from the table."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['produce']\nFalse\n", done.stderr
