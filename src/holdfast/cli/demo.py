"""`holdfast demo`: three kills, and the proof that nothing was lost.

A broker, a sender with a spool and a Spark pipeline, each a process of its own, are each killed with SIGKILL while
orders go through them (`demo.storm`). Then the audit reads the topic and the outputs and says what became of every
message, and a count of its own, order by order, says the same. With `--unsafe` plain clients and plain Spark go through
the same storm, and are counted by the same count.

Exit code 1 when something of ours was lost or is there twice, 4 when the audit could not decide. The data lies in a
temporary directory unless `--keep` names one; the certificate stays in any case.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer.exceptions import Exit

from holdfast.cli.cluster import EngineChoice
from holdfast.cli.options import CommandGroup, choice, flag, option
from holdfast.errors import ExitCode, UsageError

BULK_MESSAGES = 200_000
ORDERS = 60_000
HANDED_OVER_MESSAGES = 3_000
"""By each of the two brokers, with `--graduate`."""
CERTIFICATES = "holdfast-demo"
"""In the working directory: where the certificate goes when the rest is not kept."""

app = CommandGroup()


@app.command()
def demo(
    orders: Annotated[
        int, option("N", "Orders that are sent: copies, late and malformed ones included.", min=1000)
    ] = ORDERS,
    engine: Annotated[
        EngineChoice, choice("The broker that is killed: holdfast's own, or a local Apache Kafka.")
    ] = EngineChoice.HOLDFAST,
    unsafe: Annotated[bool, flag("Then the same with plain clients and plain Spark, side by side.")] = False,
    seed: Annotated[int, option("N", "Another seed sends other orders.")] = 0,
    keep: Annotated[str | None, option("DIR", "Keep everything in this directory.")] = None,
    svg: Annotated[str | None, option("FILE", "Write the last picture to this file too.")] = None,
    no_pipeline: Annotated[bool, flag("Only the broker and its figures, without Java.")] = False,
    messages: Annotated[
        int, option("N", "With --no-pipeline: messages of the bulk run.", min=1000)
    ] = BULK_MESSAGES,
    graduate: Annotated[
        bool,
        flag(
            "Instead: Apache Kafka takes the broker's place on its directory and port while a sender writes."
        ),
    ] = False,
) -> None:
    """Kill a broker, a sender and a Spark pipeline while orders go through them, and prove that nothing was lost."""
    console = Console()
    if graduate:
        if unsafe or no_pipeline or engine is not EngineChoice.HOLDFAST:
            raise UsageError("--graduate goes from holdfast's own broker to Apache Kafka, and alone")
        with workplace(keep) as directory:
            _hand_over(console, directory)
        return
    if no_pipeline:
        if unsafe or engine is not EngineChoice.HOLDFAST:
            raise UsageError("--no-pipeline is about holdfast's own broker alone")
        with workplace(keep) as directory:
            _broker_alone(console, directory, messages)
        return
    from holdfast.demo.show import Show
    from holdfast.pipeline.java import find_java
    from holdfast.pipeline.session import require_spark

    # Before anything is started: nothing of this works without them.
    require_spark()
    find_java()
    with workplace(keep) as directory:
        show = Show(
            console, directory, certificates(keep), engine.value, orders, seed, is_kept=keep is not None
        )
        try:
            code = show.run(beside_plain=unsafe)
        except KeyboardInterrupt:
            console.print("interrupted: every process that the demo started has been ended")
            raise Exit(ExitCode.INTERRUPTED) from None
    if svg is not None:
        show.draw(svg)
    raise Exit(code)


@contextlib.contextmanager
def workplace(keep: str | None) -> Iterator[Path]:
    """The directory of the run: the one that is named, which must be empty, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    directory = Path(keep).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"--keep {keep}: it is there already, and has something in it")
    directory.mkdir(parents=True, exist_ok=True)
    yield directory


def certificates(keep: str | None) -> Path:
    """Where the certificate goes: it outlives the data."""
    if keep is not None:
        return Path(keep).absolute()
    if os.access(".", os.W_OK):
        return Path(CERTIFICATES).absolute()
    return Path(tempfile.mkdtemp(prefix="holdfast-demo-certificate-"))


def _broker_alone(console: Console, directory: Path, messages: int) -> None:
    from holdfast.demo.broker import try_broker
    from holdfast.testing.broker import BrokerProcess

    began = time.perf_counter()
    with BrokerProcess(str(directory / "data")) as broker:
        ready = ("start to ready", f"{(time.perf_counter() - began) * 1000:,.0f} ms")
        figures, survived = try_broker(broker, console, messages)
        broker.stop()
    console.print(_table("The broker: one durable, Kafka-compatible node", [ready, *figures]))
    if not survived:
        console.print("[red]A message is missing, out of order or there twice: see above.[/red]")
        raise Exit(ExitCode.FINDINGS)
    console.print("Nothing was lost. Your own: [bold]holdfast serve --data-dir DIR[/bold]")


def _hand_over(console: Console, directory: Path) -> None:
    from holdfast.demo.graduation import hand_over

    figures, is_whole = hand_over(directory, console, HANDED_OVER_MESSAGES)
    console.print(_table("From holdfast to Apache Kafka, in place", figures))
    if not is_whole:
        console.print("[red]Something was lost, is there twice or is not proven: see above.[/red]")
        raise Exit(ExitCode.FINDINGS)
    console.print("Nothing was lost. Your own: [bold]holdfast graduate --help[/bold]")


def _table(title: str, figures: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in figures:
        table.add_row(*row)
    return table
