"""HF406, HF410: records that vanish between source and sink, and batches that are not the same twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.model import Expect, ParquetSink, Sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from .conftest import Scene

BROKEN = (b"not json", b'{"id": "six", "amount": 1}', b'{"id": 7}{"id": 8}', b"")


# ------------------------------------------------------------------- HF406 unparseable records


def test_hf406_broken_records_with_plain_spark_vanish(plain: Scene) -> None:
    plain.send_orders(range(5))
    plain.send(*BROKEN)
    plain.query(plain.orders().where("id >= 0 AND amount > 0"))
    assert plain.ids() == list(range(5))
    assert plain.values(plain.topic)[5:] == list(BROKEN)


def test_hf406_broken_records_with_ours_are_dead_letters(ours: Scene) -> None:
    ours.send_orders(range(5))
    ours.send(*BROKEN)
    summary = ours.run(steps=(Expect("positive", "amount > 0"),))
    assert ours.ids() == list(range(5))
    assert summary.routes.dead_letter == {"parse": len(BROKEN)}
    assert sorted(ours.values(f"{ours.topic}-dlt")) == sorted(BROKEN)


# ------------------------------------------------------------------- HF410 a batch that is computed again


def chosen(scene: Scene, name: str) -> dict[int, object]:
    rows = scene.spark.read.parquet(str(scene.directory / name)).collect()
    return {row.id: row.chosen for row in rows}


def test_hf410_a_batch_computed_again_with_plain_spark_is_another(plain: Scene) -> None:
    attempts: list[int] = []

    def write_both(rows: DataFrame, number: int) -> None:
        """Each target takes a batch once, which would be enough if the batch were the same."""
        attempts.append(number)
        for name in ("first", "second"):
            target = plain.directory / name / f"batch={number}"
            if not target.exists():
                rows.write.parquet(str(target))
            if len(attempts) == 1:
                raise RuntimeError("killed between the targets")

    plain.send_orders(range(5))
    with pytest.raises(Exception, match="killed between"):
        plain.query(plain.orders().selectExpr("id", "uuid() AS chosen"), write_both)
    plain.query(plain.orders().selectExpr("id", "uuid() AS chosen"), write_both)
    first, second = chosen(plain, "first"), chosen(plain, "second")
    assert set(first) == set(second) == set(range(5))
    assert not set(first.values()) & set(second.values())


def test_hf410_a_batch_computed_again_with_ours_is_the_same(ours: Scene) -> None:
    sinks = tuple(ParquetSink(path=str(ours.directory / name), name=name) for name in ("first", "second"))
    steps = (Sql("timed", "SELECT _hf, id, _batch_time AS chosen FROM input"),)
    ours.send_orders(range(5))
    ours.crash("committed:first", sinks=sinks, steps=steps)
    ours.run(sinks=sinks, steps=steps)
    assert chosen(ours, "first") == chosen(ours, "second")
    assert set(chosen(ours, "first")) == set(range(5))


@pytest.mark.parametrize("expression", ["uuid()", "rand()", "current_timestamp()"])
def test_hf410_a_step_that_differs_each_time_with_ours_is_refused(ours: Scene, expression: str) -> None:
    steps = (Sql("random", f"SELECT _hf, id, {expression} AS chosen FROM input"),)
    ours.send_orders(range(5))
    with pytest.raises(HoldfastError, match="random"):
        ours.run(steps=steps)
    assert not ours.out.exists()
