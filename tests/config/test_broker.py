"""Reading a broker's file: what is taken, what is noticed, what is refused and how it is said."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from holdfast.config import BrokerConfig, Listener, parse_properties
from holdfast.config.broker import ATTRIBUTES
from holdfast.config.catalog import BROKER, REMOVED, SYNONYMS
from holdfast.errors import ConfigError

KAFKA_4_3_SERVER_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=localhost:9093
listeners=PLAINTEXT://:9092,CONTROLLER://:9093
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://localhost:9092,CONTROLLER://localhost:9093
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
log.dirs=/var/lib/kraft-combined-logs
num.partitions=1
num.recovery.threads.per.data.dir=1
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.retention.hours=168
log.segment.bytes=1073741824
log.retention.check.interval.ms=300000
"""

KAFKA_4_3_BROKER_PROPERTIES = """
process.roles=broker
node.id=2
controller.quorum.bootstrap.servers=localhost:9093
listeners=PLAINTEXT://localhost:9092
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://localhost:9092
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL
log.dirs=/var/lib/kraft-broker-logs
"""

KAFKA_3_SERVER_PROPERTIES = """
broker.id=0
num.network.threads=3
log.dirs=/var/lib/kafka-logs
log.retention.hours=168
zookeeper.connect=localhost:2181
zookeeper.connection.timeout.ms=18000
group.initial.rebalance.delay.ms=0
"""


def load(text: str = "", **overrides: str) -> BrokerConfig:
    named = {name.replace("_", "."): value for name, value in overrides.items()}
    return BrokerConfig.load(parse_properties(text), named)[0]


def test_kafkas_own_server_properties_starts_with_one_notice_for_each_idle_setting() -> None:
    config, notices = BrokerConfig.load(parse_properties(KAFKA_4_3_SERVER_PROPERTIES))
    assert config.listeners == (Listener("PLAINTEXT", "", 9092, "PLAINTEXT", "localhost", 9092),)
    assert config.node_id == 1
    assert config.log_dirs == ("/var/lib/kraft-combined-logs",)
    assert config.topic_defaults.retention_ms == 168 * 3_600_000
    assert [re.split("[ (]", notice)[0] for notice in notices] == [
        "controller.quorum.bootstrap.servers",
        "inter.broker.listener.name",
        "num.network.threads",
        "num.io.threads",
        "socket.send.buffer.bytes",
        "socket.receive.buffer.bytes",
        "num.recovery.threads.per.data.dir",
        "offsets.topic.replication.factor",
        "share.coordinator.state.topic.replication.factor",
        "share.coordinator.state.topic.min.isr",
        "transaction.state.log.replication.factor",
        "transaction.state.log.min.isr",
        "listener",
    ]
    assert "\n" not in "".join(notices)


def test_kafkas_broker_properties_starts() -> None:
    config = load(KAFKA_4_3_BROKER_PROPERTIES)
    assert config.node_id == 2
    assert config.listeners == (Listener("PLAINTEXT", "localhost", 9092, "PLAINTEXT", "localhost", 9092),)


def test_file_of_the_zookeeper_years_starts_and_says_what_is_gone() -> None:
    config, notices = BrokerConfig.load(parse_properties(KAFKA_3_SERVER_PROPERTIES, "old.properties"))
    assert config.node_id == 0
    assert any("zookeeper.connect (old.properties:6) was removed" in notice for notice in notices)


def test_nothing_told_listens_on_loopback_and_creates_no_topic_by_mistake() -> None:
    config, notices = BrokerConfig.load({})
    assert [(listener.host, listener.port) for listener in config.listeners] == [
        ("127.0.0.1", 9092),
        ("::1", 9092),
    ]
    assert config.auto_create_topics_enable is False  # HF207
    assert config.holdfast_flush == "group"
    assert config.node_id == 1
    assert config.log_dirs == ("holdfast-data",)
    assert notices == []


def test_overrides_win_over_the_file() -> None:
    assert load("num.partitions=3", num_partitions="5").num_partitions == 5


