"""`holdfast exporter`: show a cluster's topics, groups and transactions to Prometheus."""

from __future__ import annotations

import logging
import time
from typing import Annotated

from holdfast.cli.exits import complain
from holdfast.cli.options import SERVER, CommandGroup, ServerFlags, examples, option
from holdfast.errors import UsageError

app = CommandGroup()


@app.command(
    epilog=examples(
        "holdfast exporter --bootstrap-server kafka:9092",
        "holdfast exporter --command-config client.properties --listen 0.0.0.0:9308 --every 30s",
    )
)
def exporter(
    listen: Annotated[
        str,
        option("HOST:PORT", "Where /metrics is; a port alone is for this machine only, 0 takes a free one."),
    ] = "9308",
    every: Annotated[str, option("DURATION", "How often to look at the cluster, such as 15s or 1m.")] = "15s",
    server: ServerFlags = SERVER,
) -> None:
    """Show a cluster, ours or Apache Kafka's, to Prometheus: kafka_exporter's series and what it lacks.

    What it lacks: the time until a group loses a message that it has not read, groups without a member, committed
    offsets outside the log, transactions that hang. It runs until it is stopped; a cluster that does not answer is
    holdfast_exporter_up 0.
    """
    from holdfast import exposition
    from holdfast.cli.client import read_properties
    from holdfast.doctor.exporting import Exporter
    from holdfast.pipeline.definition.units import parse_duration_ms
    from holdfast.supervisor import Supervisor

    try:
        every_s = parse_duration_ms(every) / 1000
    except ValueError as error:
        raise UsageError(f"--every: {error}") from error
    host, port = exposition.parse_address(listen)
    given = read_properties(server.command_config) if server.command_config else {}
    timeout = {"socket.connection.setup.timeout.ms": str(server.connect_timeout_ms)}
    looking = Exporter({**timeout, **given, "bootstrap.servers": server.bootstrap_server})
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    looking.look()
    with exposition.served(looking.text, host, port) as taken:
        complain(f"metrics of {server.bootstrap_server} at http://{host}:{taken}/metrics")
        supervisor = Supervisor()
        supervisor.ready(f"metrics of {server.bootstrap_server} on port {taken}")
        while True:
            time.sleep(every_s)
            looking.look()
            supervisor.alive()
