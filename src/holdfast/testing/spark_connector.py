"""Spark's own Kafka connector, for tests and measures that put it beside ours: fetched by Maven, kept in the cache.

`CONNECTOR` names what is put beside ours: the version nearest to Spark 4.3.0 that Maven finds, with the versions of its
parts that go with it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.testing.apache import cache_directory, exclusive_lock, run_maven

CONNECTOR_VERSION: Final = "4.2.0"
CONNECTOR: Final = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR_VERSION}",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.1",
    "org.apache.commons:commons-pool2:2.12.1",
)
MAVEN_GOAL: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"


class ConnectorUnavailable(HoldfastError):
    """Spark's connector cannot be had on this machine; the message says what is missing."""


def connector_jars() -> list[Path]:
    """The jars of Spark's connector, fetched when they are not there yet."""
    target = cache_directory() / f"spark-connector-{CONNECTOR_VERSION}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(target.parent / "spark-connector.lock"):
        if not target.is_dir():
            _fetch(target)
    return sorted(target.glob("*.jar"))


def _fetch(target: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix="spark-connector-", dir=target.parent))
    try:
        for artifact in CONNECTOR:
            arguments = [MAVEN_GOAL, f"-Dartifact={artifact}", f"-DoutputDirectory={aside}"]
            run_maven(f"Spark's Kafka connector ({artifact})", ConnectorUnavailable, arguments, aside)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
