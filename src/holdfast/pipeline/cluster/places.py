"""Where a pipeline keeps things, and which machines must see them.

With Spark on this machine everything may lie on its disk. On a cluster the rows of a batch are written by one machine
and read by another: the stage in the home, the segments of state, files of Parquet and Delta sinks. A path on the
driver's own disk would then mean a different directory on every machine, and a commit would name files that are not
there. So local paths are refused with a remote master, unless it is said that they are on a file system that all
machines share; whether they are is tried out before the first batch (`probing`).

A home cannot be an address (`s3a://`, `hdfs://`…), on whatever master. It holds the lock of the one driver, the plan,
and the manifests of state, which rest on a lock that dies with its holder, on a rename that is atomic and on flushes.
Hadoop's file systems have no such lock, and those of object stores copy where a rename is asked for. A Delta table may
be at an address: its commit is one conditional put of the log's next version.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from holdfast.pipeline.core.failures import DefinitionWrong
from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition
from holdfast.pipeline.definition.naming import dead_letter_sink, home_of, resolve_path

FLAG: Final = "--shared-filesystem"
_ADDRESS: Final = re.compile(r"(?!file:)([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_MASTERS: Final = re.compile(r"local(\[.*\])?|local-cluster\[.*\]|spark://\S+|yarn|k8s://\S+")


class PlaceRefused(DefinitionWrong):
    """Something is kept where not every machine that needs it can see it, or where it cannot be kept at all."""


class MasterUnknown(DefinitionWrong):
    """A master that Spark does not have."""


@dataclass(frozen=True)
class WrittenPath:
    """Somewhere the pipeline writes."""

    what: str
    path: str

    @property
    def address(self) -> str | None:
        """The scheme of a path that is not one of this machine's file systems."""
        match = _ADDRESS.match(self.path)
        return match[1] if match else None


def is_remote(master: str | None) -> bool:
    """Whether tasks run on other machines, or may."""
    return master is not None and not master.startswith("local")


def master_of(definition: PipelineDefinition, master: str | None) -> str | None:
    """Who runs the tasks: what the caller says, the definition's `spark.master`, whom `spark-submit` was told, or
    nobody else."""
    return master or definition.spark.get("spark.master") or submitted_master()


def submitted_master() -> str | None:
    """The master of `spark-submit`, which has started the JVM already and this process from it."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()
    return SparkConf().get("spark.master")


def places_of(definition: PipelineDefinition) -> list[WrittenPath]:
    """Everything the pipeline writes to by path."""
    written = (*definition.sinks, dead_letter_sink(definition))
    sinks = [sink for sink in written if isinstance(sink, ParquetSink | DeltaSink)]
    return [
        WrittenPath("the home", home_of(definition)),
        *(WrittenPath(f"the sink {sink.name!r}", resolve_path(definition, sink.path)) for sink in sinks),
    ]


def require_places(definition: PipelineDefinition, master: str | None, *, shared_filesystem: bool) -> None:
    """Refuse what cannot work, before anything is created."""
    if master is not None and not _MASTERS.fullmatch(master):
        raise MasterUnknown(
            f"{master!r} is no master of Spark: local[*], spark://HOST:PORT, yarn or k8s://https://HOST:PORT"
        )
    home, *sinks = places_of(definition)
    if home.address is not None:
        raise PlaceRefused(
            f"the home cannot be {home.path}: it holds the driver's lock, the plan and the state, which need a lock "
            f"that dies with its holder and a rename that is atomic, and {home.address}:// has not both. Give it a "
            "directory, which on a cluster is on a file system that all machines share. Delta sinks may be at an "
            "address: their commit is one conditional put"
        )
    if not is_remote(master) or shared_filesystem:
        return
    local = [place for place in (home, *sinks) if place.address is None]
    told = "; ".join(f"{place.what} is {place.path}" for place in local)
    raise PlaceRefused(
        f"with the master {master} other machines write and read these paths, and nothing says that they see the same "
        f"files there: {told}. If they are on a file system that all machines of the cluster share (NFS, CephFS, "
        f"Lustre…), run with {FLAG}; it is tried out before the first batch"
    )
