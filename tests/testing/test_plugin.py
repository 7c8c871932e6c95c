"""The pytest plugin: brokers, prepared directories, marks, parallel workers, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from holdfast.testing import BrokerProcess, BrokerThread
from holdfast.testing.plugin import asked_for
from holdfast.testing.processes import MARK, marked

WAIT_SECONDS_MAX = 60.0
FILLED: list[str] = []
"""Where a broker was when it was filled."""


def shop(broker: BrokerProcess) -> None:
    FILLED.append(broker.data_dir)
    broker.create_topic("orders", partitions=2)
    broker.produce("orders", "one", "two")


@pytest.mark.xdist_group("prepared")
@pytest.mark.holdfast(prepared=shop)
@pytest.mark.parametrize("mine", ["three", "four"])
@pytest.mark.check
def test_each_test_gets_a_copy_of_what_was_prepared_once(mine: str, holdfast_broker: BrokerProcess) -> None:
    holdfast_broker.produce("orders", mine)
    assert sorted(each.text for each in holdfast_broker.consume_all("orders")) == sorted(["one", "two", mine])
    assert len(FILLED) == 1
    assert holdfast_broker.data_dir not in FILLED
    assert "clean" not in holdfast_broker.log()  # no word of recovery: it starts as after a clean stop


@pytest.mark.xdist_group("prepared")
@pytest.mark.holdfast(prepared=shop, mode="thread")
def test_a_thread_gets_one_as_well(holdfast_broker: BrokerThread) -> None:
    assert len(holdfast_broker.consume_all("orders")) == 2
    assert len(FILLED) == 1


def test_a_topic_of_its_own_is_new_and_named_after_the_test(
    holdfast_session_broker: BrokerProcess, holdfast_topic: str
) -> None:
    assert holdfast_topic.startswith("test_a_topic_of_its_own_is_new_and_named_after_the_test-")
    assert holdfast_session_broker.consume_all(holdfast_topic) == []


PROGRAM = """
import os, time
import pytest

@pytest.mark.parametrize("number", range(2))
def test_wait(number, holdfast_broker, holdfast_session_broker, worker_id):
    holdfast_broker.create_topic("orders")
    holdfast_session_broker.create_topic(f"orders-{number}")
    with open(f"{os.environ['SEEN']}/{worker_id}-{number}", "w") as file:
        file.write(f"{holdfast_broker.bootstrap_servers} {holdfast_session_broker.bootstrap_servers}")
    while os.path.exists(f"{os.environ['SEEN']}/wait"):
        time.sleep(0.01)
"""


def run_pytest(directory: Path, program: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A run of pytest, and the mark by which all its processes are found."""
    mark = uuid4().hex
    (directory / "test_program.py").write_text(program)
    (directory / "seen").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, "test_program.py"],
        cwd=directory,
        env={**os.environ, MARK: mark, "SEEN": str(directory / "seen")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, mark


def wait_for(count: int, directory: Path) -> list[Path]:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while (
        len(seen := [each for each in directory.iterdir() if each.name != "wait" and each.stat().st_size])
        < count
    ):
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)
    return seen


def assert_none_left(mark: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.check
def test_parallel_workers_have_brokers_of_their_own_and_leave_none_when_pytest_is_killed(
    tmp_path: Path,
) -> None:
    process, mark = run_pytest(tmp_path, PROGRAM, "-n", "2")
    (tmp_path / "seen" / "wait").touch()
    seen = wait_for(2, tmp_path / "seen")  # both workers are in their first test
    assert {each.name.partition("-")[0] for each in seen} == {"gw0", "gw1"}
    assert len({address for each in seen for address in each.read_text().split()}) == 4
    assert len(marked(mark)) >= 1 + 2 + 4
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (tmp_path / "seen" / "wait").unlink()
    assert_none_left(mark)


@pytest.mark.check
def test_a_killed_pytest_takes_its_brokers_with_it(tmp_path: Path) -> None:
    process, mark = run_pytest(tmp_path, PROGRAM)
    (tmp_path / "seen" / "wait").touch()
    wait_for(1, tmp_path / "seen")
    assert len(marked(mark)) >= 3
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert_none_left(mark)  # while its test would wait on


def test_a_mark_that_says_something_else_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match="'process' or 'thread', not 'fork'"):
        asked_for(pytest.mark.holdfast(mode="fork").mark)
    for wrong in (pytest.mark.holdfast(setting={"num.partitions": "3"}), pytest.mark.holdfast("thread")):
        with pytest.raises(pytest.UsageError, match="settings and prepared, not"):
            asked_for(wrong.mark)


class TestSettings:
    """Those of a suite's own replace ours, and those of a mark are added."""

    @pytest.fixture(scope="session")
    def holdfast_settings(self) -> dict[str, str]:
        return {"num.partitions": "7"}

    @pytest.mark.holdfast(mode="thread", settings={"auto.create.topics.enable": "true"})
    def test_both_hold(self, holdfast_broker: BrokerThread) -> None:
        assert holdfast_broker.server is not None
        config = holdfast_broker.server.config
        assert (config.num_partitions, config.auto_create_topics_enable) == (7, True)
        assert config.offsets_topic_num_partitions == 50
