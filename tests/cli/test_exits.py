from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from holdfast.cli import exits
from holdfast.errors import ConfigError, CorruptLog

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "list"),
        ("configs", "describe", "--topic", "t"),
        ("produce", "--topic", "t"),
        ("consume", "--topic", "t"),
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


def test_a_broker_that_never_answers_is_exit_code_3(run_anywhere: Run, silent_address: str) -> None:
    result = run_anywhere(
        "topics", "list", "--bootstrap-server", silent_address, "--connect-timeout-ms", "300"
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
        ("serve", "--nonsense"),
        ("serve", "--override", "nonsense"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2_without_a_traceback(
    run_anywhere: Run, arguments: tuple[str, ...]
) -> None:
    result = run_anywhere(*arguments)
    assert result.returncode == 2
    assert result.stderr.strip()
    assert b"Traceback" not in result.stderr


def test_a_group_of_commands_alone_shows_its_help(run_anywhere: Run) -> None:
    result = run_anywhere("topics")
    assert result.returncode == 2
    assert b"describe" in result.stdout + result.stderr


def test_every_kind_of_error_has_its_code() -> None:
    assert exits.explain(exits.CannotConnect("x"))[1] == exits.ExitCode.CANNOT_CONNECT
    assert exits.explain(exits.CommandFailed("x"))[1] == exits.ExitCode.FINDINGS
    assert exits.explain(ConfigError("x"))[1] == exits.ExitCode.USAGE
    assert exits.explain(CorruptLog("x"))[1] == exits.ExitCode.FINDINGS
    message, code = exits.explain(FileNotFoundError(2, "No such file", "/a"))
    assert (message, code) == ("/a: No such file", exits.ExitCode.FINDINGS)


def test_an_unexpected_error_is_a_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ZeroDivisionError("by nought")

    assert exits.run(fail) == exits.ExitCode.FINDINGS
    assert capsys.readouterr().err == (
        "holdfast: unexpected error, ZeroDivisionError: by nought (HOLDFAST_TRACEBACK=1 shows where)\n"
    )


def test_an_interrupt_is_130() -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert exits.run(interrupt) == 130
