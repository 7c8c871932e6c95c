"""What happens before the first request: directories, identity, metadata, epochs, partitions, in this order.

Leader epochs rise durably before any partition is opened for writing, and the broker's registration with
them, so that everything written from now on can be told from what an earlier run wrote and a crash may have cut.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING
from uuid import UUID

from holdfast.atomic import flush_each
from holdfast.errors import DataDirectoryError
from holdfast.log.checkpoints import MetaProperties
from holdfast.metadata import changes
from holdfast.metadata.image import BrokerImage, SupportedFeature
from holdfast.node.metadata_log import open_metadata
from holdfast.seams import Now
from holdfast.wire.apis import FEATURES
from holdfast.wire.metadata_records import MetadataRecord

if TYPE_CHECKING:
    from holdfast.node.node import Node


def start(node: Node, now: Now) -> None:
    _open_directories(node)
    _settle_identity(node)
    open_metadata(node, now)
    node.apply_settings()
    _register(node, now)
    node.partitions.open_existing(node.image, now)
    for directory in node.directories:
        if not directory.offline:
            if not (directory.recovery_points_known and directory.log_starts_known):
                node.forget_deleted(directory)
            directory.begin_session(node.seams.boot_id)
    assert node.metadata is not None
    node.wall_clock.begin(node.metadata.directory.path)
    node.save_clock()
    now = node.wall_clock.proven()
    node.groups.load(now)
    # After the groups: markers that are missing are written now, and end what groups hold as pending.
    node.transactions.load(now)


def _open_directories(node: Node) -> None:
    for directory in node.directories:
        try:
            directory.open(node.seams.boot_id, node.say)
        except OSError as error:
            if directory is node.directories[0]:
                raise DataDirectoryError(f"cannot use {directory.path}: {error}") from error
            directory.offline = True
            directory.failure = str(error)
            node.say(f"log directory {directory.path} is offline until restart: {error}")


def _settle_identity(node: Node) -> None:
    """All directories belong to one cluster and to this node; new ones join."""
    online = [directory for directory in node.directories if not directory.offline]
    cluster_ids = {directory.meta.cluster_id for directory in online if directory.meta is not None}
    if len(cluster_ids) > 1:
        raise DataDirectoryError(f"the log directories belong to different clusters: {sorted(cluster_ids)}")
    node.cluster_id = cluster_ids.pop() if cluster_ids else _short(node.seams.randomness.uuid_bytes())
    for directory in online:
        meta = directory.meta
        if meta is not None and meta.node_id != node.node_id:
            raise DataDirectoryError(
                f"{directory.path} belongs to node {meta.node_id}, and this is node {node.node_id}; "
                "set node.id accordingly or choose another directory"
            )
        if meta is None or meta.directory_id is None:
            directory.write_meta(
                MetaProperties(node.cluster_id, node.node_id, node.seams.randomness.uuid_bytes())
            )


def _short(uuid: bytes) -> str:
    return urlsafe_b64encode(uuid).decode().rstrip("=")


def _register(node: Node, now: Now) -> None:
    """Announce this run and raise every leader epoch; durable before anything else is written."""
    metadata = node.metadata
    assert metadata is not None
    known = node.image.brokers.get(node.node_id)
    node.broker_epoch = max(metadata.log.end_offset, known.epoch + 1 if known is not None else 0)
    broker = BrokerImage(
        broker_id=node.node_id,
        epoch=node.broker_epoch,
        incarnation_id=UUID(bytes=node.seams.randomness.uuid_bytes()),
        end_points=tuple(node.endpoints.values()),
        features=tuple(SupportedFeature(feature.name, feature.min, feature.max) for feature in FEATURES),
        rack=node.config.broker_rack,
        fenced=False,
        log_dirs=tuple(directory.id for directory in node.directories if not directory.offline),
    )
    levels = {feature.name: feature.finalized for feature in FEATURES if feature.name != "kraft.version"}
    records: list[MetadataRecord] = [
        *(changes.set_feature_levels(node.image, levels) if known is None else ()),
        *changes.register_broker(node.image, broker),
        *changes.raise_leader_epochs(node.image, node.node_id),
    ]
    node.append_metadata(records, now)
    pending = metadata.log.begin_flush()
    flush_each(node.fs, pending.targets)
    metadata.log.flushed(pending.end)
    metadata.offsets.flushed(pending.end)
