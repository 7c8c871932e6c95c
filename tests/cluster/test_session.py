"""The settings of a session: for this machine, and for a cluster that is sent everything."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.pipeline import session
from holdfast.pipeline.cluster.packaging import Package
from holdfast.pipeline.session import (
    SHUFFLE,
    SettingFixed,
    fit_to_cluster,
    local_cores,
    session_settings,
    shipped_package,
    shipping,
    worker_python,
    workers_with_parts,
)


def test_executors_get_the_parts_beside_what_the_definition_gives_them() -> None:
    assert shipping("file:///a.tar.gz", {}) == {
        "spark.archives": "file:///a.tar.gz#holdfast_parts",
        "spark.executorEnv.PYTHONPATH": "./holdfast_parts",
        "spark.python.daemon.module": "holdfast_worker",
    }
    own = {"spark.archives": "hdfs:///model.zip#model", "spark.executorEnv.PYTHONPATH": "/opt/own"}
    both = shipping("file:///a.tar.gz", own)
    assert both["spark.archives"] == "file:///a.tar.gz#holdfast_parts,hdfs:///model.zip#model"
    assert both["spark.executorEnv.PYTHONPATH"] == "./holdfast_parts:/opt/own"


def test_the_workers_python_is_what_the_definition_says_before_the_environment() -> None:
    assert worker_python({}, {}).startswith("python3.")
    assert worker_python({}, {"PYSPARK_PYTHON": "/env/python3"}) == "/env/python3"
    both = worker_python({"spark.pyspark.python": "/opt/python3"}, {"PYSPARK_PYTHON": "/env/python3"})
    assert both == "/opt/python3"


def test_what_is_for_this_machine_is_not_set_for_a_cluster(tmp_path: Path) -> None:
    near = session_settings(str(tmp_path), "local[2]", {})
    far = session_settings(str(tmp_path), "spark://elsewhere:7077", {})
    assert near["spark.driver.host"] == "127.0.0.1"
    assert near["spark.python.daemon.module"] == "holdfast.pipeline.worker_daemon"
    assert near["spark.executorEnv.HOLDFAST_LOCAL_CORES"] == "2"
    assert "spark.executorEnv.HOLDFAST_LOCAL_CORES" not in far
    assert not {"spark.driver.host", "spark.driver.bindAddress", "spark.python.daemon.module"} & far.keys()
    assert far["spark.speculation"] == near["spark.speculation"] == "false"
    with pytest.raises(SettingFixed, match=r"spark\.speculation"):
        session_settings(str(tmp_path), "spark://elsewhere:7077", {"spark.speculation": "true"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.sql.ansi.enabled", "false"),
        ("spark.sql.files.ignoreCorruptFiles", "true"),
        ("spark.sql.files.ignoreMissingFiles", "TRUE"),
        ("spark.sql.session.timeZone", "Europe/Vienna"),
        ("spark.sql.timestampType", "TIMESTAMP_NTZ"),
        ("spark.sql.caseSensitive", "true"),
        ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MILLIS"),
        ("spark.sql.legacy.sizeOfNull", "false"),
        ("spark.sql.optimizer.decorrelateSubqueryLegacyIncorrectCountHandling.enabled", "true"),
    ],
)
def test_a_setting_that_results_rest_on_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(SettingFixed, match=f"{re.escape(name)} to '{value}'"):
        session_settings(str(tmp_path), "local[2]", {name: value})


def test_a_setting_that_says_the_same_is_taken(tmp_path: Path) -> None:
    same = {"spark.sql.session.timeZone": "Etc/UTC", "spark.sql.ansi.enabled": "TRUE", "spark.app.id": "x"}
    assert session_settings(str(tmp_path), "local[2]", same)["spark.sql.ansi.enabled"] == "true"


def test_java_options_of_the_definition_come_last_so_that_they_win(tmp_path: Path) -> None:
    name, checked = "spark.driver.extraJavaOptions", "-Darrow.enable_unsafe_memory_access=false"
    near = session_settings(str(tmp_path), "local[2]", {name: checked})[name].split()
    assert near[-1] == checked
    assert near.index("-Darrow.enable_unsafe_memory_access=true") < len(near) - 1
    assert "arrow" not in session_settings(str(tmp_path), "spark://elsewhere:7077", {})[name]


def test_a_definition_names_more_to_ship_and_long_work_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def make(directory: str, *, more: list[str], progress: object) -> Package:
        asked.append(more)
        assert callable(progress)
        for done in range(0, 101, 5):
            progress(done << 20, 100 << 20)
        path = tmp_path / "holdfast-1.tar.gz"
        path.write_bytes(b"x" * (2 << 20))
        return Package(str(path), "1", 2 << 20, 3 << 20, 1, {}, True)

    monkeypatch.setattr("holdfast.pipeline.cluster.packaging.make_package", make)
    told: list[str] = []
    settings = {session.PACKAGE_WITH: "scikit-learn, shapely"}
    served = shipped_package(str(tmp_path / "home"), settings, told.append)
    assert asked == [["scikit-learn", "shapely"]]
    assert Path(served).parent == tmp_path / "home" / "package"
    assert told[3] == "packing the Python parts for the cluster: 30 of 100 MB"
    assert told[-1].startswith("Python parts for the cluster: 2 MB in ")
    assert len(told) == 12


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local[4]", 4),
        ("local", 1),
        ("local[3,2]", 3),
        ("local-cluster[2,4,1024]", 8),
        ("local[*]", os.cpu_count()),
    ],
)
def test_shuffles_on_this_machine_follow_the_tasks_that_run_at_a_time(master: str, cores: int) -> None:
    assert local_cores(master) == cores


@pytest.mark.parametrize(
    ("cores", "settings", "now"), [(640, {}, "640"), (8, {}, "200"), (640, {SHUFFLE: "200"}, "200")]
)
def test_shuffles_on_a_large_cluster_follow_its_cores(cores: int, settings: dict[str, str], now: str) -> None:
    conf = {SHUFFLE: "200"}
    spark: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(defaultParallelism=cores),
        conf=SimpleNamespace(get=conf.get, set=conf.__setitem__),
    )
    fit_to_cluster(spark, settings)
    assert conf[SHUFFLE] == now


class Context:
    """Of a session that a user brings, as far as the parts go."""

    master = "spark://elsewhere:7077"
    pythonExec = "python3"  # noqa: N815  as Spark calls it

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.listArchives: list[str] = []
        self.addArchive = self.listArchives.append


def test_a_session_that_a_user_brings_gets_the_parts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def shipped(home: str, settings: Mapping[str, str], tell: object) -> str:
        asked.append(settings.get(session.PACKAGE_WITH, ""))
        return f"{home}/package/holdfast-{len(asked[-1])}.tar.gz"

    monkeypatch.setattr(session, "shipped_package", shipped)
    first, other = Context(), Context()
    for context in (first, other):
        for home, settings in (("a", {}), ("b", {}), ("c", {session.PACKAGE_WITH: "shapely"})):
            spark: Any = SimpleNamespace(sparkContext=context)
            with workers_with_parts(spark, home, settings):
                assert context.environment == {"PYTHONPATH": f"./{session.PARTS}"}
            assert context.environment == {}
    assert asked == ["", "shapely"] * 2
    assert first.listArchives == [
        f"{path}#{session.PARTS}" for path in ("a/package/holdfast-0.tar.gz", "c/package/holdfast-7.tar.gz")
    ]
