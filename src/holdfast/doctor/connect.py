"""Kafka Connect, its workers and connectors, and programs that are configured the same way: REST, registry, ksqlDB.

Connect gives its own clients defaults: producers wait for all, consumers of sinks begin at the beginning and never
commit by themselves. A worker changes them with `producer.` and `consumer.`, a connector with `producer.override.`.
What a connector does with a record that fails is its own setting: to tolerate it without a dead-letter topic is to
drop it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.doctor.client_defaults import INFINITE, Client, Role
from holdfast.doctor.client_settings import Setting, make_settings, shown, spelled
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Finding, Fix, Location, Severity, finding

Settings = Mapping[str, Setting]
"""By the names of the program, such as `producer.acks`."""


@dataclass(frozen=True)
class Bad:
    """Values of a setting with which something is lost."""

    values: str
    """A pattern of the whole value, in lower case."""
    risk: str
    why: str
    instead: str
    severity: Severity = Severity.WARNING
    loses: str | None = None


def judge(settings: Settings, table: Mapping[str, Bad], spelling: str) -> Iterator[Finding]:
    for name, bad in table.items():
        setting = settings.get(name)
        if setting is not None and re.fullmatch(bad.values, shown(setting.value).strip().lower()):
            yield finding(
                bad.risk,
                setting.place,
                f"{setting}: {bad.why}",
                severity=bad.severity,
                loses=bad.loses,
                fix=Fix(spelled(spelling, name, bad.instead), "settings"),
            )


def _replicas(risk: str, what: str, severity: Severity = Severity.WARNING) -> Bad:
    return Bad("1|2", risk, f"{what} on fewer than three brokers", "3", severity, f"{what}, with their disks")


def _skips(values: str, instead: str) -> Bad:
    return Bad(values, "HF306", "a record that cannot be handled is passed over", instead)


TABLE: Final[Mapping[str, Bad]] = {
    "offset.storage.replication.factor": _replicas("HF211", "the offsets of source connectors"),
    "config.storage.replication.factor": _replicas("HF211", "the settings of every connector"),
    "status.storage.replication.factor": _replicas("HF211", "the status of connectors", Severity.NOTE),
    "errors.deadletterqueue.topic.replication.factor": _replicas("HF201", "records that failed"),
    "kafkastore.topic.replication.factor": _replicas("HF201", "every schema"),
    "ksql.internal.topic.replicas": _replicas("HF201", "the statements of ksqlDB"),
    "ksql.streams.replication.factor": _replicas("HF201", "the state of queries"),
    "replication.factor": _replicas("HF201", "the topics it makes"),
    "offset.storage.file.filename": Bad(
        r"(/var)?/tmp/.*",
        "HF211",
        "the offsets of source connectors are in temporary storage",
        "/var/lib/kafka-connect/offsets",
        loses="where each source connector was: it starts anew, and repeats or skips",
    ),
    "behavior.on.malformed.documents": _skips("ignore|warn", "fail"),
    "behavior.on.error": _skips("ignore|log", "fail"),
    "drop.invalid.message": _skips("true", "false"),
    "event.processing.failure.handling.mode": _skips("skip|warn|ignore", "fail"),
    "event.deserialization.failure.handling.mode": _skips("skip|warn|ignore", "fail"),
    "default.deserialization.exception.handler": _skips(".*logandcontinue.*", "…LogAndFailExceptionHandler"),
    "deserialization.exception.handler": _skips(".*logandcontinue.*", "…LogAndFailExceptionHandler"),
    "ksql.fail.on.deserialization.error": _skips("false", "true"),
}
CLIENT_DEFAULTS: Final[Mapping[Role, Mapping[str, Any]]] = {
    "producer": {
        "acks": "all",
        "enable.idempotence": None,
        "max.in.flight.requests.per.connection": 1,
        "delivery.timeout.ms": INFINITE,
        "max.block.ms": INFINITE,
    },
    "consumer": {"enable.auto.commit": False, "auto.offset.reset": "earliest"},
}
"""What a worker sets where nothing is said; whether its producers are idempotent depends on its version."""
WORKER_NAMES: Final = frozenset(
    """key.converter value.converter offset.storage.topic config.storage.topic status.storage.topic
    offset.storage.file.filename connector.client.config.override.policy""".split()  # noqa: SIM905
)


def program_of(settings: Settings) -> tuple[str, str] | None:
    """What program these settings are of, and what stands before those of its clients; None for any other."""
    if "connector.class" in settings:
        return "a connector", "{}.override."
    if not WORKER_NAMES.isdisjoint(settings):
        return "a Connect worker", "{}."
    if "application.id" in settings and "bootstrap.servers" in settings:
        return "Kafka Streams", "{}."
    return None


def examine_program(
    settings: Settings, place: Location, result: FilesExamined, spelling: str, what: str, frame: str = "{}."
) -> None:
    """A worker, a connector or a program like them; `frame` is what stands before settings of its clients."""
    result.examination.examined.append(f"{place} as {what}")
    if what == "a Connect worker":  # which has no such setting; MirrorMaker 2 and Streams have
        settings = {name: each for name, each in settings.items() if name != "replication.factor"}
    result.examination.add(judge(settings, TABLE, spelling))
    result.examination.add(_tolerated(settings, spelling))
    result.unknown(each for name, each in settings.items() if name in TABLE or name == "errors.tolerance")
    if (policy := settings.get("connector.client.config.override.policy")) is not None:
        result.policies.append(policy)
    result.overrides += [each for name, each in settings.items() if ".override." in name]
    for role, defaults in CLIENT_DEFAULTS.items():
        prefix = frame.format(role)
        own = [
            Setting(name.removeprefix(prefix), each.value, each.place, each.written or name)
            for name, each in settings.items()
            if name.startswith(prefix)
        ]
        if own:
            framed = spelled(spelling, f"{prefix}{{}}", "{}")
            made = make_settings(role, Client.JAVA, own[0].place, own, defaults=defaults, spelling=framed)
            result.client(made, combined=False)


def _tolerated(settings: Settings, spelling: str) -> Iterator[Finding]:
    tolerance = settings.get("errors.tolerance")
    if tolerance is None or shown(tolerance.value).strip().lower() != "all":
        return
    named = shown(settings["connector.class"].value).lower() if "connector.class" in settings else "sink"
    if "sink" in named or not {"topics", "topics.regex"}.isdisjoint(settings):
        if "errors.deadletterqueue.topic.name" in settings:
            return
        risk, why = "HF306", "without errors.deadletterqueue.topic.name a record that fails is dropped"
        fix = spelled(spelling, "errors.deadletterqueue.topic.name", "<a topic>")
    else:
        risk, why = "HF107", "a record that cannot be converted, or that the broker refuses, is dropped"
        fix = spelled(spelling, "errors.tolerance", "none")
    yield finding(risk, tolerance.place, f"{tolerance}: {why}", fix=Fix(fix, "settings"))


def refused_overrides(result: FilesExamined) -> Iterator[Finding]:
    """A worker that lets connectors change nothing, and connectors that do."""
    refusing = [each for each in result.policies if shown(each.value).strip().lower() == "none"]
    for override in result.overrides if refusing else ():
        why = f"{refusing[0]} at {refusing[0].place} refuses it: the connector is not accepted"
        yield finding("HF000", override.place, f"{override}: {why}", severity=Severity.ERROR)
