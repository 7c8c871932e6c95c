"""Finding a Java for Spark, and saying what to do where there is none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.pipeline import java
from holdfast.pipeline.java import JavaMissing, find_java, install_java, java_version


def make_java(home: Path, version: str, *, release: bool = True) -> str:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return str(home)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "USUAL_FOLDERS", ())


@pytest.mark.parametrize(("text", "major"), [("17.0.15", 17), ("1.8.0_402", 8), ("21", 21), ("25-ea", 25)])
@pytest.mark.parametrize("release", [True, False])
def test_the_version_is_read_from_the_release_file_or_asked(
    tmp_path: Path, text: str, major: int, release: bool
) -> None:
    assert java_version(make_java(tmp_path / "jdk", text, release=release)) == major


def test_java_home_comes_first(tmp_path: Path) -> None:
    home, other = make_java(tmp_path / "one", "21.0.1"), make_java(tmp_path / "two", "17.0.1")
    assert find_java({"JAVA_HOME": home, "PATH": f"{other}/bin"}) == home


def test_the_path_is_followed_through_links(tmp_path: Path) -> None:
    home = make_java(tmp_path / "one", "17.0.1")
    (tmp_path / "bin").mkdir()
    os.symlink(f"{home}/bin/java", tmp_path / "bin" / "java")
    assert find_java({"PATH": str(tmp_path / "bin")}) == home


def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old, new = make_java(tmp_path / "old", "11.0.2"), make_java(tmp_path / "new", "17.0.1")
    assert find_java({"JAVA_HOME": old, "PATH": f"{new}/bin"}) == new


@pytest.mark.usefixtures("nowhere")
def test_only_old_ones_are_named_in_the_advice(tmp_path: Path) -> None:
    old = make_java(tmp_path / "old", "11.0.2")
    with pytest.raises(JavaMissing, match=r"Java 17 or newer.*apt install.*is version 11"):
        find_java({"JAVA_HOME": old, "PATH": ""})


@pytest.mark.usefixtures("nowhere")
def test_the_usual_folders_are_the_last_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java(tmp_path / "jvm" / "java-17", "17.0.1")
    monkeypatch.setattr(java, "USUAL_FOLDERS", (f"{tmp_path}/jvm/*",))
    assert find_java({"PATH": ""}) == home


@pytest.mark.usefixtures("nowhere")
def test_java_is_installed_where_apt_can_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "USUAL_FOLDERS", (f"{tmp_path}/jvm/*",))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    apt = tmp_path / "bin" / "apt-get"
    apt.parent.mkdir()
    home = tmp_path / "jvm" / "java-21"
    apt.write_text(
        "#!/bin/sh\n"
        'case "$*" in *openjdk-17*) echo "E: no such package" >&2; exit 100;; update*) exit 0;; esac\n'
        f"mkdir -p {home}/bin && : > {home}/bin/java && chmod +x {home}/bin/java\n"
        f"echo 'JAVA_VERSION=\"21\"' > {home}/release\n"
    )
    apt.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    monkeypatch.setattr("shutil.which", lambda name, path=None: str(apt) if name == "apt-get" else None)
    assert install_java(environment) == str(home)


@pytest.mark.usefixtures("nowhere")
def test_nothing_is_installed_by_someone_who_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(JavaMissing, match="apt install"):
        install_java({"PATH": ""})
