"""`holdfast sink migrate`: the tables that `DatabaseSink` keeps its committed offsets in."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.exits import CannotConnect
from holdfast.cli.options import CommandGroup, examples, option
from holdfast.client.database.store import NEWEST, DatabaseUnreachable, open_database

app = CommandGroup(
    no_args_is_help=True,
    help="Prepare databases that messages are written to exactly once.",
)


@app.callback()
def sink() -> None:
    """The group itself does nothing: its commands do."""


@app.command(
    epilog=examples(
        "holdfast sink migrate --database postgresql://app@localhost/orders",
        "holdfast sink migrate --database sqlite:///orders.sqlite",
    )
)
def migrate(
    database: Annotated[
        str,
        option(
            "URL", "postgresql://…, sqlite:///path, or the path of a SQLite file.", envvar="HOLDFAST_DATABASE"
        ),
    ],
) -> None:
    """Create or update the tables that a sink keeps its offsets in; it may be run again at any time."""
    opened = open_database(database)
    try:
        opened.connect()
    except DatabaseUnreachable as error:
        raise CannotConnect(str(error)) from error
    try:
        applied = opened.migrate()
    finally:
        opened.close()
    if applied:
        typer.echo(f"{opened.name}: the sink's tables are now at version {NEWEST}")
    else:
        typer.echo(f"{opened.name}: the sink's tables are at version {NEWEST} already")