def test_unknown_name_is_an_error_that_suggests_the_nearest_and_says_where() -> None:
    with pytest.raises(ConfigError) as caught:
        load("num.partitions=1\nlog.retention.hour=5")
    assert str(caught.value) == (
        "log.retention.hour (server.properties:2) is neither Kafka's setting nor holdfast's: "
        "did you mean log.retention.hours?"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("holdfast.flsh", "did you mean holdfast.flush?"),
        ("retention.ms", "its name for the whole broker is log.retention.ms"),
        ("segment.bytes", "its name for the whole broker is log.segment.bytes"),
        ("listener.name.inside.ssl.keystore.tpe", "did you mean listener.name.inside.ssl.keystore.type?"),
        ("listener.name.inside", "listener.name.<listener>.<setting>"),
    ],
)
def test_hint_fits_the_mistake(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        BrokerConfig.load({name: "1"})


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load("num.partitions=0\nfetch.max.bytes=x\nauto.create.topics.enable=maybe")
    lines = str(caught.value).splitlines()
    assert [line.partition("=")[0] for line in lines] == [
        "num.partitions",
        "fetch.max.bytes",
        "auto.create.topics.enable",
    ]
    assert "server.properties:2" in lines[1]


def test_wrong_value_on_the_command_line_says_so() -> None:
    with pytest.raises(ConfigError, match=r"num\.partitions='0' \(--override\): allowed is 1 or more"):
        load(num_partitions="0")


@pytest.mark.parametrize(
    "name",
    [
        "listener.name.inside.ssl.keystore.location",
        "listener.name.inside.plain.sasl.jaas.config",
        "ssl.my.provider.option",
        "sasl.my.handler.url",
        "metrics.jmx.exclude",
        "metrics.context.cluster",
        "rsm.config.bucket",
        "super.users",
        "unclean.leader.election.enable",
    ],
)
def test_names_kafka_accepts_are_accepted_with_one_notice(name: str) -> None:
    value = "false" if name == "unclean.leader.election.enable" else "x"
    _, notices = BrokerConfig.load({name: value})
    assert len(notices) == 1
    assert notices[0].startswith(name)


def test_near_miss_below_an_open_prefix_is_hinted_at() -> None:
    _, notices = BrokerConfig.load({"ssl.keystore.locaton": "/x"})
    assert "did you mean ssl.keystore.location?" in notices[0]


def test_settings_nobody_acts_on_are_checked_all_the_same() -> None:
    with pytest.raises(ConfigError, match=r"num\.io\.threads"):
        BrokerConfig.load({"num.io.threads": "0"})
    with pytest.raises(ConfigError, match=r"listener\.name\.inside\.max\.connections"):
        BrokerConfig.load({"listener.name.inside.max.connections": "-1"})


def test_repeated_line_is_noticed_and_the_last_counts() -> None:
    config, notices = BrokerConfig.load(parse_properties("num.partitions=2\nnum.partitions=3"))
    assert config.num_partitions == 3
    assert "lines 1 and 2" in notices[0]


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_names_of_older_kafkas_are_accepted(name: str) -> None:
    _, notices = BrokerConfig.load({name: "1"})
    assert "has no effect" in notices[0]


@pytest.mark.parametrize(("given", "node_id"), [({"broker.id": "7"}, 7), ({"node.id": "7"}, 7)])
def test_broker_id_and_node_id_are_one_setting(given: dict[str, str], node_id: int) -> None:
    config, _ = BrokerConfig.load(given)
    assert config.node_id == node_id
    assert config.static == {"broker.id": "7", "node.id": "7"}


def test_two_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="the same setting"):
        BrokerConfig.load({"broker.id": "1", "node.id": "2"})


@pytest.mark.parametrize(
    ("given", "retention_ms"),
    [
        ({}, 604_800_000),
        ({"log.retention.hours": "2"}, 7_200_000),
        ({"log.retention.hours": "2", "log.retention.minutes": "3"}, 180_000),
        ({"log.retention.hours": "2", "log.retention.minutes": "3", "log.retention.ms": "4"}, 4),
        ({"log.retention.hours": "-1"}, -1),
        ({"log.retention.minutes": "-5"}, -1),
        ({"log.retention.hours": "0", "log.retention.ms": "4"}, 4),
    ],
)
def test_the_finest_unit_of_retention_counts(given: dict[str, str], retention_ms: int) -> None:
    config, _ = BrokerConfig.load(given)
    assert config.topic_defaults.retention_ms == retention_ms


def test_other_units_are_converted_too() -> None:
    config = load(log_roll_hours="2", log_roll_jitter_hours="1", log_flush_scheduler_interval_ms="50")
    topics = config.topic_defaults
    assert (topics.segment_ms, topics.segment_jitter_ms, topics.flush_ms) == (7_200_000, 3_600_000, 50)
    finer = load(log_flush_interval_ms="9", log_flush_scheduler_interval_ms="50")
    assert finer.topic_defaults.flush_ms == 9


