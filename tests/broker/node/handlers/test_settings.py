"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and ListConfigResources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node.loggers import GROUPS, REQUESTS
from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig

DESCRIBE, ALTER, INCREMENTAL, LIST = 32, 33, 44, 74
TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)


def resource(kind: int, name: str, keys: list[str] | None = None) -> dict[str, Any]:
    return {"resource_type": kind, "resource_name": name, "configuration_keys": keys}


def full(kind: int, name: str, **values: str | None) -> dict[str, Any]:
    configs = [{"name": key.replace("_", "."), "value": value} for key, value in values.items()]
    return {"resource_type": kind, "resource_name": name, "configs": configs}


def single(kind: int, name: str, *changes: tuple[str, int, str | None]) -> dict[str, Any]:
    configs = [{"name": key, "config_operation": what, "value": value} for key, what, value in changes]
    return {"resource_type": kind, "resource_name": name, "configs": configs}


def described(desk: Any, kind: int, name: str, *keys: str) -> dict[str, Any]:
    (result,) = desk.ask(
        DESCRIBE, resources=[resource(kind, name, list(keys) or None)], include_synonyms=True
    ).results
    assert result.error_code == ErrorCode.none, result.error_message
    return {config.name: config for config in result.configs}


@pytest.mark.parametrize("version", range(1, 5))
def test_a_topics_settings_are_described_in_every_version(desk: Any, version: int) -> None:
    desk.create("orders", retention_ms="5000")
    (result,) = desk.ask(
        DESCRIBE, version, resources=[resource(TOPIC, "orders", ["retention.ms", "unknown"])]
    ).results
    assert (result.error_code, result.resource_type, result.resource_name) == (0, TOPIC, "orders")
    (config,) = result.configs
    assert (config.name, config.value, config.config_source) == ("retention.ms", "5000", 1)
    assert (config.read_only, config.is_sensitive, config.synonyms) == (False, False, ())
    if version >= 3:
        assert (config.config_type, config.documentation) == (5, None)


def test_synonyms_and_documentation_come_when_asked_for(desk: Any) -> None:
    desk.create("orders", cleanup_policy="compact")
    (result,) = desk.ask(
        DESCRIBE,
        resources=[resource(TOPIC, "orders", ["cleanup.policy"])],
        include_synonyms=True,
        include_documentation=True,
    ).results
    (config,) = result.configs
    assert [(s.name, s.value, s.source) for s in config.synonyms] == [
        ("cleanup.policy", "compact", 1),
        ("log.cleanup.policy", "delete", 5),
    ]
    assert config.documentation
    (result,) = desk.ask(
        DESCRIBE,
        resources=[resource(BROKER, "1", ["holdfast.flush", "num.io.threads"])],
        include_synonyms=False,
        include_documentation=True,
    ).results
    acted_on, ignored = result.configs
    assert acted_on.documentation
    assert ignored.documentation is None


def test_no_keys_and_an_empty_list_of_keys_ask_for_everything(desk: Any) -> None:
    desk.create("orders")
    nothing, null = desk.ask(
        DESCRIBE, resources=[resource(TOPIC, "orders", []), resource(TOPIC, "orders", None)]
    ).results
    assert len(nothing.configs) == len(null.configs) > 30


def test_the_broker_describes_every_setting(desk: Any) -> None:
    configs = described(desk, BROKER, "1")
    assert len(configs) > 300
    assert (configs["node.id"].value, configs["node.id"].config_source) == ("1", 4)
    assert configs["node.id"].read_only
    assert not configs["log.retention.ms"].read_only
    assert configs["ssl.keystore.password"].is_sensitive


