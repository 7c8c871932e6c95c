"""The Python that Spark is given: the driver's, without Spark's archives on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from holdfast.pipeline.worker_python import quick_python

SPARK = os.path.dirname(pyspark.__file__)
ARCHIVES = (
    f"{SPARK}/python/lib/pyspark.zip",
    f"{SPARK}/python/lib/py4j-0.10.9.9-src.zip",
    f"{SPARK}/jars/spark-core_2.13-4.3.0.jar",
)


@pytest.fixture
def script(tmp_path: Path) -> str:
    home = tmp_path / "a home"
    home.mkdir()
    found = quick_python(str(home), {})
    assert found.startswith(str(home))
    return found


def run(*command: str, path: str = "") -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_spark_s_archives_are_taken_off_the_path_and_nothing_else(script: str, tmp_path: Path) -> None:
    ours = [str(tmp_path / "with space"), f"{tmp_path}/*", f"{tmp_path}/pyspark.zip"]
    path = os.pathsep.join([*ARCHIVES[:2], ours[0], ARCHIVES[2], *ours[1:]])
    said = run(script, "-c", "import os; print(os.environ['PYTHONPATH'])", path=path)
    assert said.split(os.pathsep) == ours


def test_pyspark_is_the_installed_one_and_the_interpreter_the_driver_s(script: str) -> None:
    code = "import pyspark, sys; print(pyspark.__file__); print(sys.executable)"
    assert run(script, "-c", code, path=os.pathsep.join(ARCHIVES)).splitlines() == [
        pyspark.__file__,
        sys.executable,
    ]


def test_a_module_runs_as_with_m(script: str, tmp_path: Path) -> None:
    module = tmp_path / "told.py"
    module.write_text(
        "import sys, pickle\n"
        "class Here: pass\n"
        "print(__name__, sys.argv, type(pickle.loads(pickle.dumps(Here()))) is Here)\n"
    )
    said = run(script, "-m", "told", "-x", "a b", path=str(tmp_path))
    assert said == f"__main__ {[str(module), '-x', 'a b']} True"


def test_kio_finds_no_hypothesis_but_a_function_does(script: str, tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        "import sys\nprint('hypothesis' in sys.modules)\nimport hypothesis.strategies\nprint(hypothesis.__name__)\n"
    )
    assert run(script, "-m", "told", path=str(tmp_path)).splitlines() == ["False", "hypothesis"]


def test_another_spark_keeps_its_own_pyspark(tmp_path: Path) -> None:
    assert quick_python(str(tmp_path), {"SPARK_HOME": str(tmp_path)}) == sys.executable


def test_without_a_place_for_the_script_it_is_the_interpreter_itself(tmp_path: Path) -> None:
    assert quick_python(str(tmp_path / "nowhere"), {}) == sys.executable
