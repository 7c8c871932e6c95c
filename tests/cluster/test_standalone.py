"""A pipeline on a standalone cluster whose workers have a bare Python and nothing of ours.

One run goes through it all, since each start of a Spark costs seconds: a batch during which an executor is lost between
two sinks, and one during which the other worker dies as a machine does. It must end with the rows that a run on this
machine would have made, each once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.pipeline_chaos import (
    Orders,
    check_once,
    dead_letter_rows,
    delta_rows,
    parquet_rows,
)
from tests.support.spark_cluster import SparkCluster

from holdfast.pipeline.java import find_java
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET
from holdfast.testing.processes import MARK, die_with_parent, marked

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800), pytest.mark.long]

PARTITIONS: Final = 4
RECORDS: Final = 30_000
BATCH_RECORDS: Final = 15_000
WAIT_SECONDS_MAX: Final = 800.0
"""On a busy machine: half a gigabyte of Python is packed, and unpacked by every executor, before the first batch."""
POLL_SECONDS: Final = 0.02

DEFINITION: Final = """\
pipeline: {name}
source:
  topics: orders
  batch_records: {batch_records}
  value:
    format: json
    fields: {{part: integer, number: long, amount: double, note: string}}
  event_time: {{field: _timestamp, delay: 10m}}
steps:
  - dedupe: {{name: once, key: [part, number], within: 1h}}
  - python:
      file: steps.py
      function: double
      schema: part int, number long, note string, twice double, place string
  - sql: SELECT _hf, part, number, twice, place, length(note) AS wide FROM input
sinks:
  - parquet: {{path: {name}/files}}
  - delta: {{path: {name}/table}}
home: {name}/home
spark:
  spark.executor.memory: 1g
  spark.driver.host: 127.0.0.1
  spark.sql.shuffle.partitions: "2"
"""
STEPS: Final = """\
import pyarrow as pa
import pyarrow.compute as pc

from helpers import place


def double(batch):
    names = [*batch.schema.names, "twice", "place"]
    columns = [*batch.columns, pc.multiply(batch.column("amount"), 2), pa.array([place()] * batch.num_rows)]
    return pa.RecordBatch.from_arrays(columns, names=names)
"""
HELPERS: Final = """\
import os
import sys


def place():
    return sys.prefix + " " + os.getcwd()
"""
DRIVER: Final = """\
import os
import pathlib
import sys
import time

from pyspark.sql import SparkSession

from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.running import run_pipeline

file, master, signs = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])


def faults(point):
    sign = signs / point.replace(":", "-")
    if sign.exists():
        reached = sign.rename(sign.with_suffix(".reached"))
        while reached.exists():
            time.sleep(0.02)


def progress(event):
    print(event, file=sys.stderr, flush=True)


