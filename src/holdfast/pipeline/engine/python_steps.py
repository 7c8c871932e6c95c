"""Python steps: a function over batches of rows, in Spark's Python workers.

The function gets a batch without the engine's own columns but with `_hf`, and returns a batch: with `_hf`, rows may be
left out (or multiplied, for a step that expands); without, it has as many rows as it was given, in their order. The
wrapper here gives each returned row the full lineage of the row it came from again, looked up by `_hf` in the batch
that was handed out: a function cannot invent a row.

A pandas function gets dtypes that keep what Arrow has, by the column's type and never by what a batch holds: whole and
floating numbers in pandas' nullable dtypes (a null among longs would make floats of them, and NaN is not null), arrays,
structs and maps in Arrow's. A float that it returns in one of NumPy's dtypes is null where it is NaN, as pandas has it.

What the function raises is told with the step's name and the line of the function it happened in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.pipeline.core.failures import StepError, spark_message
from holdfast.pipeline.core.frames import map_in_arrow, pickled, raised_at
from holdfast.pipeline.core.sql import LINEAGE, PLACE, arrow_schema
from holdfast.pipeline.definition.functions import load_function
from holdfast.pipeline.definition.model import Python
from holdfast.pipeline.engine.failures import step_failure

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


class StepRaised(Exception):
    """Carries the text of `step_failure` through Spark."""


class WrongResult(Exception):
    """The function returned what cannot go on."""


def apply_python(frame: DataFrame, step: Python, directory: str) -> DataFrame:
    """The rows the function returns, not computed yet."""
    function = load_function(step, directory)
    schema = output_schema(frame, step)
    run = partial(run_step, step.name, step.mode, step.expand, pickled(function), schema.json())
    return map_in_arrow(frame, run, schema)


def output_schema(frame: DataFrame, step: Python) -> StructType:
    """`_hf` as it stands, and the columns the step says it returns."""
    from pyspark.sql.types import StructType

    from holdfast.pipeline.core.sql import ddl_schema

    if not step.schema.strip():
        return frame.schema
    try:
        declared = ddl_schema(step.schema)
    except Exception as error:
        raise StepError(step.name, f"its schema {step.schema!r}: {spark_message(error)}") from error
    reserved = [field.name for field in declared if field.name.startswith("_") and field.name != LINEAGE]
    if reserved:
        raise StepError(
            step.name, f"its schema names {reserved[0]!r}: names with an underscore before are ours"
        )
    return StructType([frame.schema[LINEAGE], *(field for field in declared if field.name != LINEAGE)])


def run_step(
    name: str, mode: str, expands: bool, function: bytes, schema_json: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """In a worker: one batch after the other through the function."""
    import json

    from pyspark import cloudpickle
    from pyspark.sql.types import StructType

    call = cloudpickle.loads(function)
    wanted = arrow_schema(StructType.fromJson(json.loads(schema_json)))
    for batch in batches:
        if batch.num_rows == 0:
            continue
        given = _hand_out(batch)
        try:
            returned = _call(call, mode, given)
            result = _take_back(batch, given, returned, wanted, expands)
        except Exception as error:  # noqa: BLE001  it is the user's function: whatever it raises is told
            # The text is all that reaches the driver.
            where = "" if isinstance(error, WrongResult) else raised_at(error)
            raise StepRaised(step_failure(name, error, where)) from None
        yield result


def _hand_out(batch: pa.RecordBatch) -> pa.RecordBatch:
    """What the function sees: lineage as sinks have it, and no column of the engine's own."""
    import pyarrow as pa

    lineage = batch.column(LINEAGE)
    narrow = pa.StructArray.from_arrays([lineage.field(name) for name in PLACE], names=list(PLACE))
    names = [name for name in batch.schema.names if name != LINEAGE]
    return pa.RecordBatch.from_arrays(
        [narrow, *(batch.column(name) for name in names)], names=[LINEAGE, *names]
    )


def _call(call: Callable[[Any], Any], mode: str, given: pa.RecordBatch) -> pa.Table:
    import pyarrow as pa

    if mode == "pandas":
        import pandas as pd

        returned = call(given.to_pandas(types_mapper=_pandas_dtype))
        if not isinstance(returned, pd.DataFrame):
            raise WrongResult(f"returned {type(returned).__name__}, not a DataFrame")
        return pa.Table.from_pandas(returned, preserve_index=False)
    returned = call(given)
    if isinstance(returned, pa.RecordBatch):
        return pa.Table.from_batches([returned])
    if isinstance(returned, pa.Table):
        return returned
    raise WrongResult(f"returned {type(returned).__name__}, not a RecordBatch or Table")


def _pandas_dtype(kind: pa.DataType) -> Any:
    """Where pandas' own choice would change a value, one that does not; otherwise None."""
    import pandas as pd
    import pyarrow as pa

    if pa.types.is_signed_integer(kind) or pa.types.is_floating(kind):
        family = "Int" if pa.types.is_signed_integer(kind) else "Float"
        return pd.api.types.pandas_dtype(f"{family}{kind.bit_width}")
    return pd.ArrowDtype(kind) if pa.types.is_nested(kind) else None


def _take_back(
    batch: pa.RecordBatch, given: pa.RecordBatch, returned: pa.Table, wanted: pa.Schema, expands: bool
) -> pa.RecordBatch:
    import pyarrow as pa

    if LINEAGE in returned.schema.names:
        rows = _rows_of(given, returned.column(LINEAGE), expands)
        lineage = batch.column(LINEAGE) if rows is None else batch.column(LINEAGE).take(rows)
    elif returned.num_rows == batch.num_rows:
        lineage = batch.column(LINEAGE)
    else:
        raise WrongResult(
            f"returned {returned.num_rows} rows for {batch.num_rows} without `_hf`: keep the column `_hf`, so that "
            "each row can be told from the record it came from"
        )
    columns = []
    for field in wanted:
        if field.name == LINEAGE:
            columns.append(lineage)
            continue
        if field.name not in returned.schema.names:
            raise WrongResult(f"the column {field.name!r} is missing in what it returned")
        columns.append(_cast(returned.column(field.name), field))
    result = pa.RecordBatch.from_arrays(columns, names=wanted.names)
    try:
        result.validate(full=True)  # The JVM takes it as it comes.
    except pa.ArrowInvalid as error:
        raise WrongResult(f"returned arrays that are none: {error}") from None
    return result


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    import pyarrow as pa

    try:
        array = column.cast(field.type).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise WrongResult(f"the column {field.name!r} is no {field.type}: {error}") from None
    if isinstance(array, pa.ChunkedArray):
        return array.chunk(0) if array.num_chunks else pa.array([], field.type)
    return array


def _rows_of(given: pa.RecordBatch, lineage: pa.ChunkedArray, expands: bool) -> pa.Array | None:
    """For each returned row the number of the row it came from; nothing when they are all there, in order."""
    import pyarrow as pa

    before = given.column(LINEAGE)
    if (
        not expands
        and len(lineage) == len(before)
        and lineage.cast(before.type).combine_chunks().equals(before)
    ):
        return None
    places = {_place(value): number for number, value in enumerate(before.to_pylist())}
    rows = []
    for value in lineage.to_pylist():
        number = places.get(_place(value)) if value is not None else None
        if number is None:
            raise WrongResult(f"returned a row whose `_hf` is {value}: no row it was given has it")
        rows.append(number)
    return pa.array(rows, pa.int64())


def _place(value: Any) -> tuple[Any, ...]:
    return value["topic"], value["partition"], value["offset"], value["index"]
