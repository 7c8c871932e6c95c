"""What a process pays before it reads its first record: little is imported, and nothing is compiled twice."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.reader import kernel

BUILD_SCRIPT = """
import sys
from holdfast.reader import arrow, kernel
from tests.support.reader_cases import by_arrow, by_reference
from holdfast.wire.batch import make_batch
data = memoryview(make_batch([b"x", None]))
assert by_arrow(data, 0, 2) == by_reference(data, 0, 2)
print("numba" in sys.modules)
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_neither_arrow_nor_machine_code() -> None:
    code = "import holdfast.reader, sys; print(sorted({'numpy', 'pyarrow', 'numba', 'llvmlite'} & set(sys.modules)))"
    assert run(code) == "[]"


def test_reading_needs_neither_numba_nor_pandas() -> None:
    kernel.load()  # made, if it was not there yet
    code = """
import sys
from holdfast.reader import warm
from holdfast.reader.arrow import Reading, decode, survey
from holdfast.reader.model import PartitionRange, RangeReport
from holdfast.wire.batch import Record, build_batch, make_batch
import uuid
warm()
wanted = PartitionRange("t", uuid.uuid4(), 0, 0, 3)
data = make_batch([b"x", None]) + build_batch(
    [Record(0, 0, b"k", b"v", (("h", b"x"),))], base_offset=2, log_append_time=True
)
reading = Reading(wanted, 0, RangeReport(wanted), (), True, 1 << 20)
assert sum(batch.num_rows for batch in decode(survey(memoryview(data)), reading)) == 3
print(sorted({"numba", "pandas", "confluent_kafka"} & set(sys.modules)))
"""
    assert run(code) == "[]"


@pytest.mark.check
def test_machine_code_is_made_once_and_kept(tmp_path: Path) -> None:
    directory = str(tmp_path / "cache")
    assert run(BUILD_SCRIPT, HOLDFAST_CACHE_DIR=directory) == "True"
    assert len(os.listdir(directory)) == 1
    assert run(BUILD_SCRIPT, HOLDFAST_CACHE_DIR=directory) == "False"


def test_a_file_cut_short_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.CACHE_DIRECTORY, str(tmp_path))
    kernel._keep("code.o", b"machine code")
    kept = tmp_path / "code.o"
    for size in range(len(kept.read_bytes())):
        (tmp_path / "cut.o").write_bytes(kept.read_bytes()[:size])
        assert kernel._kept("cut.o") is None
    assert kernel._kept("code.o") == b"machine code"
    assert sorted(os.listdir(tmp_path)) == ["code.o", "cut.o"]


def test_code_that_others_could_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel.CACHE_DIRECTORY, str(tmp_path))
    kernel._keep("code.o", b"machine code")
    assert kernel._kept("code.o") == b"machine code"
    assert kernel._kept("other.o") is None
    tmp_path.chmod(0o777)
    assert kernel._kept("code.o") is None
    tmp_path.chmod(0o755)
    os.chmod(tmp_path / "code.o", 0o666)
    assert kernel._kept("code.o") is None
    os.chmod(tmp_path / "code.o", 0o644)
    assert kernel._kept("code.o") == b"machine code"


def test_where_nothing_can_be_kept_code_is_made_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv(kernel.CACHE_DIRECTORY, str(in_the_way / "below"))
    kernel._keep("code.o", b"machine code")
    assert kernel._kept("code.o") is None


def test_the_usual_places_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(kernel.CACHE_DIRECTORY, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    places = list(kernel._directories())
    assert places[0].endswith("reader/__pycache__")
    assert places[1] == str(tmp_path / "xdg" / "holdfast")
    assert str(os.getuid()) in places[2]
    assert stat.S_ISDIR(os.stat(os.path.dirname(places[0])).st_mode)


def test_a_missing_compiler_is_said_in_one_line(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["numba"] = None
from holdfast.errors import UsageError
from holdfast.reader import kernel
try:
    kernel.load()
except UsageError as error:
    print(error)
"""
    said = run(code, HOLDFAST_CACHE_DIR=str(tmp_path))
    assert said == "making machine code needs numba, which is not installed: pip install 'holdfast[reader]'"
