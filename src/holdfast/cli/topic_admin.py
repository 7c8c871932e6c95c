"""Topics as the commands see them: matching names, descriptions, and the flags that need parsing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource, ConfigSource, TopicDescription

from holdfast.cli.advice import failure
from holdfast.cli.client import REQUEST_TIMEOUT_S
from holdfast.errors import UsageError

_LITERAL_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def name_pattern(expression: str | None) -> re.Pattern[str]:
    """Kafka's topic filter: a regular expression over the whole name, where a comma means "or"."""
    if expression is None:
        return re.compile(".*")
    text = re.sub(r"\s+", "", expression.strip().strip("\"'")).replace(",", "|")
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"--topic {expression!r} is not a regular expression: {error}") from error


def pattern_to_change(expression: str) -> re.Pattern[str]:
    """What `alter` and `delete` mean by an expression.

    What could be a topic's name is taken literally: the dot in "orders.v1" must not delete "orders-v1".
    """
    return name_pattern(re.escape(expression) if _LITERAL_NAME.fullmatch(expression) else expression)


def select_topics(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    return sorted(name for name in names if pattern.fullmatch(name))


def parse_replica_assignment(text: str) -> list[list[int]]:
    """Kafka's `0:1,1:2`: partitions by comma, the replicas of each by colon, the preferred leader first."""
    try:
        assignment = [[int(broker) for broker in part.split(":")] for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--replica-assignment {text!r} is not broker ids like 0:1,1:2 (partitions by comma)"
        ) from None
    for partition, replicas in enumerate(assignment):
        if len(set(replicas)) != len(replicas):
            raise UsageError(
                f"--replica-assignment names a broker twice for partition {partition}: {replicas}"
            )
        if len(replicas) != len(assignment[0]):
            raise UsageError("--replica-assignment gives partitions different numbers of replicas")
    return assignment


@dataclass(frozen=True)
class PartitionView:
    topic: str
    partition: int
    leader: int | None
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "leader": self.leader,
            "replicas": list(self.replicas),
            "isr": list(self.in_sync),
        }


@dataclass(frozen=True)
class TopicView:
    name: str
    topic_id: str
    internal: bool
    partitions: tuple[PartitionView, ...]
    overrides: Mapping[str, str]
    """The settings that differ from the brokers' defaults because somebody set them on the topic."""
    min_insync_replicas: int | None

    @property
    def replication_factor(self) -> int:
        return len(self.partitions[0].replicas) if self.partitions else 0

    def as_json(self, partitions: Sequence[PartitionView]) -> dict[str, Any]:
        return {
            "topic": self.name,
            "topic_id": self.topic_id,
            "internal": self.internal,
            "partition_count": len(self.partitions),
            "replication_factor": self.replication_factor,
            "configs": dict(self.overrides),
            "partitions": [partition.as_json() for partition in partitions],
        }


def describe_topics(admin: AdminClient, names: Sequence[str]) -> dict[str, TopicDescription]:
    """Descriptions by name; topics that do not exist are left out."""
    found: dict[str, TopicDescription] = {}
    if not names:
        return found
    futures = admin.describe_topics(TopicCollection(list(names)), request_timeout=REQUEST_TIMEOUT_S)
    for name, future in futures.items():
        try:
            found[name] = future.result()
        except KafkaException as error:
            if error.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                raise failure(error, f"cannot describe topic '{name}'", name) from error
    return found


def topic_views(admin: AdminClient, names: Sequence[str]) -> list[TopicView]:
    descriptions = describe_topics(admin, names)
    configs = topic_configs(admin, list(descriptions))
    return [_view(description, configs[name]) for name, description in sorted(descriptions.items())]


def topic_configs(admin: AdminClient, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Every setting of each topic, as confluent-kafka's ConfigEntry by name."""
    if not names:
        return {}
    resources = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
    configs: dict[str, dict[str, Any]] = {}
    for resource, future in admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S).items():
        try:
            configs[resource.name] = future.result()
        except KafkaException as error:
            raise failure(
                error, f"cannot read the settings of topic '{resource.name}'", resource.name
            ) from error
    return configs


def url_safe_id(topic_id: object) -> str:
    """A topic id as Kafka's tools write it."""
    return str(topic_id).translate(str.maketrans("+/", "-_")).rstrip("=")


def _view(description: TopicDescription, configs: Mapping[str, Any]) -> TopicView:
    minimum = configs.get("min.insync.replicas")
    return TopicView(
        name=description.name,
        topic_id=url_safe_id(description.topic_id),
        internal=bool(description.is_internal),
        partitions=tuple(
            PartitionView(
                topic=description.name,
                partition=partition.id,
                leader=partition.leader.id
                if partition.leader is not None and partition.leader.id >= 0
                else None,
                replicas=tuple(node.id for node in partition.replicas),
                in_sync=tuple(node.id for node in partition.isr),
            )
            for partition in sorted(description.partitions, key=lambda partition: partition.id)
        ),
        overrides={
            name: entry.value
            for name, entry in sorted(configs.items())
            if entry.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        },
        min_insync_replicas=int(minimum.value) if minimum is not None and minimum.value else None,
    )
