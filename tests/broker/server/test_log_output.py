"""The broker's log: what is written, what is counted instead, and that the broker never waits for it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from holdfast import Broker
from holdfast.broker.node.loggers import BROKER, CONNECTIONS, GROUPS, REQUESTS, Levels
from holdfast.broker.server import log_output
from holdfast.broker.server.log_output import (
    LIMIT_LINES,
    LIMIT_SECONDS,
    LINE_CHARACTERS_MAX,
    LINES_MAX,
    LibraryLines,
    Limits,
    LogOutput,
    write_json_to_standard_error,
    write_to_standard_error,
)
from holdfast.cli.serve import parse_options
from holdfast.config.dynamic import Alteration, Operation
from holdfast.errors import UsageError
from holdfast.saying import Level, Line, debug, error, info, named, warn
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import CLOSED, WireClient

BAD_FRAME: Final = struct.pack(">i", -1)


class Written:
    """Takes lines, unless told to wait or to fail."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.failure: Exception | None = None
        self.waits = threading.Event()

    def __call__(self, at: float, line: Line) -> None:
        self.waits.set()
        self.may_go_on.wait(30)
        if self.failure is not None:
            raise self.failure
        self.lines.append(line)


@pytest.fixture
def written() -> Iterator[Written]:
    written = Written()
    yield written
    written.may_go_on.set()


# Levels


def test_lines_below_the_level_are_left_out(written: Written) -> None:
    log = LogOutput(written, Levels(Level.WARN))
    for line in (debug("debug"), "info", warn("warn"), error("error")):
        log(line)
    log.close()
    assert written.lines == ["warn", "error"]
    assert [line.level.name for line in written.lines] == ["WARN", "ERROR"]


def test_a_logger_has_a_level_of_its_own_that_changes_meanwhile(written: Written) -> None:
    log = LogOutput(written, Levels(Level.WARN))
    groups, others = named(log, GROUPS), named(log, BROKER)
    for change in (Alteration(GROUPS, Operation.SET, "DEBUG"), Alteration(GROUPS, Operation.DELETE, None)):
        log.levels.alter([change])
        groups(debug(f"group after {Operation(change.operation).name}"))
        others("other")
    log.close()
    assert written.lines == ["group after SET"]
    assert written.lines[0].logger == GROUPS


def test_the_level_is_chosen_on_the_command_line() -> None:
    assert parse_options([]).log_level is Level.INFO
    assert parse_options(["--log-level", "warn"]).log_level is Level.WARN
    with pytest.raises(SystemExit):
        parse_options(["--log-level", "loud"])


# Limits


def test_of_one_kind_the_first_lines_pass_and_the_others_are_counted() -> None:
    limits = Limits()
    passed = [number for number in range(500) if limits.admits(warn(f"frame {number}", "frames"), 0.0)]
    assert passed == list(range(LIMIT_LINES))
    assert limits.admits(error("another kind", "defects"), 0.0)
    assert all(limits.admits(Line("without a kind"), 0.0) for _ in range(500))
    assert limits.summaries(LIMIT_SECONDS - 1) == []
    (summary,) = limits.summaries(LIMIT_SECONDS)
    assert summary == f"{500 - LIMIT_LINES} more lines like this in the last minute: frame 499"
    assert (summary.level, summary.kind) == (Level.WARN, "")
    assert limits.next_end is None


def test_a_new_minute_begins_with_the_next_line() -> None:
    limits = Limits()
    for _ in range(LIMIT_LINES + 1):
        limits.admits(info("x", "k"), 0.0)
    assert limits.next_end == LIMIT_SECONDS
    assert len(limits.summaries(100.0)) == 1
    assert limits.admits(info("x", "k"), 100.0)
    assert limits.next_end == 100.0 + LIMIT_SECONDS
    assert limits.summaries(100.0 + LIMIT_SECONDS) == [], "nothing was left out"


def test_the_next_line_after_a_minute_comes_behind_what_was_counted(written: Written) -> None:
    now = 0.0
    log = LogOutput(written, clock=lambda: now)
    for _ in range(LIMIT_LINES + 7):
        log(warn("bad", "k"))
    now = LIMIT_SECONDS
    log(warn("later", "k"))
    log.close()
    assert written.lines == ["bad"] * LIMIT_LINES + [
        "7 more lines like this in the last minute: bad",
        "later",
    ]


def test_what_was_counted_is_written_at_the_end(written: Written) -> None:
    log = LogOutput(written)
    for _ in range(LIMIT_LINES + 2000):
        log(warn("bad", "k"))
    log.close()
    assert written.lines[LIMIT_LINES:] == ["2,000 more lines like this in the last minute: bad"]


# A reader that is slow, stuck or gone


def test_lines_that_nobody_takes_are_dropped_and_counted(written: Written) -> None:
    written.may_go_on.clear()
    log = LogOutput(written)
    log("first")
    assert written.waits.wait(30), "from now on the thread waits, and the queue fills"
    for number in range(LINES_MAX + 5):
        log(f"{number}")
    written.may_go_on.set()
    log.close()
    assert written.lines[:3] == ["first", "5 lines before this one were dropped: nobody took them", "0"]
    assert written.lines[-1] == f"{LINES_MAX - 1}"
    assert len(written.lines) == LINES_MAX + 2


def test_a_log_that_fails_loses_its_lines_and_counts_them_when_it_works_again() -> None:
    failures = [BrokenPipeError("nobody reads"), OSError("no room for the log"), ValueError("whatever")]
    lines: list[Line] = []

    def write(at: float, line: Line) -> None:
        if failures:
            raise failures.pop()
        lines.append(line)

    log = LogOutput(write)
    for line in ("lost", "lost", "lost", "taken"):
        log(line)
    log.close()
    assert lines == ["3 lines before this one were dropped: nobody took them", "taken"]


