"""Three forms of one digest agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.digest import (
    MASK,
    digest_of_offsets,
    hash_sql,
    join_halves,
    place_hash,
)
from holdfast.pipeline.sinks.lineage import digest_of_lineage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACES = st.tuples(st.text(max_size=70), st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1))


@given(st.lists(PLACES, max_size=20))
def test_columns_and_single_places_give_the_same(places: list[tuple[str, int, int]]) -> None:
    whole = sum(place_hash(*place) for place in places) & MASK
    columns = zip(*places, strict=True) if places else ([], [], [])
    topics, partitions, offsets = (list(column) for column in columns)
    lineage = pa.StructArray.from_arrays(
        [
            pa.array(topics, pa.string()),
            pa.array(partitions, pa.int32()),
            pa.array(offsets, pa.int64()),
            pa.array([0] * len(topics), pa.int32()),
        ],
        names=["topic", "partition", "offset", "index"],
    )
    assert whole == digest_of_lineage(lineage)


def test_offsets_of_a_partition_are_hashed_together() -> None:
    offsets = np.arange(5_000, dtype=np.int64)
    assert (
        digest_of_offsets("orders", 3, offsets)
        == sum(place_hash("orders", 3, n) for n in range(5_000)) & MASK
    )
    assert digest_of_offsets("orders", 3, offsets[:0]) == 0


def test_a_row_twice_or_missing_changes_it() -> None:
    offsets = np.array([1, 2, 3, 4], dtype=np.int64)
    whole = digest_of_offsets("orders", 0, offsets)
    assert whole != digest_of_offsets("orders", 0, offsets[:3])
    assert whole != digest_of_offsets("orders", 0, np.array([1, 2, 3, 3], dtype=np.int64))
    assert whole != digest_of_offsets("orders", 1, offsets)


def test_spark_gives_the_same(spark: SparkSession) -> None:
    places = [
        ("orders", 0, 0),
        ("orders", 3, 2**62),
        ("", 1, 5),
        ("a topic's name of more than 32 bytes, ünïcödé", 2**31 - 1, 7),
    ]
    value = hash_sql()
    low, high = f"sum({value} & 4294967295L)", f"sum(shiftrightunsigned({value}, 32))"
    rows = spark.createDataFrame(
        [(place,) for place in places], "_hf struct<topic:string,partition:int,offset:bigint>"
    )
    found = rows.selectExpr(f"{low} AS low", f"{high} AS high").first()
    assert found is not None
    assert join_halves(found.low, found.high) == sum(place_hash(*place) for place in places) & MASK
