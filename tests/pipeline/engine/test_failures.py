"""The cause is told, not the layers around it."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from pyspark import SparkContext

from holdfast.errors import ConfigError, HoldfastError
from holdfast.pipeline.core.failures import DefinitionWrong, EnvironmentFails, PipelineError, StepError
from holdfast.pipeline.engine.failures import explain_failure, is_transient, step_failure
from holdfast.pipeline.sinks.base import SinkUnavailable
from holdfast.reader import OffsetGone, TopicMissing, Unreachable

PERMISSION = (
    "An error occurred while calling o120.parquet.\n: org.apache.spark.SparkException: Job aborted.\n"
    "\tat org.apache.spark.Foo(Foo.scala:3)\nCaused by: java.nio.file.AccessDeniedException: /data/out/part-0\n"
)


def code_of(error: BaseException) -> int | None:
    return getattr(explain_failure(error), "exit_code", None)


def test_errors_of_ours_keep_their_words_and_get_a_code() -> None:
    error = Unreachable("no broker at a:1")
    assert explain_failure(error) is error
    assert code_of(error) == 3
    assert code_of(TopicMissing("x")) == 2
    assert code_of(ConfigError("x")) == 2
    assert code_of(OffsetGone("x", offset=1, log_start=2, log_end=3)) == 1
    assert code_of(StepError("s", "x")) == 2


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            EnvironmentFails,
            "no space left on the disk at /x",
        ),
        (OSError(errno.EACCES, "Permission denied", "/x"), EnvironmentFails, "/x: Permission denied"),
        (RuntimeError("java.io.IOException: No space left on device"), EnvironmentFails, "no space left"),
        (RuntimeError(PERMISSION), EnvironmentFails, "permission denied: /data/out/part-0"),
        (ValueError("odd"), PipelineError, "unexpected error, ValueError: odd"),
    ],
)
def test_what_the_machine_does_is_told_with_what_to_do(
    error: BaseException, kind: type[HoldfastError], text: str
) -> None:
    explained = explain_failure(error)
    assert isinstance(explained, kind)
    assert text in str(explained)
    assert "\tat " not in str(explained)


def test_what_a_step_raised_is_found_in_whatever_surrounds_it() -> None:
    inner = step_failure("enrich", KeyError("city"), "steps.py, line 7: row['city']")
    error = RuntimeError(
        f"org.apache.spark.api.python.PythonException: Traceback\n StepRaised: {inner}\n\tat Foo"
    )
    explained = explain_failure(error)
    assert (
        str(explained)
        == "step 'enrich': the function raised KeyError: 'city' (steps.py, line 7: row['city'])"
    )
    assert isinstance(explained, DefinitionWrong)


def test_only_what_time_mends_is_tried_again() -> None:
    assert is_transient(Unreachable("x"))
    assert is_transient(SinkUnavailable("x"))
    assert not is_transient(TopicMissing("x"))
    assert not is_transient(OSError(errno.ENOSPC, "full"))


def test_a_java_process_that_is_gone_is_called_by_its_name() -> None:
    gone: dict[str, Any] = {"__name__": "py4j.java_gateway"}
    exec("def ask(): raise ConnectionRefusedError(111, 'Connection refused')", gone)
    with pytest.raises(ConnectionRefusedError) as refused:
        gone["ask"]()
    told = explain_failure(refused.value, "/home/of/orders")
    assert str(told) == (
        "Spark's Java process has ended. Nothing of the batch was committed: run again. Its log is "
        "/home/of/orders/spark.log"
    )
    gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: -9))
    with patch.object(SparkContext, "_gateway", gateway):
        assert "process was killed by SIGKILL, as the kernel does" in str(explain_failure(refused.value))
    assert getattr(told, "exit_code", None) == 3
    assert "Java" not in str(explain_failure(ConnectionRefusedError(111, "Connection refused")))


def test_a_path_through_a_file_says_what_to_do() -> None:
    told = str(explain_failure(NotADirectoryError(errno.ENOTDIR, "Not a directory")))
    assert told.startswith("a path of the pipeline: Not a directory: ")
