"""One Spark session for every test of the pipeline: starting it takes longer than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.testing.kafka_fixtures import unavailable
from holdfast.testing.spark_connector import ConnectorUnavailable, connector_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STAGES_AS_THEY_ARE = {"spark.sql.codegen.wholeStage": "false"}
"""A query over a handful of rows is done before Spark would have compiled its stages. Programs that tests start have
them compiled as always, and so has this session with --long."""


@pytest.fixture(scope="session")
def connector() -> list[Path] | str:
    """The jars of Spark's own Kafka connector, or why there are none."""
    try:
        return connector_jars()
    except ConnectorUnavailable as missing:
        return str(missing)


def remembering(look_up: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Py4J asks the JVM at every `jvm.org.apache.spark`, which looks through two hundred jars for a class of that name:
    an eighth of what a query over a handful of rows costs. A package or class that was found once stays found."""

    def found(self: Any, name: str) -> Any:
        self.__dict__[name] = look_up(self, name)
        return self.__dict__[name]

    return found


@pytest.fixture(scope="session")
def spark(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, connector: list[Path] | str
) -> Iterator[SparkSession]:
    from py4j.java_gateway import JavaPackage, JVMView  # type: ignore[import-untyped]

    from holdfast.pipeline.session import spark_session

    for kind in (JavaPackage, JVMView):
        kind.__getattr__ = remembering(kind.__getattr__)
    settings = {} if pytestconfig.getoption("--long") else dict(STAGES_AS_THEY_ARE)
    if not isinstance(connector, str):
        settings["spark.jars"] = ",".join(map(str, connector))
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
