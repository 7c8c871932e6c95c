"""Spark's classes in an archive: when it is used, how it is made, and that nothing goes wrong without it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from holdfast.pipeline import session as sessions
from holdfast.pipeline.class_archive import KEPT, LISTS_MAX, ClassArchive, class_archive, make
from holdfast.pipeline.java import find_java
from holdfast.pipeline.sinks.files import hold

pytestmark = pytest.mark.java

NAMES = "java/lang/Object\njava/lang/String\njava/util/ArrayList\n"


@pytest.fixture
def archive(tmp_path: Path) -> ClassArchive:
    return ClassArchive(find_java(), str(tmp_path / "java"), "key")


@pytest.fixture
def classes(archive: ClassArchive) -> str:
    os.makedirs(archive.directory)
    path = Path(archive.list_path)
    path.write_text(NAMES + "java/util/Has", encoding="ascii")  # as the JVM that still runs has written it
    return str(path)


def touched(path: str, seconds: int = 0, content: bytes = b"") -> str:
    Path(path).write_bytes(content)
    os.utime(path, (seconds, seconds))
    return path


# ---------------------------------------------------------------------------- what Java is told


def test_classes_are_noted_until_there_is_an_archive_and_then_it_is_used(archive: ClassArchive) -> None:
    assert archive.java_options()[0] == f"-XX:DumpLoadedClassList={archive.list_path}"
    Path(archive.path).write_bytes(b"classes")
    used = archive.java_options()
    assert f"-XX:SharedArchiveFile={archive.path}" in used
    assert "-Xshare:auto" in used


def test_what_others_can_write_to_is_not_used(archive: ClassArchive, classes: str) -> None:
    os.chmod(archive.directory, 0o777)
    assert archive.java_options() == []
    Path(archive.path).write_bytes(b"classes")
    assert not any("SharedArchiveFile" in option for option in archive.java_options())


def test_without_a_place_for_it_everything_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert ClassArchive(find_java(), str(tmp_path / "file" / "java"), "key").java_options() == []


def test_lists_of_runs_that_were_killed_do_not_pile_up(archive: ClassArchive) -> None:
    os.makedirs(archive.directory, mode=0o700)
    for number in range(20):
        touched(os.path.join(archive.directory, f"key.{number}.classes"), seconds=1_000 + number)
    archive.java_options()
    assert len(os.listdir(archive.directory)) == LISTS_MAX - 1


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ({"spark.driver.extraJavaOptions": "-Dx=y -Xshare:off"}, {}),
        ({"spark.driver.extraJavaOptions": "-XX:SharedArchiveFile=/mine.jsa"}, {}),
        ({"spark.driver.extraJavaOptions": "-XX:+UseZGC"}, {}),
        ({"spark.driver.memory": "40g"}, {}),
        ({"spark.driver.memory": "plenty"}, {}),
        ({}, {"SPARK_SUBMIT_OPTS": "-Xshare:auto"}),
        ({}, {"SPARK_HOME": "/nowhere"}),
    ],
)
def test_whoever_shares_classes_another_way_is_left_alone(
    settings: Mapping[str, str], environment: Mapping[str, str]
) -> None:
    assert class_archive(find_java(), {}, {}) is not None
    assert class_archive(find_java(), settings, environment) is None


def test_another_java_and_other_jars_have_an_archive_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "jars").mkdir()
    touched(str(tmp_path / "jars" / "one.jar"), content=b"1")
    java = tmp_path / "java" / "lib"
    java.mkdir(parents=True)
    touched(str(java / "modules"), content=b"1")

    def key(**settings: str) -> str:
        found = class_archive(str(tmp_path / "java"), settings, {"SPARK_HOME": str(tmp_path)})
        assert found is not None
        return found.key

    keys = [key(), key(**{"spark.driver.extraClassPath": "/more.jar"})]
    touched(str(tmp_path / "jars" / "one.jar"), content=b"22")
    keys.append(key())
    touched(str(tmp_path / "jars" / "two.jar"), content=b"1")
    keys.append(key())
    touched(str(java / "modules"), content=b"1", seconds=9)
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[-1]


def test_options_of_the_definition_come_after_those_of_the_archive(tmp_path: Path) -> None:
    settings = {"spark.driver.extraJavaOptions": "-Xshare:off"}
    chosen = sessions.session_settings(str(tmp_path), "local[*]", settings, ["-Xshare:auto"])
    assert chosen["spark.driver.extraJavaOptions"].endswith("-Xshare:auto -Xshare:off")


def test_a_jvm_that_ends_at_once_is_started_again_without_the_archive(
    archive: ClassArchive, classes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(archive.path).write_bytes(b"damaged in a way that Java does not see")
    tried: list[str] = []

    def start(settings: Mapping[str, str]) -> SparkSession:
        tried.append(settings["spark.driver.extraJavaOptions"])
        raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})

    monkeypatch.setattr(sessions, "_started", start)
    with pytest.raises(PySparkRuntimeError):
        sessions.spark_session("test", str(tmp_path / "home"), archive=archive)
    assert [archive.path in options for options in tried] == [True, False]
    assert not os.path.exists(archive.path)


def test_drivers_of_a_cluster_have_nothing_to_do_with_it(
    archive: ClassArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def start(settings: Mapping[str, str]) -> SparkSession:
        tried.append(settings["spark.driver.extraJavaOptions"])
        raise PySparkRuntimeError(errorClass="JAVA_GATEWAY_EXITED", messageParameters={})

    monkeypatch.setattr(sessions, "_started", start)
    monkeypatch.setattr(sessions, "shipped_package", lambda *_: str(tmp_path / "package.tar.gz"))
    with pytest.raises(PySparkRuntimeError):
        sessions.spark_session("test", str(tmp_path), master="spark://elsewhere:7077", archive=archive)
    assert len(tried) == 1
    assert archive.directory not in tried[0]


# ---------------------------------------------------------------------------- making it


def maps(archive: ClassArchive, class_path: str = "") -> bool:
    """Whether Java starts from it: with `-Xshare:on` it refuses to start otherwise."""
    java = os.path.join(archive.java_home, "bin", "java")
    options = ["-Xshare:on", f"-XX:SharedArchiveFile={archive.path}", "-version"]
    environment = {**os.environ, "CLASSPATH": class_path}
    done = subprocess.run([java, *options], env=environment, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def test_another_process_makes_an_archive_that_java_starts_from(archive: ClassArchive, classes: str) -> None:
    maker = archive.make_beside("")
    assert maker is not None
    assert archive.make_beside("") is None  # once for each run
    assert maker.wait(120) == 0
    assert maps(archive)
    assert sorted(os.listdir(archive.directory)) == ["key.jsa", "key.lock"]
    assert os.stat(archive.path).st_mode & 0o077 == 0


class Started:
    """What is asked of a session: the class path of its JVM."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, name: str) -> str:
        return ""


