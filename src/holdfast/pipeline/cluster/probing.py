"""Before the first batch on a cluster: its workers have the right Python, the parts, and the same files as the driver.

The driver writes a file in the home and a job reads it on every executor that answers; each task writes one of its own
and the driver reads that. Executors that join later are not asked; what they write is looked for by the driver before
it is committed, so that one of them on a machine without the file system stops the batch and loses nothing.

The job uses no part of the package but its start, so that it can tell what is wrong with the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.cluster.worker_start import MARK
from holdfast.pipeline.core.failures import EnvironmentFails, spark_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS_MIN: Final = 4
TASKS_MAX: Final = 256
TASKS_PER_CORE: Final = 2
"""More tasks than cores, so that no executor is left out by chance when all are there."""
DRIVER_FILE: Final = "driver"


class ClusterUnusable(EnvironmentFails):
    """A worker of the cluster cannot run this pipeline; the message says which and why."""


Report = Mapping[str, Any]


def probe(spark: SparkSession, home: str, version: str) -> list[str]:
    """The machines that answered; raises `ClusterUnusable`. `version` is that of the driver's Spark."""
    directory = os.path.join(home, f"probe-{uuid.uuid4().hex}")
    word = uuid.uuid4().hex
    os.makedirs(directory)
    try:
        with open(os.path.join(directory, DRIVER_FILE), "w", encoding="ascii") as file:
            file.write(word)
            file.flush()
            os.fsync(file.fileno())
        context = spark.sparkContext
        tasks = min(TASKS_MAX, max(TASKS_MIN, TASKS_PER_CORE * context.defaultParallelism))
        try:
            reports = context.parallelize(range(tasks), tasks).map(_look(directory, word)).collect()
        except Exception as error:
            raise explained(error) from error
        check_reports(reports, directory, word, version, _read)
        return sorted({report["host"] for report in reports})
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _look(directory: str, word: str) -> Callable[[int], dict[str, Any]]:
    """What each task does. It is sent as it stands here, whole: the worker may have nothing of ours."""
    driver_file = DRIVER_FILE

    def look(number: int) -> dict[str, Any]:
        import os
        import socket
        import sys

        import pyspark

        found: dict[str, Any] = {
            "host": socket.gethostname(),
            "python": sys.executable,
            "spark": pyspark.__version__,
            "seen": "",
            "written": "",
            "trouble": "",
            "parts": "",
        }
        try:
            with open(os.path.join(directory, driver_file), encoding="ascii") as file:
                found["seen"] = file.read()
            own = os.path.join(directory, f"task-{number}-{os.getpid()}")
            with open(own, "w", encoding="ascii") as file:
                file.write(word)
                file.flush()
                os.fsync(file.fileno())
            found["written"] = own
        except OSError as error:
            found["trouble"] = str(error)
        try:
            from holdfast.reader import warm

            warm()
        except Exception as error:  # noqa: BLE001  whatever it is, the driver tells it
            found["parts"] = f"{type(error).__name__}: {error}"
        return found

    return look


def check_reports(
    reports: Sequence[Report], directory: str, word: str, version: str, read: Callable[[str], str]
) -> None:
    """Every worker has what it needs and sees what the driver sees."""
    for report in reports:
        who = f"the worker on {report['host']}"
        if report["parts"]:
            raise ClusterUnusable(
                f"{who} cannot use the package that was sent to it ({report['python']}): {report['parts']}"
            )
        if report["spark"].split(".")[:2] != version.split(".")[:2]:
            raise ClusterUnusable(
                f"{who} has Spark {report['spark']} and the driver {version}: they have to be of one minor version"
            )
        if report["trouble"] or report["seen"] != word:
            raise ClusterUnusable(
                f"{who} does not see the files of the driver under {os.path.dirname(directory)} "
                f"({report['trouble'] or 'their content is another'}): --shared-filesystem says that it does. Mount "
                "the same file system at the same path on all machines, for the user that runs the executors, and "
                "move the pipeline's home there"
            )
        if read(report["written"]) != word:
            raise ClusterUnusable(
                f"what {who} wrote to {report['written']} is not there for the driver: --shared-filesystem says that "
                "it is. Mount the same file system at the same path on all machines"
            )


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def explained(error: Exception) -> ClusterUnusable:
    """Why no task could run, in words."""
    text = str(error)
    told = re.search(rf"{MARK} (.*)", text)
    if told:
        return ClusterUnusable(
            f"the package was {told[1].strip()}. Start the driver with the Python that the workers have, or name one "
            "of theirs in the definition's `spark`, as spark.pyspark.python"
        )
    versions = re.search(r"PYTHON_VERSION_MISMATCH\][^\n]*", text)
    if versions:
        return ClusterUnusable(
            f"workers have another Python: {versions[0].partition('] ')[2]} Name one of the driver's minor version in "
            "the definition's `spark`, as spark.pyspark.python"
        )
    program = re.search(r'Cannot run program "([^"]*)"', text)
    if program:
        return ClusterUnusable(
            f"a worker has no program {program[1]!r}: install Python there, or name the one it has in the "
            "definition's `spark`, as spark.pyspark.python"
        )
    python = re.search(r"Error from python worker:\s*(.*?)\s*PYTHONPATH was:", text, re.DOTALL)
    if python:
        last = python[1].splitlines()[-1].strip()
        return ClusterUnusable(f"Python does not start on a worker: {last}")
    return ClusterUnusable(f"no task runs on the cluster: {spark_message(error)}")
