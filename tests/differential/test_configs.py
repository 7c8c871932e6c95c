"""Settings: described, altered whole and one by one, of topics and brokers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.differential import Script, Side

from holdfast.wire.api_keys import (
    ALTER_CONFIGS,
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    LIST_CONFIG_RESOURCES,
)

Compare = Callable[[Script], None]
TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)
GIVEN_AT_START = frozenset(
    (
        "advertised.listeners",
        "auto.create.topics.enable",
        "controller.listener.names",
        "controller.quorum.bootstrap.servers",
        "group.initial.rebalance.delay.ms",
        "inter.broker.listener.name",
        "listener.security.protocol.map",
        "listeners",
        "log.dir",
        "log.dirs",
        "offsets.topic.num.partitions",
        "offsets.topic.replication.factor",
        "queued.max.request.bytes",
        "share.coordinator.state.topic.min.isr",
        "share.coordinator.state.topic.replication.factor",
        "transaction.state.log.min.isr",
        "transaction.state.log.num.partitions",
        "transaction.state.log.replication.factor",
    )
)
"""Settings of which one broker or the other was told at its start, or whose defaults differ."""
WEEK = "604800000"
NEVER = "9223372036854775807"


def describe(
    side: Side,
    label: str,
    kind: int,
    name: str,
    keys: list[str] | None = None,
    *,
    version: int = 4,
    **fields: Any,
) -> Any:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys}
    return side.ask(label, DESCRIBE_CONFIGS, version, {"resources": [resource], **fields})


def settings_of_topics(side: Side) -> None:
    side.create_topic("settings", 1, {"retention.ms": "123456", "cleanup.policy": "compact,delete"})
    for version in range(1, 5):
        describe(side, f"all, version {version}", TOPIC, "settings", version=version)
    describe(side, "with synonyms", TOPIC, "settings", include_synonyms=True)
    describe(side, "with documentation", TOPIC, "settings", include_documentation=True)
    describe(side, "some", TOPIC, "settings", ["retention.ms", "segment.bytes", "no.such.setting"])
    describe(side, "none", TOPIC, "settings", [])
    describe(side, "no such topic", TOPIC, "nowhere")
    describe(side, "illegal name", TOPIC, "a/b")
    describe(side, "empty name", TOPIC, "")


def settings_of_brokers(side: Side) -> None:
    keys = [
        "log.retention.ms",
        "num.io.threads",
        "compression.type",
        "advertised.listeners",
        "no.such.setting",
    ]
    for version in range(1, 5):
        describe(
            side, f"some, version {version}", BROKER, "1", keys[:3], version=version, include_synonyms=True
        )
    describe(side, "unknown names", BROKER, "1", keys[4:])
    describe(side, "another broker", BROKER, "9", keys[:3])
    describe(side, "no number", BROKER, "one", keys[:3])
    describe(side, "all brokers together", BROKER, "")
    describe(side, "unknown kind of resource", 7, "1")
    everything = side.client.ask(
        DESCRIBE_CONFIGS,
        4,
        {"resources": [{"resource_type": BROKER, "resource_name": "1", "configuration_keys": None}]},
    )
    side.note(
        "names, types and defaults",
        {
            each.name: f"{each.config_type} {each.is_sensitive} {each.value}"
            for each in everything.results[0].configs
            if each.name not in GIVEN_AT_START and not each.name.startswith("holdfast.")
        },
    )


def alter(
    side: Side, label: str, kind: int, name: str, *changes: tuple[str, int, str | None], **fields: Any
) -> Any:
    listed = [
        {"name": key, "config_operation": operation, "value": value} for key, operation, value in changes
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": listed}
    version = fields.pop("version", 1)
    return side.ask(label, INCREMENTAL_ALTER_CONFIGS, version, {"resources": [resource], **fields})


def show(side: Side, label: str, topic: str, **expected: str) -> None:
    """Describe settings of a topic once they have these values."""
    keys = [key.replace("_", ".") for key in expected]
    wanted = {"resource_type": TOPIC, "resource_name": topic, "configuration_keys": keys}

    def has_come_about() -> bool:
        found = side.client.ask(DESCRIBE_CONFIGS, 4, {"resources": [wanted]}).results[0].configs
        values = {each.name.replace(".", "_"): each.value for each in found}
        return values == expected

    side.wait_until(has_come_about)
    describe(side, label, TOPIC, topic, keys, include_synonyms=True)


def one_by_one(side: Side) -> None:
    side.create_topic("altered", 1, {"retention.ms": "5000"})
    alter(side, "set", TOPIC, "altered", ("retention.ms", SET, "7000"), ("segment.bytes", SET, "2097152"))
    show(side, "after set", "altered", retention_ms="7000", segment_bytes="2097152")
    alter(side, "delete", TOPIC, "altered", ("retention.ms", DELETE, None), version=0)
    show(side, "after delete", "altered", retention_ms=WEEK)
    alter(side, "delete what is not set", TOPIC, "altered", ("flush.ms", DELETE, None))
    alter(side, "append", TOPIC, "altered", ("cleanup.policy", APPEND, "compact"))
    show(side, "after append", "altered", cleanup_policy="delete,compact")
    alter(side, "append again", TOPIC, "altered", ("cleanup.policy", APPEND, "compact"))
    show(side, "after appending again", "altered", cleanup_policy="delete,compact")
    alter(side, "subtract", TOPIC, "altered", ("cleanup.policy", SUBTRACT, "delete"))
    show(side, "after subtract", "altered", cleanup_policy="compact")
    alter(side, "subtract what is not there", TOPIC, "altered", ("cleanup.policy", SUBTRACT, "delete"))
    alter(side, "append to a number", TOPIC, "altered", ("retention.ms", APPEND, "5"))
    alter(side, "unknown operation", TOPIC, "altered", ("retention.ms", 9, "5"))
    alter(side, "null value", TOPIC, "altered", ("retention.ms", SET, None))
    alter(side, "empty value", TOPIC, "altered", ("retention.ms", SET, ""))
    alter(side, "bad value", TOPIC, "altered", ("retention.ms", SET, "often"))
    alter(side, "unknown setting", TOPIC, "altered", ("no.such.setting", SET, "5"))
    alter(side, "delete unknown setting", TOPIC, "altered", ("no.such.setting", DELETE, None))
    alter(side, "one good and one bad", TOPIC, "altered", ("flush.ms", SET, "50"), ("retention.ms", SET, "x"))
    show(side, "nothing of it done", "altered", flush_ms=NEVER, retention_ms=WEEK)
    alter(side, "one key twice", TOPIC, "altered", ("flush.ms", SET, "5"), ("flush.ms", SET, "6"))
    alter(side, "only validated", TOPIC, "altered", ("flush.ms", SET, "77"), validate_only=True)
    show(side, "not done", "altered", flush_ms=NEVER)
    alter(side, "no such topic", TOPIC, "nowhere", ("flush.ms", SET, "77"))
    alter(side, "empty topic name", TOPIC, "", ("flush.ms", SET, "77"))
    alter(side, "no changes", TOPIC, "altered")
    alter(side, "unknown kind", 7, "altered", ("flush.ms", SET, "77"))
    resource = {
        "resource_type": TOPIC,
        "resource_name": "altered",
        "configs": [{"name": "flush.ms", "config_operation": SET, "value": "9"}],
    }
    side.ask("one resource twice", INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource, resource]})


def all_at_once(side: Side) -> None:
    side.create_topic("replaced-settings", 1, {"retention.ms": "5000", "flush.ms": "10"})

    def replace(
        label: str, topic: str, version: int = 2, validate: bool = False, **settings: str | None
    ) -> None:
        listed = [{"name": key.replace("_", "."), "value": value} for key, value in settings.items()]
        resource = {"resource_type": TOPIC, "resource_name": topic, "configs": listed}
        side.ask(label, ALTER_CONFIGS, version, {"resources": [resource], "validate_only": validate})

    replace("only validated", "replaced-settings", validate=True, flush_ms="99")
    show(side, "not done", "replaced-settings", retention_ms="5000", flush_ms="10")
    for version in range(3):
        replace(f"version {version}", "replaced-settings", version, flush_ms=str(20 + version))
    show(side, "the rest is gone", "replaced-settings", retention_ms=WEEK, flush_ms="22")
    replace("bad value", "replaced-settings", flush_ms="x")
    replace("unknown setting", "replaced-settings", no_such="x")
    replace("null value", "replaced-settings", flush_ms=None)
    replace("no such topic", "nowhere", flush_ms="1")
    replace("nothing", "replaced-settings")
    show(side, "all gone", "replaced-settings", retention_ms=WEEK, flush_ms=NEVER)


def settings_of_the_cluster(side: Side) -> None:
    """Last of all a change of the default for every topic, taken back again."""
    side.create_topic("inherits")
    alter(side, "nothing of its own", TOPIC, "inherits", ("retention.ms", DELETE, None))
    alter(side, "default", BROKER, "", ("log.retention.ms", SET, "999000"))
    show(side, "inherited", "inherits", retention_ms="999000")
    alter(side, "of this broker", BROKER, "1", ("log.retention.ms", SET, "888000"))
    show(side, "this broker's first", "inherits", retention_ms="888000")
    describe(side, "of the broker", BROKER, "1", ["log.retention.ms"], include_synonyms=True)
    describe(side, "of all brokers", BROKER, "", ["log.retention.ms"], include_synonyms=True)
    alter(side, "not to be changed", BROKER, "1", ("log.dirs", SET, "/elsewhere"))
    alter(side, "unknown", BROKER, "1", ("no.such.setting", SET, "1"))
    alter(side, "bad", BROKER, "1", ("log.retention.ms", SET, "x"))
    alter(side, "another broker", BROKER, "9", ("log.retention.ms", SET, "1"))
    alter(side, "no number", BROKER, "one", ("log.retention.ms", SET, "1"))
    alter(side, "back, this broker", BROKER, "1", ("log.retention.ms", DELETE, None))
    alter(side, "back, all brokers", BROKER, "", ("log.retention.ms", DELETE, None))
    show(side, "as before", "inherits", retention_ms=WEEK)


def resources_with_settings(side: Side) -> None:
    side.create_topic("resource")

    def ask(label: str, version: int, *kinds: int) -> None:
        answer = side.client.ask(LIST_CONFIG_RESOURCES, version, {"resource_types": list(kinds)})
        found = getattr(answer, "config_resources", ())
        side.note(
            label,
            {
                "error_code": answer.error_code,
                "kinds": sorted({each.resource_type for each in found}),
                "resource": any(each.resource_name == "resource" for each in found),
            },
        )

    ask("topics", 1, TOPIC)
    ask("brokers", 1, BROKER)
    ask("topics and brokers", 1, TOPIC, BROKER)
    ask("client metrics", 1, CLIENT_METRICS)
    ask("loggers", 1, BROKER_LOGGER)
    ask("groups", 1, GROUP)
    ask("everything", 1)
    ask("unknown kind", 1, 7)
    ask("version 0", 0)


def levels_of_loggers(side: Side) -> None:
    describe(side, "root", BROKER_LOGGER, "1", ["root", "no.such"], include_synonyms=True)
    for label, *changes in (
        ("checked only", ("root", SET, "ERROR")),
        ("a level", ("root", SET, "WARN")),
        ("none that is", ("root", SET, "LOUD")),
        ("nobody's", ("no.such", SET, "INFO")),
        ("appended", ("root", APPEND, "INFO")),
        ("given back", ("root", DELETE, None)),
        ("twice", ("root", SET, "INFO"), ("root", SET, "INFO")),
        ("without value", ("root", SET, None)),
        ("back again", ("root", SET, "INFO")),
    ):
        alter(side, label, BROKER_LOGGER, "1", *changes, validate_only=label == "checked only")
        describe(side, f"after {label}", BROKER_LOGGER, "1", ["root"])
    alter(side, "another broker", BROKER_LOGGER, "9", ("root", SET, "INFO"))


SCRIPTS = (
    levels_of_loggers,
    settings_of_topics,
    settings_of_brokers,
    one_by_one,
    all_at_once,
    settings_of_the_cluster,
    resources_with_settings,
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_settings_are_answered_as_apache_kafka_answers(script: Script, compare: Compare) -> None:
    compare(script)
