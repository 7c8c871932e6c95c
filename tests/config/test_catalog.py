"""The tables against what Apache Kafka 4.3 says of itself.

`kafka_4_3_settings.tsv` was read out of Apache Kafka 4.3.1's own definitions: resource, name, type, default,
where it may be altered, and whether it is internal. The catalogue may differ from it only where it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.config import catalog
from holdfast.config.catalog import (
    BROKER,
    CLIENT_METRICS,
    GROUP,
    OUR_DEFAULTS,
    OUR_SCOPES,
    REMOVED,
    SYNONYMS,
    TOPIC,
    listener_base,
    nearest,
    same_quantity,
)
from holdfast.config.definitions import Setting
from holdfast.config.definitions_coordinators import GROUP_SYNONYMS
from holdfast.config.descriptions import DESCRIPTIONS
from holdfast.config.values import format_value

TABLES: Mapping[str, Mapping[str, Setting]] = {
    "broker": BROKER,
    "topic": TOPIC,
    "group": GROUP,
    "client-metrics": CLIENT_METRICS,
}


class KafkaRow(NamedTuple):
    resource: str
    name: str
    type: str
    default: str
    scope: str
    visibility: str


KAFKA = [
    KafkaRow(*line.split("\t"))
    for line in Path(__file__).with_name("kafka_4_3_settings.tsv").read_text().splitlines()
]


@pytest.mark.parametrize("resource", TABLES)
def test_exactly_kafkas_names_and_ours_are_known(resource: str) -> None:
    kafkas = {row.name for row in KAFKA if row.resource == resource}
    ours = {name for name, setting in TABLES[resource].items() if setting.is_ours}
    assert TABLES[resource].keys() - ours == kafkas


@pytest.mark.parametrize("row", KAFKA, ids=lambda row: f"{row.resource}:{row.name}")
def test_type_default_scope_and_visibility_are_kafkas(row: KafkaRow) -> None:
    setting = TABLES[row.resource][row.name]
    default = format_value(setting.default)
    assert setting.type.name == row.type
    assert setting.internal == (row.visibility == "internal")
    if row.resource == "broker" and row.name in OUR_DEFAULTS:
        assert default != row.default
    else:
        assert ("<none>" if default is None else default) == row.default
    if row.resource == "broker" and row.name in OUR_SCOPES:
        assert setting.scope.value != row.scope
    elif row.resource == "broker":
        assert setting.scope.value == row.scope


def test_topic_settings_fall_back_to_broker_settings_of_the_same_default() -> None:
    for name, synonyms in SYNONYMS.items():
        broker_value = next(
            BROKER[synonym.name].default for synonym in synonyms if BROKER[synonym.name].default is not None
        )
        factor = next(synonym.factor for synonym in synonyms if BROKER[synonym.name].default is not None)
        scaled = broker_value * factor if isinstance(broker_value, int) and factor != 1 else broker_value
        assert scaled == TOPIC[name].default, name


def test_group_settings_fall_back_to_broker_settings_of_the_same_default() -> None:
    for name, broker_name in GROUP_SYNONYMS.items():
        assert GROUP[name].default == BROKER[broker_name].default, name


def test_a_topic_setting_is_acted_on_when_and_only_when_its_broker_setting_is() -> None:
    for name, synonyms in SYNONYMS.items():
        for synonym in synonyms:
            assert BROKER[synonym.name].acted_on == TOPIC[name].acted_on, (name, synonym.name)


def test_each_setting_we_act_on_has_a_line_of_meaning_and_no_other_has() -> None:
    acted_on = {name for table in (BROKER, TOPIC) for name, setting in table.items() if setting.acted_on}
    assert acted_on == DESCRIPTIONS.keys()


def test_all_of_our_own_settings_are_acted_on() -> None:
    ours = [setting for table in TABLES.values() for setting in table.values() if setting.is_ours]
    assert ours
    assert all(setting.acted_on for setting in ours)


def test_removed_names_are_not_known_as_well() -> None:
    assert not REMOVED & BROKER.keys()
    assert not any(name.startswith("holdfast.") for name in REMOVED)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("listener.name.internal.ssl.keystore.type", "ssl.keystore.type"),
        ("listener.name.internal.max.connections", "max.connections"),
        ("listener.name.internal.plain.sasl.jaas.config", "sasl.jaas.config"),
        (
            "listener.name.internal.scram-sha-256.sasl.server.callback.handler.class",
            "sasl.server.callback.handler.class",
        ),
        ("listener.name.internal", None),
        ("max.connections", None),
    ],
)
def test_listener_names_are_peeled_off(name: str, base: str | None) -> None:
    assert listener_base(name) == base


def test_names_for_one_quantity_stand_together() -> None:
    retention = ("log.retention.ms", "log.retention.minutes", "log.retention.hours")
    assert all(same_quantity(name) == retention for name in retention)
    assert same_quantity("log.flush.interval.ms")[1] == "log.flush.scheduler.interval.ms"
    assert same_quantity("log.flush.scheduler.interval.ms") == ("log.flush.scheduler.interval.ms",)
    assert same_quantity("num.partitions") == ("num.partitions",)


def test_nearest_name_is_found_and_nonsense_has_none() -> None:
    assert nearest("log.retention.hour", BROKER) == "log.retention.hours"
    assert nearest("zzzzzz", BROKER) is None


def test_open_prefixes_end_with_a_dot() -> None:
    assert all(prefix.endswith(".") for prefix in catalog.OPEN_PREFIXES)
