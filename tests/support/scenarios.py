"""Scenario files: commands in, a readable trace out, reviewed like prose.

A scenario is a text file. A line is a command; the indented lines under it are what it led to. Lines that begin with
`#` and empty lines are for the reader.

    # The second member makes the first join again.
    join bob
    beat alice
      alice: REBALANCE_IN_PROGRESS

`check_scenario` runs the commands through an interpreter and compares the trace with the file, whole. When the
environment variable `HOLDFAST_SCENARIOS` is `write`, it writes the file anew instead: read the difference before you
believe it.

An interpreter is anything with `execute(verb, words, options) -> lines`. `options` are the words of the form
`name=value`; `words` are the others, in order, without the verb.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import Protocol

REWRITE_VARIABLE = "HOLDFAST_SCENARIOS"
INDENT = "  "


class Interpreter(Protocol):
    def execute(self, verb: str, words: Sequence[str], options: Mapping[str, str]) -> Iterable[str]:
        """Carry out one command; what came of it, line by line."""
        ...


def scenario_files(directory: Path) -> list[Path]:
    """Every scenario of a directory, for `pytest.mark.parametrize`."""
    found = sorted(directory.glob("*.txt"))
    if not found:
        raise FileNotFoundError(f"no scenario in {directory}")
    return found


def check_scenario(path: Path, interpreter: Interpreter) -> None:
    written = path.read_text()
    traced = "\n".join(run_scenario(written, interpreter)) + "\n"
    if os.environ.get(REWRITE_VARIABLE) == "write":
        path.write_text(traced)
        return
    if traced != written:
        difference = unified_diff(
            written.splitlines(), traced.splitlines(), "as written", "as it is", lineterm="", n=6
        )
        raise AssertionError(f"{path.name} went another way:\n" + "\n".join(difference))


def run_scenario(text: str, interpreter: Interpreter) -> Iterator[str]:
    """The scenario as it goes: its comments and commands, each with what it leads to."""
    for line in text.splitlines():
        if line.startswith(INDENT) and line.strip():
            continue
        yield line.rstrip()
        command = line.split("#", 1)[0].strip() if not line.startswith("#") else ""
        if command:
            verb, words, options = parse_command(command)
            yield from (INDENT + said for said in interpreter.execute(verb, words, options))


def parse_command(command: str) -> tuple[str, list[str], dict[str, str]]:
    verb, *rest = command.split()
    words = [word for word in rest if "=" not in word]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    return verb, words, options
