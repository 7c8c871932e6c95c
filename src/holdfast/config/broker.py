"""The broker's settings: what the file and the command line say, what was altered since, and the defaults.

Three layers of text are kept as given, because DescribeConfigs must show each: the file with its overrides
(static), what was altered for all brokers, and what was altered for this one; the later wins. From them
come the typed attributes below, which hold what is in force.

What only gives topics their defaults has no attribute: `topic_defaults` holds it, by the finest unit where Kafka has
several names for one quantity (`retention_ms` follows `log.retention.ms`, else `.minutes`, else `.hours`). `log_dirs`
follows `log.dirs`, else `log.dir`; `listeners` holds what the settings that qualify them make of them.

A `BrokerConfig` never changes; `with_dynamic` makes a new one.

Rules may bind several broker settings, or one in a way its type and range cannot say. They are Kafka's, as far as
they concern what holdfast acts on, so that a file that starts the one starts the other; stricter only where Kafka
takes what means nothing (a negative flush interval, a shortest compaction lag above the longest).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.config import catalog
from holdfast.config.definitions import Setting, Value
from holdfast.config.listeners import Listener, resolve_listeners
from holdfast.config.properties import Properties
from holdfast.config.topic import TopicConfig, parse_topic_overrides, topic_config, validate_topic_overrides
from holdfast.config.values import format_value, parse_value, split_list
from holdfast.errors import ConfigError

_MEBIBYTE = 1 << 20


def check_broker_values(values: Mapping[str, Value], where: Mapping[str, str]) -> None:
    """ConfigError that lists every rule the typed values of the broker's settings break."""
    mistakes = [*_log_mistakes(values), *_server_mistakes(values)]
    if mistakes:
        raise ConfigError("\n".join(_at(name, values, where) + ": " + what for name, what in mistakes))


def _at(name: str, values: Mapping[str, Value], where: Mapping[str, str]) -> str:
    place = f" ({where[name]})" if name in where else ""
    return f"{name}={format_value(values[name])}{place}"


