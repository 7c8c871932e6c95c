from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.forked import open_process

from holdfast.cli import exits
from holdfast.errors import ConfigError, CorruptLog, ExitCode

Run = Callable[..., subprocess.CompletedProcess[bytes]]
COMMAND = [sys.executable, "-m", "holdfast.cli"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "list"),
        ("configs", "describe", "--topic", "t"),
        ("produce", "--topic", "t"),
        ("consume", "--topic", "t"),
        ("consume", "--topic", "t", "--group", "g"),
        ("groups", "list"),
        ("groups", "describe", "--group", "g"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics", "--to-earliest"),
        ("groups", "delete", "--group", "g"),
        ("groups", "delete-offsets", "--group", "g", "--topic", "t"),
        ("transactions", "list"),
        ("transactions", "describe", "--transactional-id", "i"),
        ("transactions", "abort", "--transactional-id", "i"),
        ("transactions", "find-hanging", "--topic", "t"),
    ],
)
def test_no_broker_is_one_line_and_exit_code_3(
    run_anywhere: Run, dead_address: str, arguments: tuple[str, ...]
) -> None:
    result = run_anywhere(*arguments, "--bootstrap-server", dead_address, "--connect-timeout-ms", "300")
    assert result.returncode == 3
    (line,) = result.stderr.decode().splitlines()
    assert dead_address in line
    assert "Connection refused" in line
    assert result.stdout == b""


@pytest.mark.parametrize("command", ["topics", "groups", "transactions"])
def test_a_broker_that_never_answers_is_exit_code_3(
    run_anywhere: Run, silent_address: str, command: str
) -> None:
    result = run_anywhere(
        command, "list", "--bootstrap-server", silent_address, "--connect-timeout-ms", "300"
    )
    assert result.returncode == 3
    assert b"cannot connect" in result.stderr


