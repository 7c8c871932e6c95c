"""One topic's settings: what counts, what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from holdfast.config import BrokerConfig, TopicConfig, validate_topic_overrides
from holdfast.config.catalog import TOPIC
from holdfast.errors import ConfigError


def broker(**settings: str) -> BrokerConfig:
    return BrokerConfig.load({name.replace("_", "."): value for name, value in settings.items()})[0]


def test_there_is_an_attribute_for_every_topic_setting_that_we_act_on() -> None:
    attributes = {field.name for field in fields(TopicConfig)}
    acted_on = {name.replace(".", "_") for name, setting in TOPIC.items() if setting.acted_on}
    assert acted_on - {"remote_storage_enable"} <= attributes <= {name.replace(".", "_") for name in TOPIC}


def test_the_topic_beats_the_dynamic_broker_which_beats_the_file_which_beats_the_default() -> None:
    default = broker()
    static = broker(log_segment_bytes="2000000")
    for_all = static.with_dynamic({}, {"log.segment.bytes": "3000000"})
    for_one = static.with_dynamic({"log.segment.bytes": "4000000"}, {"log.segment.bytes": "3000000"})
    sizes = [config.topic_config({}).segment_bytes for config in (default, static, for_all, for_one)]
    assert sizes == [1_073_741_824, 2_000_000, 3_000_000, 4_000_000]
    assert for_one.topic_config({"segment.bytes": "5000000"}).segment_bytes == 5_000_000


def test_topics_without_settings_share_one_object() -> None:
    config = broker()
    assert config.topic_config({}) is config.topic_config({}) is config.topic_defaults


def test_values_are_typed() -> None:
    topic = broker().topic_config(
        {
            "cleanup.policy": " compact , delete ",
            "min.cleanable.dirty.ratio": ".25",
            "preallocate": "TRUE",
            "retention.ms": "-1",
            "holdfast.flush": "os",
            "message.timestamp.type": "LogAppendTime",
        }
    )
    assert topic.cleanup_policy == frozenset({"compact", "delete"})
    assert topic.min_cleanable_dirty_ratio == 0.25
    assert topic.preallocate is True
    assert topic.retention_ms == -1
    assert topic.holdfast_flush == "os"
    assert topic.message_timestamp_type == "LogAppendTime"


def test_flush_mode_falls_back_to_the_brokers() -> None:
    assert broker(holdfast_flush="os").topic_config({}).holdfast_flush == "os"
    assert broker(holdfast_flush="os").topic_config({"holdfast.flush": "group"}).holdfast_flush == "group"


def test_empty_cleanup_policy_keeps_everything() -> None:
    assert broker().topic_config({"cleanup.policy": ""}).cleanup_policy == frozenset()


def test_internal_segment_size_replaces_the_bounded_one() -> None:
    assert broker().topic_config({"internal.segment.bytes": "100"}).segment_bytes == 100


def test_configuration_cannot_be_changed() -> None:
    topic = broker().topic_defaults
    with pytest.raises(FrozenInstanceError):
        topic.retention_ms = 5  # type: ignore[misc]
    assert not hasattr(topic, "__dict__")


@pytest.mark.parametrize(
    "overrides",
    [
        {"retention.ms": "0"},
        {"retention.ms": "-1"},
        {"cleanup.policy": "delete,delete"},
        {"compression.gzip.level": "-1"},
        {"compression.type": "uncompressed"},
        {"leader.replication.throttled.replicas": "*"},
        {"leader.replication.throttled.replicas": "0:1,1:2"},
        {"segment.jitter.ms": "10", "segment.ms": "5"},
        {"local.retention.ms": "-1", "retention.ms": "5"},
        {"max.message.bytes": "2000000000"},
        {"holdfast.flush": "os"},
        {},
    ],
)
def test_what_kafka_accepts_is_accepted(overrides: dict[str, str]) -> None:
    validate_topic_overrides(overrides)
    broker().validate_topic_overrides(overrides)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"retention.ms": "-2"}, r"retention\.ms='-2': allowed is -1 or more"),
        ({"retention.ms": "x"}, r"retention\.ms='x': allowed is a whole number"),
        ({"retention.ms": ""}, r"retention\.ms=''"),
        ({"cleanup.policy": "none"}, "compact, delete"),
        ({"cleanup.policy": "Compact"}, "compact, delete"),
        ({"cleanup.policy": "compact,"}, "none of them empty"),
        ({"compression.gzip.level": "0"}, "1 to 9, or -1"),
        ({"compression.type": "none"}, "uncompressed"),
        ({"compression.type": "GZIP"}, "gzip"),
        ({"segment.bytes": "14"}, "1048576 or more"),
        ({"preallocate": "yes"}, "true or false"),
        ({"min.cleanable.dirty.ratio": "1.5"}, "0 to 1"),
        ({"leader.replication.throttled.replicas": "x"}, "partition:broker"),
        ({"message.timestamp.type": "createtime"}, "CreateTime, LogAppendTime"),
        ({"min.insync.replicas": "0"}, "1 or more"),
        ({"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "5"}, "must not be above"),
        ({"remote.storage.enable": "true"}, "own disk"),
        ({"holdfast.flush": "sometimes"}, "group, os"),
        ({"retention.mss": "1"}, r"did you mean retention\.ms\?"),
        ({"log.retention.hours": "1"}, r"did you mean retention\.ms\?"),
        ({"message.format.version": "3.0"}, "is not a topic setting"),
    ],
)
def test_what_kafka_refuses_is_refused(overrides: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        validate_topic_overrides(overrides)


def test_rules_count_what_the_topic_inherits() -> None:
    config = broker(log_cleaner_max_compaction_lag_ms="100")
    validate_topic_overrides({"min.compaction.lag.ms": "200"})
    with pytest.raises(ConfigError, match="must not be above"):
        config.validate_topic_overrides({"min.compaction.lag.ms": "200"})


def test_a_segment_of_a_compacted_topic_leaves_room_to_grow_when_it_is_cleaned() -> None:
    largest = {"segment.bytes": str(2**31 - 1)}
    assert broker().topic_config(largest).segment_bytes == 2**31 - 1
    for policy in ("compact", "compact,delete"):
        assert broker().topic_config({**largest, "cleanup.policy": policy}).segment_bytes == 2**30
