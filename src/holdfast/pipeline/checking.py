"""`pipeline check` with Spark: the schema is followed from step to step, over a frame without rows.

What the rules cannot see shows here: names that do not resolve, types that do not fit, a step that loses `_hf`, a
function that answers differently each time. Nothing is read and nothing is written; the steps are analysed by the code
that runs them (`engine.routing.apply_step`), so what passes here is what will run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import StepError, spark_message
from holdfast.pipeline.definition.errors import Finding, Path
from holdfast.pipeline.definition.functions import FunctionMissing, load_function
from holdfast.pipeline.definition.model import (
    DeltaSink,
    Expect,
    Filter,
    KafkaSink,
    Lookup,
    PipelineDefinition,
    PostgresSink,
    Python,
    Sql,
    Step,
)
from holdfast.pipeline.definition.naming import kind_of_sink, place_of_step
from holdfast.pipeline.definition.secrets import Redactor, SecretMissing, expand_definition, is_reference
from holdfast.pipeline.definition.streams import is_stateful

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

MAIN: Final = ""
"""The stream of rows at the end of the steps, as sinks ask for it."""


def check_definition(
    definition: PipelineDefinition, spark: SparkSession, environment: Mapping[str, str] | None = None
) -> tuple[list[Finding], dict[str, StructType]]:
    """What is wrong with a definition that keeps the rules, and the schemas that reach its sinks, by what they take
    (`rows`); those that are not known are not named."""
    from holdfast.pipeline.core.inspection import quiet_spark
    from holdfast.pipeline.engine.staging import stage_schema

    quiet_spark()
    findings: list[Finding] = []
    expanded, redactor = definition, Redactor()
    try:
        expanded, redactor = expand_definition(
            definition, *([environment] if environment is not None else [])
        )
    except SecretMissing as missing:
        findings += [Finding(each.path, each.message, "warning") for each in missing.findings]
    try:
        frame = spark.createDataFrame([], stage_schema(expanded.source))
    except HoldfastError as error:
        return [*findings, Finding(("source", "value"), str(error))], {}
    found, streams = _follow(expanded, frame)
    findings += [replace(finding, message=redactor.redact(finding.message)) for finding in found]
    findings += _check_sinks(expanded, streams)
    return findings, {name: frame.schema for name, frame in streams.items()}


def _follow(definition: PipelineDefinition, frame: DataFrame) -> tuple[list[Finding], dict[str, DataFrame]]:
    """Step by step; and no rows of each stream that sinks can take, without those that are not known.

    A rule that fails, or a step that lets the rows pass, leaves the schema as it was; another one that fails leaves
    none.
    """
    from holdfast.pipeline.engine.operators import narrow

    findings: list[Finding] = []
    streams: dict[str, DataFrame] = {}
    for index, step in enumerate(definition.steps):
        path = place_of_step(index, step)
        if is_stateful(step):
            found, beside = _check_stateful(definition, step, path, frame)
            findings += found
            streams |= beside
            continue
        found, after = _check_step(definition, step, path, frame)
        findings += found
        if isinstance(step, Expect | Filter):
            continue
        if found or after is None:
            later = definition.steps[index + 1 :]
            if later:
                names = ", ".join(step.name for step in later)
                note = f"not checked, since they stand behind step {step.name!r}: {names}"
                findings.append(Finding(("steps", index + 1), note, "warning"))
            return findings, streams
        frame = after
    return findings, {**streams, MAIN: narrow(frame)}


def _check_stateful(
    definition: PipelineDefinition, step: Step, path: Path, frame: DataFrame
) -> tuple[list[Finding], dict[str, DataFrame]]:
    """A stateful step leaves the schema as it is; its side outputs, as sinks get them."""
    from holdfast.pipeline.engine.routing import side_outputs
    from holdfast.pipeline.state.operator import operator_of

    try:
        return [], side_outputs(frame.sparkSession, operator_of(step, definition), frame.schema)
    except Exception as error:  # noqa: BLE001  every failure of the analysis is a finding about this step
        return [Finding(path, analysis_message(error))], {}


def _check_step(
    definition: PipelineDefinition, step: Step, path: Path, frame: DataFrame
) -> tuple[list[Finding], DataFrame | None]:
    from holdfast.pipeline.engine.routing import apply_step

    if isinstance(step, Lookup):
        return _check_lookup(definition, step, path, frame)
    try:
        if isinstance(step, Python):
            load_function(step, definition.directory)
        after = apply_step(frame, step, directory=definition.directory)
        names = [field.name for field in after.schema.fields]
    except FunctionMissing as error:
        return [Finding(path, str(error))], None
    except Exception as error:  # noqa: BLE001  every failure of the analysis is a finding about this step
        return [Finding(path, analysis_message(error))], None
    findings = []
    known = set(frame.columns)
    for name in names:
        if name.startswith("_") and name not in known:
            message = f"it makes the column {name!r}; names that start with '_' are kept for holdfast's own"
            findings.append(Finding(path, message))
    if isinstance(step, Expect | Filter | Sql) and not _is_deterministic(after):
        message = (
            "it calls a function whose answer changes when the batch is recomputed after a crash; "
            "use _batch_time for the time, and columns for the rest"
        )
        findings.append(Finding(path, message))
    return findings, after


def _check_lookup(
    definition: PipelineDefinition, step: Lookup, path: Path, frame: DataFrame
) -> tuple[list[Finding], DataFrame | None]:
    """The table is asked for its columns; one that cannot be reached from here may be when the pipeline runs."""
    from holdfast.pipeline.state.lookups import Lookups
    from holdfast.pipeline.state.tables import LookupUnavailable

    if is_reference(step.table):
        return [
            Finding(path, "its columns are not checked: where the table is, is not known here", "warning")
        ], None
    try:
        tables = Lookups(definition)
        schema = tables.schema_after(frame.schema, step)
        after = frame.sparkSession.createDataFrame([], schema).drop(*tables.flags(step))
    except LookupUnavailable as error:
        return [Finding(path, f"its columns are not checked: {error}", "warning")], None
    except Exception as error:  # noqa: BLE001  every failure of the analysis is a finding about this step
        return [Finding(path, analysis_message(error))], None
    return [], after


def _is_deterministic(frame: Any) -> bool:
    """Whether Spark knows every expression of the plan to give the same each time."""
    return bool(frame._jdf.queryExecution().analyzed().deterministic())


def analysis_message(error: Exception) -> str:
    """The complaint in one line, without the step's name, which the place tells."""
    if isinstance(error, StepError):
        return error.reason
    return str(error) if isinstance(error, HoldfastError) else spark_message(error)


