"""Topics of the measures, made and removed through confluent-kafka's admin client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from bench.servers import Broker

ADMIN_TIMEOUT_S: Final = 120.0


def admin(broker: Broker) -> AdminClient:
    """An admin client of this broker."""
    # Warnings and worse; it otherwise tells of every queue it empties when it goes.
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 4})


def create(broker: Broker, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
    """Create a topic and wait until each of its partitions has a leader."""
    client = admin(broker)
    wanted = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=dict(settings))
    client.create_topics([wanted], operation_timeout=ADMIN_TIMEOUT_S)[topic].result(ADMIN_TIMEOUT_S)
    deadline = time.monotonic() + ADMIN_TIMEOUT_S
    while time.monotonic() < deadline:
        found = client.list_topics(topic, timeout=ADMIN_TIMEOUT_S).topics[topic].partitions
        if len(found) == partitions and all(each.leader >= 0 for each in found.values()):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{broker.label} gave {topic} no leaders within {ADMIN_TIMEOUT_S:.0f} s")


def delete(broker: Broker, topic: str) -> None:
    """Delete a topic."""
    # The client is named because its requests end with it.
    client = admin(broker)
    client.delete_topics([topic], operation_timeout=ADMIN_TIMEOUT_S)[topic].result(ADMIN_TIMEOUT_S)


def alter(broker: Broker, topic: str, settings: Mapping[str, str]) -> None:
    """Change settings of a topic, leaving its others."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    client = admin(broker)
    client.incremental_alter_configs([resource])[resource].result(ADMIN_TIMEOUT_S)