@pytest.mark.parametrize(
    ("kind", "name", "code"),
    [
        (TOPIC, "unknown", ErrorCode.unknown_topic_or_partition),
        (TOPIC, "", ErrorCode.invalid_topic_exception),
        (TOPIC, "bad name", ErrorCode.invalid_topic_exception),
        (BROKER, "9", ErrorCode.invalid_request),
        (BROKER, "one", ErrorCode.invalid_request),
        (BROKER_LOGGER, "", ErrorCode.invalid_request),
        (BROKER_LOGGER, "9", ErrorCode.invalid_request),
        (CLIENT_METRICS, "", ErrorCode.invalid_request),
        (GROUP, "", ErrorCode.invalid_request),
        (99, "x", ErrorCode.invalid_request),
        (0, "x", ErrorCode.invalid_request),
    ],
)
def test_what_cannot_be_described_spoils_nothing_else(
    desk: Any, kind: int, name: str, code: ErrorCode
) -> None:
    desk.create("orders")
    bad, good = desk.ask(DESCRIBE, resources=[resource(kind, name), resource(TOPIC, "orders")]).results
    assert (bad.error_code, bad.resource_type, bad.resource_name) == (code, kind, name)
    assert bad.error_message
    assert bad.configs == ()
    assert good.error_code == ErrorCode.none


def test_groups_subscriptions_and_loggers_can_be_described(desk: Any) -> None:
    assert described(desk, GROUP, "readers")["consumer.session.timeout.ms"].value == "45000"
    assert described(desk, CLIENT_METRICS, "m")["interval.ms"].value == "300000"
    assert described(desk, BROKER_LOGGER, "1", "root")["root"].value == "INFO"
    assert described(desk, BROKER, "") == {}


@pytest.mark.parametrize("version", range(3))
def test_a_full_alteration_replaces_everything(desk: Any, version: int) -> None:
    desk.create("orders", retention_ms="5000")
    (response,) = desk.ask(
        ALTER, version, resources=[full(TOPIC, "orders", cleanup_policy="compact")], validate_only=False
    ).responses
    assert (response.error_code, response.error_message) == (ErrorCode.none, None)
    assert (response.resource_type, response.resource_name) == (TOPIC, "orders")
    config = desk.node.settings.topic("orders")
    assert config.cleanup_policy == {"compact"}
    assert config.retention_ms == 604_800_000


@pytest.mark.parametrize("version", range(2))
def test_an_incremental_alteration_changes_what_it_names(desk: Any, version: int) -> None:
    desk.create("orders", retention_ms="5000")
    change = single(TOPIC, "orders", ("cleanup.policy", APPEND, "compact"), ("segment.bytes", SET, "2000000"))
    (response,) = desk.ask(INCREMENTAL, version, resources=[change], validate_only=False).responses
    assert response.error_code == ErrorCode.none, response.error_message
    config = desk.node.settings.topic("orders")
    assert (config.cleanup_policy, config.segment_bytes, config.retention_ms) == (
        {"delete", "compact"},
        2_000_000,
        5000,
    )


def test_a_running_partition_follows_its_topics_settings(desk: Any) -> None:
    desk.create("orders")
    change = single(TOPIC, "orders", ("max.message.bytes", SET, "1234"))
    desk.ask(INCREMENTAL, resources=[change], validate_only=False)
    assert desk.node.partitions.get("orders", 0).log.config.max_message_bytes == 1234
    desk.ask(INCREMENTAL, resources=[single(TOPIC, "orders", ("max.message.bytes", DELETE, None))])
    assert desk.node.partitions.get("orders", 0).log.config.max_message_bytes == 1_048_588


def test_broker_settings_reach_topics_without_their_own(desk: Any) -> None:
    desk.create("orders")
    desk.create("own", retention_ms="7")
    for_all = single(BROKER, "", ("log.retention.ms", SET, "111"))
    assert desk.ask(INCREMENTAL, resources=[for_all]).responses[0].error_code == ErrorCode.none
    assert desk.node.settings.topic("orders").retention_ms == 111
    for_one = single(BROKER, "1", ("log.retention.ms", SET, "222"))
    assert desk.ask(INCREMENTAL, resources=[for_one]).responses[0].error_code == ErrorCode.none
    assert desk.node.settings.topic("orders").retention_ms == 222
    assert desk.node.settings.topic("own").retention_ms == 7
    sources = [s.source for s in described(desk, BROKER, "1")["log.retention.ms"].synonyms]
    assert sources[:2] == [2, 3]


