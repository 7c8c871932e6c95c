"""Spark's own Kafka connector, for tests and measures that put it beside ours: fetched by Maven, kept in the cache.

`CONNECTOR` names what is put beside ours: the version nearest to Spark 4.3.0 that Maven finds, with the versions of its
parts that go with it.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.testing.apache import cache_directory, exclusive_lock, maven_executable

CONNECTOR_VERSION: Final = "4.2.0"
CONNECTOR: Final = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR_VERSION}",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.1",
    "org.apache.commons:commons-pool2:2.12.1",
)
MAVEN_GOAL: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
DOWNLOAD_TIMEOUT_S: Final = 600.0


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
    maven = maven_executable("Spark's Kafka connector", ConnectorUnavailable)
    aside = Path(tempfile.mkdtemp(prefix="spark-connector-", dir=target.parent))
    try:
        for artifact in CONNECTOR:
            _copy(maven, artifact, aside)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _copy(maven: str, artifact: str, to: Path) -> None:
    command = [maven, "-B", "-q", MAVEN_GOAL, f"-Dartifact={artifact}", f"-DoutputDirectory={to}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, cwd=to, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConnectorUnavailable(
            f"Maven fetched {artifact} for {DOWNLOAD_TIMEOUT_S:.0f} s in vain"
        ) from error
    if done.returncode != 0:
        raise ConnectorUnavailable(f"Maven could not fetch {artifact}: {done.stdout[-500:]}")
