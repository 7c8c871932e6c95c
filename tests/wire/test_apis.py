"""The table of APIs against the schemas."""

from __future__ import annotations

from holdfast.wire import apis
from holdfast.wire.message_schema import known_versions, request_type, response_type


def test_every_version_served_has_schemas() -> None:
    for api in apis.APIS:
        served = [version for version in range(api.min, api.max + 1) if api.is_served(version)]
        assert set(served) <= set(known_versions(api.key)), api
        assert served


def test_flexible_versions_are_those_of_the_schemas() -> None:
    for api in apis.APIS:
        for version in range(api.served_from, api.max + 1):
            flexible = request_type(api.key, version).__flexible__
            assert response_type(api.key, version).__flexible__ == flexible
            assert (version >= apis.FLEXIBLE_FROM[api.key]) == flexible, (api, version)


def test_names_are_those_of_the_schemas() -> None:
    for api in apis.APIS:
        assert request_type(api.key, api.max).__name__ == api.name + "Request"


def test_keys_are_in_order_and_unique() -> None:
    keys = [api.key for api in apis.APIS]
    assert keys == sorted(set(keys))
    assert len(apis.BY_KEY) == len(apis.BY_NAME) == len(apis.APIS) == 75


def test_produce_is_advertised_from_zero_and_served_from_three() -> None:
    produce = apis.BY_NAME["Produce"]
    assert produce.min == 0
    assert not produce.is_served(2)
    assert [api.name for api in apis.APIS if api.served_from != api.min] == ["Produce"]
    assert apis.is_served(0, 3)
    assert not apis.is_served(0, 14)
    assert not apis.is_served(52, 0)  # Vote: for controllers


def test_features_are_finalized_within_their_range() -> None:
    assert {feature.name for feature in apis.FEATURES} >= {"metadata.version", "transaction.version"}
    for feature in apis.FEATURES:
        assert feature.min <= feature.finalized <= feature.max


def test_the_version_exchange_itself_has_a_header_anyone_can_read() -> None:
    for version in (0, 3, 4, 99):
        assert apis.response_header_version(apis.API_VERSIONS, version) == 0
    assert apis.request_header_version(apis.API_VERSIONS, 2) == 1
    assert apis.request_header_version(apis.API_VERSIONS, 3) == 2
    assert apis.request_header_version(12345, 3) == 1


def test_old_clients_are_not_told_of_features_that_begin_at_zero() -> None:
    assert [feature.name for feature in apis.supported_features(3)] == ["metadata.version"]
    assert apis.supported_features(4) == apis.FEATURES
