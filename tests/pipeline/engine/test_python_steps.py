"""What a Python step returns, looked at in the worker: no Spark needed."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from holdfast.pipeline.engine.python_steps import StepRaised, pickled, run_step


def given(rows: int) -> pa.RecordBatch:
    places = [{"topic": "t", "partition": 0, "offset": number, "index": 0} for number in range(rows)]
    type_ = pa.struct(
        [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
    )
    values = [f"v{number}" for number in range(rows)]
    return pa.RecordBatch.from_arrays([pa.array(places, type_), pa.array(values)], names=["_hf", "name"])


def step(function: object) -> list[pa.RecordBatch]:
    batch = given(3)
    schema = from_arrow_schema(batch.schema).json()
    return list(run_step("label", "arrow", False, pickled(function), schema, [batch]))  # type: ignore[arg-type]


def test_rows_come_back_with_the_lineage_they_had() -> None:
    [result] = step(lambda batch: batch.slice(1, 2))
    assert result.column("_hf").field("offset").to_pylist() == [1, 2]
    assert result.column("name").to_pylist() == ["v1", "v2"]


def test_an_array_whose_values_run_backwards_never_gets_to_the_jvm() -> None:
    def forge(batch: pa.RecordBatch) -> pa.RecordBatch:
        import struct

        import pyarrow as pa

        offsets = pa.py_buffer(struct.pack("4i", 0, 4, 2, 6))
        names = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"v0v1v2")])
        return pa.RecordBatch.from_arrays([batch.column("_hf"), names], names=["_hf", "name"])

    with pytest.raises(StepRaised, match=r"label.*returned arrays that are none"):
        step(forge)
