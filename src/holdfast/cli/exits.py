"""Exit codes and error messages: the one place where a failure becomes a line and a number.

A command raises, `run` catches. The codes are a promise to scripts:

    0    fine
    1    findings: something asked for failed, or a check found a problem
    2    usage: the command line or a file it names is wrong
    3    cannot connect: no broker answered in time, or the machine lacks something (Java, disk, a permission)
    4    inconclusive: a comparison that cannot be decided yet
    130  interrupted by Ctrl-C or SIGTERM

No traceback reaches the user; set HOLDFAST_TRACEBACK=1 to see one.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum

from holdfast.errors import HoldfastError, UsageError


class ExitCode(IntEnum):
    FINE = 0
    FINDINGS = 1
    USAGE = 2
    CANNOT_CONNECT = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130


class CommandFailed(HoldfastError):
    """The command could not do what it was asked; the message says what to do about it."""

    exit_code = ExitCode.FINDINGS


class CannotConnect(CommandFailed):
    """No broker answered in time."""

    exit_code = ExitCode.CANNOT_CONNECT


def run(action: Callable[[], int | None]) -> int:
    """Run a command and turn whatever it raises into one line on standard error and an exit code."""
    try:
        code = action() or ExitCode.FINE
        sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _forget_standard_output()
        return ExitCode.FINE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.FINDINGS
    except Exception as error:  # noqa: BLE001  the outermost frame: every error ends as a message
        if os.environ.get("HOLDFAST_TRACEBACK"):
            traceback.print_exc()
        message, exit_code = explain(error)
        complain(message)
        return exit_code


def explain(error: Exception) -> tuple[str, ExitCode]:
    """What to tell the user about an error, and the exit code it means."""
    if isinstance(error, CommandFailed):
        return str(error), error.exit_code
    if isinstance(error, UsageError):
        return str(error), ExitCode.USAGE
    if isinstance(error, HoldfastError):
        return str(error), ExitCode(getattr(error, "exit_code", ExitCode.FINDINGS))
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", ExitCode.FINDINGS
    what = f"{type(error).__name__}: {error}"
    return f"unexpected error, {what} (HOLDFAST_TRACEBACK=1 shows where)", ExitCode.FINDINGS


def complain(message: str) -> None:
    print(f"holdfast: {message}", file=sys.stderr, flush=True)


def _forget_standard_output() -> None:
    """The reader of our output has gone (`| head`): the interpreter's last flush goes nowhere, in silence."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
