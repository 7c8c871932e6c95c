"""How a failure inside Spark becomes one sentence, and whether the batch may simply be tried again.

Spark wraps what went wrong into several layers of its own; `explain_failure` finds the cause: an error of ours that
a worker raised, the Python exception of a step, Spark's own message without the JVM's stack, or a full disk.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import (
    ENVIRONMENT,
    FINDINGS,
    USAGE,
    DefinitionWrong,
    EnvironmentFails,
    PipelineError,
    StepError,
    spark_message,
    text_of,
)
from holdfast.pipeline.definition.errors import Path
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME, home_of, path_of

STEP_MARK: Final = "holdfast-step-failed:"
"""Before the JSON by which a Python step tells its driver what was raised, through Spark's own text."""

_NO_SPACE: Final = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_DENIED: Final = re.compile(r"(?:AccessDeniedException|Permission denied)[:\s(]*([^\s):]*)")
_NAMED: Final = re.compile(r"\b(?P<kind>step|sink) '(?P<name>[^']+)'")
_STATE_FILE: Final = re.compile(r"while reading file (?:file:/*(?=/))?(/\S*/state[^/\s]*/data/\S+\.parquet)")


def is_transient(error: BaseException) -> bool:
    """Whether the same batch may simply be tried again later: brokers restart, elections take time."""
    from holdfast.admin.errors import Unreachable
    from holdfast.pipeline.formats.registry import RegistryUnavailable
    from holdfast.pipeline.sinks.base import SinkUnavailable
    from holdfast.pipeline.state.tables import LookupUnavailable
    from holdfast.reader.errors import EndNotReached

    return isinstance(
        error, Unreachable | EndNotReached | RegistryUnavailable | SinkUnavailable | LookupUnavailable
    )


def explain_failure(error: BaseException, home: str = "<home>") -> HoldfastError:
    """The error to show: its message says what happened and what to do, its `exit_code` is for scripts."""
    if isinstance(error, HoldfastError):
        return _with_code(error)
    if _is_dead_jvm(error):
        return EnvironmentFails(
            f"Spark's Java process {_how_it_ended()}. Nothing of the batch was committed: run again. Its log is "
            f"{os.path.join(home, 'spark.log')}"
        )
    if isinstance(error, OSError):
        return _explain_os_error(error)
    text = text_of(error)
    told = _told_by_step(text)
    if told is not None:
        return told
    if _NO_SPACE.search(text):
        return _disk_full("")
    denied = _DENIED.search(text)
    if denied:
        return EnvironmentFails(
            f"permission denied{': ' + denied[1] if denied[1] else ''}: give this user the right to write there. "
            "Nothing of the batch was committed."
        )
    name = type(error).__name__
    unread = _STATE_FILE.search(text)
    if unread:
        from holdfast.pipeline.state.segments import StateDamaged

        return StateDamaged(unread[1], "is not what was written, or cannot be read")
    if _is_spark(error):
        kind: type[PipelineError] = DefinitionWrong if _is_users(error) else PipelineError
        return kind(f"Spark: {spark_message(error)}")
    return PipelineError(f"unexpected error, {name}: {error} (HOLDFAST_TRACEBACK=1 shows where)")


def place_of(error: HoldfastError, definition: PipelineDefinition) -> Path:
    """Where in the definition, with its secrets, stands what an error is about; nothing where it does not tell.

    Errors of steps and sinks name them, as `sink 'parquet'`; those of brokers and directories name the address.
    """
    from holdfast.admin.errors import Unreachable

    if isinstance(error, DefinitionWrong) and error.path:
        return error.path
    text = str(error)
    named = _NAMED.search(text)
    if named is not None and named["name"] == DEAD_LETTER_NAME:
        return ("dead_letter",)
    if named is not None:
        path = path_of(f"{named['kind']}s.{named['name']}", definition)
        return path if isinstance(path[1], int) else ()
    bootstrap = definition.source.bootstrap
    if isinstance(error, Unreachable) and bootstrap and bootstrap in text:
        return ("source", "bootstrap")
    return ("home",) if definition.home and home_of(definition) in text else ()


def step_failure(step: str, error: BaseException, where: str) -> str:
    """The text a worker raises when the function of a step has failed; `explain_failure` reads it again."""
    told = {"step": step, "error": type(error).__name__, "message": str(error), "where": where}
    return f"{STEP_MARK}{json.dumps(told)}"


def _told_by_step(text: str) -> StepError | None:
    at = text.find(STEP_MARK)
    if at < 0:
        return None
    try:
        told: dict[str, Any] = json.JSONDecoder().raw_decode(text, at + len(STEP_MARK))[0]
    except ValueError:
        return None
    where = f" ({told['where']})" if told["where"] else ""
    return StepError(told["step"], f"the function raised {told['error']}: {told['message']}{where}")


def _with_code(error: HoldfastError) -> HoldfastError:
    if not hasattr(error, "exit_code"):
        error.exit_code = _code_of(error)  # type: ignore[attr-defined]
    return error


def _code_of(error: HoldfastError) -> int:
    from holdfast.admin.errors import NotAuthorised, Unreachable
    from holdfast.errors import UsageError
    from holdfast.pipeline.formats.registry import RegistryUnavailable
    from holdfast.reader.errors import TopicMissing

    if isinstance(error, UsageError | TopicMissing):
        return USAGE
    if isinstance(error, Unreachable | NotAuthorised | RegistryUnavailable):
        return ENVIRONMENT
    return FINDINGS


def _explain_os_error(error: OSError) -> HoldfastError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(error.filename or "")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentFails(
            f"{error.filename or 'a file'}: {error.strerror}: give this user the right to write there. "
            "Nothing of the batch was committed."
        )
    if error.errno == errno.ENOTDIR:
        return EnvironmentFails(
            f"{error.filename or 'a path of the pipeline'}: {error.strerror}: a part of it is a file. Name another "
            "path, or move the file away."
        )
    where = f"{error.filename}: " if error.filename else ""
    return EnvironmentFails(f"{where}{error.strerror or error}")


def _disk_full(path: str) -> EnvironmentFails:
    where = f" at {path}" if path else ""
    return EnvironmentFails(
        f"no space left on the disk{where}. Nothing of the batch was committed: make room, or move the pipeline's "
        "`home`, and run again; it goes on where it stands."
    )


def _is_spark(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j")


def _is_dead_jvm(error: BaseException) -> bool:
    """Whether nobody answers at the other end of py4j's socket, or ever did."""
    if type(error).__name__ == "Py4JNetworkError" or "JAVA_GATEWAY_EXITED" in str(error):
        return True
    trace = error.__traceback__ if isinstance(error, ConnectionError | EOFError) else None
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith("py4j."):
            return True
        trace = trace.tb_next
    return False


def _how_it_ended() -> str:
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    code = None if process is None else process.poll()
    if code is None:
        return "has ended"
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does where memory is short"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _is_users(error: BaseException) -> bool:
    """Whether the SQL or the data asked for it, rather than the machine."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(
        names
        & {
            "AnalysisException",
            "ParseException",
            "ArithmeticException",
            "ArrayIndexOutOfBoundsException",
            "DateTimeException",
            "NumberFormatException",
            "SparkRuntimeException",
            "IllegalArgumentException",
        }
    )
