"""`holdfast demo`: a broker that is killed, a pipeline, and the count of what arrived.

Everything lives in a temporary directory. Exit code 1 when a message is missing, or there twice.
"""

from __future__ import annotations

import tempfile
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.testing.broker import BrokerProcess

BULK_MESSAGES = 200_000
ORDERS = 60_000

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    messages: Annotated[
        int, typer.Option(help="Messages of the broker's bulk run.", min=1000)
    ] = BULK_MESSAGES,
    orders: Annotated[int, typer.Option(help="Orders that go through the pipeline.", min=1000)] = ORDERS,
    no_pipeline: Annotated[
        bool, typer.Option("--no-pipeline", help="Leave out the pipeline, which needs Java 17 or newer.")
    ] = False,
    keep: Annotated[str | None, typer.Option(help="Keep the data in this directory.", metavar="DIR")] = None,
) -> None:
    """Start a broker, kill it, run a pipeline into Parquet and a topic, and count what arrived."""
    from holdfast.cli.demo_broker import try_broker

    if not no_pipeline:
        from holdfast.pipeline.java import find_java

        find_java()  # before anything else is started: without it half of this cannot run
    console = Console()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as temporary:
        directory = keep or temporary
        began = time.perf_counter()
        with BrokerProcess(f"{directory}/data") as broker:
            ready = ("start to ready", f"{(time.perf_counter() - began) * 1000:,.0f} ms")
            figures, survived = try_broker(broker, console, messages)
            _show(console, "The broker: one durable, Kafka-compatible node", [ready, *figures])
            if not no_pipeline:
                from holdfast.cli.demo_pipeline import try_pipeline

                outcome = try_pipeline(broker, console, directory, orders)
                _show(console, "The pipeline: orders to Parquet and a topic, exactly once", outcome.rows())
                survived = survived and outcome.is_whole
            broker.stop()
    if not survived:
        console.print("[red]A message is missing, out of order or there twice: see above.[/red]")
        raise typer.Exit(1)
    console.print(
        "Nothing was lost. Your own: [bold]holdfast serve --data-dir DIR[/bold], then "
        "[bold]holdfast pipeline init[/bold]"
    )


def _show(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
