"""One topic's settings, resolved: its own, else what the broker was altered to, else its file, else defaults.

A `TopicConfig` never changes; a change of configuration makes a new one. Topics without settings of their
own share the broker's single object, so thousands of them cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.config.catalog import SYNONYMS, TOPIC, nearest
from holdfast.config.definitions import Value
from holdfast.config.values import parse_value
from holdfast.errors import ConfigError

COMPACTED_SEGMENT_BYTES_MAX: Final = 2**30
"""Cleaning may make batches larger, by the times of tombstones and by packing them again; positions in a segment
end at 2^31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """The values in force for one topic, named as Kafka names them with dots turned into underscores."""

    cleanup_policy: frozenset[str]
    """Of "delete" and "compact"; empty keeps everything for ever."""
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    delete_retention_ms: int
    file_delete_delay_ms: int
    flush_messages: int
    flush_ms: int
    holdfast_flush: Literal["group", "os"]
    holdfast_write_ahead_bytes: int
    index_interval_bytes: int
    internal_segment_bytes: int | None
    max_compaction_lag_ms: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"]
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    min_insync_replicas: int
    preallocate: bool
    retention_bytes: int
    """-1 for no limit."""
    retention_ms: int
    """-1 for no limit."""
    segment_bytes: int
    """`internal.segment.bytes` when that is set; of a compacted topic at most `COMPACTED_SEGMENT_BYTES_MAX`."""
    segment_index_bytes: int
    segment_jitter_ms: int
    segment_ms: int


def parse_topic_overrides(overrides: Mapping[str, str]) -> dict[str, Value]:
    """The typed values of a topic's own settings; ConfigError for a name or value that cannot be right."""
    values: dict[str, Value] = {}
    for name, text in overrides.items():
        setting = TOPIC.get(name)
        if setting is None:
            raise _unknown_name(name)
        values[name] = parse_value(setting, text)
    return values


def _unknown_name(name: str) -> ConfigError:
    by_broker_name = {synonym.name: topic for topic, synonyms in SYNONYMS.items() for synonym in synonyms}
    guess = by_broker_name.get(name) or nearest(name, TOPIC)
    hint = f"; did you mean {guess}?" if guess else ""
    return ConfigError(f"{name} is not a topic setting{hint}")


def validate_topic_overrides(
    overrides: Mapping[str, str], inherited: Mapping[str, Value] | None = None
) -> None:
    """ConfigError, to be answered INVALID_CONFIG, unless a topic may have these settings of its own.

    `inherited` holds the value of every topic setting the topic does not set; Kafka's defaults if not given.
    """
    if inherited is None:
        inherited = {name: setting.default for name, setting in TOPIC.items()}
    _check_together({**inherited, **parse_topic_overrides(overrides)})


def _check_together(values: Mapping[str, Value]) -> None:
    """The rules that bind several settings of one topic; `values` holds all of them."""
    shortest: Any = values["min.compaction.lag.ms"]
    longest: Any = values["max.compaction.lag.ms"]
    if shortest > longest:
        raise ConfigError(
            f"min.compaction.lag.ms ({shortest}) must not be above max.compaction.lag.ms ({longest})"
        )
    if values["remote.storage.enable"]:
        raise ConfigError("remote.storage.enable=true: holdfast keeps every segment on its own disk")


def topic_config(values: Mapping[str, Value]) -> TopicConfig:
    """The object for one topic from the typed values of every topic setting."""
    fields: dict[str, Any] = {
        attribute: value
        for name, value in values.items()
        if (attribute := name.replace(".", "_")) in TopicConfig.__dataclass_fields__
    }
    fields["cleanup_policy"] = frozenset(fields["cleanup_policy"])
    if fields["internal_segment_bytes"] is not None:
        fields["segment_bytes"] = fields["internal_segment_bytes"]
    if "compact" in fields["cleanup_policy"]:
        fields["segment_bytes"] = min(fields["segment_bytes"], COMPACTED_SEGMENT_BYTES_MAX)
    return TopicConfig(**fields)
