"""Exit codes and error messages: the one place where a failure becomes a line and a number.

A command raises, `run` catches. The codes are a promise to scripts:

    0    fine
    1    findings: something asked for failed, or a check found a problem
    2    usage: the command line or a file it names is wrong
    3    cannot connect: no broker answered in time, or the machine lacks something (Java, disk, a permission)
    4    inconclusive: a comparison that cannot be decided yet
    130  interrupted by Ctrl-C or SIGTERM

No traceback reaches the user; set HOLDFAST_TRACEBACK=1 to see one.

Nobody has to read what a command prints: when the reader of standard output or standard error goes away (`| head`), the
command does all of its work and its exit code is the same. Commands that only print, without an end, stop instead.

Ctrl-C and SIGTERM for commands that must finish what they began: a signal sets a flag, raising nothing.

`KeyboardInterrupt` can strike between reading a line and sending it, and the line is lost without a trace. A
command inside `Interrupts` looks at the flag where it is safe to stop.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Final

from holdfast.errors import ExitCode, HoldfastError, UsageError

EXTRAS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("duckdb", "numba", "numpy", "pyarrow"), "reader"),
    "cryptography": "sign",
    "psycopg": "postgres",
    **dict.fromkeys(("deltalake", "fastavro", "google", "jsonschema", "pandas", "pyspark"), "spark"),
    **dict.fromkeys(
        ("attr", "authlib", "avro", "cachetools", "certifi", "httpx2", "referencing", "requests"), "registry"
    ),
}
"""By the module that is missing: the extra of ours that brings it."""
DISTRIBUTIONS: Final = {"attr": "attrs", "google": "protobuf"}
"""Of modules with another name than what is installed."""


class CommandFailed(HoldfastError):
    """The command could not do what it was asked; the message says what to do about it."""

    exit_code = ExitCode.FINDINGS


class CannotConnect(CommandFailed):
    """No broker answered in time."""

    exit_code = ExitCode.CANNOT_CONNECT


class _Unread(io.FileIO):
    """A standard stream: what nobody reads any more is dropped; a full disk behind it is told once."""

    stops_command = False
    is_lost = False

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            is_unread = isinstance(error, BrokenPipeError) and not self.stops_command
            if data and not (
                is_unread or self.is_lost
            ):  # with nothing, typer looks what kind of stream it is
                self.is_lost = True
                error.filename = "standard output" if self.fileno() == 1 else "standard error"
                raise
            return memoryview(data).nbytes


def take_standard_streams() -> None:
    """For this process: let nobody who stops reading, or never did (`>&-`), change what a command does."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process lives
            continue
        stream.flush()
        raw = _Unread(descriptor, "w", closefd=False)
        # PYTHONUNBUFFERED stays in force.
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
        given = (stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through)
        setattr(sys, name, io.TextIOWrapper(buffer, *given))


def stop_when_unread() -> None:
    """For a command that prints without an end: it stops, with exit code 0, when nobody reads on."""
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if isinstance(raw, _Unread):
        raw.stops_command = True


def run(action: Callable[[], int | None]) -> int:
    """Run a command and turn whatever it raises into one line on standard error and an exit code."""
    try:
        code = int(action() or ExitCode.FINE)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.FINE
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # what typer makes of it
            return ExitCode.FINE
        return stop.code if isinstance(stop.code, int) else ExitCode.FINDINGS
    except Exception as error:  # noqa: BLE001  the outermost frame: every error ends as a message
        if os.environ.get("HOLDFAST_TRACEBACK"):
            traceback.print_exc()
        message, exit_code = explain(error)
        complain(message)
        return exit_code


def explain(error: Exception) -> tuple[str, ExitCode]:
    """What to tell the user about an error, and the exit code it means."""
    if isinstance(error, HoldfastError):
        otherwise = ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FINDINGS
        return str(error), ExitCode(getattr(error, "exit_code", otherwise))
    if isinstance(error, ModuleNotFoundError) and (missing := (error.name or "").partition(".")[0]) in EXTRAS:
        name = DISTRIBUTIONS.get(missing, missing)
        what = f"this needs {name}, which is not installed: pip install 'holdfast[{EXTRAS[missing]}]'"
        return what, ExitCode.CANNOT_CONNECT
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", ExitCode.FINDINGS
    what = f"{type(error).__name__}: {error}"
    return f"unexpected error, {what} (HOLDFAST_TRACEBACK=1 shows where)", ExitCode.FINDINGS


def complain(message: str) -> None:
    with suppress(OSError):  # a full disk behind standard error, for one; the exit code tells too
        print(f"holdfast: {message}", file=sys.stderr, flush=True)


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    def __init__(self) -> None:
        self.count = 0
        """One asks to finish in order, two to finish at once."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
