"""`holdfast cluster`: brokers to try things on, in the background, that end when told and no sooner."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

from holdfast.cli.exits import CommandFailed
from holdfast.cli.options import CommandGroup, OutputOption, choice, examples, option
from holdfast.cli.output import Output, print_json, print_table

app = CommandGroup(
    no_args_is_help=True,
    help="Brokers on the loopback interface to try things on: one of ours, or one or three of Apache Kafka.",
)


class EngineChoice(StrEnum):
    HOLDFAST = "holdfast"
    KAFKA = "kafka"


DirectoryOption: TypeAlias = Annotated[
    str, option("DIR", "Where the cluster's data, logs and process ids are.")
]


@app.command(epilog=examples("holdfast cluster up --engine kafka --brokers 3 --directory ./cluster"))
def up(
    directory: DirectoryOption,
    engine: Annotated[
        EngineChoice, choice("Whose brokers: holdfast's own, or Apache Kafka's.")
    ] = EngineChoice.HOLDFAST,
    brokers: Annotated[int, option("N", "How many: 1, or 3 of Apache Kafka.")] = 1,
) -> None:
    """Start a cluster in the background and print its bootstrap servers.

    Maven fetches Apache Kafka the first time; its controller is a separate process.
    """
    from holdfast.lab.clusters import start_cluster

    cluster = start_cluster(engine.value, brokers, Path(directory))
    print(cluster.bootstrap_servers)


@app.command()
def down(directory: DirectoryOption) -> None:
    """End a cluster: exactly the processes that `up` started. Its data stays."""
    from holdfast.lab.clusters import load_cluster

    ended = load_cluster(Path(directory)).stop()
    print(f"{ended} {'process' if ended == 1 else 'processes'} ended")


@app.command()
def status(directory: DirectoryOption, output: OutputOption = Output.TABLE) -> None:
    """Whether a cluster's processes live, and where. Exit code 1 when one does not."""
    from holdfast.lab.clusters import load_cluster

    cluster = load_cluster(Path(directory))
    states = [(each, "running" if each.is_alive() else "gone") for each in cluster.nodes]
    if output is Output.JSON:
        nodes = [{"node": each.name, "pid": each.pid, "state": state} for each, state in states]
        print_json({"engine": cluster.engine, "bootstrap_servers": cluster.bootstrap_servers, "nodes": nodes})
    else:
        print_table(("node", "pid", "state"), [(each.name, each.pid, state) for each, state in states])
        print(cluster.bootstrap_servers)
    if any(state == "gone" for _, state in states):
        raise CommandFailed(f"not every process of the cluster in {directory} lives")
