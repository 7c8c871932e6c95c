"""What can be lost between clients and topics that are each in order by themselves.

Messages die where two settings meet: acknowledgement by all of an in-sync set that may be one broker, a transaction
that a reader does not wait for, a message that the next hop finds too large, one transactional id in two programs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.doctor.client_defaults import Client
from holdfast.doctor.client_settings import ClientSettings
from holdfast.doctor.findings import Finding, Fix, Location, Severity, finding

BROKER_MESSAGE_BYTES_MAX: Final = 1_048_588
"""message.max.bytes of a broker that was told nothing."""
HASHES: Final = {
    "consistent": "crc32",
    "consistent_random": "crc32",
    "murmur2": "murmur2",
    "murmur2_random": "murmur2",
}


PROGRAMS: Final = ("python", "spring")
"""Styles in which a program is written: two programs of one directory may have nothing to do with each other."""


@dataclass(frozen=True)
class TopicFacts:
    """What is known about a topic, from a file or from the cluster."""

    name: str
    place: Location
    replication_factor: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Kafka's names of topic settings, as far as they are known."""

    def number(self, name: str) -> int | None:
        value = self.settings.get(name, "")
        return int(value) if value.lstrip("-").isdecimal() else None


def across_clients(clients: Sequence[ClientSettings]) -> Iterator[Finding]:
    """Clients against each other."""
    producers = [client for client in clients if client.role == "producer"]
    consumers = [client for client in clients if client.role == "consumer"]
    yield from _shared_transactional_id(producers)
    yield from _aborted_is_read(producers, consumers)
    yield from _keys_apart(producers)
    yield from _too_large_to_receive(producers, consumers)


def _shared_transactional_id(producers: Sequence[ClientSettings]) -> Iterator[Finding]:
    by_id: defaultdict[str, list[ClientSettings]] = defaultdict(list)
    for producer in producers:
        name = producer.text("transactional.id")
        if name and producer.style != "spring":  # a prefix there: the instance adds its number
            by_id[name].append(producer)
    for name, sharing in by_id.items():
        places = {str(producer.place_of("transactional.id")): producer for producer in sharing}
        if len(places) < 2:
            continue
        for where, producer in places.items():
            others = ", ".join(other for other in places if other != where)
            yield finding(
                "HF108",
                producer.place_of("transactional.id"),
                f"transactional.id {name} is also used at {others}: each of them fences the other",
                severity=Severity.WARNING if producer.style == "python" else Severity.ERROR,
                loses="the open transaction of whichever program was fenced last",
                fix=Fix(
                    f"a transactional.id of its own for each program, such as {name}-1 and {name}-2",
                    "advice",
                ),
            )


def _aborted_is_read(
    producers: Sequence[ClientSettings], consumers: Sequence[ClientSettings]
) -> Iterator[Finding]:
    transactional = [producer for producer in producers if producer.written("transactional.id")]
    if not transactional:
        return
    for consumer in consumers:
        if consumer.text("isolation.level") == "read_uncommitted":
            yield consumer.finding(
                "HF310",
                "isolation.level",
                f", and {transactional[0].place} writes in transactions",
                "read_committed",
                severity=Severity.WARNING if _belong_together(consumer, transactional) else Severity.NOTE,
            )


def _belong_together(consumer: ClientSettings, producers: Sequence[ClientSettings]) -> bool:
    """Named side by side, or in one program; two programs of one directory may have no topic in common."""
    return consumer.style not in PROGRAMS or any(
        producer.style not in PROGRAMS or producer.place.file == consumer.place.file for producer in producers
    )


def _keys_apart(producers: Sequence[ClientSettings]) -> Iterator[Finding]:
    hashes: dict[str, ClientSettings] = {}
    for producer in producers:
        if producer.written("partitioner.class") or producer.open_ended:
            continue
        used = HASHES.get(producer.text("partitioner") or "")
        if used is not None:
            hashes.setdefault(used, producer)
    if len(hashes) < 2:
        return
    crc, murmur = hashes["crc32"], hashes["murmur2"]
    yield crc.finding(
        "HF000",
        "partitioner",
        f" and {murmur.place} ({murmur.client.words}) send a key to different partitions: its order is lost where both "
        "write to one topic",
        "murmur2_random",
        severity=Severity.NOTE,
    )


