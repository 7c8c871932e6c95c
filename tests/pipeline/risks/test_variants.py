"""What the experiments of HF401, HF403 and HF410 do not show: another way into the loss, and what is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.model import Sql
from holdfast.pipeline.source import HoldfastSource

if TYPE_CHECKING:
    from .conftest import Scene


def test_hf401_our_source_does_not_take_the_setting_that_hides_a_loss(ours: Scene) -> None:
    ours.spark.dataSource.register(HoldfastSource)
    with pytest.raises(Exception, match="HF401"):
        ours.stream("holdfast", failOnDataLoss="false").schema  # noqa: B018


def test_hf403_a_lost_checkpoint_with_plain_spark_writes_twice(plain: Scene) -> None:
    plain.send_orders(range(5))
    plain.query(plain.orders())
    shutil.rmtree(plain.checkpoint)
    plain.query(plain.orders())
    assert Counter(plain.ids()) == dict.fromkeys(range(5), 2)


@pytest.mark.parametrize("expression", ["uuid()", "rand()", "current_timestamp()"])
def test_hf410_a_step_that_differs_each_time_with_ours_is_refused(ours: Scene, expression: str) -> None:
    steps = (Sql("random", f"SELECT _hf, id, {expression} AS chosen FROM input"),)
    ours.send_orders(range(5))
    with pytest.raises(HoldfastError, match="random"):
        ours.run(steps=steps)
    assert not ours.out.exists()
