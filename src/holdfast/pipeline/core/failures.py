"""What can stop a pipeline.

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
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Final

from holdfast.errors import HoldfastError

FINDINGS: Final = 1
USAGE: Final = 2
ENVIRONMENT: Final = 3

_PLACE_IN_CODE: Final = re.compile(r"\n?== (?:SQL|DataFrame|.*?) ==.*", re.DOTALL)
_STACK: Final = re.compile(r"\n\s*(?:at [\w.$]+\(|JVM stacktrace|Driver stacktrace|Caused by:).*", re.DOTALL)
_SQL_STATE: Final = re.compile(r"\s*SQLSTATE: \w{5}")


class PipelineError(HoldfastError):
    """A pipeline stops; nothing of the batch under way is visible anywhere."""

    exit_code: int = FINDINGS


class DefinitionWrong(PipelineError):
    """The definition asks for what cannot be done; correct it and start again."""

    exit_code = USAGE
    path: tuple[str | int, ...] = ()
    """The part of the definition that is wrong, where it is known."""


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
    """There is no state where the sinks stand; it can be rebuilt from the source."""


class StateOutdated(StateMissing):
    """The state was made by steps that did something else."""


class RuleBroken(PipelineError):
    """Rows break a rule whose `otherwise` is `fail`."""


class Unbalanced(PipelineError):
    """What came out of the steps is not what went in."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when one of the known names is close, else nothing."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def spark_message(error: BaseException) -> str:
    """Spark's own words for what is wrong, without its stack, its error state and its picture of the query; for the
    mistakes that people make most, ours."""
    condition = getattr(error, "getCondition", lambda: None)() or ""
    for mistake, words in _MISTAKES.items():
        if condition.startswith(mistake):
            return words(getattr(error, "getMessageParameters", lambda: None)() or {})
    message = text_of(error)
    getter = getattr(error, "getMessage", None)
    if getter is not None:
        message = str(getter() or message)
    message = _STACK.sub("", message)
    message = _PLACE_IN_CODE.sub("", message)
    return " ".join(_SQL_STATE.sub("", message).split())


def _no_column(found: Mapping[str, str]) -> str:
    name = found.get("objectName", "").replace("`", "")
    proposed = [each for each in found.get("proposal", "").replace("`", "").split(", ") if each]
    columns = [each for each in proposed if not each.startswith("_")]
    there = f"; the nearest are {', '.join(columns)}" if columns else ""
    return f"there is no column {name!r}{nearest(name, columns) or there}"


def _no_function(found: Mapping[str, str]) -> str:
    from pyspark.sql import functions

    name = found.get("routineName", "").replace("`", "")
    known = [each for each in dir(functions) if each.islower() and not each.startswith("_")]
    return f"Spark has no function {name!r}{nearest(name, known)}"


def _no_sql(found: Mapping[str, str]) -> str:
    return f"this is not SQL: Spark cannot read on at {found.get('error', 'its end')}{found.get('hint', '')}"


_MISTAKES: Final = {
    "UNRESOLVED_COLUMN": _no_column,
    "UNRESOLVED_ROUTINE": _no_function,
    "PARSE_SYNTAX_ERROR": _no_sql,
    "PARSE_EMPTY_STATEMENT": _no_sql,
}
"""By the beginning of Spark's error condition: the sentence, from the error's parameters."""


def text_of(error: BaseException) -> str:
    """Everything the layers of an error say."""
    texts: list[str] = []
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        texts.append(str(each))
        each = each.__cause__ or each.__context__
    return "\n".join(texts)
