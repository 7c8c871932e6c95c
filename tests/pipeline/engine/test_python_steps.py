"""What a Python step returns, looked at in the worker: no Spark needed."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from holdfast.pipeline.core.frames import pickled
from holdfast.pipeline.engine.python_steps import StepRaised, run_step


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


NESTED = pa.struct([("n", pa.int64()), ("x", pa.float64())])
EXACT = {
    "whole": pa.array([2**63 - 1, None, -(2**53) - 1], pa.int64()),
    "small": pa.array([1, None, -128], pa.int8()),
    "real": pa.array([float("nan"), None, -0.0], pa.float64()),
    "single": pa.array([float("nan"), None, 1.5], pa.float32()),
    "flag": pa.array([True, None, False]),
    "text": pa.array(["", None, "\0ö"]),
    "raw": pa.array([b"", None, b"\xff"]),
    "money": pa.array([Decimal("9007199254740993.01"), None, Decimal("-0.01")], pa.decimal128(20, 2)),
    "day": pa.array([date(1, 1, 1), None, date(9999, 12, 31)]),
    "at": pa.array(
        [datetime(1, 1, 1, tzinfo=UTC), None, datetime(9999, 12, 31, tzinfo=UTC)], pa.timestamp("us", "UTC")
    ),
    "wall": pa.array(
        [datetime(1, 1, 1), None, datetime(9999, 12, 31, 23, 59, 59, 999999)], pa.timestamp("us")
    ),
    "many": pa.array([[2**63 - 1, None], None, []], pa.list_(pa.int64())),
    "reals": pa.array([[float("nan"), None], None, [-0.0]], pa.list_(pa.float64())),
    "one": pa.array([{"n": 2**53 + 1, "x": float("nan")}, None, {"n": None, "x": None}], NESTED),
    "map": pa.array([[("a", 2**53 + 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int64())),
    "deep": pa.array([[{"n": 2**53 + 1, "x": None}, None], None, []], pa.list_(NESTED)),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("function", [lambda frame: frame, lambda frame: frame[frame.index >= 0].copy()])
def test_a_pandas_step_hands_values_on_as_they_are(name: str, function: object) -> None:
    batch = given(3).append_column(name, EXACT[name])
    schema = from_arrow_schema(batch.schema).json()
    [result] = run_step("label", "pandas", False, pickled(function), schema, [batch])  # type: ignore[arg-type]
    assert repr(result.column(name).to_pylist()) == repr(
        EXACT[name].to_pylist()
    )  # by repr NaN equals NaN, -0.0 not 0.0


def test_a_column_has_one_dtype_whatever_a_batch_holds() -> None:
    seen: list[str] = []

    def look(frame: Any) -> Any:
        raise ValueError(f"{frame.dtypes['whole']} {frame.dtypes['real']}")

    for values in ([1, 2, 3], [1, None, 3]):
        columns = {"whole": pa.array(values, pa.int64()), "real": pa.array(values, pa.float64())}
        batch = given(3)
        for name, column in columns.items():
            batch = batch.append_column(name, column)
        with pytest.raises(StepRaised) as raised:
            list(
                run_step(
                    "label", "pandas", False, pickled(look), from_arrow_schema(batch.schema).json(), [batch]
                )
            )
        seen.append(str(raised.value))
    assert "Int64 Float64" in seen[0]
    assert seen[0] == seen[1]


def test_an_array_whose_values_run_backwards_never_gets_to_the_jvm() -> None:
    def forge(batch: pa.RecordBatch) -> pa.RecordBatch:
        import struct

        import pyarrow as pa

        offsets = pa.py_buffer(struct.pack("4i", 0, 4, 2, 6))
        names = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"v0v1v2")])
        return pa.RecordBatch.from_arrays([batch.column("_hf"), names], names=["_hf", "name"])

    with pytest.raises(StepRaised, match=r"label.*returned arrays that are none"):
        step(forge)
