"""What DescribeConfigs answers, held to the answers of Apache Kafka 4.3.1."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from holdfast.config import BrokerConfig, Type
from holdfast.config.catalog import BROKER, CLIENT_METRICS, GROUP, TOPIC
from holdfast.config.describe import (
    ConfigEntry,
    Source,
    describe_all_brokers,
    describe_broker,
    describe_client_metrics,
    describe_group,
    describe_topic,
)


@pytest.fixture
def config() -> BrokerConfig:
    return BrokerConfig.load({"node.id": "1", "num.partitions": "2", "ssl.key.password": "hunter2"})[0]


def by_name(entries: Iterable[ConfigEntry]) -> dict[str, ConfigEntry]:
    return {entry.name: entry for entry in entries}


def synonyms(entry: ConfigEntry) -> list[tuple[str, str | None, int]]:
    return [(synonym.name, synonym.value, synonym.source) for synonym in entry.synonyms]


def test_broker_shows_every_public_setting_once_and_in_order(config: BrokerConfig) -> None:
    names = [entry.name for entry in describe_broker(config)]
    assert names == sorted(name for name, setting in BROKER.items() if not setting.internal)


def test_topic_shows_every_public_setting_once_and_in_order(config: BrokerConfig) -> None:
    names = [entry.name for entry in describe_topic(config, {})]
    assert names == sorted(name for name, setting in TOPIC.items() if not setting.internal)


def test_default_static_and_derived_values_name_their_source(config: BrokerConfig) -> None:
    entries = by_name(describe_broker(config))
    assert entries["num.partitions"] == ConfigEntry(
        name="num.partitions",
        value="2",
        read_only=True,
        config_source=Source.STATIC_BROKER,
        is_sensitive=False,
        synonyms=entries["num.partitions"].synonyms,
        config_type=Type.INT,
    )
    assert synonyms(entries["num.partitions"]) == [("num.partitions", "2", 4), ("num.partitions", "1", 5)]
    assert synonyms(entries["broker.id"])[0] == ("broker.id", "1", 4)
    assert entries["log.retention.hours"].config_source == Source.DEFAULT
    assert synonyms(entries["log.retention.hours"]) == [("log.retention.hours", "168", 5)]
    assert (entries["log.retention.ms"].value, entries["log.retention.ms"].synonyms) == (None, ())
    assert entries["log.retention.ms"].read_only is False
    assert entries["log.cleaner.io.max.bytes.per.second"].value == "1.7976931348623157E308"


def test_layers_are_listed_strongest_first(config: BrokerConfig) -> None:
    altered = config.with_dynamic({"message.max.bytes": "10"}, {"message.max.bytes": "20"})
    entry = by_name(describe_broker(altered))["message.max.bytes"]
    assert (entry.value, entry.config_source) == ("10", Source.DYNAMIC_BROKER)
    assert synonyms(entry) == [
        ("message.max.bytes", "10", 2),
        ("message.max.bytes", "20", 3),
        ("message.max.bytes", "1048588", 5),
    ]
    topic = by_name(describe_topic(altered, {"max.message.bytes": "30"}))["max.message.bytes"]
    assert synonyms(topic) == [("max.message.bytes", "30", 1), *synonyms(entry)]
    assert by_name(describe_topic(altered, {}))["max.message.bytes"].config_source == Source.DYNAMIC_BROKER


def test_other_units_show_as_kafka_shows_them() -> None:
    hours = BrokerConfig.load({"log.retention.hours": "24"})[0]
    topic = by_name(describe_topic(hours, {}))["retention.ms"]
    assert (topic.value, topic.config_source, topic.synonyms) == ("86400000", Source.DEFAULT, ())
    both = BrokerConfig.load({"log.retention.hours": "24", "log.retention.ms": "5"})[0]
    assert synonyms(by_name(describe_topic(both, {}))["retention.ms"]) == [
        ("log.retention.ms", "5", 4),
        ("log.retention.hours", "24", 4),
        ("log.retention.hours", "168", 5),
    ]
    assert synonyms(by_name(describe_broker(both))["log.retention.hours"]) == [
        ("log.retention.hours", "24", 4),
        ("log.retention.hours", "168", 5),
    ]


def test_topic_values_are_written_as_parsed(config: BrokerConfig) -> None:
    entries = by_name(
        describe_topic(
            config,
            {
                "cleanup.policy": "compact , delete, delete",
                "preallocate": "TRUE",
                "internal.segment.bytes": "100",
            },
        )
    )
    assert entries["cleanup.policy"].value == "compact,delete"
    assert synonyms(entries["cleanup.policy"]) == [
        ("cleanup.policy", "compact,delete", 1),
        ("log.cleanup.policy", "delete", 5),
    ]
    assert entries["preallocate"].value == "true"
    assert synonyms(entries["internal.segment.bytes"]) == [("internal.segment.bytes", "100", 1)]
    assert entries["remote.storage.enable"].synonyms == ()


def test_secrets_are_never_shown(config: BrokerConfig) -> None:
    entry = by_name(describe_broker(config))["ssl.key.password"]
    assert entry.is_sensitive
    assert entry.value is None
    assert synonyms(entry) == [("ssl.key.password", None, 4)]
    assert "hunter2" not in str(describe_broker(config))


def test_names_nobody_knows_are_shown_without_their_value() -> None:
    config = BrokerConfig.load({"super.users": "User:admin"})[0]
    entry = by_name(describe_broker(config))["super.users"]
    assert (entry.value, entry.is_sensitive, entry.config_type) == (None, True, Type.UNKNOWN)
    assert synonyms(entry) == [("super.users", None, 4)]


def test_listener_setting_is_shown_with_the_one_it_overrides() -> None:
    config = BrokerConfig.load({"listener.name.inside.max.connections": "5"})[0]
    entry = by_name(describe_broker(config))["listener.name.inside.max.connections"]
    assert (entry.value, entry.config_type, entry.read_only) == ("5", Type.INT, True)
    assert synonyms(entry) == [
        ("listener.name.inside.max.connections", "5", 4),
        ("max.connections", "2147483647", 5),
    ]


def test_internal_settings_are_shown_when_given() -> None:
    config = BrokerConfig.load({"log.initial.task.delay.ms": "10"})[0]
    assert by_name(describe_broker(config))["log.initial.task.delay.ms"].value == "10"


def test_all_brokers_show_only_what_was_altered_for_all(config: BrokerConfig) -> None:
    assert describe_all_brokers(config) == []
    altered = config.with_dynamic({"message.max.bytes": "10"}, {"message.max.bytes": "20"})
    (entry,) = describe_all_brokers(altered)
    assert (entry.value, entry.config_source) == ("20", Source.DYNAMIC_DEFAULT_BROKER)
    assert synonyms(entry) == [("message.max.bytes", "20", 3)]


def test_only_the_names_asked_for_are_described(config: BrokerConfig) -> None:
    assert [entry.name for entry in describe_broker(config, ["node.id", "nobody.knows"])] == ["node.id"]
    assert [entry.name for entry in describe_topic(config, {}, ["segment.ms"])] == ["segment.ms"]
    assert describe_topic(config, {}, []) == []


def test_groups_follow_the_brokers_settings(config: BrokerConfig) -> None:
    entries = by_name(describe_group(config, {"share.isolation.level": "read_committed"}))
    assert entries.keys() == GROUP.keys()
    assert synonyms(entries["consumer.session.timeout.ms"]) == [
        ("group.consumer.session.timeout.ms", "45000", 5)
    ]
    assert synonyms(entries["share.auto.offset.reset"]) == [("share.auto.offset.reset", "latest", 5)]
    assert entries["share.isolation.level"].config_source == Source.GROUP
    static = BrokerConfig.load({"group.consumer.session.timeout.ms": "50000"})[0]
    assert by_name(describe_group(static, {}))["consumer.session.timeout.ms"].value == "50000"


def test_client_metrics_have_their_own_source() -> None:
    entries = by_name(describe_client_metrics({"interval.ms": "1000"}))
    assert entries.keys() == CLIENT_METRICS.keys()
    assert (entries["interval.ms"].value, entries["interval.ms"].config_source) == (
        "1000",
        Source.CLIENT_METRICS,
    )
    assert entries["metrics"].config_source == Source.DEFAULT
    assert entries["interval.ms"].synonyms == ()
