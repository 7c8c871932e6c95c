"""What is made of the workers' answers before the first batch."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.pipeline.cluster.probing import ClusterUnusable, check_reports, explained

HOME = "/shared/home"
DIRECTORY = f"{HOME}/probe-1"
GOOD = {
    "host": "one",
    "python": "/usr/bin/python3.11",
    "spark": "4.3.0",
    "seen": "word",
    "written": f"{DIRECTORY}/task-0-1",
    "trouble": "",
    "parts": "",
}


def check(*reports: dict[str, Any], found: str = "word") -> None:
    check_reports(reports, DIRECTORY, "word", "4.3.1", lambda path: found)


def test_workers_that_see_what_the_driver_sees_are_taken() -> None:
    check(GOOD, {**GOOD, "host": "two"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"seen": "", "trouble": "No such file or directory"},
            "does not see the files of the driver under /shared/home",
        ),
        ({"seen": "another"}, "their content is another"),
        ({"parts": "ImportError: libarrow"}, "cannot use the package .*libarrow"),
        ({"spark": "4.2.0"}, "has Spark 4.2.0 and the driver 4.3.1"),
    ],
)
def test_one_worker_that_cannot_is_named_with_the_reason(change: dict[str, str], told: str) -> None:
    with pytest.raises(ClusterUnusable, match=f"the worker on two .*{told}"):
        check(GOOD, {**GOOD, "host": "two", **change})


def test_what_a_worker_wrote_must_be_there_for_the_driver() -> None:
    with pytest.raises(ClusterUnusable, match="is not there for the driver"):
        check(GOOD, found="")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "SparkException: \nError from python worker:\n  holdfast-package: made for python 3.11, and "
            "/usr/bin/python3 on two is python 3.9\nPYTHONPATH was:\n  ./holdfast_parts",
            "the package was made for python 3.11, and /usr/bin/python3 on two is python 3.9. Start the driver",
        ),
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in "
            "driver: 3.11.\n at x",
            "workers have another Python: Python in worker has different version: 3.12",
        ),
        (
            'java.io.IOException: Cannot run program "python3.11": error=2, No such file or directory',
            "a worker has no program 'python3.11'",
        ),
        (
            "Error from python worker:\n  /usr/bin/python3: No module named x\nPYTHONPATH was:\n  y",
            "Python does not start on a worker: /usr/bin/python3: No module named x",
        ),
        (
            "Job aborted: all is lost\n\tat org.apache.Spark(x)",
            "no task runs on the cluster: Job aborted: all is lost",
        ),
    ],
)
def test_a_worker_that_runs_nothing_is_explained(text: str, told: str) -> None:
    error = explained(RuntimeError(text))
    assert str(error).startswith(told)
    assert error.exit_code == 3
