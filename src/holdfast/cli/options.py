"""Options that several commands share: one name, one help text, one default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from holdfast.cli.output import Output

DEFAULT_BOOTSTRAP_SERVER = "127.0.0.1:9092"
DEFAULT_CONNECT_TIMEOUT_MS = 10_000

BootstrapServerOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--bootstrap-server",
        metavar="HOST:PORT,…",
        envvar="HOLDFAST_BOOTSTRAP_SERVER",
        help="The broker or brokers to ask first.",
    ),
]
CommandConfigOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--command-config", metavar="FILE", help="A properties file for the client (security, time-outs…)."
    ),
]
ConnectTimeoutOption: TypeAlias = Annotated[
    int,
    typer.Option(
        "--connect-timeout-ms",
        min=1,
        metavar="MS",
        help="Give up, with exit code 3, when no broker has answered after this long.",
    ),
]
OutputOption: TypeAlias = Annotated[
    Output, typer.Option("--output", case_sensitive=False, help="For people (table) or for programs (json).")
]


def examples(*lines: str) -> str:
    """The end of a --help text; rich keeps a line break only where there is an empty line."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in lines)])


class OptionalValues(TyperCommand):
    """A command some of whose options may stand without a value, which is then empty.

    Kafka's tools take `--state` as well as `--state Stable,Empty`; typer's options always have a value or never.
    """

    flags: Sequence[str] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        completed: list[str] = []
        for index, argument in enumerate(args):
            completed.append(argument)
            if argument in self.flags and (index + 1 == len(args) or args[index + 1].startswith("-")):
                completed.append("")
        return super().parse_args(ctx, completed)