def test_altered_settings_survive_a_restart(desk: Any) -> None:
    desk.create("orders")
    changes = [
        single(TOPIC, "orders", ("retention.ms", SET, "333")),
        single(BROKER, "", ("log.cleaner.threads", SET, "2")),
    ]
    desk.ask(INCREMENTAL, resources=changes)
    again = desk.restart()
    assert again.node.settings.topic("orders").retention_ms == 333
    assert again.node.settings.broker.dynamic_default == {"log.cleaner.threads": "2"}


@pytest.mark.parametrize("api", [ALTER, INCREMENTAL])
def test_validating_changes_nothing(desk: Any, api: int) -> None:
    desk.create("orders")
    wanted = (
        full(TOPIC, "orders", retention_ms="1")
        if api == ALTER
        else single(TOPIC, "orders", ("retention.ms", SET, "1"))
    )
    (response,) = desk.ask(api, resources=[wanted], validate_only=True).responses
    assert response.error_code == ErrorCode.none
    assert not desk.node.metadata.image.configs


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (single(TOPIC, "unknown", ("retention.ms", SET, "1")), ErrorCode.unknown_topic_or_partition),
        (single(TOPIC, "", ("retention.ms", SET, "1")), ErrorCode.invalid_request),
        (single(TOPIC, "bad name", ("retention.ms", SET, "1")), ErrorCode.invalid_topic_exception),
        (single(TOPIC, "orders", ("no.such", SET, "1")), ErrorCode.invalid_config),
        (single(TOPIC, "orders", ("retention.ms", SET, "x")), ErrorCode.invalid_config),
        (single(TOPIC, "orders", ("retention.ms", APPEND, "1")), ErrorCode.invalid_config),
        (single(TOPIC, "orders", ("retention.ms", SET, None)), ErrorCode.invalid_request),
        (single(TOPIC, "orders", ("retention.ms", 9, "1")), ErrorCode.invalid_request),
        (single(BROKER, "1", ("node.id", SET, "3")), ErrorCode.invalid_request),
        (single(BROKER, "1", ("num.io.threads", SET, "x")), ErrorCode.invalid_request),
        (single(BROKER, "9"), ErrorCode.invalid_request),
        (single(BROKER, "one"), ErrorCode.invalid_request),
        (single(BROKER_LOGGER, "9", ("root", SET, "INFO")), ErrorCode.invalid_request),
        (single(BROKER_LOGGER, "1", ("root", APPEND, "INFO")), ErrorCode.invalid_request),
        (single(BROKER_LOGGER, "1", ("root", DELETE, None)), ErrorCode.invalid_request),
        (single(BROKER_LOGGER, "1", ("root", SET, "LOUD")), ErrorCode.invalid_config),
        (single(BROKER_LOGGER, "1", ("no.such", SET, "INFO")), ErrorCode.invalid_config),
        (single(CLIENT_METRICS, "m", ("no.such", SET, "1")), ErrorCode.invalid_request),
        (single(CLIENT_METRICS, ""), ErrorCode.invalid_request),
        (single(GROUP, "g", ("no.such", SET, "1")), ErrorCode.invalid_config),
        (single(GROUP, ""), ErrorCode.invalid_request),
        (single(99, "x"), ErrorCode.invalid_request),
    ],
)
def test_a_refused_alteration_spoils_nothing_else(desk: Any, wanted: dict[str, Any], code: ErrorCode) -> None:
    desk.create("orders")
    desk.create("other")
    good = single(TOPIC, "other", ("retention.ms", SET, "1"))
    refused, fine = desk.ask(INCREMENTAL, resources=[wanted, good]).responses
    assert refused.error_code == code
    assert refused.error_message
    assert fine.error_code == ErrorCode.none
    assert len(desk.node.metadata.image.configs) == 1


