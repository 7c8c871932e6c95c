"""What the commands of `holdfast pipeline` share: arguments, loading a definition, telling what is wrong."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from typer.exceptions import Exit

from holdfast.cli.exits import CommandFailed, complain
from holdfast.cli.options import flag, option
from holdfast.errors import ExitCode, HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.pipeline.definition.errors import Finding
    from holdfast.pipeline.definition.loading import Loaded

FileArgument: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="FILE", help="The pipeline: a YAML file, or a Python file that makes a Pipeline."),
]
BootstrapOption: TypeAlias = Annotated[
    str | None,
    option(
        "HOST:PORT,…",
        "The brokers of the source, over the definition's own (without both: HOLDFAST_BOOTSTRAP_SERVER, "
        "127.0.0.1:9092).",
    ),
]


@dataclass(frozen=True)
class RunFlags:
    """Where a pipeline reads and on what it runs."""

    bootstrap_server: BootstrapOption = None
    master: Annotated[str | None, option("URL", "Spark's master (default: all cores of this machine).")] = (
        None
    )
    shared_filesystem: Annotated[
        bool,
        flag(
            "The home and the paths of file sinks are on a file system that all machines of the master see."
        ),
    ] = False

    @property
    def spark(self) -> dict[str, Any]:
        """What the engine takes of it."""
        return {"master": self.master, "shared_filesystem": self.shared_filesystem}


RUN: Final = RunFlags()


class LacksSomething(CommandFailed):
    """What a command needs of this machine is not there."""

    exit_code = ExitCode.CANNOT_CONNECT


def require_extra() -> None:
    """What pipelines need beside the broker and its tools is an extra, and the error says so."""
    if importlib.util.find_spec("pyarrow") is None:
        raise LacksSomething("pipelines need pyarrow, which is not installed: pip install 'holdfast[spark]'")


def load(file: str) -> Loaded:
    require_extra()
    from holdfast.pipeline.definition.errors import DefinitionError
    from holdfast.pipeline.definition.loading import load_pipeline

    try:
        loaded = load_pipeline(file)
    except DefinitionError as error:
        tell(error.findings)
        raise Exit(ExitCode.USAGE) from error
    tell(loaded.warnings)
    return loaded


@contextmanager
def located(loaded: Loaded) -> Iterator[None]:
    """What goes wrong while a definition is used gets the line it stands in, an exit code, and shows no secret."""
    from holdfast.pipeline.changes.classifying import UnsafeChange
    from holdfast.pipeline.definition.errors import DefinitionError, Finding
    from holdfast.pipeline.definition.naming import path_of
    from holdfast.pipeline.definition.secrets import expand_definition

    try:
        yield
    except DefinitionError as error:
        tell([loaded.findings.located(finding) for finding in error.findings])
        raise Exit(ExitCode.USAGE) from error
    except UnsafeChange as error:
        for change in error.changes:
            path = path_of(change.where, loaded.definition)
            tell([loaded.findings.located(Finding(path, str(change).removeprefix(f"{change.where}: ")))])
        lines = [line for line in str(error).splitlines() if not line.startswith("  ") or not error.changes]
        raise CommandFailed(". ".join(lines)) from error
    except (HoldfastError, OSError) as error:
        from holdfast.pipeline.engine.failures import explain_failure, place_of

        explained = explain_failure(error)
        expanded, redactor = expand_definition(loaded.definition)
        place, text = place_of(explained, expanded), redactor.redact(str(explained))
        if place:
            # The line says of which step or sink.
            tell([loaded.findings.located(Finding(place, re.sub(r"^(step|sink) '[^']+': ", "", text)))])
            raise Exit(getattr(explained, "exit_code", ExitCode.FINDINGS)) from error
        explained.args = (text,)
        raise explained from error


def tell(findings: list[Finding] | tuple[Finding, ...]) -> None:
    for finding in findings:
        print(finding, file=sys.stderr)


def ask(question: str, *, otherwise: str) -> None:
    """Go on only if somebody at the terminal says so."""
    if not sys.stdin.isatty():
        raise UsageError(f"{otherwise}: there is no terminal to ask at; --yes does it unasked")
    if not typer.confirm(question, default=False):
        complain(otherwise)
        raise Exit(ExitCode.FINDINGS)
