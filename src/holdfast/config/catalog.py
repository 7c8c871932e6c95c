"""Every setting by name, and what is known about names that are no setting.

The catalogue starts from Kafka's tables and changes them in three places only, each with its
reason beside it: `OUR_DEFAULTS`, `OUR_SCOPES` and `OUR_BROKER_SETTINGS` and `OUR_TOPIC_SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.config.definitions import Scope, Setting, Value
from holdfast.config.definitions_coordinators import (
    CLIENT_METRICS_SETTINGS,
    COORDINATORS_SETTINGS,
    GROUP_SETTINGS,
)
from holdfast.config.definitions_log import (
    LOG_SETTINGS,
    OUR_BROKER_SETTINGS,
    OUR_TOPIC_SETTINGS,
    OUR_TOPIC_SYNONYMS,
    TOPIC_SETTINGS,
    TOPIC_SYNONYMS,
    Synonym,
)
from holdfast.config.definitions_server import DYNAMIC_ONLY_SETTINGS, SECURITY_SETTINGS, SERVER_SETTINGS

OUR_DEFAULTS: Mapping[str, Value] = {
    # A mistyped topic name must not create a topic (HF207).
    "auto.create.topics.enable": False,
    # One node is its own controller, so the settings of a quorum need not be given.
    "broker.id": 1,
    "node.id": 1,
    "process.roles": ("broker", "controller"),
    "controller.listener.names": (),
    # Nothing is open to the network unless told.
    "listeners": ("PLAINTEXT://127.0.0.1:9092", "PLAINTEXT://[::1]:9092"),
    # Data that must survive does not belong in a directory that is emptied at boot.
    "log.dir": ("holdfast-data",),
    # Requests that begin to arrive must not use up the memory: without a limit given, a share of it is one.
    "queued.max.request.bytes": None,
    # One node holds one replica, and is its own in-sync set.
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
}

OUR_SCOPES: Mapping[str, Scope] = {
    # Sockets are bound once, at start.
    "listeners": Scope.READ_ONLY,
    "listener.security.protocol.map": Scope.READ_ONLY,
}


def _adapted(setting: Setting) -> Setting:
    if setting.name in OUR_DEFAULTS:
        setting = setting._replace(default=OUR_DEFAULTS[setting.name])
    if setting.name in OUR_SCOPES:
        setting = setting._replace(scope=OUR_SCOPES[setting.name])
    return setting


def _by_name(*tables: tuple[Setting, ...]) -> dict[str, Setting]:
    return {setting.name: _adapted(setting) for table in tables for setting in table}


BROKER: Mapping[str, Setting] = _by_name(
    SERVER_SETTINGS, LOG_SETTINGS, SECURITY_SETTINGS, COORDINATORS_SETTINGS, OUR_BROKER_SETTINGS
)
"""What a broker's file may hold."""

DYNAMIC_ONLY: Mapping[str, Setting] = _by_name(DYNAMIC_ONLY_SETTINGS)
TOPIC: Mapping[str, Setting] = _by_name(TOPIC_SETTINGS, OUR_TOPIC_SETTINGS)
GROUP: Mapping[str, Setting] = _by_name(GROUP_SETTINGS)
CLIENT_METRICS: Mapping[str, Setting] = _by_name(CLIENT_METRICS_SETTINGS)
SYNONYMS: Mapping[str, tuple[Synonym, ...]] = {**TOPIC_SYNONYMS, **OUR_TOPIC_SYNONYMS}

SAME_QUANTITY: tuple[tuple[str, ...], ...] = (
    ("log.roll.ms", "log.roll.hours"),
    ("log.roll.jitter.ms", "log.roll.jitter.hours"),
    ("log.retention.ms", "log.retention.minutes", "log.retention.hours"),
)
"""Broker settings that say one thing in different units, the strongest first."""

REMOVED: frozenset[str] = frozenset(
    {
        "auto.include.jmx.reporter",
        "broker.id.generation.enable",
        "control.plane.listener.name",
        "controlled.shutdown.max.retries",
        "controlled.shutdown.retry.backoff.ms",
        "group.coordinator.new.enable",
        "inter.broker.protocol.version",
        "leader.imbalance.per.broker.percentage",
        "log.message.downconversion.enable",
        "log.message.format.version",
        "log.message.timestamp.difference.max.ms",
        "offsets.commit.required.acks",
        "reserved.broker.max.id",
        "zookeeper.clientCnxnSocket",
        "zookeeper.connect",
        "zookeeper.connection.timeout.ms",
        "zookeeper.max.in.flight.requests",
        "zookeeper.metadata.migration.enable",
        "zookeeper.session.timeout.ms",
        "zookeeper.set.acl",
    }
)
"""Names that older versions of Kafka knew and whose absence changes nothing here: accepted with a notice."""

OPEN_PREFIXES: tuple[str, ...] = (
    "config.providers.",
    "kafka.csv.metrics.",
    "kafka.metrics.",
    "metrics.",
    "password.encoder.",
    "quota.",
    "rlmm.config.",
    "rsm.config.",
    "sasl.",
    "ssl.",
    "zookeeper.ssl.",
)
"""Kafka hands names below these to plug-ins, so any of them may stand in a file."""

PLUGIN_NAMES: frozenset[str] = frozenset({"super.users", "allow.everyone.if.no.acl.found"})
"""Names that only a plug-in shipped with Kafka reads."""

LISTENER_PREFIX = "listener.name."

_BEHIND_MECHANISM = (
    "sasl.jaas.config",
    "sasl.login.callback.handler.class",
    "sasl.login.class",
    "sasl.server.callback.handler.class",
    "connections.max.reauth.ms",
)


def listener_base(name: str) -> str | None:
    """The broker setting that `listener.name.<listener>.<setting>` overrides, or None for any other name."""
    if not name.startswith(LISTENER_PREFIX):
        return None
    _, dot, base = name.removeprefix(LISTENER_PREFIX).partition(".")
    if not dot:
        return None
    for setting in _BEHIND_MECHANISM:
        if base.endswith("." + setting):
            return setting
    return base


def same_quantity(name: str) -> tuple[str, ...]:
    """The broker settings that decide what `name` decides, strongest first."""
    for names in SAME_QUANTITY:
        if name in names:
            return names
    if name == "log.flush.interval.ms":
        return (name, "log.flush.scheduler.interval.ms")
    base = listener_base(name)
    return (name,) if base is None else (name, base)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like a mistyped one, if any is like it at all."""
    from difflib import get_close_matches  # only a start that fails pays for it

    matches = get_close_matches(name, known, n=1, cutoff=0.7)
    return matches[0] if matches else None