def test_the_bootstrap_server_comes_from_the_environment(run_anywhere: Run, dead_address: str) -> None:
    result = run_anywhere(
        "topics", "list", "--connect-timeout-ms", "300", env={"HOLDFAST_BOOTSTRAP_SERVER": dead_address}
    )
    assert result.returncode == 3
    assert dead_address.encode() in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("topics", "nonsense"),
        ("topics", "create"),
        ("topics", "create", "--topic", "t", "--partitions", "none"),
        ("topics", "list", "--nonsense"),
        ("topics", "list", "--topic", "("),
        ("topics", "list", "--output", "xml"),
        ("topics", "list", "--command-config", "/no/such/file"),
        ("topics", "create", "--topic", "t", "--config", "nonsense"),
        ("topics", "create", "--topic", "t", "--replica-assignment", "a:b"),
        ("configs", "describe"),
        ("configs", "alter", "--topic", "t"),
        ("configs", "describe", "--entity-type", "nonsense"),
        ("produce",),
        ("produce", "--topic", "t", "--request-required-acks", "2"),
        ("produce", "--topic", "t", "--reader-property", "parse.keys=true"),
        ("produce", "--topic", "t", "--command-property", "nonsense=1"),
        ("consume",),
        ("consume", "--topic", "t", "--include", "t"),
        ("consume", "--topic", "t", "--offset", "5"),
        ("consume", "--topic", "t", "--partition", "0", "--offset", "-5"),
        ("consume", "--topic", "t", "--group", "g", "--partition", "0"),
        ("consume", "--topic", "t", "--isolation-level", "nonsense"),
        ("consume", "--topic", "t", "--formatter-property", "print.keys=true"),
        ("groups", "list", "--state", "nonsense"),
        ("groups", "list", "--type", "share"),
        ("groups", "list", "--group", "g"),
        ("groups", "describe"),
        ("groups", "describe", "--group", "g", "--all-groups"),
        ("groups", "describe", "--group", "g", "--members", "--state"),
        ("groups", "delete"),
        ("groups", "delete", "--group", "g", "--topic", "t"),
        ("groups", "delete-offsets", "--group", "g"),
        ("groups", "delete-offsets", "--group", "g", "--topic", "t:x"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics"),
        ("groups", "reset-offsets", "--group", "g", "--to-earliest"),
        ("groups", "reset-offsets", "--all-topics", "--to-earliest"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics", "--topic", "t", "--to-earliest"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics", "--to-earliest", "--to-latest"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics", "--to-latest", "--dry-run", "--execute"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics", "--to-datetime", "yesterday"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics", "--by-duration", "1h"),
        ("groups", "reset-offsets", "--group", "g", "--from-file", "/no/such/file"),
        ("groups", "reset-offsets", "--group", "g", "--all-topics", "--from-file", "/dev/null"),
        ("transactions", "list", "--state", "nonsense"),
        ("transactions", "describe"),
        ("transactions", "describe-producers", "--topic", "t"),
        ("transactions", "abort"),
        ("transactions", "abort", "--topic", "t", "--start-offset", "0"),
        ("transactions", "abort", "--topic", "t", "--partition", "0"),
        ("transactions", "abort", "--topic", "t", "--partition", "0", "--producer-id", "1"),
        ("transactions", "abort", "--transactional-id", "i", "--topic", "t"),
        ("transactions", "find-hanging"),
        ("transactions", "find-hanging", "--broker-id", "1", "--partition", "0"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_without_a_traceback(
    run_here_anywhere: Run, arguments: tuple[str, ...]
) -> None:
    check_usage_error(run_here_anywhere(*arguments))


@pytest.mark.parametrize(
    "arguments",
    [("serve", "--nonsense"), ("serve", "--override", "nonsense"), ("topics", "list", "--nonsense")],
)
def test_a_wrong_command_line_ends_its_process_with_2(run_anywhere: Run, arguments: tuple[str, ...]) -> None:
    check_usage_error(run_anywhere(*arguments))


def check_usage_error(result: subprocess.CompletedProcess[bytes]) -> None:
    assert result.returncode == 2
    assert result.stderr.strip()
    assert b"Traceback" not in result.stderr


def test_a_group_of_commands_alone_shows_its_help(run_anywhere: Run) -> None:
    result = run_anywhere("topics")
    assert result.returncode == 2
    assert b"describe" in result.stdout + result.stderr


def test_every_kind_of_error_has_its_code() -> None:
    assert exits.explain(exits.CannotConnect("x"))[1] == ExitCode.CANNOT_CONNECT
    assert exits.explain(exits.CommandFailed("x"))[1] == ExitCode.FINDINGS
    assert exits.explain(ConfigError("x"))[1] == ExitCode.USAGE
    assert exits.explain(CorruptLog("x"))[1] == ExitCode.FINDINGS
    message, code = exits.explain(FileNotFoundError(2, "No such file", "/a"))
    assert (message, code) == ("/a: No such file", ExitCode.FINDINGS)


def test_an_unexpected_error_is_a_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ZeroDivisionError("by nought")

    assert exits.run(fail) == ExitCode.FINDINGS
    assert capsys.readouterr().err == (
        "holdfast: unexpected error, ZeroDivisionError: by nought (HOLDFAST_TRACEBACK=1 shows where)\n"
    )


@pytest.mark.parametrize("command", ["groups", "transactions"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_while_it_waits_is_130(
    start: Callable[..., subprocess.Popen[bytes]], silent_listener: socket.socket, command: str, number: int
) -> None:
    host, port = silent_listener.getsockname()
    process = start(command, "list", "--bootstrap-server", f"{host}:{port}")
    silent_listener.settimeout(60)
    connection, _ = silent_listener.accept()  # it waits for an answer now
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    connection.close()
    assert (process.returncode, errors) == (130, b"")


def test_an_interrupt_is_130() -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert exits.run(interrupt) == 130


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("topics", "--help"), 0),
        (("version",), 0),
        (("lab", "list"), 0),
        (("topics", "nonsense"), 2),
        (("doctor", "--producer", "acks-0.properties"), 1),
    ],
)
@pytest.mark.parametrize("unread", ["stdout", "both"])
def test_output_that_nobody_reads_changes_no_exit_code(
    arguments: tuple[str, ...], code: int, unread: str, tmp_path: Path
) -> None:
    (tmp_path / "acks-0.properties").write_text("acks=0\n")
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": writer, "stderr": writer if unread == "both" else subprocess.PIPE}
    try:
        with open_process([*COMMAND, *arguments], cwd=tmp_path, **streams) as process:
            _, said = process.communicate(timeout=60)
    finally:
        os.close(writer)
    assert (process.returncode, (said or b"").count(b"\n")) == (code, int(code == 2 and unread == "stdout"))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.check
def test_a_command_without_end_stops_when_nobody_reads(unbuffered: str) -> None:
    reader, writer = os.pipe()
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [*COMMAND, "generate", "orders", "--to", "-", "--count", "100000000"], stdout=writer, env=environment
    ) as process:
        os.close(writer)
        os.read(reader, 1)
        os.close(reader)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("version",), b"holdfast: standard output: No space left on device\n"),
        (("topics", "nonsense"), None),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.check
def test_a_full_disk_behind_the_output_is_one_line_and_a_code(
    arguments: tuple[str, ...], said: bytes | None, unbuffered: str
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        errors = full if said is None else subprocess.PIPE
        with subprocess.Popen([*COMMAND, *arguments], stdout=full, stderr=errors, env=environment) as process:
            _, heard = process.communicate(timeout=60)
    assert (process.returncode, heard) == (1 if said else 2, said)


def test_what_an_extra_brings_is_told_by_its_name() -> None:
    missing = ModuleNotFoundError("No module named 'pyarrow.lib'", name="pyarrow.lib")
    assert exits.explain(missing) == (
        "this needs pyarrow, which is not installed: pip install 'holdfast[reader]'",
        ExitCode.CANNOT_CONNECT,
    )