def test_levels_of_loggers_are_altered_and_inherited(desk: Any) -> None:
    def alter(*changes: tuple[str, int, str | None], validate_only: bool = False) -> None:
        wanted = [single(BROKER_LOGGER, "1", *changes)]
        (answer,) = desk.ask(INCREMENTAL, resources=wanted, validate_only=validate_only).responses
        assert answer.error_code == ErrorCode.none, answer.error_message

    def levels() -> set[tuple[str, str]]:
        found = described(desk, BROKER_LOGGER, "1", "root", GROUPS, REQUESTS)
        return {(name.rpartition(".")[2], each.value) for name, each in found.items()}

    alter(("root", SET, "error"), validate_only=True)
    assert levels() == {("root", "INFO"), ("groups", "INFO"), ("requests", "INFO")}
    alter(("holdfast.broker", SET, "warn"), (GROUPS, SET, "DEBUG"))
    assert levels() == {("root", "INFO"), ("groups", "DEBUG"), ("requests", "WARN")}
    alter((GROUPS, DELETE, None), ("root", SET, "ERROR"))
    assert levels() == {("root", "ERROR"), ("groups", "WARN"), ("requests", "WARN")}
    (entry,) = described(desk, BROKER_LOGGER, "1", "root").values()
    assert (entry.config_source, entry.read_only, entry.is_sensitive) == (6, False, False)
    assert not desk.node.metadata.image.configs


def test_a_resource_named_twice_is_refused_twice(desk: Any) -> None:
    desk.create("orders")
    twice = [full(TOPIC, "orders", retention_ms="1"), full(TOPIC, "orders", retention_ms="2")]
    answer = desk.ask(ALTER, resources=twice, validate_only=False)
    assert [r.error_code for r in answer.responses] == [ErrorCode.invalid_request] * 2
    assert not desk.node.metadata.image.configs


def test_every_resource_with_settings_is_listed(desk: Any) -> None:
    desk.create("orders")
    desk.ask(INCREMENTAL, resources=[single(GROUP, "readers", ("consumer.session.timeout.ms", SET, "50000"))])
    answer = desk.ask(LIST, resource_types=[])
    assert {(r.resource_type, r.resource_name) for r in answer.config_resources} == {
        (TOPIC, "orders"),
        (BROKER, "1"),
        (BROKER_LOGGER, "1"),
        (GROUP, "readers"),
    }


def test_listed_resources_can_be_chosen_by_type(desk: Any) -> None:
    desk.create("orders")
    answer = desk.ask(LIST, resource_types=[BROKER, BROKER])
    assert [(r.resource_type, r.resource_name) for r in answer.config_resources] == [(BROKER, "1")]
    assert desk.ask(LIST, resource_types=[99]).error_code == ErrorCode.unsupported_version


def test_version_0_lists_client_metrics_subscriptions(desk: Any) -> None:
    desk.create("orders")
    desk.ask(INCREMENTAL, resources=[single(CLIENT_METRICS, "m", ("interval.ms", SET, "1000"))])
    assert [r.resource_name for r in desk.ask(LIST, 0).config_resources] == ["m"]


def test_a_topics_settings_cost_no_other_topic_anything(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[object] = []
    resolve = BrokerConfig.topic_config

    def counted(self: BrokerConfig, altered: Mapping[str, str]) -> TopicConfig:
        resolved.append(altered)
        return resolve(self, altered)

    monkeypatch.setattr(BrokerConfig, "topic_config", counted)
    for number in range(20):
        desk.create(f"topic-{number}", retention_ms="5000")
    assert len(resolved) <= 3 * 20
    resolved.clear()
    desk.ask(INCREMENTAL, resources=[single(TOPIC, "topic-7", ("retention.ms", SET, "6000"))])
    assert described(desk, TOPIC, "topic-7", "retention.ms")["retention.ms"].value == "6000"
    assert len(resolved) <= 3
    desk.ask(INCREMENTAL, resources=[single(BROKER, "", ("log.retention.ms", SET, "7000"))])
    assert len(resolved) >= 20
