"""The Python of Spark's processes on this machine: the driver's own, started without the detours that Spark adds.

Spark puts its archived copy of pyspark and one of its jars first on the path of each Python it starts. What lies in an
archive is compiled from source every time, and every other import looks into both first, so such a process takes a
second before it does anything. Workers fork from a daemon that has that behind it, but each streaming query starts a
process for the driver's part of its source, and the first query of a session starts four.

A pip-installed pyspark is beside the interpreter anyway, in compiled form and the same version. So Spark is given a
small script for its Python, which takes those three entries off the path and runs the driver's interpreter. Where
Spark is not the one that was installed with pyspark (`SPARK_HOME`), or the script cannot be run (a file system without
execution), it gets the interpreter itself: slower, and the same.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

NAME = "worker-python"
TRIAL_TIMEOUT_S = 30

SCRIPT = """\
#!/bin/sh
# Written by holdfast: the Python that Spark starts its workers with. See holdfast.pipeline.worker_python.
set -f
kept=
IFS=:
for part in $PYTHONPATH; do
    case $part in
        {home}/python/lib/pyspark.zip | {home}/python/lib/py4j-*-src.zip | {home}/jars/spark-core_*.jar) ;;
        *) kept=$kept${{kept:+:}}$part ;;
    esac
done
unset IFS
export PYTHONPATH="$kept"
case $1 in
    -m) shift; exec {python} -m {module} "$@" ;;
    *) exec {python} "$@" ;;
esac
"""


def quick_python(home: str, environment: Mapping[str, str] = os.environ) -> str:
    """What Spark should start as Python: a script in `home` where that is of use, else this interpreter."""
    installed = _installed_spark()
    spark_home = environment.get("SPARK_HOME", installed)
    if not installed or not os.path.isdir(spark_home) or not os.path.samefile(spark_home, installed):
        return sys.executable
    path = Path(home, NAME)
    aside = Path(home, f"{NAME}.{os.getpid()}")
    text = SCRIPT.format(
        home=shlex.quote(spark_home),
        python=shlex.quote(sys.executable),
        module="holdfast.pipeline.worker_python",
    )
    try:
        aside.write_text(text, encoding="utf-8")
        aside.chmod(0o755)
        # A session that starts meanwhile finds the old script or the new one, and both do.
        aside.replace(path)
        subprocess.run([path, "-c", ""], check=True, capture_output=True, timeout=TRIAL_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return sys.executable
    return str(path)


def _installed_spark() -> str:
    """The directory of pyspark where it is Spark's home too; empty where it is in an archive or without Spark."""
    found = importlib.util.find_spec("pyspark")
    directory = os.path.dirname(found.origin) if found is not None and found.origin else ""
    return directory if os.path.isdir(os.path.join(directory, "jars")) else ""


def main() -> None:
    """Run a module as `python -m` does."""
    # kio must not find hypothesis, with which it registers its types wherever that is installed: it takes long. A
    # function of the user's may well use it.
    hidden = [name for name in ("hypothesis", "hypothesis.strategies") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    import holdfast.errors  # noqa: F401

    for name in hidden:
        del sys.modules[name]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
