"""A directory that Apache Kafka has used: what this broker takes over, and what it refuses before it writes anything.

`holdfast serve` goes on where a single Apache Kafka node was stopped: its files are Kafka's, and every metadata record
is understood or kept. What is refused, by name and with what to do, is what would be lost or disregarded here without a
word:

- A cluster of several nodes: other voters, other registered brokers, partitions with replicas elsewhere.
- Features at levels above those that this version knows, and records of kinds that it does not know.
- Topics in tiered storage, whose older segments are not in the directory.
- Access control entries, SCRAM credentials, quotas and delegation tokens, which nobody enforces here. Somebody who
  accepts that says so for each kind (`--serve-unenforced`); the records stay as they are.

A directory that no Apache Kafka has led, which its `quorum-state` tells, is not looked at twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from holdfast.broker.metadata.image import UNENFORCED, ClusterImage, ResourceType
from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.metadata_log import Quorum, load_image, readable_batches
from holdfast.broker.node.other_writer import QUORUM_STATE_FILE
from holdfast.errors import CorruptLog, DataDirectoryError
from holdfast.seams import FileSystem
from holdfast.wire.apis import FEATURES

UNENFORCED_KINDS: Final = tuple(UNENFORCED.values())
NAMED_MAX: Final = 5
"""Things of one kind that a line names; of more it gives the number."""
_WORDS: Final = {
    "acls": "access control entries",
    "scram": "SCRAM credentials",
    "quotas": "client quotas",
    "tokens": "delegation tokens",
}


def was_led_by_kafka(fs: FileSystem, path: str) -> bool:
    """Whether an Apache Kafka has ever led the metadata log in this directory."""
    return fs.exists(f"{path}/{METADATA_TOPIC}-0/{QUORUM_STATE_FILE}")


def refuse_unservable(fs: FileSystem, path: str, node_id: int, accepted: Iterable[str]) -> None:
    """Raise `DataDirectoryError` if the cluster of the directory `path` cannot be served as it is; changes nothing."""
    if not was_led_by_kafka(fs, path):
        return
    try:
        metadata = f"{path}/{METADATA_TOPIC}-0"
        quorum = Quorum()
        image = load_image(fs, metadata, readable_batches(fs, metadata), quorum)
    except CorruptLog as error:
        raise DataDirectoryError(f"{path} cannot be served: {error}. Nothing was changed") from error
    reasons = [
        *_of_several_nodes(image, quorum, node_id),
        *_of_newer_versions(image),
        *_of_tiered_storage(image),
        *_of_unenforced(image, frozenset(accepted)),
    ]
    if reasons:
        raise DataDirectoryError(
            f"{path} was written by Apache Kafka and cannot be served as it is; nothing was changed: "
            + "; ".join(reasons)
        )


def _of_several_nodes(image: ClusterImage, quorum: Quorum, node_id: int) -> list[str]:
    reasons = []
    if others := quorum.voters - {node_id}:
        reasons.append(
            f"the quorum has other voters ({_listed(sorted(others))}): take them out with "
            "kafka-metadata-quorum remove-controller"
        )
    if strangers := image.brokers.keys() - {node_id}:
        reasons.append(
            f"other brokers are registered ({_listed(sorted(strangers))}): move their partitions with "
            "kafka-reassign-partitions and take them out with kafka-cluster unregister"
        )
    elsewhere = [
        f"{topic.name}-{partition.index}"
        for topic in image.topics.values()
        for partition in topic.partitions
        if partition.replicas != (node_id,)
    ]
    if elsewhere:
        reasons.append(
            f"partitions have replicas on other nodes ({_listed(elsewhere)}): reassign them to node {node_id} alone"
        )
    return reasons


def _of_newer_versions(image: ClusterImage) -> list[str]:
    known = {feature.name: feature.max for feature in FEATURES}
    return [
        f"{name} is at level {level}, and this version of holdfast knows "
        + (f"levels up to {known[name]}" if name in known else "no such feature")
        for name, level in sorted(image.features.items())
        if level > known.get(name, 0)
    ]


def _of_tiered_storage(image: ClusterImage) -> list[str]:
    tiered = [
        resource.name
        for resource, settings in sorted(image.configs.items())
        if resource.type is ResourceType.TOPIC and settings.get("remote.storage.enable") == "true"
    ]
    if not tiered:
        return []
    return [
        f"topics have tiered storage ({_listed(tiered)}), whose remote segments are not here: set "
        "remote.log.delete.on.disable=true,remote.storage.enable=false for each with Kafka, or copy them to others"
    ]


def _of_unenforced(image: ClusterImage, accepted: frozenset[str]) -> list[str]:
    return [
        f"it has {count} {_WORDS[kind]}, which nobody would enforce: serve it all the same with "
        f"--serve-unenforced={kind}"
        for kind, count in sorted(image.unenforced().items())
        if kind not in accepted
    ]


def _listed(names: Iterable[object]) -> str:
    texts = list(map(str, names))
    more = len(texts) - NAMED_MAX
    return ", ".join(texts[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
