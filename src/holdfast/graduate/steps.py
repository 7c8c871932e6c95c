"""The commands that start Apache Kafka on the directory and grow it to three brokers, as a page for the operator.

The order keeps the promise: nothing that was acknowledged depends on one machine's memory. Flushing before the
acknowledgement ends only after every topic has three replicas and two of them must have a message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from holdfast.broker.metadata.image import ClusterImage, Resource, ResourceType
from holdfast.graduate.properties import Places, text_of
from holdfast.graduate.records import FLUSH_DEFAULT

STEPS_FILE: Final = "STEPS.md"
REASSIGNMENT_FILE: Final = "reassign.json"
FACTOR: Final = 3
MIN_INSYNC: Final = "min.insync.replicas"


def reassignment(image: ClusterImage, brokers: Sequence[int]) -> dict[str, Any]:
    """Every partition on all of `brokers`; who is preferred to lead goes round."""
    partitions = []
    for topic in (image.topics[name] for name in sorted(image.topics)):
        for partition in topic.partitions:
            first = partition.index % len(brokers)
            replicas = [*brokers[first:], *brokers[:first]]
            partitions.append({"topic": topic.name, "partition": partition.index, "replicas": replicas})
    return {"version": 1, "partitions": partitions}


def reassignment_text(image: ClusterImage, node_id: int) -> str:
    return json.dumps(reassignment(image, [node_id, *other_nodes(node_id)]), indent=1) + "\n"


def other_nodes(node_id: int) -> list[int]:
    return [node_id + 1, node_id + 2]


def steps(output: str, cluster_id: str, node_id: int, places: Places, image: ClusterImage) -> str:
    server, controller = text_of(places.advertised), text_of(places.controller)
    second, third = other_nodes(node_id)
    own = [
        topic
        for topic in sorted(image.topics)
        if MIN_INSYNC in image.settings(Resource(ResourceType.TOPIC, topic))
    ]
    of_topics = "".join(
        f"    kafka-configs.sh --bootstrap-server {server} --alter --topic {topic} --add-config {MIN_INSYNC}=2\n"
        for topic in own
    )
    plan = f"--reassignment-json-file {output}/{REASSIGNMENT_FILE}"
    reassign = f"kafka-reassign-partitions.sh --bootstrap-server {server} {plan}"
    defaults = f"kafka-configs.sh --bootstrap-server {server} --alter --entity-type brokers --entity-default"
    return f"""# From holdfast to Apache Kafka

Cluster {cluster_id}, node {node_id}. Everything that was changed is in `{output}/graduation.json`; until Kafka has run,
`holdfast graduate --undo --output {output}` takes it back byte for byte.

## 1. Start Kafka on this machine

    kafka-server-start.sh {output}/server.properties

Then hold it against the manifest; nobody needs to wait for it:

    holdfast graduate verify --output {output} --bootstrap-server {server}

As long as there is one broker, it flushes before it acknowledges: `{FLUSH_DEFAULT}=1` stands in the metadata log for
all brokers. That costs throughput. Leave it until step 4.

## 2. Add two machines

On each, write a `server.properties` as here with its own `node.id` ({second}, {third}), addresses and `log.dirs`,
with `controller.quorum.bootstrap.servers={controller}`, and with a `broker.rack` that tells whose power it shares.
Then, on each:

    kafka-storage.sh format --cluster-id {cluster_id} --no-initial-controllers --config server.properties
    kafka-server-start.sh server.properties
    kafka-metadata-quorum.sh --bootstrap-server {server} --command-config server.properties add-controller

Add the second and the third controller one soon after the other: two voters are both needed for every change.

## 3. Three replicas, two of which must have a message

`{REASSIGNMENT_FILE}` names every partition that there was at the hand-over, for brokers {node_id}, {second} and
{third}; add topics that were made since (`holdfast graduate verify` names them).

    {reassign} --execute
    {reassign} --verify

When that says that all are complete:

    {defaults} --add-config {MIN_INSYNC}=2
{of_topics}
Set the factors in every `server.properties` to 3 (those of `min.isr` to 2), `default.replication.factor=3` too, list
all three controllers in `controller.quorum.bootstrap.servers`, give this machine its `broker.rack` as well, and restart
one broker after the other, each when all replicas are in sync again.

## 4. Replicas take over from the disk

`holdfast graduate verify` says "replicas: every topic has 3, and 2 must have a message". Only then:

    {defaults} --delete-config {FLUSH_DEFAULT}
    holdfast doctor --bootstrap-server {server}
"""
