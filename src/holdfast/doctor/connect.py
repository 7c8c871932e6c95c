"""Kafka Connect, its workers and connectors, and programs that are configured the same way: REST, registry, ksqlDB.

Connect gives its own clients defaults: producers wait for all, consumers of sinks begin at the beginning and never
commit by themselves. A worker changes them with `producer.` and `consumer.`, a connector with `producer.override.`.
What a connector does with a record that fails is its own setting: to tolerate it without a dead-letter topic is to
drop it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from holdfast.doctor.client_defaults import INFINITE, Client, Role
from holdfast.doctor.client_settings import Setting, make_settings, shown, spelled
from holdfast.doctor.examined import FilesExamined
from holdfast.doctor.findings import Finding, Fix, Place, Severity, finding
from holdfast.doctor.spark_options import is_temporary

Settings = Mapping[str, Setting]
"""By the names of the program, such as `producer.acks`."""

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
FEW_REPLICAS: Final[Mapping[str, tuple[str, Severity, str]]] = {
    "offset.storage.replication.factor": ("HF211", Severity.WARNING, "the positions of source connectors"),
    "config.storage.replication.factor": ("HF211", Severity.WARNING, "the settings of every connector"),
    "status.storage.replication.factor": ("HF211", Severity.NOTE, "the status of connectors"),
    "errors.deadletterqueue.topic.replication.factor": ("HF201", Severity.WARNING, "what failed"),
    "kafkastore.topic.replication.factor": ("HF201", Severity.WARNING, "every schema"),
    "ksql.internal.topic.replicas": ("HF201", Severity.WARNING, "the statements of ksqlDB"),
    "ksql.streams.replication.factor": ("HF201", Severity.WARNING, "the state of queries"),
    "replication.factor": ("HF201", Severity.WARNING, "the topics it makes"),
}
"""Topics that these programs make for themselves, and what is lost with one of them."""
SKIPPING: Final[Mapping[str, tuple[str, ...]]] = {
    "behavior.on.malformed.documents": ("ignore", "warn"),
    "behavior.on.error": ("ignore", "log"),
    "drop.invalid.message": ("true",),
    "event.processing.failure.handling.mode": ("skip", "warn", "ignore"),
    "event.deserialization.failure.handling.mode": ("skip", "warn", "ignore"),
    "default.deserialization.exception.handler": ("logandcontinue",),
    "deserialization.exception.handler": ("logandcontinue",),
    "ksql.fail.on.deserialization.error": ("false",),
}
"""Settings of connectors and streams with which a record that cannot be handled is passed over."""


JUDGED: Final = frozenset({*FEW_REPLICAS, *SKIPPING, "errors.tolerance"})


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
    settings: Settings, place: Place, result: FilesExamined, spelling: str, what: str, frame: str = "{}."
) -> None:
    """A worker, a connector or a program like them; `frame` is what stands before settings of its clients."""
    examination = result.examination
    examination.examined.append(f"{place} as {what}")
    examination.add(_own_topics(settings, spelling))
    examination.add(records_skipped(settings))
    examination.add(_tolerated(settings, place, spelling))
    examination.add(_positions(settings))
    result.unknown(each for name, each in settings.items() if name in JUDGED)
    roles: tuple[Role, ...] = ("producer", "consumer")
    for role in roles:
        prefix = frame.format(role)
        own = [
            Setting(name.removeprefix(prefix), each.value, each.place, each.written or name)
            for name, each in settings.items()
            if name.startswith(prefix)
        ]
        if own:
            result.client(
                make_settings(
                    role,
                    Client.JAVA,
                    own[0].place,
                    own,
                    defaults=CLIENT_DEFAULTS[role],
                    spelling=_framed(spelling, prefix),
                ),
                combined=False,
            )


def _framed(spelling: str, prefix: str) -> str:
    """`CONNECT_{}: {}` and `producer.` are `CONNECT_PRODUCER_{}: {}`."""
    return spelled(spelling, f"{prefix}{{}}", "{}")


def _own_topics(settings: Settings, spelling: str) -> Iterator[Finding]:
    for name, (risk, severity, what) in FEW_REPLICAS.items():
        setting = settings.get(name)
        if setting is not None and shown(setting.value).strip() in ("1", "2"):
            yield finding(
                risk,
                setting.place,
                f"{setting}: {what} on {shown(setting.value)} broker{'s' * (shown(setting.value) != '1')}",
                severity=severity,
                loses=f"{what}, with the disk that held them",
                fix=Fix(spelled(spelling, name, "3"), "settings"),
            )


def records_skipped(settings: Settings) -> Iterator[Finding]:
    for name, values in SKIPPING.items():
        setting = settings.get(name)
        if setting is not None and any(value in shown(setting.value).lower() for value in values):
            yield finding(
                "HF306",
                setting.place,
                f"{setting}: a record that cannot be handled is passed over",
                severity=Severity.WARNING,
                fix=Fix(
                    f"leave {setting.written or name} at its default, or send such records aside", "advice"
                ),
            )


def _tolerated(settings: Settings, place: Place, spelling: str) -> Iterator[Finding]:
    tolerance = settings.get("errors.tolerance")
    if tolerance is None or shown(tolerance.value).strip().lower() != "all":
        return
    if settings.get("errors.deadletterqueue.topic.name") is not None:
        return
    connector = settings.get("connector.class")
    is_source = "topics" not in settings and "topics.regex" not in settings
    if connector is not None and is_source and "sink" not in shown(connector.value).lower():
        yield finding(
            "HF107",
            tolerance.place,
            f"{tolerance}: a record that cannot be converted, or that the broker refuses, is dropped",
            fix=Fix(spelled(spelling, "errors.tolerance", "none"), "settings"),
        )
        return
    yield finding(
        "HF306",
        tolerance.place,
        f"{tolerance} without errors.deadletterqueue.topic.name: a record that fails is dropped",
        fix=Fix(spelled(spelling, "errors.deadletterqueue.topic.name", "<a topic>"), "settings"),
    )


def _positions(settings: Settings) -> Iterator[Finding]:
    file = settings.get("offset.storage.file.filename")
    if file is not None and is_temporary(shown(file.value)):
        yield finding(
            "HF211",
            file.place,
            f"{file}: the positions of source connectors are in temporary storage",
            loses="where each source connector was: it starts anew, and repeats or skips",
            fix=Fix("offset.storage.file.filename=/var/lib/kafka-connect/offsets", "settings"),
        )
