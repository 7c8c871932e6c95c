"""`holdfast version`."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from holdfast import __version__
from holdfast.cli.options import CommandGroup, OutputOption
from holdfast.cli.output import Output, print_json

app = CommandGroup()

PARTS = ("confluent-kafka", "kio")


@app.command()
def version(output: OutputOption = Output.TABLE) -> None:
    """Show the version of holdfast, and of what it stands on."""
    parts = {name: metadata.version(name) for name in PARTS}
    if output is Output.JSON:
        print_json({"holdfast": __version__, "python": platform.python_version(), **parts})
        return
    rest = ", ".join(f"{name} {number}" for name, number in parts.items())
    typer.echo(f"holdfast {__version__} (Python {platform.python_version()}, {rest})")