run_pipeline(
    load_pipeline(file).definition,
    bootstrap=sys.argv[4],
    master=master,
    spark=SparkSession.builder.getOrCreate() if "SUBMITTED" in os.environ else None,
    shared_filesystem=True,
    once=True,
    progress=progress,
    faults=faults,
)
"""


@pytest.fixture(scope="module")
def orders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Orders]]:
    if not request.config.getoption("--pipeline-kills"):
        pytest.skip(
            "a cluster takes a minute of both cores: --pipeline-kills=1 runs it (make cluster, make chaos)"
        )
    with BrokerProcess(str(tmp_path_factory.mktemp("broker") / "data")) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **QUIET})
        admin.create_topics([NewTopic("orders", PARTITIONS, 1)])["orders"].result(30)
        orders = Orders(broker.bootstrap_servers, "orders", PARTITIONS)
        orders.send(RECORDS)
        yield broker.bootstrap_servers, orders


class Driver:
    """A process that runs the pipeline and stops where a sign is put up, until the sign is taken down."""

    def __init__(
        self, directory: Path, name: str, master: str, bootstrap_servers: str, *, is_submitted: bool = False
    ) -> None:
        """One that `is_submitted` is started by spark-submit, and brings the session that it is given."""
        self._name = name
        self._is_submitted = is_submitted
        self._signs = directory / f"{name}-signs"
        self._signs.mkdir()
        self._output = directory / f"{name}.out"
        self._mark = f"driver-{os.getpid()}-{name}"
        (directory / f"{name}.yaml").write_text(DEFINITION.format(name=name, batch_records=BATCH_RECORDS))
        (directory / "steps.py").write_text(STEPS)
        (directory / "helpers.py").write_text(HELPERS)
        (directory / "driver.py").write_text(DRIVER)
        self._local = directory / f"{name}-local"
        self._command = [
            *(submitting(master) if is_submitted else (sys.executable,)),
            "driver.py",
            f"{name}.yaml",
            master,
            str(self._signs),
            bootstrap_servers,
        ]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Driver:
        environment = {
            **os.environ,
            MARK: self._mark,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._local),
        }
        environment.pop("PYSPARK_PYTHON", None)
        if self._is_submitted:
            python = f"python{sys.version_info.major}.{sys.version_info.minor}"
            environment |= {
                "SUBMITTED": "1",
                "PYSPARK_DRIVER_PYTHON": sys.executable,
                "PYSPARK_PYTHON": python,
            }
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent(),
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while (left := marked(self._mark)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        # Large, and of no use to whoever looks at what a failed test left.
        shutil.rmtree(self._local, ignore_errors=True)
        shutil.rmtree(self._directory / self._name / "home" / "package", ignore_errors=True)

    def put_up(self, point: str) -> None:
        (self._signs / point.replace(":", "-")).touch()

    def await_sign(self, point: str) -> Path:
        """Wait until it stands there; the path is to be removed."""
        reached = self._signs / f"{point.replace(':', '-')}.reached"
        self._until(reached.exists)
        return reached

    def finish(self) -> None:
        assert self._process is not None
        self._until(lambda: self._process is not None and self._process.poll() is not None, ended=True)
        assert self._process.returncode == 0, self.said()

    def _until(self, come_about: Any, *, ended: bool = False) -> None:
        assert self._process is not None
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not come_about():
            assert ended or self._process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(POLL_SECONDS)

    def said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")[-6000:]


def submitting(master: str) -> list[str]:
    import pyspark

    program = os.path.join(os.path.dirname(pyspark.__file__), "bin", "spark-submit")
    memory = "spark.executor.memory=1g"
    return [program, "--master", master, "--deploy-mode", "client", "--conf", memory]


def expected(sent: Orders) -> list[tuple[int, int, float, int]]:
    """What the steps make of every record that is not broken: number, twice its amount, the width of its note."""
    return [(part, n, n / 2, n % 50) for part, numbers in sent.good().items() for n in numbers]


def stored(path: Path) -> tuple[list[tuple[int, int, float, int]], set[str]]:
    """The rows, and the places they were made in."""
    import pyarrow.dataset as ds

    table = ds.dataset(path, format="parquet").to_table(columns=["part", "number", "twice", "wide", "place"])
    rows = zip(*(table.column(name).to_pylist() for name in ("part", "number", "twice", "wide")), strict=True)
    return sorted(rows), set(table.column("place").to_pylist())


def test_a_cluster_of_bare_workers_gives_every_row_once_whoever_dies(
    orders: tuple[str, Orders], tmp_path: Path
) -> None:
    bootstrap_servers, sent = orders
    with (
        SparkCluster(tmp_path / "cluster", java_home=find_java()) as cluster,
        Driver(tmp_path, "far", cluster.url, bootstrap_servers) as driver,
    ):
        driver.put_up("prepared:parquet")
        reached = driver.await_sign("prepared:parquet")
        assert len(cluster.workers[1].kill_executors()) == 1
        driver.put_up("planned")
        reached.unlink()
        reached = driver.await_sign("planned")
        reached.unlink()
        cluster.workers[0].kill()
        driver.finish()
    rows, places = stored(tmp_path / "far" / "files")
    assert rows == expected(sent)
    check_once(sent.good(), parquet_rows(tmp_path / "far" / "files"), "parquet")
    check_once(sent.good(), delta_rows(tmp_path / "far" / "table"), "delta")
    check_once(sent.broken(), dead_letter_rows(bootstrap_servers, "far-dlt"), "dead letters")
    assert list((tmp_path / "far" / "home" / "state" / "versions").iterdir())
    assert {place.split()[0] for place in places} == {str(tmp_path / "cluster" / "python")}
    assert all(Path(place.split()[1]).is_relative_to(tmp_path / "cluster") for place in places)


def test_a_program_that_spark_submit_starts_brings_its_session(
    orders: tuple[str, Orders], tmp_path: Path
) -> None:
    bootstrap_servers, sent = orders
    with (
        SparkCluster(tmp_path / "cluster", java_home=find_java()) as cluster,
        Driver(tmp_path, "given", cluster.url, bootstrap_servers, is_submitted=True) as driver,
    ):
        driver.finish()
    rows, places = stored(tmp_path / "given" / "files")
    assert rows == expected(sent)
    assert {place.split()[0] for place in places} == {str(tmp_path / "cluster" / "python")}
