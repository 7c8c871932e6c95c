"""Safe by default; unsafe only by name."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.client.errors import UnsafeSetting
from holdfast.client.settings import consumer_settings, producer_settings
from holdfast.errors import ConfigError


def test_a_producer_confirms_only_what_every_replica_has_and_stores_nothing_twice() -> None:
    settings = producer_settings("host:9092", {})
    assert settings["acks"] == "all"
    assert settings["enable.idempotence"] is True


def test_a_consumer_commits_nothing_by_itself_and_reads_committed() -> None:
    settings = consumer_settings("host:9092", "billing", {})
    assert settings["group.id"] == "billing"
    assert settings["enable.auto.commit"] is False
    assert settings["isolation.level"] == "read_committed"


def test_other_settings_pass_through() -> None:
    assert (
        producer_settings("h", {"linger.ms": 20, "statistics.interval.ms": 5})["statistics.interval.ms"] == 5
    )


@pytest.mark.parametrize(
    ("setting", "value", "risk"),
    [
        ("acks", 1, "HF102"),
        ("request.required.acks", "0", "HF102"),
        ("enable.idempotence", "false", "HF106"),
        ("delivery.timeout.ms", 5000, "HF103"),
        ("retries", 0, "HF103"),
    ],
)
def test_a_producer_setting_that_loses_messages_is_refused_with_its_risk(
    setting: str, value: Any, risk: str
) -> None:
    with pytest.raises(UnsafeSetting, match=risk):
        producer_settings("h", {setting: value})
    producer_settings("h", {setting: value}, unsafe=(setting,))


@pytest.mark.parametrize(
    ("setting", "value", "risk"),
    [
        ("enable.auto.commit", True, "HF301"),
        ("auto.offset.reset", "latest", "HF305"),
        ("isolation.level", "read_uncommitted", "HF310"),
        ("check.crcs", False, "HF205"),
    ],
)
def test_a_consumer_setting_that_loses_messages_is_refused_with_its_risk(
    setting: str, value: Any, risk: str
) -> None:
    with pytest.raises(UnsafeSetting, match=risk):
        consumer_settings("h", "g", {setting: value})
    assert consumer_settings("h", "g", {setting: value}, unsafe=(setting,))[setting] == value


def test_an_exception_without_a_reason_is_refused() -> None:
    with pytest.raises(ConfigError, match="acks"):
        producer_settings("h", {}, unsafe=("acks",))


def test_two_names_of_one_setting_may_not_disagree() -> None:
    with pytest.raises(ConfigError, match="two values"):
        producer_settings("h", {"acks": "all", "request.required.acks": "-1"})


def test_a_number_that_is_none_is_said() -> None:
    with pytest.raises(ConfigError, match="not a number"):
        producer_settings("h", {"retries": "many"})
