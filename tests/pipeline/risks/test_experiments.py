"""HF401 to HF410 as experiments of the lab: plain Spark loses, our pipeline in the same situation does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from holdfast.lab.engines import Engines
from holdfast.lab.experiment import Outcome, run_experiment
from holdfast.lab.experiments import EXPERIMENTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WITH_SPARK = [each.id for each in EXPERIMENTS.values() if "spark" in each.needs]


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines(tmp_path_factory.mktemp("lab")) as made:
        yield made


TAKE_LONG = ("HF403", "HF405", "HF406", "HF407", "HF408", "HF410")


@pytest.mark.parametrize(
    "risk", [pytest.param(each, marks=pytest.mark.long if each in TAKE_LONG else ()) for each in WITH_SPARK]
)
def test_the_claim_holds(risk: str, engines: Engines, plain_spark: SparkSession) -> None:
    engines.adopt(plain_spark)
    result = run_experiment(EXPERIMENTS[risk], engines, "holdfast")
    assert (result.outcome, result.reasons) == (Outcome.HELD, ())


def test_all_of_them_are_there() -> None:
    assert [f"HF{number}" for number in range(401, 411)] == WITH_SPARK