def test_log_dirs_beats_log_dir_and_repeats_count_once() -> None:
    assert load(log_dir="/a").log_dirs == ("/a",)
    assert load(log_dir="/a", log_dirs="/b, /c,/b").log_dirs == ("/b", "/c")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"log.retention.ms": "0"}, r"log\.retention\.ms=0 \(properties\): allowed is -1"),
        ({"log.retention.hours": "0"}, r"log\.retention\.hours=0"),
        ({"log.roll.ms": "0"}, r"log\.roll\.ms=0"),
        ({"log.roll.jitter.ms": "-1"}, r"log\.roll\.jitter\.ms=-1"),
        ({"log.flush.interval.ms": "-1"}, r"log\.flush\.interval\.ms=-1"),
        ({"log.cleaner.dedupe.buffer.size": "1000"}, "more than one MiB"),
        ({"log.cleaner.max.compaction.lag.ms": "5", "log.cleaner.min.compaction.lag.ms": "6"}, "at most"),
        ({"queued.max.request.bytes": "5"}, r"socket\.request\.max\.bytes"),
        ({"connections.max.idle.ms": "50"}, "more than connection"),
        ({"process.roles": "controller"}, "must include broker"),
        ({"process.roles": "broker,worker"}, "at least one of broker, controller"),
        (
            {"config.providers": "file", "broker.rack": "${file:/x:rack}"},
            r"broker\.rack \(.*write this one out",
        ),
        ({"authorizer.class.name": "x.Y"}, "not served yet"),
        ({"remote.log.storage.system.enable": "true"}, "own disk"),
        ({"log.dirs": ""}, r"log\.dirs=''"),
        ({"node.id": "-1"}, r"node\.id='-1'"),
        ({"holdfast.flush": "never"}, "one of group, os"),
        ({"holdfast.requests.in.flight.max": "0"}, "1 or more"),
    ],
)
def test_values_that_cannot_work_are_refused(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BrokerConfig.load(given)


@pytest.mark.parametrize(
    "given",
    [
        {"queued.max.request.bytes": "-1"},
        {"connections.max.idle.ms": "-1"},
        {"authorizer.class.name": ""},
        {"config.providers": "file", "broker.rack": "${other}"},
        {"log.cleanup.policy": ""},
        {"default.replication.factor": "-1"},
    ],
)
def test_values_with_a_special_meaning_are_taken(given: dict[str, str]) -> None:
    BrokerConfig.load(given)


def test_every_setting_we_act_on_has_a_typed_attribute_or_is_in_what_topics_and_listeners_get() -> None:
    of_topics = {synonym.name for synonyms in SYNONYMS.values() for synonym in synonyms}
    of_listeners = {"advertised.listeners", "controller.listener.names", "listener.security.protocol.map"}
    elsewhere = of_topics | of_listeners | {"broker.id", "log.dir", "process.roles"}
    acted_on = {name for name, setting in BROKER.items() if setting.acted_on}
    assert acted_on - elsewhere <= set(ATTRIBUTES.values()) <= acted_on
    layers = {"static", "dynamic", "dynamic_default", "values", "topic_values", "topic_defaults"}
    assert {field.name for field in fields(BrokerConfig)} - layers == set(ATTRIBUTES)


def test_attributes_have_the_types_they_are_declared_with() -> None:
    config = load()
    declared = {field.name: str(field.type) for field in fields(BrokerConfig)}
    for attribute in ATTRIBUTES:
        value = getattr(config, attribute)
        if declared[attribute].startswith("tuple"):
            assert isinstance(value, tuple) or "None" in declared[attribute], attribute
        elif declared[attribute] in ("int", "bool", "float", "str"):
            assert type(value).__name__ == declared[attribute], attribute


def test_settings_of_any_name_can_be_read_typed() -> None:
    config = load("num.io.threads=9")
    assert config.values["num.io.threads"] == 9
    assert config.values["group.initial.rebalance.delay.ms"] == 3000


def test_altering_makes_a_new_configuration_and_leaves_the_old() -> None:
    config = load(log_retention_hours="5")
    altered = config.with_dynamic(
        {"log.retention.ms": "10"}, {"log.retention.ms": "20", "holdfast.flush": "os"}
    )
    assert (altered.topic_defaults.retention_ms, altered.holdfast_flush) == (10, "os")
    assert altered.topic_defaults.holdfast_flush == "os"
    assert (config.topic_defaults.retention_ms, config.holdfast_flush) == (18_000_000, "group")
    assert altered.with_dynamic({}, {}).topic_defaults.retention_ms == 18_000_000


def test_passwords_stay_out_of_the_representation() -> None:
    assert "hunter2" not in repr(load(ssl_key_password="hunter2"))
