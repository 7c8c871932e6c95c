"""Full and incremental changes of settings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import NewTopic, create_topic
from holdfast.broker.metadata.image import ClusterImage, Resource, ResourceType
from holdfast.broker.metadata.settings import alter_settings, check_broker_name, replace_settings
from holdfast.config.broker import BrokerConfig
from holdfast.config.dynamic import Alteration, Operation
from holdfast.errors import ApiError
from holdfast.seams import Randomness

ORDERS = Resource(ResourceType.TOPIC, "orders")
BROKER = Resource(ResourceType.BROKER, "1")
ALL_BROKERS = Resource(ResourceType.BROKER, "")


@pytest.fixture
def image(image: ClusterImage, config: BrokerConfig, randomness: Randomness) -> ClusterImage:
    orders = NewTopic("orders", configs=[("retention.ms", "5")])
    image.apply_all(create_topic(image, orders, config, randomness))
    return image


def altered(
    image: ClusterImage, config: BrokerConfig, *changes: tuple[str, int, str | None]
) -> dict[str, str]:
    image.apply_all(alter_settings(image, ORDERS, [Alteration(*change) for change in changes], config))
    return dict(image.settings(ORDERS))


def test_set_replaces_one_value_and_keeps_the_others(image: ClusterImage, config: BrokerConfig) -> None:
    after = altered(image, config, ("cleanup.policy", Operation.SET, "compact"))
    assert after == {"retention.ms": "5", "cleanup.policy": "compact"}


def test_delete_gives_a_setting_back_to_its_default(image: ClusterImage, config: BrokerConfig) -> None:
    assert altered(image, config, ("retention.ms", Operation.DELETE, None)) == {}
    assert ORDERS not in image.configs


def test_deleting_what_is_not_set_changes_nothing(image: ClusterImage, config: BrokerConfig) -> None:
    assert alter_settings(image, ORDERS, [Alteration("cleanup.policy", Operation.DELETE, None)], config) == []


def test_append_starts_from_the_default(image: ClusterImage, config: BrokerConfig) -> None:
    after = altered(image, config, ("cleanup.policy", Operation.APPEND, "compact"))
    assert after["cleanup.policy"] == "delete,compact"


def test_append_adds_what_is_not_there_yet(image: ClusterImage, config: BrokerConfig) -> None:
    altered(image, config, ("cleanup.policy", Operation.SET, "compact"))
    after = altered(image, config, ("cleanup.policy", Operation.APPEND, "compact,delete"))
    assert after["cleanup.policy"] == "compact,delete"


def test_subtract_takes_away_what_is_there(image: ClusterImage, config: BrokerConfig) -> None:
    altered(image, config, ("cleanup.policy", Operation.SET, "compact,delete"))
    after = altered(image, config, ("cleanup.policy", Operation.SUBTRACT, "delete,nothing"))
    assert after["cleanup.policy"] == "compact"


def test_a_value_that_is_no_list_cannot_be_appended_to(image: ClusterImage, config: BrokerConfig) -> None:
    for operation in (Operation.APPEND, Operation.SUBTRACT):
        with pytest.raises(ApiError) as caught:
            alter_settings(image, ORDERS, [Alteration("retention.ms", operation, "5")], config)
        assert caught.value.code is ErrorCode.invalid_config


def test_setting_the_value_it_has_makes_no_record(image: ClusterImage, config: BrokerConfig) -> None:
    assert alter_settings(image, ORDERS, [Alteration("retention.ms", Operation.SET, "5")], config) == []


def test_setting_a_broker_setting_again_is_recorded(image: ClusterImage, config: BrokerConfig) -> None:
    again = [Alteration("log.retention.ms", Operation.SET, "7")]
    image.apply_all(alter_settings(image, BROKER, again, config))
    assert len(alter_settings(image, BROKER, again, config)) == 1


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([("nope", 0, "1")], ErrorCode.invalid_config),
        ([("retention.ms", 0, "soon")], ErrorCode.invalid_config),
        ([("retention.ms", 0, None)], ErrorCode.invalid_request),
        ([("cleanup.policy", 2, None)], ErrorCode.invalid_request),
        ([("retention.ms", 0, "1"), ("retention.ms", 0, "2")], ErrorCode.invalid_request),
        ([("retention.ms", 7, "1")], ErrorCode.invalid_request),
    ],
)
def test_impossible_changes_are_refused_and_change_nothing(
    image: ClusterImage,
    config: BrokerConfig,
    changes: Sequence[tuple[str, int, str | None]],
    code: ErrorCode,
) -> None:
    with pytest.raises(ApiError) as caught:
        altered(image, config, ("cleanup.policy", Operation.SET, "compact"), *changes)
    assert caught.value.code is code
    assert image.settings(ORDERS) == {"retention.ms": "5"}


def test_full_replacement_drops_what_is_not_named(image: ClusterImage, config: BrokerConfig) -> None:
    image.apply_all(replace_settings(image, ORDERS, [("cleanup.policy", "compact")], config))
    assert image.settings(ORDERS) == {"cleanup.policy": "compact"}


def test_full_replacement_with_nothing_drops_all(image: ClusterImage, config: BrokerConfig) -> None:
    image.apply_all(replace_settings(image, ORDERS, [], config))
    assert image.settings(ORDERS) == {}


def test_full_replacement_refuses_a_missing_value(image: ClusterImage, config: BrokerConfig) -> None:
    with pytest.raises(ApiError) as caught:
        replace_settings(image, ORDERS, [("retention.ms", None)], config)
    assert caught.value.code is ErrorCode.invalid_request


@pytest.mark.parametrize(
    ("resource", "code"),
    [
        (Resource(ResourceType.TOPIC, "unknown"), ErrorCode.unknown_topic_or_partition),
        (Resource(ResourceType.TOPIC, ""), ErrorCode.invalid_request),
        (Resource(ResourceType.BROKER, "9"), ErrorCode.invalid_request),
        (Resource(ResourceType.BROKER, "one"), ErrorCode.invalid_request),
    ],
)
def test_settings_of_what_does_not_exist_are_refused(
    image: ClusterImage, config: BrokerConfig, resource: Resource, code: ErrorCode
) -> None:
    with pytest.raises(ApiError) as caught:
        alter_settings(image, resource, [], config)
    assert caught.value.code is code


def test_all_brokers_have_settings_of_their_own(image: ClusterImage, config: BrokerConfig) -> None:
    change = [Alteration("log.retention.ms", Operation.SET, "9")]
    image.apply_all(alter_settings(image, ALL_BROKERS, change, config))
    assert image.settings(ALL_BROKERS) == {"log.retention.ms": "9"}
    assert image.settings(BROKER) == {}


def test_a_bad_broker_setting_is_an_invalid_request(image: ClusterImage, config: BrokerConfig) -> None:
    with pytest.raises(ApiError) as caught:
        alter_settings(image, BROKER, [Alteration("log.retention.ms", Operation.SET, "x")], config)
    assert caught.value.code is ErrorCode.invalid_request


def test_a_broker_is_named_by_its_number(image: ClusterImage) -> None:
    assert check_broker_name(image, "1") == 1


def test_append_to_a_list_set_to_nothing_starts_from_nothing(
    image: ClusterImage, config: BrokerConfig
) -> None:
    altered(image, config, ("cleanup.policy", Operation.SET, ""))
    assert (
        altered(image, config, ("cleanup.policy", Operation.APPEND, "compact"))["cleanup.policy"] == "compact"
    )


@pytest.mark.parametrize(("timeout_ms", "fits"), [("44999", False), ("45000", True), ("60001", False)])
def test_settings_of_groups_keep_to_the_brokers_bounds(
    image: ClusterImage, config: BrokerConfig, timeout_ms: str, fits: bool
) -> None:
    group = Resource(ResourceType.GROUP, "readers")
    change = [Alteration("consumer.session.timeout.ms", Operation.SET, timeout_ms)]
    if fits:
        assert len(alter_settings(image, group, change, config)) == 1
        return
    with pytest.raises(ApiError) as caught:
        alter_settings(image, group, change, config)
    assert caught.value.code is ErrorCode.invalid_config
