"""`server.properties` for Apache Kafka, made of what holdfast was told, and what changes where Kafka has no
counterpart.

Kafka's settings keep their names and values. Listeners, roles and the quorum are written anew. Our defaults that differ
from Kafka's are written out, so that nothing changes silently; internal topics keep factor 1, which one node can hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from holdfast.config.catalog import BROKER
from holdfast.config.listeners import address_text
from holdfast.config.values import format_value
from holdfast.errors import UsageError
from holdfast.graduate.records import CONTROLLER_LISTENER

LISTENER: Final = "PLAINTEXT"
REPLACED: Final = frozenset(
    {
        "process.roles",
        "node.id",
        "broker.id",
        "listeners",
        "advertised.listeners",
        "listener.security.protocol.map",
        "inter.broker.listener.name",
        "security.inter.broker.protocol",
        "controller.listener.names",
        "controller.quorum.voters",
        "controller.quorum.bootstrap.servers",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
    }
)
FACTORS: Final = (
    "offsets.topic.replication.factor",
    "transaction.state.log.replication.factor",
    "transaction.state.log.min.isr",
    "share.coordinator.state.topic.replication.factor",
    "share.coordinator.state.topic.min.isr",
)
WITHOUT_COUNTERPART: Final = {
    "holdfast.flush": "Kafka acknowledges what is in memory. Until topics have replicas, the metadata log now has "
    "log.flush.interval.messages=1 for all brokers, with which Kafka flushes first",
    "holdfast.clock.settle.ms": "Kafka believes the wall clock at once: a clock that jumps ahead deletes what has "
    "expired by it. Keep the machine's clock synchronised, and alert when it jumps",
    "holdfast.cluster.id": "Kafka compares the cluster's id with meta.properties by itself and refuses a directory of "
    "another cluster; an empty directory it does not start on before it is formatted",
    "holdfast.write.ahead.bytes": "Kafka does not write space ahead of small flushes: they cost more",
    "holdfast.busy.poll.us": "Kafka's network threads wait for requests; latency differs, nothing else does",
    "holdfast.flush.threads": "Kafka flushes on the thread that appends",
    "holdfast.slow.request.ms": "Kafka shows the time of requests in its metrics, kafka.network:type=RequestMetrics",
    "holdfast.requests.in.flight.max": "Kafka takes one request of a connection at a time",
}
"""Our settings, and what changes without them."""
ALWAYS_SAID: Final = ("holdfast.flush", "holdfast.clock.settle.ms")
"""In force with holdfast whether they were set or not."""


class Written(NamedTuple):
    text: str
    without_counterpart: list[str]


class Places(NamedTuple):
    """Where Kafka listens and keeps its data."""

    listen: tuple[str, int]
    advertised: tuple[str, int]
    controller: tuple[str, int]
    log_dirs: Sequence[str]
    metadata_dir: str


def address(text: str, flag: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(f"{flag} {text!r} is not HOST:PORT, such as 10.0.0.1:9092")
    return host, int(port)


def text_of(place: tuple[str, int]) -> str:
    return address_text(*place)


def server_properties(node_id: int, places: Places, given: Mapping[str, str]) -> Written:
    """`given` is what holdfast was started with."""
    listen = f"{LISTENER}://{text_of(places.listen)},{CONTROLLER_LISTENER}://{text_of(places.controller)}"
    advertised = (
        f"{LISTENER}://{text_of(places.advertised)},{CONTROLLER_LISTENER}://{text_of(places.controller)}"
    )
    needed = {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.quorum.bootstrap.servers": text_of(places.controller),
        "controller.listener.names": CONTROLLER_LISTENER,
        "listeners": listen,
        "advertised.listeners": advertised,
        "inter.broker.listener.name": LISTENER,
        "listener.security.protocol.map": f"{CONTROLLER_LISTENER}:PLAINTEXT,{LISTENER}:PLAINTEXT",
        "log.dirs": ",".join(places.log_dirs),
        "metadata.log.dir": places.metadata_dir,
    }
    kept = {
        name: value
        for name, value in given.items()
        if name not in REPLACED and not name.startswith("holdfast.")
    }
    # A mistyped topic name makes no topic, as with holdfast.
    kept.setdefault("auto.create.topics.enable", "false")
    lines = [
        "# Apache Kafka on the data that holdfast wrote; see STEPS.md beside this file.",
        *(f"{name}={_escaped(value)}" for name, value in needed.items()),
        "",
        "# One node holds one replica. Raise these to 3 (min.isr to 2) when three brokers run, before new internal",
        "# topics are made; the steps raise the factor of those that there are.",
        *(f"{name}={kept.pop(name, '1')}" for name in FACTORS),
        "",
        "# As holdfast was told.",
        *(f"{name}={_escaped(value)}" for name, value in sorted(kept.items())),
        "",
        "# log.flush.interval.messages=1 stands in the metadata log for all brokers, until replicas take over.",
    ]
    ours = [name for name in (*ALWAYS_SAID, *sorted(given)) if name in WITHOUT_COUNTERPART]
    said = [f"{name}{_told(name, given)}: {WITHOUT_COUNTERPART[name]}" for name in dict.fromkeys(ours)]
    if "queued.max.request.bytes" not in given:
        said.append(
            "queued.max.request.bytes (a quarter of the memory with holdfast): Kafka's default is no limit; the heap "
            "of the JVM bounds it"
        )
    unknown = sorted(name for name in kept if name not in BROKER and not name.startswith("listener.name."))
    said += [f"{name}: neither holdfast nor Kafka 4.3 knows it; it is written as it was" for name in unknown]
    return Written("\n".join(lines) + "\n", said)


def _told(name: str, given: Mapping[str, str]) -> str:
    if name in given:
        return f"={given[name]}"
    return f" (default {format_value(BROKER[name].default)})"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\")