def _check_sinks(definition: PipelineDefinition, streams: Mapping[str, DataFrame]) -> Iterator[Finding]:
    """Each against the rows it takes; none whose rows are not known."""
    from holdfast.pipeline.sinks.building import build_sink

    for index, sink in enumerate(definition.sinks):
        rows = streams.get(sink.rows)
        if rows is None:
            continue
        path: Path = ("sinks", index, kind_of_sink(sink))
        texts: dict[Path, str | None] = {}
        if isinstance(sink, KafkaSink):
            texts = {("key",): sink.key, ("value",): sink.value}
            texts |= {("headers", name): text for name, text in sink.headers.items()}
        elif isinstance(sink, PostgresSink | DeltaSink):
            texts = {("delete_when",): sink.delete_when}
        wrong = False
        for inner, text in texts.items():
            message = _expression_problem(text, rows) if text is not None else None
            if message is not None:
                wrong = True
                yield Finding((*path, *inner), message)
        if wrong:
            continue
        try:
            problems = build_sink(definition, sink).check(rows.schema)
        except HoldfastError as error:
            yield Finding(path, str(error))
            continue
        for problem in problems:
            below: Path = tuple(part for part in problem.where.split(".") if part and part != sink.name)
            yield Finding((*path, *below), problem.message)


def _expression_problem(text: str, rows: DataFrame) -> str | None:
    from pyspark.sql import functions

    try:
        chosen = rows.select(functions.expr(text))
        return None if _is_deterministic(chosen) else "its answer changes when the batch is recomputed"
    except Exception as error:  # noqa: BLE001  every failure of the analysis is a finding about this text
        return analysis_message(error)


@contextmanager
def checking_session(definition: PipelineDefinition) -> Iterator[SparkSession]:
    """A small local session whose files go away with it."""
    from holdfast.pipeline.class_archive import made_archive
    from holdfast.pipeline.java import find_java
    from holdfast.pipeline.session import spark_session

    with tempfile.TemporaryDirectory(prefix="holdfast-check-") as home:
        settings = {name: text for name, text in definition.spark.items() if not is_reference(text)}
        archive = made_archive(find_java(), settings)
        session = spark_session(definition.name, home, master="local[1]", settings=settings, archive=archive)
        try:
            yield session
        finally:
            session.stop()
