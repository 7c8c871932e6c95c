"""Arrow functions over frames whose columns may have any name.

Spark's `mapInArrow` looks every column up as an expression, in which a dot and a backtick mean something: a record's
field `user.id` would be looked for in a column `user`. Such frames go there under other names, and the function sees
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    ArrowFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def map_in_arrow(frame: DataFrame, function: ArrowFunction, schema: StructType | str) -> DataFrame:
    names = frame.columns
    if not any("." in name or "`" in name for name in names):
        return frame.mapInArrow(function, schema)

    def under_their_names(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return function(batch.rename_columns(names) for batch in batches)

    return frame.toDF(*(f"_{number}" for number in range(len(names)))).mapInArrow(under_their_names, schema)