def _too_large_to_receive(
    producers: Sequence[ClientSettings], consumers: Sequence[ClientSettings]
) -> Iterator[Finding]:
    for consumer in consumers:
        receive = consumer.number("receive.message.max.bytes")
        if receive is None:
            continue
        for producer in producers:
            size = producer.number("max.request.size")
            if size is not None and size > receive:
                yield consumer.finding(
                    "HF208",
                    "receive.message.max.bytes",
                    f", but {producer.said('max.request.size')} at {producer.place_of('max.request.size')}: "
                    "a message may be too large to receive",
                    str(size + 1024 * 1024),
                    severity=Severity.ERROR,
                )


def against_topics(clients: Sequence[ClientSettings], topics: Sequence[TopicFacts]) -> Iterator[Finding]:
    """Clients against topics they may write to or read from."""
    for topic in topics:
        yield from _replicas_and_minimum(topic, clients)
        for client in clients:
            if client.role == "producer":
                yield from _size(client, topic)
                yield from _no_key(client, topic)


def _replicas_and_minimum(topic: TopicFacts, clients: Sequence[ClientSettings]) -> Iterator[Finding]:
    """acks=all means all that are in sync: with a minimum of one, that may be the leader alone."""
    minimum = topic.number("min.insync.replicas")
    factor = topic.replication_factor
    if minimum is None or factor is None or factor < 2:
        return
    producers = [client for client in clients if client.role == "producer"]
    relying = [client for client in producers if client.text("acks") == "all"]
    if minimum <= 1 and relying:
        yield finding(
            "HF202",
            topic.place,
            f"min.insync.replicas=1 on {topic.name} with {factor} replicas, and {relying[0].place} relies on "
            "acks=all: with the followers away that is the leader alone",
            fix=_alter(topic, "min.insync.replicas", "2"),
            related=("HF102", "HF209"),
        )
    ignoring = [client for client in producers if client.text("acks") in ("0", "1")]
    if minimum > 1 and ignoring:
        why = f": min.insync.replicas={minimum} of {topic.name} counts for acks=all only"
        yield ignoring[0].finding("HF102", "acks", why, "all", related=("HF202",))


def _size(producer: ClientSettings, topic: TopicFacts) -> Iterator[Finding]:
    limit = topic.number("max.message.bytes")
    size = producer.number("max.request.size")
    if limit is None or size is None:
        return
    # By default librdkafka and Java stand within a few bytes of the broker's default: nobody chose to differ.
    if not producer.written("max.request.size") and limit >= BROKER_MESSAGE_BYTES_MAX:
        return
    if size > limit:
        why = f" is more than {topic.name} takes (max.message.bytes={limit})"
        fix = _alter(topic, "max.message.bytes", str(size))
        yield producer.finding("HF208", "max.request.size", why, fix=fix, related=("HF107",))


def _no_key(producer: ClientSettings, topic: TopicFacts) -> Iterator[Finding]:
    """A compacted topic keeps the latest value of a key: order decides which one that is."""
    if "compact" not in topic.settings.get("cleanup.policy", ""):
        return
    in_flight = producer.number("max.in.flight.requests.per.connection")
    if producer.client is Client.AIOKAFKA or in_flight is None or in_flight <= 1:
        return
    if producer.flag("enable.idempotence") is False and not producer.written("transactional.id"):
        yield producer.finding(
            "HF106",
            "enable.idempotence",
            f", and {topic.name} is compacted: a reordered retry keeps the older value of a key for good",
            "true",
            severity=Severity.ERROR,
            related=("HF210",),
        )


def _alter(topic: TopicFacts, setting: str, value: str) -> Fix:
    return Fix(f"holdfast configs alter --topic {topic.name} --add-config {setting}={value}", "command")