class Asked(ClassArchive):
    """Counts how often it is to be made."""

    def make_beside(self, class_path: str) -> None:
        with open(self.refusal_path, "a", encoding="ascii") as file:
            file.write("asked\n")


def test_it_is_made_at_the_clean_end_of_a_run_that_noted_its_classes(
    archive: ClassArchive, classes: str
) -> None:
    asked = Asked(archive.java_home, archive.directory, archive.key)
    with contextlib.suppress(RuntimeError), asked.learning(cast("SparkSession", Started())):
        raise RuntimeError
    assert not os.path.exists(classes)
    with asked.learning(cast("SparkSession", Started())):  # which noted nothing
        pass
    assert not os.path.exists(asked.refusal_path)
    Path(classes).write_text(NAMES, encoding="ascii")
    with asked.learning(cast("SparkSession", Started())):
        assert not os.path.exists(asked.refusal_path)
    assert Path(asked.refusal_path).read_text(encoding="ascii") == "asked\n"


def test_a_java_that_cannot_make_one_is_noted(archive: ClassArchive, classes: str, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho cannot have non-empty directory in paths; exit 1\n", encoding="ascii")
    java.chmod(0o755)
    refusing = replace(archive, java_home=str(tmp_path))
    assert not make(refusing, classes)
    assert b"non-empty directory" in Path(archive.refusal_path).read_bytes()
    assert archive.java_options() == []
    os.utime(archive.refusal_path, (1_000, 1_000))
    assert archive.java_options() != []  # a day later


def test_of_two_makers_one_makes(archive: ClassArchive, classes: str) -> None:
    with held(os.path.join(archive.directory, "key.lock")):
        assert not make(archive, classes)
    assert not os.path.exists(archive.path)


def test_archives_that_are_not_used_go_and_so_does_what_was_left(archive: ClassArchive, classes: str) -> None:
    old = [touched(os.path.join(archive.directory, f"old{at}.jsa"), seconds=1_000 + at) for at in range(KEPT)]
    left = [touched(os.path.join(archive.directory, name), 1_000) for name in ("a.1.new", "a.1.classes")]
    Path(archive.path).write_bytes(b"made already")
    assert make(archive, classes)
    assert Path(archive.path).read_bytes() == b"made already"
    assert not any(map(os.path.exists, [old[0], *left]))
    assert all(map(os.path.exists, old[1:]))


@contextlib.contextmanager
def held(path: str) -> Iterator[None]:
    lock = hold(path)
    assert lock is not None
    try:
        yield
    finally:
        lock.release()
