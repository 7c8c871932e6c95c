"""One Spark session for every test of the pipeline: starting it takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from holdfast.pipeline.session import spark_session

    session = spark_session("tests", str(tmp_path_factory.mktemp("spark")), master="local[2]")
    yield session
    session.stop()
