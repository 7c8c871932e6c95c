"""The risks HF401 to HF410, each in two halves.

`test_hfNNN_…_plain_spark_…` fails if the loss or the duplicate does not show with Spark's own connector, set as the
risk says; `test_hfNNN_…_ours_…` fails if it shows with our pipeline or our source in the same situation.
`test_every_risk.py` sees to it that none is missing.

    HF401  test_reading.py   records that retention took while the query was down
    HF402  test_reading.py   what was there before the first start; a partition that was added
    HF403  test_writing.py   a checkpoint that is gone
    HF404  test_writing.py   a batch that was written, and not known to be
    HF405  test_writing.py   Spark's Kafka sink, and a write that fails in the middle
    HF406  test_steps.py     records that are no JSON
    HF407  test_late.py      rows that come after their window was closed
    HF408  test_reading.py   a topic that was deleted and created again
    HF409  test_reading.py   messages that were taken back
    HF410  test_steps.py     a step that computes something else the second time
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.spark_scene import SparkScene as Scene
from holdfast.testing.spark_scene import order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Scene", "order"]


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
