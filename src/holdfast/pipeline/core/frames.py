"""Spark's frames where their own methods fall short: columns of any name, a view that is somebody else's, and functions
of a definition on their way to workers.

Spark's `mapInArrow` looks every column up as an expression, in which a dot and a backtick mean something: a record's
field `user.id` would be looked for in a column `user`. Such frames go there under other names, and the function sees
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(frame: DataFrame, function: ArrowFunction, schema: StructType | str) -> DataFrame:
    names = frame.columns
    if not any("." in name or "`" in name for name in names):
        return frame.mapInArrow(function, schema)

    def under_their_names(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*(f"_{number}" for number in range(len(names)))).mapInArrow(under_their_names, schema)


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


def pickled(function: Callable[..., Any]) -> bytes:
    """By value, whatever module it stands in: workers need not have its file."""
    import sys

    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped
    module = sys.modules.get(getattr(function, "__module__", ""))
    is_ours = module is not None and module.__name__.split(".")[0] in ("holdfast", "builtins")
    if module is None or is_ours or module.__name__ == "__main__":
        return bytes(cloudpickle.dumps(function))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
