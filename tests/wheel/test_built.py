"""The wheel itself: the same bytes from the same sources, and an upgrade that opens what earlier versions left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from tests.golden.make_pipelines import send
from tests.golden.make_spools import create
from tests.golden.opening import GENERATIONS, PACKED, expected_of, fetch_all, produce, text_of, unpack
from tests.golden.pipeline_inputs import plain_rows
from tests.golden.pipelines import Pipelines
from tests.golden.test_spools import Scene, arrived, by_spool, wanted
from tests.support.wheels import ROOT, Installed

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient
from holdfast.wire.batch import Record, build_batch, iterate_records

pytestmark = [pytest.mark.check, pytest.mark.xdist_group("wheel")]

Install = Callable[..., Installed]
SOURCES: Final = (".gitignore", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src")
LONG_AGO_S: Final = 1_000_000_000
BUILD_SECONDS_MAX: Final = 120
COMMAND_SECONDS_MAX: Final = 240


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


def broker_of(installed: Installed, directory: Path, expected: Any) -> BrokerProcess:
    """The wheel's, on what was unpacked into a directory."""

    class InstalledBroker(BrokerProcess):
        @staticmethod
        def open_process(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            assert command[0] == sys.executable
            there = [str(installed.python), *command[1:]]
            return subprocess.Popen(there, env=installed.environment(), **options)

    log_dirs = ",".join(str(directory / each) for each in expected.get("log_dirs", ["data"]))
    return InstalledBroker(
        directory / "data", settings=expected["settings"], arguments=("--data-dir", log_dirs)
    )


def run(installed: Installed, broker: BrokerProcess, directory: Path, line: str) -> tuple[int, str]:
    """A command of the wheel: its exit code and what it printed."""
    done = subprocess.run(
        [installed.bin / "holdfast", *line.split()],
        cwd=directory,
        env=installed.environment(HOLDFAST_BOOTSTRAP_SERVER=broker.bootstrap_servers),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS_MAX,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


of_generations = pytest.mark.parametrize(
    "generation",
    # The oldest is the longest way; each alone is opened from the checkout in every run.
    [GENERATIONS[0], *(pytest.param(each, marks=pytest.mark.long) for each in GENERATIONS[1:])],
    ids=lambda path: path.name,
)


@of_generations
def test_the_installed_wheel_opens_what_an_earlier_version_left(
    generation: Path, install: Install, tmp_path: Path
) -> None:
    installed = install()
    archive = generation / f"broker-killed{PACKED}"
    unpack(archive, tmp_path)
    expected = expected_of(archive)

    with (
        broker_of(installed, tmp_path, expected) as broker,
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


@of_generations
@pytest.mark.parametrize("guarantee", ["at-least-once", "exactly-once"])
def test_the_installed_wheel_delivers_what_waits_in_an_earlier_versions_spools(
    generation: Path, guarantee: str, install: Install, tmp_path: Path
) -> None:
    installed = install()
    archive = generation / f"spools{PACKED}"
    unpack(archive, tmp_path)
    expected = expected_of(archive)
    with (
        broker_of(installed, tmp_path, expected) as broker,
        WireClient(broker.bootstrap_servers) as client,
    ):
        for topic, (partitions, configs) in expected["topics_to_come"].items():
            create(client, topic, partitions, configs)
        scene = Scene(broker.bootstrap_servers, client, tmp_path, expected)
        spools = {each["spool"] for each in scene.sent(guarantee)}
        code, printed = run(installed, broker, tmp_path, f"spool drain --spool {guarantee}")
        assert code == bool(scene.sent(guarantee, "refused")), printed
        arriving = [each for each in scene.sent(guarantee) if each["fate"] != "refused"]
        found = arrived(scene, spools, {"letters": 2, "receipts": 1, "addresses": 1})
        assert by_spool(found) == by_spool(wanted(arriving))


@of_generations
def test_the_installed_wheel_reads_what_an_earlier_versions_pipelines_left(
    generation: Path, install: Install, tmp_path: Path
) -> None:
    """Homes, ledgers, states, sinks and certificates."""
    installed = install("spark")
    archive = generation / f"pipelines{PACKED}"
    unpack(archive, tmp_path)
    with broker_of(installed, tmp_path, expected_of(archive)) as broker:
        code, printed = run(installed, broker, tmp_path, "pipeline status plain.yaml --output json")
        standing = json.loads(printed)
        assert code == 0
        assert [(each["problem"], each["lag"]) for each in standing["sinks"]] == [(None, 0)] * 4
        code, printed = run(installed, broker, tmp_path, "audit pipeline counting.yaml --output json")
        report = json.loads(printed)
        assert report["findings"] == []
        assert code == 4, "rows from before digests are trusted, and nobody has accepted that"
        assert run(installed, broker, tmp_path, "audit verify certificates")[0] == 0


@pytest.mark.long
@pytest.mark.java
@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda path: path.name)
def test_the_installed_wheel_goes_on_with_an_earlier_versions_pipeline(
    generation: Path, install: Install, tmp_path: Path
) -> None:
    installed = install("spark")
    archive = generation / f"pipelines{PACKED}"
    unpack(archive, tmp_path)
    expected = expected_of(archive)
    with broker_of(installed, tmp_path, expected) as broker:
        send(broker.bootstrap_servers, "plain", expected["parts"] + 1)
        assert run(installed, broker, tmp_path, "pipeline run plain.yaml")[0] == 0
        kept = plain_rows(expected["parts"] + 1)["kept"]
        pipelines = Pipelines(broker.bootstrap_servers, tmp_path, expected)
        assert sorted(row["id"] for row in pipelines.rows("out/plain")) == kept
