"""One Spark session for every test of the pipeline: starting it takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.spark_connector import ConnectorUnavailable, connector_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def connector() -> list[Path] | str:
    """The jars of Spark's own Kafka connector, or why there are none."""
    try:
        return connector_jars()
    except ConnectorUnavailable as missing:
        return str(missing)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, connector: list[Path] | str) -> Iterator[SparkSession]:
    from holdfast.pipeline.session import spark_session

    settings = {} if isinstance(connector, str) else {"spark.jars": ",".join(map(str, connector))}
    home = str(tmp_path_factory.mktemp("spark"))
    session = spark_session("tests", home, master="local[2]", settings=settings)
    yield session
    session.stop()


@pytest.fixture
def plain_spark(spark: SparkSession, connector: list[Path] | str) -> SparkSession:
    """The same session, for what needs Spark's own connector."""
    if isinstance(connector, str):
        unavailable(connector)
    return spark
