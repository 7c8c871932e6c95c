"""`spark-submit` of the command line, in client mode and in cluster mode, on a standalone master.

The workers have a bare Python; in cluster mode the driver runs on one of them, with the Python that `--conf` names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pyspark
import pytest
from tests.support.spark_cluster import SparkCluster

import holdfast
from holdfast.client import Producer
from holdfast.pipeline.java import find_java
from holdfast.testing.broker import BrokerProcess

pytestmark = [pytest.mark.long, pytest.mark.java, pytest.mark.timeout(900)]

SPARK_HOME = Path(pyspark.__file__).parent
COMMAND = Path(holdfast.__file__).parent / "cli" / "__main__.py"
WAIT_S = 400.0
DEFINITION = """\
pipeline: orders
source:
  topics: [orders]
  bootstrap: {address}
  value: {{format: json, fields: {{id: long}}}}
steps:
  - filter: id % 2 = 0
sinks:
  - parquet:
      path: out
home: home
spark:
  spark.executor.memory: 512m
  spark.driver.host: 127.0.0.1
  spark.cores.max: "1"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with SparkCluster(directory, workers=2, cores=2, memory="2g", java_home=find_java()) as cluster:
        yield cluster


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with BrokerProcess(str(tmp_path / "broker")) as broker:
        subprocess.run(
            [sys.executable, "-m", "holdfast.cli", "topics", "create", "--topic", "orders"],
            env={**os.environ, "HOLDFAST_BOOTSTRAP_SERVER": broker.bootstrap_servers},
            check=True,
        )
        with Producer(broker.bootstrap_servers) as producer:
            producer.send_many("orders", [json.dumps({"id": number}).encode() for number in range(20)])
        (tmp_path / "orders.yaml").write_text(DEFINITION.format(address=broker.bootstrap_servers))
        yield tmp_path


def submit(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "JAVA_HOME": find_java(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(place / "local"),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    environment.pop("PYSPARK_PYTHON", None)
    return subprocess.run(
        [str(SPARK_HOME / "bin" / "spark-submit"), *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def ids(place: Path) -> list[int]:
    rows = ds.dataset(place / "out", format="parquet", partitioning="hive", exclude_invalid_files=True)
    return sorted(rows.to_table(["id"])["id"].to_pylist())


def test_the_command_runs_in_client_mode(cluster: SparkCluster, place: Path) -> None:
    arguments = ("pipeline", "run", "orders.yaml", "--shared-filesystem")
    done = submit(place, "--master", cluster.url, str(COMMAND), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ids(place) == list(range(0, 20, 2))
    assert f"asking {cluster.url} for executors" in done.stdout  # where Spark puts both


def test_the_command_runs_in_cluster_mode(cluster: SparkCluster, place: Path) -> None:
    """Spark refuses Python applications there, and runs its own Python runner as any other class."""
    file = str(place / "orders.yaml")
    done = submit(
        place,
        *("--master", cluster.url, "--deploy-mode", "cluster"),
        *("--conf", f"spark.pyspark.driver.python={sys.executable}"),
        *("--conf", "spark.driver.memory=512m"),
        *("--conf", "spark.driver.host=127.0.0.1"),
        *("--class", "org.apache.spark.deploy.PythonRunner"),
        str(next((SPARK_HOME / "jars").glob("spark-core_*.jar"))),
        *(str(COMMAND), str(COMMAND.parents[2]), "pipeline", "run", file, "--shared-filesystem"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + WAIT_S
    while not (log := place / "home" / "log.jsonl").exists() or '"summary"' not in log.read_text():
        assert time.monotonic() < deadline, [worker.said()[-3000:] for worker in cluster.workers]
        time.sleep(0.5)
    assert ids(place) == list(range(0, 20, 2))
