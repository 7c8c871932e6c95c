"""The wheel itself: the same bytes from the same sources, and an upgrade that opens what earlier versions left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from tests.golden.opening import GENERATIONS, PACKED, expected_of, fetch_all, produce, text_of, unpack
from tests.support.wheels import ROOT, Installed

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient
from holdfast.wire.batch import Record, build_batch, iterate_records

pytestmark = [pytest.mark.check, pytest.mark.xdist_group("wheel")]

Install = Callable[..., Installed]
SOURCES: Final = (".gitignore", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src")
LONG_AGO_S: Final = 1_000_000_000
BUILD_SECONDS_MAX: Final = 120


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    """On another day, in another place, by somebody with other habits."""
    # Without git's data: with them a wheel also names the commit that it is of.
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for place in (here, elsewhere):
        place.mkdir()
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, place / name)
    for path in elsewhere.rglob("*"):
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
        path.chmod(0o700 if path.is_dir() else 0o600)
    builds = [
        subprocess.Popen(
            [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path / name],
            cwd=where,
            env={**os.environ, **habits},
            stdout=subprocess.DEVNULL,
        )
        for name, where, habits in (
            ("one", here, {"TZ": "UTC", "PYTHONHASHSEED": "1"}),
            ("other", elsewhere, {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "LC_ALL": "C"}),
        )
    ]
    assert [build.wait(BUILD_SECONDS_MAX) for build in builds] == [0, 0]
    one, other = (next((tmp_path / name).glob("*.whl")).read_bytes() for name in ("one", "other"))
    assert one == other


@pytest.mark.parametrize(
    "generation",
    # The oldest is the longest way; each alone is opened from the checkout in every run.
    [GENERATIONS[0], *(pytest.param(each, marks=pytest.mark.long) for each in GENERATIONS[1:])],
    ids=lambda path: path.name,
)
def test_the_installed_wheel_opens_what_an_earlier_version_left(
    generation: Path, install: Install, tmp_path: Path
) -> None:
    installed = install()
    archive = generation / f"broker-killed{PACKED}"
    unpack(archive, tmp_path)
    expected = expected_of(archive)

    class InstalledBroker(BrokerProcess):
        @staticmethod
        def open_process(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            assert command[0] == sys.executable
            there = [str(installed.python), *command[1:]]
            return subprocess.Popen(there, env=installed.environment(), **options)

    log_dirs = ",".join(str(tmp_path / each) for each in expected["log_dirs"])
    arguments = ("--data-dir", log_dirs)
    with (
        InstalledBroker(tmp_path / "data", settings=expected["settings"], arguments=arguments) as broker,
        WireClient(broker.bootstrap_servers) as client,
    ):
        for topic, described in expected["topics"].items():
            for number, partition in enumerate(described["partitions"]):
                found = [
                    text_of(record.value)
                    for header, batch in fetch_all(client, topic, number)
                    if not header.is_control
                    for record in iterate_records(batch)
                    if header.base_offset + record.offset_delta >= partition["start"]
                ]
                kept = [each for each in partition["records"] if each["offset"] >= partition["start"]]
                assert found == [each["value"] for each in kept], f"{topic}-{number}"
        topic = next(iter(expected["topics"]))
        assert produce(client, topic, 0, build_batch([Record(0, 0, b"key", b"on it goes")])).error_code == 0
        assert broker.stop() == 0
