"""How `serve` stands in `holdfast --help`; the command itself is `cli/serve.py`, reached without typer."""

from __future__ import annotations

import typer
from typer.exceptions import Exit

from holdfast.cli.options import CommandGroup
from holdfast.cli.serve import SUMMARY, serve_command

app = CommandGroup()


@app.command(
    help=SUMMARY,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def serve(context: typer.Context) -> None:
    raise Exit(serve_command(context.args) or 0)
