"""What can stop a pipeline, and how a failure inside Spark becomes one sentence.

    HoldfastError
    └── PipelineError              carries the exit code
        ├── DefinitionWrong  2     a step, a rule or a setting cannot work as written
        │   └── StepError    2     names the step
        ├── EnvironmentFails 3     a broker, a disk, Java or a permission
        │   ├── AlreadyRunning     another copy has the pipeline's home
        │   ├── SinkLost           a sink has vanished, has gone back, or is another's
        │   └── StateMissing       sinks stand where there is no state
        │       └── StateOutdated  the state was made by other steps
        ├── RuleBroken       1     an expectation with `fail` did not hold
        └── Unbalanced       1     the routes of a batch do not add up to what was read

Whatever is raised, the batch under way was not committed: the sinks hold what their ledgers say.

Spark wraps what went wrong into several layers of its own; `explain_failure` finds the cause: an error of ours that
a worker raised, the Python exception of a step, Spark's own message without the JVM's stack, or a full disk.
"""

from __future__ import annotations

import errno
import json
import re
from typing import Any, Final

from holdfast.errors import HoldfastError

FINDINGS: Final = 1
USAGE: Final = 2
ENVIRONMENT: Final = 3

STEP_MARK: Final = "holdfast-step-failed:"
"""Before the JSON by which a Python step tells its driver what was raised, through Spark's own text."""

_NO_SPACE: Final = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_DENIED: Final = re.compile(r"(?:AccessDeniedException|Permission denied)[:\s(]*([^\s):]*)")
_STATE_FILE: Final = re.compile(r"while reading file (?:file:/*(?=/))?(/\S*/state[^/\s]*/data/\S+\.parquet)")
_PLACE_IN_CODE: Final = re.compile(r"\n?== (?:SQL|DataFrame|.*?) ==.*", re.DOTALL)
_STACK: Final = re.compile(r"\n\s*(?:at [\w.$]+\(|JVM stacktrace|Driver stacktrace|Caused by:).*", re.DOTALL)
_SQL_STATE: Final = re.compile(r"\s*SQLSTATE: \w{5}")


class PipelineError(HoldfastError):
    """A pipeline stops; nothing of the batch under way is visible anywhere."""

    exit_code: int = FINDINGS


class DefinitionWrong(PipelineError):
    """The definition asks for what cannot be done; correct it and start again."""

    exit_code = USAGE


class StepError(DefinitionWrong):
    """A step cannot do its work; the message names it."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(f"step {step!r}: {message}")
        self.step = step
        self.reason = message

    def __reduce__(self) -> tuple[object, ...]:
        return StepError, (self.step, self.reason)


class EnvironmentFails(PipelineError):
    """Something outside the pipeline is missing, full or forbidden."""

    exit_code = ENVIRONMENT


class AlreadyRunning(EnvironmentFails):
    """Another process runs this pipeline."""


class SinkLost(EnvironmentFails):
    """A sink no longer has what this pipeline wrote to it. Nothing was read, and nothing was written to any sink."""


class StateMissing(EnvironmentFails):
    """There is no state where the sinks stand; it can be made again from the source."""


class StateOutdated(StateMissing):
    """The state was made by steps that did something else."""


class RuleBroken(PipelineError):
    """Rows break a rule whose `otherwise` is `fail`."""


class Unbalanced(PipelineError):
    """What came out of the steps is not what went in."""


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


def explain_failure(error: BaseException) -> HoldfastError:
    """The error to show: its message says what happened and what to do, its `exit_code` is for scripts."""
    if isinstance(error, HoldfastError):
        return _with_code(error)
    if isinstance(error, OSError):
        return _explain_os_error(error)
    text = _text_of(error)
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


def spark_message(error: BaseException) -> str:
    """Spark's own words for what is wrong, without its stack, its error state and its picture of the query."""
    message = _text_of(error)
    getter = getattr(error, "getMessage", None)
    if getter is not None:
        message = str(getter() or message)
    message = _STACK.sub("", message)
    message = _PLACE_IN_CODE.sub("", message)
    return " ".join(_SQL_STATE.sub("", message).split())


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


def _text_of(error: BaseException) -> str:
    """Everything the layers of an error say."""
    texts: list[str] = []
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        texts.append(str(each))
        each = each.__cause__ or each.__context__
    return "\n".join(texts)
