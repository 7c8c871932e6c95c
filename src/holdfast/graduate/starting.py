"""Starting the Apache Kafka that `holdfast cluster` gets on a directory that was handed over.

It outlives this process; `cluster.json` in the output directory says which process it is, so that
`holdfast cluster down --directory OUTPUT` ends it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from holdfast.admin.settings import parse_address
from holdfast.errors import UsageError
from holdfast.graduate import changes
from holdfast.graduate.handing_over import PROPERTIES_FILE, locked
from holdfast.lab.clusters import Cluster, node_of
from holdfast.testing.apache import ApacheKafka

ENGINE: Final = "kafka"


def start_kafka(output: str, *, is_detached: bool = True, jvm_options: tuple[str, ...] = ()) -> ApacheKafka:
    """Start it and wait until it answers."""
    output = os.path.abspath(output)
    journal = changes.load(output)
    if journal is None or journal.state != changes.GRADUATED:
        raise UsageError(f"{output}: nothing was handed over from there that Kafka could start on")
    with locked(journal.log_dirs):
        pass  # nobody serves it yet: the address would answer for another
    kafka = ApacheKafka(directory=output, is_detached=is_detached, jvm_options=jvm_options)
    kafka.host, kafka.port = parse_address(journal.details["listen"])
    assert (Path(output) / PROPERTIES_FILE).exists()
    kafka.launch()
    try:
        kafka.wait_until_ready()
    except BaseException:
        kafka.kill()
        raise
    if is_detached:
        address = journal.details["listen"]
        Cluster(Path(output), ENGINE, address, (node_of("broker 1", kafka.pid),)).save()
    return kafka
