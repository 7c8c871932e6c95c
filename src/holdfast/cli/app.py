"""The tree of commands: each one's module is imported when it is named."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Exit, TyperException

from holdfast import __version__
from holdfast.cli import exits
from holdfast.errors import ExitCode


class CommandPlace(NamedTuple):
    """Where a command lives, and its line in the list of all commands."""

    module: str
    task: str
    """The heading that it stands under."""
    summary: str


COMMANDS: dict[str, CommandPlace] = {
    "demo": CommandPlace("demo", "Try it", "Crash a broker and a pipeline, and see nothing lost."),
    "version": CommandPlace("version", "Try it", "Show the versions of holdfast and its libraries."),
    "man": CommandPlace("man", "Try it", "Print all of this as a manual page."),
    "bugreport": CommandPlace("bugreport", "Try it", "Gather what a report of a bug needs, without secrets."),
    "serve": CommandPlace("serve_help", "Run brokers", "Start the broker: one durable node in this process."),
    "cluster": CommandPlace(
        "cluster", "Run brokers", "Start and end brokers to try things on, ours or Kafka's."
    ),
    "graduate": CommandPlace(
        "graduate", "Run brokers", "Hand the data over to Apache Kafka in place, with proof."
    ),
    "backup": CommandPlace("backup", "Run brokers", "Copy a running node's data to a repository of backups."),
    "restore": CommandPlace("restore", "Run brokers", "Make data directories from a backup, verified."),
    "dump-log": CommandPlace("dump_log", "Run brokers", "Show what log and index files hold."),
    "topics": CommandPlace("topics", "Topics and groups", "Create, list, describe, alter and delete topics."),
    "configs": CommandPlace(
        "configs", "Topics and groups", "Show and change the settings of topics and brokers."
    ),
    "groups": CommandPlace(
        "groups", "Topics and groups", "List and delete groups, reset their committed offsets."
    ),
    "transactions": CommandPlace(
        "transactions", "Topics and groups", "List transactions, find those that hang, abort them."
    ),
    "produce": CommandPlace("produce", "Messages", "Send lines of standard input to a topic."),
    "consume": CommandPlace("consume", "Messages", "Print the messages of topics."),
    "export": CommandPlace("export", "Messages", "Write records to Parquet, Arrow, CSV or JSON lines."),
    "generate": CommandPlace("generate", "Messages", "Send sample data, with the results expected of it."),
    "spool": CommandPlace("spool", "Messages", "Show and send what producers have spooled to disk."),
    "dlq": CommandPlace("dlq", "Messages", "List, show, filter and redrive dead letters."),
    "sink": CommandPlace("sink", "Messages", "Prepare databases that messages are written to."),
    "pipeline": CommandPlace("pipeline", "Pipelines", "Check, run, change and rebuild pipelines on Spark."),
    "audit": CommandPlace(
        "audit", "Find and prove losses", "Prove that every record is where it belongs, or accounted for."
    ),
    "trace": CommandPlace(
        "trace", "Find and prove losses", "Show the life of one record, from producer to sink."
    ),
    "doctor": CommandPlace(
        "doctor", "Find and prove losses", "Find what can lose messages in settings, code, clusters."
    ),
    "exporter": CommandPlace(
        "exporter", "Find and prove losses", "Show topics, groups and transactions to Prometheus."
    ),
    "check": CommandPlace(
        "check", "Find and prove losses", "Judge a history: what was lost, duplicated, reordered."
    ),
    "lab": CommandPlace("lab", "Find and prove losses", "Make every loss happen, and see it prevented."),
}


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and imports one when it is asked for."""

    is_listing = False

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The list of all commands is made from the table."""
        self.is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.is_listing = False

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """A shell that completes the name of a command waits for none of them to be imported."""
        self.is_listing = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        if self.is_listing:
            return TyperCommand(cmd_name, help=place.summary, rich_help_panel=place.task)
        command = typer.main.get_command(importlib.import_module(f"holdfast.cli.{place.module}").app)
        command.name = cmd_name
        return command


root = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
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
