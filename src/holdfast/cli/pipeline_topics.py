"""What a broker says about the topics a pipeline reads, for `pipeline explain --ask-broker`."""

from __future__ import annotations

import re
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from holdfast.cli.client import REQUEST_TIMEOUT_S, Connection, interruptible, no_such_topic, translate
from holdfast.cli.options import DEFAULT_CONNECT_TIMEOUT_MS
from holdfast.pipeline.definition.explaining import TopicFacts
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import client_settings, own_topics
from holdfast.pipeline.definition.secrets import expand_definition

TOLD: Final = (
    "holdfast.flush",
    "min.insync.replicas",
    "unclean.leader.election.enable",
    "cleanup.policy",
    "retention.ms",
)


def ask_topics(definition: PipelineDefinition, bootstrap: str | None) -> list[TopicFacts]:
    expanded, _ = expand_definition(definition)
    settings = client_settings(expanded, bootstrap)
    address = settings.pop("bootstrap.servers")
    connection = Connection(address, DEFAULT_CONNECT_TIMEOUT_MS, translate(settings))
    admin = connection.admin()
    metadata = connection.reach(admin)
    source = expanded.source
    if source.pattern:
        own = own_topics(expanded)
        matching = (name for name in metadata.topics if re.fullmatch(source.pattern, name))
        names = [name for name in matching if name not in own and not name.startswith(("hf-ledger-", "__"))]
    else:
        names = list(source.topics)
    facts = []
    for name in sorted(names):
        topic = metadata.topics.get(name)
        if topic is None or topic.error is not None:
            raise no_such_topic(name)
        replicas = min((len(each.replicas) for each in topic.partitions.values()), default=0)
        facts.append(TopicFacts(name, len(topic.partitions), replicas, _settings(connection, admin, name)))
    return facts


def _settings(connection: Connection, admin: AdminClient, topic: str) -> dict[str, str]:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    futures = admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    try:
        entries = interruptible(lambda: futures[resource].result(REQUEST_TIMEOUT_S))
    except KafkaException as error:
        raise connection.unreachable(error.args[0]) from error
    return {name: str(entries[name].value) for name in TOLD if name in entries}
