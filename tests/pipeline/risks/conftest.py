"""What the risks HF401 to HF410 need: Spark, and a broker.

The two halves of each, Spark's own connector that loses and a pipeline of ours that does not, are experiments of the
lab (`holdfast.lab.experiments.hf4xx`), run by test_experiments.py on the session that all tests of the pipeline share.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.spark_scene import SparkScene as Scene

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Scene"]


@pytest.fixture(scope="session")
def risky_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(str(tmp_path_factory.mktemp("risks") / "broker")) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def plain(risky_broker: str, plain_spark: SparkSession, tmp_path: Path) -> Scene:
    """Spark with its own connector."""
    return Scene(risky_broker, plain_spark, tmp_path)


@pytest.fixture
def ours(risky_broker: str, spark: SparkSession, tmp_path: Path) -> Scene:
    return Scene(risky_broker, spark, tmp_path)