def _log_mistakes(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    mistakes: list[tuple[str, str]] = []
    retention = ("log.retention.ms", "log.retention.minutes", "log.retention.hours")
    counts = next(name for name in retention if values[name] is not None)
    if values[counts] == 0:
        mistakes.append((counts, "allowed is -1 for no limit, or 1 or more"))
    mistakes += [
        (name, "allowed is 0 or more")
        for name in ("log.flush.interval.ms", "log.flush.scheduler.interval.ms", "log.roll.jitter.ms")
        if values[name] is not None and values[name] < 0
    ]
    if values["log.roll.ms"] is not None and values["log.roll.ms"] < 1:
        mistakes.append(("log.roll.ms", "allowed is 1 or more"))
    shortest = values["log.cleaner.min.compaction.lag.ms"]
    longest = values["log.cleaner.max.compaction.lag.ms"]
    if shortest > longest:
        name = "log.cleaner.min.compaction.lag.ms"
        mistakes.append((name, f"allowed is at most log.cleaner.max.compaction.lag.ms, {longest}"))
    threads = max(1, values["log.cleaner.threads"])
    if values["log.cleaner.dedupe.buffer.size"] <= threads * _MEBIBYTE:
        name = "log.cleaner.dedupe.buffer.size"
        mistakes.append((name, f"allowed is more than one MiB for each of {threads} log.cleaner.threads"))
    if values["remote.log.storage.system.enable"]:
        name = "remote.log.storage.system.enable"
        mistakes.append((name, "holdfast keeps every segment on its own disk"))
    return mistakes


def _server_mistakes(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    mistakes: list[tuple[str, str]] = []
    if "broker" not in values["process.roles"]:
        mistakes.append(("process.roles", "holdfast serves clients, so the roles must include broker"))
    if values["authorizer.class.name"]:
        # Ignoring it would open to everybody what its owner meant to be closed.
        mistakes.append(
            ("authorizer.class.name", "access control is not served yet; remove it to go without")
        )
    largest_request = values["socket.request.max.bytes"]
    if 0 < (values["queued.max.request.bytes"] or -1) < largest_request:
        name = "queued.max.request.bytes"
        mistakes.append((name, f"allowed is at least socket.request.max.bytes, {largest_request}, or -1"))
    delay_ms = values["connection.failed.authentication.delay.ms"]
    if 0 <= values["connections.max.idle.ms"] <= delay_ms:
        name = "connections.max.idle.ms"
        what = f"allowed is more than connection.failed.authentication.delay.ms, {delay_ms}, or -1"
        mistakes.append((name, what))
    return mistakes


OVERRIDE = "--override"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BrokerConfig:
    """The values in force, named as Kafka names them with dots turned into underscores."""

    auto_create_topics_enable: bool
    broker_rack: str | None
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    connections_max_idle_ms: int
    default_replication_factor: int
    delete_topic_enable: bool
    fetch_max_bytes: int
    group_consumer_assignment_interval_ms: int
    group_consumer_assignors: tuple[str, ...]
    group_consumer_heartbeat_interval_ms: int
    group_consumer_max_heartbeat_interval_ms: int
    group_consumer_max_session_timeout_ms: int
    group_consumer_max_size: int
    group_consumer_migration_policy: str
    group_consumer_min_heartbeat_interval_ms: int
    group_consumer_min_session_timeout_ms: int
    group_consumer_regex_refresh_interval_ms: int
    group_consumer_session_timeout_ms: int
    group_coordinator_rebalance_protocols: tuple[str, ...]
    group_initial_rebalance_delay_ms: int
    group_max_session_timeout_ms: int
    group_max_size: int
    group_min_session_timeout_ms: int
    holdfast_busy_poll_us: int
    holdfast_clock_settle_ms: int
    holdfast_cluster_id: str | None
    holdfast_flush: Literal["group", "os"]
    holdfast_flush_threads: int
    holdfast_metrics_listener: str | None
    holdfast_requests_in_flight_max: int
    holdfast_slow_request_ms: int
    holdfast_write_ahead_bytes: int
    listeners: tuple[Listener, ...]
    """What to open, resolved with the three settings that qualify it."""
    log_cleaner_backoff_ms: int
    log_cleaner_dedupe_buffer_size: int
    log_cleaner_enable: bool
    log_dirs: tuple[str, ...]
    log_retention_check_interval_ms: int
    max_connections: int
    max_incremental_fetch_session_cache_slots: int
    max_request_partition_size_limit: int
    min_insync_replicas: int
    node_id: int
    num_partitions: int
    offset_metadata_max_bytes: int
    offsets_retention_check_interval_ms: int
    offsets_retention_minutes: int
    offsets_topic_num_partitions: int
    offsets_topic_segment_bytes: int
    producer_id_expiration_ms: int
    queued_max_request_bytes: int | None
    socket_request_max_bytes: int
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int
    transaction_max_timeout_ms: int
    transaction_partition_verification_enable: bool
    transaction_remove_expired_transaction_cleanup_interval_ms: int
    transaction_state_log_num_partitions: int
    transaction_state_log_segment_bytes: int
    transactional_id_expiration_ms: int

    static: Mapping[str, str] = field(repr=False)
    """The file with its overrides, as given."""
    dynamic_default: Mapping[str, str] = field(repr=False)
    """Altered while running, for every broker."""
    dynamic: Mapping[str, str] = field(repr=False)
    """Altered while running, for this broker."""
    values: Mapping[str, Value] = field(repr=False)
    """The typed value in force of every broker setting of Kafka and ours, by its dotted name."""
    topic_values: Mapping[str, Value] = field(repr=False)
    """The typed value of every topic setting for a topic that has none of its own."""
    topic_defaults: TopicConfig = field(repr=False)

    @classmethod
    def load(
        cls, properties: Mapping[str, str], overrides: Mapping[str, str] | None = None
    ) -> tuple[BrokerConfig, list[str]]:
        """The settings of a start, and one notice for each line that is accepted and changes nothing.

        ConfigError names every mistake at once: the setting, its value, where it stands and what is allowed.
        """
        given = {**properties, **(overrides or {})}
        where = {name: _place(name, properties, overrides or {}) for name in given}
        notices = _repeated(properties)
        notices += _check_names(given, where)
        _refuse_variables(given, where)
        static = _with_node_id(given, where)
        config, listener_notices = _build(static, {}, {}, where)
        return config, notices + listener_notices

    def with_dynamic(self, dynamic: Mapping[str, str], dynamic_default: Mapping[str, str]) -> BrokerConfig:
        """This configuration with what was altered while running, for this broker and for all."""
        return _build(self.static, dynamic_default, dynamic, {})[0]

    def topic_config(self, overrides: Mapping[str, str]) -> TopicConfig:
        """The settings in force for a topic with these of its own."""
        if not overrides:
            return self.topic_defaults
        return topic_config({**self.topic_values, **parse_topic_overrides(overrides)})

    def validate_topic_overrides(self, overrides: Mapping[str, str]) -> None:
        """ConfigError, to be answered INVALID_CONFIG, unless a topic may have these settings here."""
        validate_topic_overrides(overrides, self.topic_values)


def known_setting(name: str) -> Setting | None:
    """The broker setting behind a name: itself, or the one that `listener.name.<listener>.` overrides."""
    setting = catalog.BROKER.get(name) or catalog.DYNAMIC_ONLY.get(name)
    if setting is None and (base := catalog.listener_base(name)) is not None:
        setting = catalog.BROKER.get(base)
    return setting


def parse_broker_values(texts: Mapping[str, str], where: Mapping[str, str]) -> dict[str, Value]:
    """The typed values of the names Kafka or we know; ConfigError lists every bad one."""
    values: dict[str, Value] = {}
    mistakes: list[str] = []
    for name, text in texts.items():
        setting = known_setting(name)
        if setting is None:
            continue
        try:
            values[name] = parse_value(setting._replace(name=name), text, where.get(name, ""))
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return values


def _build(
    static: Mapping[str, str],
    dynamic_default: Mapping[str, str],
    dynamic: Mapping[str, str],
    where: Mapping[str, str],
) -> tuple[BrokerConfig, list[str]]:
    given = parse_broker_values({**static, **dynamic_default, **dynamic}, where)
    values: dict[str, Value] = {name: setting.default for name, setting in catalog.BROKER.items()}
    values.update(given)
    check_broker_values(values, where)
    in_force: dict[str, Any] = {**values, "log.dirs": values["log.dirs"] or values["log.dir"]}
    topic_values = {name: _topic_value(name, setting, values) for name, setting in catalog.TOPIC.items()}
    listeners, notices = resolve_listeners(
        in_force["listeners"],
        in_force["advertised.listeners"],
        in_force["listener.security.protocol.map"],
        in_force["controller.listener.names"],
        {name: f"{name} ({place})" for name, place in where.items()},
    )
    in_force["listeners"] = listeners
    attributes = {attribute: in_force[name] for attribute, name in ATTRIBUTES.items()}
    config = BrokerConfig(
        **attributes,
        static=dict(static),
        dynamic_default=dict(dynamic_default),
        dynamic=dict(dynamic),
        values=values,
        topic_values=topic_values,
        topic_defaults=topic_config(topic_values),
    )
    return config, notices


ATTRIBUTES: Mapping[str, str] = {
    name.replace(".", "_"): name
    for name in catalog.BROKER
    if name.replace(".", "_") in BrokerConfig.__dataclass_fields__
}
"""Which setting each typed attribute shows."""


def _topic_value(name: str, setting: Setting, broker_values: Mapping[str, Value]) -> Value:
    for synonym in catalog.SYNONYMS.get(name, ()):
        value = broker_values[synonym.name]
        if isinstance(value, int) and not isinstance(value, bool):
            # Retention below zero means no limit in every unit.
            return -1 if name == "retention.ms" and value < 0 else value * synonym.factor
        if value is not None:
            return value
    return setting.default


def _with_node_id(given: Mapping[str, str], where: Mapping[str, str]) -> dict[str, str]:
    """`broker.id` is the old name of `node.id`: whichever is given stands for both, as in Kafka."""
    static = dict(given)
    old, new = given.get("broker.id"), given.get("node.id")
    if old is not None and new is not None and old.strip() != new.strip():
        raise ConfigError(
            f"node.id={new} ({where['node.id']}) and broker.id={old} ({where['broker.id']}) are the same "
            "setting: give one value"
        )
    if old is None and new is not None:
        static["broker.id"] = new
    if new is None and old is not None:
        static["node.id"] = old
    return static


def _refuse_variables(given: Mapping[str, str], where: Mapping[str, str]) -> None:
    """Kafka replaces `${provider:…}` by what a provider looks up; taken literally it would mean something else."""
    marks = tuple("${" + provider + ":" for provider in split_list(given.get("config.providers", "")))
    mistakes = [
        f"{name} ({where[name]}): holdfast does not look values up elsewhere; write this one out"
        for name, text in given.items()
        if any(mark in text for mark in marks)
    ]
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _place(name: str, properties: Mapping[str, str], overrides: Mapping[str, str]) -> str:
    if name in overrides:
        return OVERRIDE
    return properties.where(name) if isinstance(properties, Properties) else "properties"


def _repeated(properties: Mapping[str, str]) -> list[str]:
    if not isinstance(properties, Properties):
        return []
    return [
        f"{name} stands twice in {properties.source}, in lines {lost} and {won}: the last one counts"
        for name, lost, won in properties.repeated
    ]


def _check_names(names: Iterable[str], where: Mapping[str, str]) -> list[str]:
    """Notices for names that are accepted and change nothing; ConfigError for those nobody knows."""
    notices: list[str] = []
    mistakes: list[str] = []
    for name in names:
        setting = catalog.BROKER.get(name)
        place = where[name]
        if setting is not None:
            if not setting.acted_on:
                notices.append(f"{name} ({place}) is a setting of Kafka that holdfast does not act on")
        elif name in catalog.REMOVED:
            notices.append(f"{name} ({place}) was removed from Kafka and has no effect")
        elif catalog.listener_base(name) in catalog.BROKER:
            notices.append(
                f"{name} ({place}) is accepted and has no effect: listeners share one set of settings"
            )
        elif name.startswith(catalog.OPEN_PREFIXES) or name in catalog.PLUGIN_NAMES:
            notices.append(
                f"{name} ({place}) is accepted for plug-ins of Kafka and has no effect{_hint(name)}"
            )
        else:
            mistakes.append(f"{name} ({place}) is neither Kafka's setting nor holdfast's{_hint(name)}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return notices


def _hint(name: str) -> str:
    prefix = ""
    wanted = name
    if (base := catalog.listener_base(name)) is not None:
        prefix, wanted = name.removesuffix(base), base
    elif name.startswith(catalog.LISTENER_PREFIX):
        return ": it must read listener.name.<listener>.<setting>"
    if wanted in catalog.SYNONYMS:
        return f": it is a topic setting; its name for the whole broker is {catalog.SYNONYMS[wanted][0].name}"
    guess = catalog.nearest(wanted, catalog.BROKER)
    return f": did you mean {prefix}{guess}?" if guess else ""
