"""What the two brokers say they offer: the same versions, the same features, and no API more or less than told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.differential import Allowed

from holdfast.testing.apache import ApacheKafka
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.wire_client import WireClient
from holdfast.wire.api_keys import API_VERSIONS

GAPS = Path(__file__).parents[2] / "docs" / "GAPS.md"


def section(title: str) -> str:
    """The text under one heading of docs/GAPS.md."""
    found = re.search(
        rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", GAPS.read_text(encoding="utf-8"), re.M | re.S
    )
    assert found, f"docs/GAPS.md has no section {title!r}"
    return found.group(1)


def offered(bootstrap_servers: str, version: int) -> Any:
    with WireClient(bootstrap_servers) as client:
        fields = {"client_software_name": "differential", "client_software_version": "1"}
        return client.ask(API_VERSIONS, version, fields)


def versions(answer: Any) -> dict[int, tuple[int, int]]:
    return {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}


@pytest.mark.parametrize("version", range(5))
def test_every_api_is_offered_at_the_versions_of_apache_kafka(
    version: int, our_broker: BrokerProcess, apache_kafka: ApacheKafka
) -> None:
    ours = versions(offered(our_broker.bootstrap_servers, version))
    theirs = versions(offered(apache_kafka.bootstrap_servers, version))
    assert ours == {key: theirs.get(key) for key in ours}


def test_apis_not_offered_are_those_the_documentation_lists(
    our_broker: BrokerProcess, apache_kafka: ApacheKafka
) -> None:
    ours = versions(offered(our_broker.bootstrap_servers, 4))
    theirs = versions(offered(apache_kafka.bootstrap_servers, 4))
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", section("APIs of Kafka 4.3 that are not offered"), re.M)
    assert {int(key) for key, _ in rows} == theirs.keys() - ours.keys()


@pytest.mark.parametrize("version", [3, 4])
def test_features_are_those_of_apache_kafka(
    version: int, our_broker: BrokerProcess, apache_kafka: ApacheKafka
) -> None:
    ours = offered(our_broker.bootstrap_servers, version)
    theirs = offered(apache_kafka.bootstrap_servers, version)
    assert {f.name: f for f in ours.supported_features} == {f.name: f for f in theirs.supported_features}
    assert {f.name: f for f in ours.finalized_features} == {f.name: f for f in theirs.finalized_features}
    assert ours.zk_migration_ready == theirs.zk_migration_ready
    assert ours.finalized_features_epoch > 0


def test_every_allowed_difference_is_explained_and_no_other(allowed_differences: list[Allowed]) -> None:
    explained = re.findall(r"^\| `([a-z-]+)` \|", section("Differences from Apache Kafka 4.3"), re.M)
    assert sorted(explained) == sorted(rule.name for rule in allowed_differences)
