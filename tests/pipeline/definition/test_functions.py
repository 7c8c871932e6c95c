"""Functions of Python steps: found where they are named, and sent to workers whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.pipeline.definition.functions import FunctionMissing, load_function, source_of
from holdfast.pipeline.definition.model import Python

STEPS = """\
from dataclasses import dataclass

import helpers
from helpers import twice


@dataclass
class Rate:
    value: int


def changed(rows):
    return twice(rows) + helpers.OFFSET + Rate(1).value


class Tools:
    @staticmethod
    def changed(rows):
        return rows
"""
HELPERS = "OFFSET = 10\n\n\ndef twice(number):\n    return 2 * number\n"


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "helpers.py").write_text(HELPERS)
    return str(tmp_path)


def test_a_function_of_a_file_may_import_its_neighbours(directory: str) -> None:
    assert load_function(Python("s", "steps.py", "changed"), directory)(3) == 17
    assert load_function(Python("s", "steps.py", "Tools.changed"), directory)(3) == 3


def test_nothing_is_left_among_the_imported_modules(directory: str) -> None:
    before = (dict(sys.modules), list(sys.path))
    load_function(Python("s", "steps.py", "changed"), directory)
    assert "helpers" not in sys.modules
    assert (sys.modules.keys(), sys.path) == (before[0].keys(), before[1])


def test_two_directories_have_their_own_neighbours(directory: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "steps.py").write_text(STEPS)
    (other / "helpers.py").write_text(HELPERS.replace("10", "100"))
    step = Python("s", "steps.py", "changed")
    assert load_function(step, directory)(3) == 17
    assert load_function(step, str(other))(3) == 107


def test_a_worker_needs_none_of_the_files(directory: str, tmp_path: Path) -> None:
    from pyspark import cloudpickle

    sent = tmp_path / "sent"
    dumps: Any = cloudpickle.dumps
    sent.write_bytes(dumps(load_function(Python("s", "steps.py", "changed"), directory)))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))(3))"
    done = subprocess.run(
        [sys.executable, "-c", f"import pyspark.cloudpickle; {program}", str(sent)],
        cwd="/",
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == b"17"


def test_a_function_by_its_module() -> None:
    assert load_function(Python("s", None, "json:dumps"), ".")([1]) == "[1]"
    assert load_function(Python("s", None, "os.path.join"), ".")("a", "b") == "a/b"
    assert load_function(Python("s", None, len), ".") is len


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Python("s", "steps.py", "chnged"), "step 's': steps.py has no function 'chnged'"),
        (Python("s", "no.py", "f"), "cannot run .*no.py: No such file"),
        (Python("s", "bad.py", "f"), "cannot run .*bad.py: ZeroDivisionError: division by zero"),
        (Python("s", None, "nowhere_at_all:f"), "step 's': cannot import nowhere_at_all"),
        (Python("s", None, "f"), "'f' names no module; write module:function, or give 'file'"),
        (Python("s", None, "json:nothing"), "json has no function 'nothing'"),
    ],
)
def test_a_function_that_cannot_be_had_says_why(directory: str, step: Python, message: str) -> None:
    (Path(directory) / "bad.py").write_text("1 / 0\n")
    with pytest.raises(FunctionMissing, match=message):
        load_function(step, directory)


def test_the_source_is_the_functions_own_lines(directory: str) -> None:
    assert source_of(Python("s", "steps.py", "changed"), directory) == (
        "def changed(rows):\n    return twice(rows) + helpers.OFFSET + Rate(1).value"
    )
    assert source_of(Python("s", "steps.py", "Tools.changed"), directory) == (
        "@staticmethod\ndef changed(rows):\n    return rows"
    )
    function = load_function(Python("s", "steps.py", "changed"), directory)
    assert source_of(Python("s", None, function), directory).startswith("def changed(rows):")


def test_a_function_without_source_is_known_by_name() -> None:
    assert source_of(Python("s", None, len), ".") == "builtins:len"
    assert source_of(Python("s", None, "json:dumps"), ".").startswith("def dumps(")
