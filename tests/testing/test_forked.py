"""A forked process is to its asker what one that was started would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import open_process

from holdfast.testing.forked import ForkedProcess

HOLDFAST = [sys.executable, "-m", "holdfast.cli"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="adopts orphans the way Linux does")


def outcome(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    with process:
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.parametrize("arguments", [["version"], ["no-such-command"], ["dump-log", "--files", "gone.log"]])
def test_it_says_and_ends_as_one_that_was_started(arguments: list[str], tmp_path: Path) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": str(tmp_path)}
    forked = open_process([*HOLDFAST, *arguments], **streams)
    assert isinstance(forked, ForkedProcess)
    assert outcome(forked) == outcome(subprocess.Popen([*HOLDFAST, *arguments], **streams))


def test_a_member_of_a_storm_is_forked_and_may_be_waited_for_in_vain() -> None:
    command = [sys.executable, "-m", "tests.support.chaos_member", "{}"]
    with open_process(command, stderr=subprocess.PIPE) as member:
        assert isinstance(member, ForkedProcess)
        _, errors = member.communicate(timeout=60)
    assert (member.returncode, b"KeyError: 'history'" in errors) == (1, True)
    with open_process([*HOLDFAST, "produce", "--topic", "t"], stdin=subprocess.PIPE) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=0.01)
        waiting.kill()
        assert waiting.wait() == -signal.SIGKILL


def test_it_reads_its_input_in_its_directory_with_its_environment(tmp_path: Path) -> None:
    (tmp_path / "here.properties").write_text("no.such.setting=1\n")
    command = [*HOLDFAST, "produce", "--topic", "t"]
    environment = {**os.environ, "HOLDFAST_BOOTSTRAP_SERVER": "nowhere.invalid:1", "HOLDFAST_TRACEBACK": "1"}
    process = open_process(
        [*command, "--producer.config", "here.properties"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=str(tmp_path),
    )
    with process:
        output, _ = process.communicate(b"line\n", timeout=60)
    assert process.returncode != 0
    assert b"no.such.setting" in output


def test_it_is_a_child_that_can_be_killed_and_leaves_its_ports_behind(tmp_path: Path) -> None:
    command = [*HOLDFAST, "serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    with open_process(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert any(b"ready on" in line for line in iter(process.stderr.readline, b""))
        assert process.poll() is None
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ([sys.executable, "-c", "pass"], {}),
        ([*HOLDFAST, "version"], {"env": {**os.environ, "PYTHONUTF8": "1"}}),
        ([*HOLDFAST, "version"], {"preexec_fn": os.getpid}),
    ],
)
def test_what_would_make_a_difference_is_started(command: list[str], options: dict[str, object]) -> None:
    process = open_process(command, stdout=subprocess.DEVNULL, **options)
    assert not isinstance(process, ForkedProcess)
    assert process.wait(timeout=60) == 0