def test_closing_does_not_wait_for_a_reader_that_is_stuck(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "CLOSE_SECONDS", 0.01)
    written.may_go_on.clear()
    log = LogOutput(written)
    log("first")
    log.close()
    assert written.lines == []


# What a line looks like


def test_a_line_has_its_time_and_level_and_cannot_pass_for_two(capfd: pytest.CaptureFixture[str]) -> None:
    write_to_standard_error(0.0, warn("client 'x\x1b[2J'\n2026-01-01 00:00:00 ERROR forged"))
    first, second = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARN client 'x\\x1b\[2J'", first)
    assert second == "    2026-01-01 00:00:00 ERROR forged"


def test_a_line_of_json_is_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    write_json_to_standard_error(0.25, Line("of 'x\ny\x1b'", Level.WARN, logger=GROUPS))
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "WARN",
        "logger": GROUPS,
        "message": "of 'x\ny\x1b'",
    }


def test_an_embedded_broker_logs_with_logging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast.broker")
    with Broker() as broker:
        bad_connections(broker.bootstrap_servers, 1)
        broker.create_topic("orders")
        with pytest.raises(UsageError):
            broker.create_topic("others", settings={"retention.ms": "x"})
    told = {(record.name, record.levelname) for record in caplog.records}
    assert (CONNECTIONS, "INFO") in told
    refused = [record.getMessage() for record in caplog.records if record.name == REQUESTS]
    assert len(refused) == 1
    assert re.match(r"refused CreateTopics of 127\.0\.0\.1:\d+ \(.*PLAINTEXT\) for others: ", refused[0])


def test_of_a_very_long_line_both_ends_are_written(capfd: pytest.CaptureFixture[str]) -> None:
    write_to_standard_error(0.0, error("begin" + "x" * 10 * LINE_CHARACTERS_MAX + "end"))
    line = capfd.readouterr().err
    assert "begin" in line
    assert line.endswith("end\n")
    assert len(line) < LINE_CHARACTERS_MAX + 100


# Real processes


def bad_connections(bootstrap_servers: str, count: int) -> None:
    for _ in range(count):
        with WireClient(bootstrap_servers) as client:
            client.send(BAD_FRAME)
            assert client.receive() == CLOSED


def test_bad_connections_do_not_fill_the_log(broker: BrokerProcess) -> None:
    bad_connections(broker.bootstrap_servers, 200)
    broker.stop()
    told = [line for line in broker.log().splitlines() if "closing the connection" in line]
    assert len(told) == LIMIT_LINES + 1
    assert " INFO closing the connection of 127.0.0.1" in told[0]
    assert f" {200 - LIMIT_LINES} more lines like this" in told[-1]


def fill(pipe: int) -> None:
    """Write until nothing more fits, so that the next byte anybody writes has to wait."""
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe, b"\n")
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags)


def test_a_standard_error_that_nobody_reads_or_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--data-dir", str(tmp_path / "data")]
    process = BrokerProcess.open_process([*command, "--listen", "127.0.0.1:0"], stderr=writing)
    try:
        with os.fdopen(os.dup(reading), "rb", buffering=0) as said:
            ready = b""
            while b"ready on" not in ready or not ready.endswith(b"\n"):
                ready += said.read(1024) or pytest.fail(f"it ended: {ready!r}")
        found = re.search(rb"ready on (\S+?)(?:,| in )", ready)
        assert found is not None
        bootstrap_servers = found[1].decode()
        fill(writing)
        bad_connections(bootstrap_servers, 50)
        with WireClient(bootstrap_servers, timeout_s=30) as client:
            assert client.is_alive()
        os.close(writing)
        os.close(reading)  # from now on every line is a broken pipe
        bad_connections(bootstrap_servers, 50)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


NULL_DEVICE_FOR_CLOSED_STREAMS: Final = """
import os
os.close(0)
os.close(2)
from holdfast.broker.server.log_output import occupy_standard_descriptors
occupy_standard_descriptors()
print(*(os.readlink(f"/proc/self/fd/{number}") for number in (0, 2)), len(os.listdir("/proc/self/fd")))
"""


def test_no_data_file_gets_the_number_of_a_closed_standard_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NULL_DEVICE_FOR_CLOSED_STREAMS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["/dev/null", "/dev/null", "4"]


def test_what_libraries_log_goes_the_same_way() -> None:
    lines: list[str] = []
    logger = logging.getLogger("a.library")
    logger.propagate = False
    logger.addHandler(LibraryLines(lines.append))
    logger.info("quiet")
    logger.warning("socket.send() raised %s", "exception")
    try:
        raise OSError("out of system resource")
    except OSError:
        logger.exception("accepting failed")
    first, second = map(Line.of, lines)
    assert (first, first.level) == ("a.library: socket.send() raised exception", Level.WARN)
    assert second.startswith("a.library: accepting failed\nTraceback")
    assert second.level is Level.ERROR
    assert first.kind == second.kind != ""


# The embedded broker


def test_a_say_that_hangs_or_raises_holds_no_embedded_broker_up(written: Written) -> None:
    written.may_go_on.clear()

    def say(line: str) -> None:
        written(0.0, Line.of(line))
        raise ValueError("the program's own")

    with Broker(say=say) as broker:
        bad_connections(broker.bootstrap_servers, 3)
        with WireClient(broker.bootstrap_servers) as client:
            assert client.is_alive()
        assert written.lines == []
        written.may_go_on.set()
    assert len(written.lines) == 3


def test_an_embedded_broker_is_quiet_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    with Broker() as broker:
        bad_connections(broker.bootstrap_servers, 1)
    assert capfd.readouterr() == ("", "")
