"""Changes while running: operations, and which broker settings they may touch."""

from __future__ import annotations

import pytest

from holdfast.config import BrokerConfig
from holdfast.config.catalog import BROKER, TOPIC
from holdfast.config.dynamic import Alteration, Operation, alter, validate_broker_overrides
from holdfast.errors import ConfigError

SET, DELETE, APPEND, SUBTRACT = Operation.SET, Operation.DELETE, Operation.APPEND, Operation.SUBTRACT


@pytest.fixture
def config() -> BrokerConfig:
    return BrokerConfig.load({})[0]


@pytest.mark.parametrize(
    ("current", "alteration", "after"),
    [
        ({}, Alteration("retention.ms", SET, "5"), {"retention.ms": "5"}),
        ({"retention.ms": "5"}, Alteration("retention.ms", DELETE), {}),
        ({}, Alteration("retention.ms", DELETE), {}),
        ({}, Alteration("nobody.knows", DELETE, "5"), {}),
        ({}, Alteration("cleanup.policy", APPEND, "compact"), {"cleanup.policy": "delete,compact"}),
        (
            {"cleanup.policy": "compact"},
            Alteration("cleanup.policy", APPEND, "compact"),
            {"cleanup.policy": "compact"},
        ),
        (
            {"cleanup.policy": "compact, delete"},
            Alteration("cleanup.policy", SUBTRACT, "delete"),
            {"cleanup.policy": "compact"},
        ),
        ({}, Alteration("cleanup.policy", SUBTRACT, "delete"), {"cleanup.policy": ""}),
    ],
)
def test_operations_apply(current: dict[str, str], alteration: Alteration, after: dict[str, str]) -> None:
    before = dict(current)
    assert alter(current, [alteration], TOPIC) == after
    assert current == before


@pytest.mark.parametrize("operation", [APPEND, SUBTRACT])
@pytest.mark.parametrize("name", ["retention.ms", "nobody.knows"])
def test_only_lists_can_be_appended_to_and_subtracted_from(operation: Operation, name: str) -> None:
    with pytest.raises(ConfigError, match="is for lists"):
        alter({}, [Alteration(name, operation, "5")], TOPIC)


def test_setting_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a value"):
        alter({}, [Alteration("retention.ms", SET, None)], TOPIC)


@pytest.mark.parametrize(
    "overrides",
    [
        {"log.retention.ms": "5000"},
        {"listener.name.plaintext.max.connections": "5"},
        {"leader.replication.throttled.rate": "5"},
        {"message.max.bytes": "5"},
        {"holdfast.flush": "os"},
        {"num.io.threads": "9"},
        {},
    ],
)
@pytest.mark.parametrize("per_broker", [True, False])
def test_dynamic_settings_may_be_altered(
    config: BrokerConfig, overrides: dict[str, str], per_broker: bool
) -> None:
    validate_broker_overrides(config, overrides, per_broker=per_broker)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"log.retention.hours": "5"}, "read at start only"),
        ({"num.partitions": "5"}, "read at start only"),
        ({"listeners": "PLAINTEXT://localhost:1"}, "read at start only"),
        ({"log.retention.ms": "0"}, "-1 for no limit"),
        ({"log.retention.ms": "x"}, "a whole number"),
        ({"log.cleaner.dedupe.buffer.size": "5"}, "one MiB"),
        ({"leader.replication.throttled.rate": "-1"}, "0 or more"),
        ({"ssl.keystore.location": "/x"}, "one listener only"),
        ({"log.retention.mss": "5"}, r"did you mean log\.retention\.ms\?"),
    ],
)
@pytest.mark.parametrize("per_broker", [True, False])
def test_other_changes_are_refused(
    config: BrokerConfig, overrides: dict[str, str], complaint: str, per_broker: bool
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        validate_broker_overrides(config, overrides, per_broker=per_broker)


@pytest.mark.parametrize("name", ["cordoned.log.dirs", "listener.name.plaintext.ssl.keystore.type"])
def test_some_settings_belong_to_one_broker(config: BrokerConfig, name: str) -> None:
    validate_broker_overrides(config, {name: "x"}, per_broker=True)
    with pytest.raises(ConfigError, match="one broker only"):
        validate_broker_overrides(config, {name: "x"}, per_broker=False)


def test_in_sync_minimum_belongs_to_all_brokers(config: BrokerConfig) -> None:
    validate_broker_overrides(config, {"min.insync.replicas": "1"}, per_broker=False)
    with pytest.raises(ConfigError, match="not for one broker"):
        validate_broker_overrides(config, {"min.insync.replicas": "1"}, per_broker=True)


def test_rules_see_the_other_layers_too(config: BrokerConfig) -> None:
    altered = config.with_dynamic({"log.cleaner.max.compaction.lag.ms": "10"}, {})
    validate_broker_overrides(config, {"log.cleaner.min.compaction.lag.ms": "20"}, per_broker=False)
    with pytest.raises(ConfigError, match="at most"):
        validate_broker_overrides(altered, {"log.cleaner.min.compaction.lag.ms": "20"}, per_broker=False)


def test_broker_lists_are_altered_like_topic_lists() -> None:
    appended = alter({}, [Alteration("log.cleanup.policy", APPEND, "compact")], BROKER)
    assert appended == {"log.cleanup.policy": "delete,compact"}
