"""Spark's frames where their own methods fall short: columns of any name, a view that is somebody else's, functions of
a definition on their way to workers, and failures on their way back.

Spark's `mapInArrow` looks every column up as an expression, in which a dot and a backtick mean something: a record's
field `user.id` would be looked for in a column `user`. Such frames go there under other names, and the function sees
its own.
"""

from __future__ import annotations

import base64
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Observation, SparkSession
    from pyspark.sql.types import StructType

    ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]

OBSERVED_WITHIN_S: Final = 5.0
"""Metrics come after the job that made them, by another thread; longer than this is never."""


def map_in_arrow(frame: DataFrame, function: ArrowFunction, schema: StructType | str) -> DataFrame:
    names = frame.columns
    if not any("." in name or "`" in name for name in names):
        return frame.mapInArrow(function, schema)

    def under_their_names(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*(f"_{number}" for number in range(len(names)))).mapInArrow(under_their_names, schema)


def no_rows(spark: SparkSession, schema: StructType) -> DataFrame:
    """A frame to look at what steps make of these columns: `createDataFrame` asks the JVM five times as much."""
    from pyspark.sql import DataFrame

    session, java = spark._jsparkSession, cast("Any", spark._jvm).java
    return DataFrame(
        session.createDataFrame(java.util.ArrayList(), session.parseDataType(schema.json())), spark
    )


def reports_of(frame: DataFrame, task: ArrowFunction, schema: str, *, is_small: bool = False) -> list[Any]:
    """What tasks report of the frame's rows. The driver does the task of a frame that is small: handing it to a worker
    costs more than what it does there."""
    if is_small:
        return reported(task(frame.toArrow().to_batches()))
    return map_in_arrow(frame, task, schema).collect()


def reported(reports: Iterable[pa.RecordBatch]) -> list[Mapping[str, Any]]:
    return [row for batch in reports for row in batch.to_pylist()]


def metrics_of(observation: Observation) -> Mapping[str, Any] | None:
    """What was observed while a job ran; nothing when it does not come: an action that Spark does not observe."""
    made: Any = observation._jo
    deadline_s = time.monotonic() + OBSERVED_WITHIN_S
    while not made.future().isCompleted():
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.002)
    metrics: Mapping[str, Any] = observation.get
    return metrics or None


@contextmanager
def as_input(spark: SparkSession, frame: DataFrame) -> Iterator[None]:
    """The frame is the view `input` inside; a view of that name that the session's owner has is there again behind."""
    views = spark._jsparkSession.sessionState().catalog()
    owners = spark.table("input") if views.getTempView("input").isDefined() else None
    frame.createOrReplaceTempView("input")
    try:
        yield
    finally:
        if owners is None:
            spark.catalog.dropTempView("input")
        else:
            owners.createOrReplaceTempView("input")


@contextmanager
def by_value(function: Callable[..., Any]) -> Iterator[Any]:
    """Inside, what is pickled of the function's module takes its code along: workers need not have its file."""
    import sys

    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_ours = module is not None and module.__name__.split(".")[0] in ("holdfast", "builtins")
    if module is None or is_ours or module.__name__ == "__main__":
        yield cloudpickle
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield cloudpickle
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def pickled(function: Callable[..., Any]) -> bytes:
    """By value, whatever module it stands in."""
    with by_value(function) as cloudpickle:
        return bytes(cloudpickle.dumps(function))


def raised_at(error: BaseException) -> str:
    """The innermost line of an error that is neither ours nor an installed package's, else the innermost not ours."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    found = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in found if not frame.filename.startswith(ours)]
    own = [each for each in frames if os.path.isabs(each.filename) and "site-packages" not in each.filename]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}" + (f": {frame.line}" if frame.line else "")


def failure_report(error: Exception) -> dict[str, str]:
    """What a worker reports of a failure: raised there, it would come back as a JVM exception around a traceback."""
    return {"failure": base64.b64encode(pickle.dumps(error)).decode("ascii")}


def raise_reported(reports: Iterable[Mapping[str, Any]]) -> None:
    """Raise the failure that a worker has reported, if one has."""
    for report in reports:
        if "failure" in report:
            raise pickle.loads(base64.b64decode(report["failure"]))
