"""The tree of commands: each one's module is imported when it is named, all of them only for --help."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup
from typer.exceptions import Exit, TyperException

from holdfast import __version__
from holdfast.cli import exits
from holdfast.errors import ExitCode


class CommandPlace(NamedTuple):
    """Where a command lives: a module, and the `typer.Typer` in it."""

    module: str
    attribute: str = "app"


COMMANDS: dict[str, CommandPlace] = {
    "serve": CommandPlace("holdfast.cli.serve_help"),
    "topics": CommandPlace("holdfast.cli.topics"),
    "configs": CommandPlace("holdfast.cli.configs"),
    "produce": CommandPlace("holdfast.cli.produce"),
    "consume": CommandPlace("holdfast.cli.consume"),
    "generate": CommandPlace("holdfast.cli.generate"),
    "export": CommandPlace("holdfast.cli.export"),
    "groups": CommandPlace("holdfast.cli.groups"),
    "transactions": CommandPlace("holdfast.cli.transactions"),
    "sink": CommandPlace("holdfast.cli.sink"),
    "dlq": CommandPlace("holdfast.cli.dlq"),
    "spool": CommandPlace("holdfast.cli.spool"),
    "pipeline": CommandPlace("holdfast.cli.pipeline"),
    "audit": CommandPlace("holdfast.cli.audit"),
    "audit verify": CommandPlace("holdfast.cli.audit_verify"),
    "trace": CommandPlace("holdfast.cli.trace"),
    "doctor": CommandPlace("holdfast.cli.doctor"),
    "lab": CommandPlace("holdfast.cli.lab"),
    "check": CommandPlace("holdfast.cli.check"),
    "cluster": CommandPlace("holdfast.cli.cluster"),
    "dump-log": CommandPlace("holdfast.cli.dump_log"),
    "demo": CommandPlace("holdfast.cli.demo"),
    "version": CommandPlace("holdfast.cli.version"),
}


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and imports one when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        command = typer.main.get_command(getattr(importlib.import_module(place.module), place.attribute))
        command.name = cmd_name
        # The list of all commands has one sentence of each.
        command.short_help = re.split(r"(?<=\.)\s", command.help or "", maxsplit=1)[0]
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Two words that are a command come before one: `audit verify` beside `audit PIPELINE`."""
        name = " ".join(args[:2])
        if name in COMMANDS and len(args) > 1:
            return name, self.get_command(ctx, name), args[2:]
        return super().resolve_command(ctx, args)


root = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
    help="holdfast moves data through Kafka without losing a message. "
    "Its tools take the flags of Kafka's own and work on Apache Kafka too.",
    epilog="Exit codes: 0 fine, 1 findings, 2 usage, 3 cannot connect or something is missing here, "
    "4 inconclusive, 130 interrupted.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise Exit


@root.callback()
def holdfast(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """The group itself does nothing: its commands do."""


def run_command(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(root)
    try:
        result = command.main(list(arguments), prog_name="holdfast", standalone_mode=False)
    except TyperException as error:
        return _report_usage(error)
    return result if isinstance(result, int) else ExitCode.FINE


def _report_usage(error: TyperException) -> int:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is not None:
        if not message:  # a group named without a command: typer's error is its help
            return ExitCode.USAGE
        message = f"{message.rstrip('.')} (try '{context.command_path} --help')"
    exits.complain(message)
    return ExitCode.USAGE
