"""What happens before the first request: directories, identity, metadata, epochs, partitions, in this order.

Who this broker is stands in its directories, and nothing is taken for new that could be something missing:

- The metadata log is looked for in every directory. One directory with an identity and no metadata log anywhere: that
  log was lost or is not mounted, and the start ends.
- A directory without an identity is new only if the broker misses none. Otherwise it may be the place where a missing
  one was to be mounted: it is offline, and nothing is written there.
- Which directories there were, the broker's registration and the records of its partitions tell.

Leader epochs rise durably before any partition is opened for writing, and the broker's registration with them, so
that everything written from now on can be told from what an earlier run wrote and a crash may have cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING
from uuid import UUID

from holdfast.atomic import flush_each
from holdfast.broker.log.checkpoints import MetaProperties, encode_uuid
from holdfast.broker.log.write_ahead import NO_ROOM_ERRNOS
from holdfast.broker.metadata import changes
from holdfast.broker.metadata.image import RESERVED_DIRECTORIES
from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.directories import BrokerRun, LogDirectory
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.inherited import refuse_unservable
from holdfast.broker.node.metadata_log import find_metadata, make_metadata
from holdfast.broker.node.placement import Survey, flag
from holdfast.broker.node.troubles import Kind
from holdfast.errors import ApiError, CorruptLog, DataDirectoryError
from holdfast.saying import warn
from holdfast.seams import Now
from holdfast.wire.apis import FEATURES
from holdfast.wire.metadata_records import (
    AbortTransaction,
    MetadataRecord,
    RegisterBroker,
    SupportedFeature,
)

if TYPE_CHECKING:
    from holdfast.broker.node.node import Node

METADATA_LOG = f"{METADATA_TOPIC}-0"


def start(node: Node, now: Now) -> None:
    _open_directories(node)
    _check_identity(node)
    try:
        metadata = _metadata_directory(node)
    except OSError as error:
        raise DataDirectoryError(f"the metadata log cannot be looked at: {error}") from error
    for directory in _online(node):
        refuse_unservable(node.seams.fs, directory.path, node.identity.node_id, node.serve_unenforced)
    _use_up_clean_markers(node)
    try:
        deleted = node.metadata.open(
            metadata, lambda hosted, start: node.log_starts.move([(hosted, start)]), now
        )
        _check_metadata(node, metadata)
        _check_ages(node, metadata)
    except OSError as error:
        raise DataDirectoryError(
            f"cannot use {metadata.path}, which holds the metadata log: {error}"
        ) from error
    missed = _admit_new_directories(node)
    node.settings.reload()

    def failed(directory: LogDirectory, error: OSError) -> None:
        directory.take_offline(error)
        if node.failures.fatal is not None:
            raise DataDirectoryError(node.failures.fatal) from error

    survey = Survey(
        node.seams.fs,
        node.identity.node_id,
        node.directories,
        node.metadata.image,
        deleted,
        node.accepted,
        node.say,
        failed,
    )
    _register(node, missed, survey.changes(), now)
    node.partitions.open_placed(survey.placements, now)
    node.checkpoints.deletions.decide(survey.doomed)
    for directory in _online(node):
        if not directory.checkpoints_known or directory.is_untidy:
            node.checkpoints.forget_deleted(directory)
    _begin_sessions(node)
    node.wall_clock.begin(metadata)
    node.wall_clock.save()
    now = node.wall_clock.proven()
    node.groups.load(now)
    # After the groups: markers that are missing are written now, and end what groups hold as pending.
    node.transactions.load(now)
    if node.failures.fatal is not None:
        raise DataDirectoryError(node.failures.fatal)
    for name in node.accepted.unused:
        node.say(warn(f"{flag(name)}: nothing of that name is missing; leave it out from now on"))


def _use_up_clean_markers(node: Node) -> None:
    for directory in _online(node):
        try:
            directory.use_up_clean_marker()
        except OSError as error:
            _put_offline(node, directory, error)


def finish(node: Node, now: Now) -> None:
    """Do what a start had no room or descriptors for: tried once a second."""
    _begin_sessions(node)
    for hosted in node.partitions.open_refused(now):
        node.groups.opened(hosted, now)
        node.transactions.opened(hosted, now)


def _begin_sessions(node: Node) -> None:
    """Name boot and run in every directory whose logs are all recovered; last in that of the metadata log."""
    last = node.metadata.hosted.directory
    for directory in sorted(_online(node), key=lambda each: each is last):
        if directory.is_in_session or node.partitions.has_refused(directory):
            continue
        others = frozenset(each.id for each in _online(node) if each.is_in_session)
        session = BrokerRun(
            node.seams.boot_id, node.identity.broker_epoch, others if directory is last else frozenset()
        )
        try:
            directory.begin_session(session)
        except OSError as error:
            directory.refuses(error)


def _online(node: Node) -> list[LogDirectory]:
    return [directory for directory in node.directories if not directory.offline]


def _put_offline(node: Node, directory: LogDirectory, reason: object) -> None:
    directory.offline = True
    directory.failure = str(reason)
    text = f"log directory {directory.path} is offline until restart: {reason}"
    node.troubles.begin(Kind.DIRECTORY_OFFLINE, directory.path, text)


# Identity


def _open_directories(node: Node) -> None:
    for directory in node.directories:
        try:
            directory.open(node.seams.boot_id, node.say)
        except (OSError, CorruptLog) as error:
            _put_offline(node, directory, error)


def _check_identity(node: Node) -> None:
    """All directories belong to one cluster and to this node, each once."""
    named = [(each, each.meta) for each in _online(node) if each.meta is not None]
    pinned = node.settings.broker.holdfast_cluster_id
    ids: dict[bytes, str] = {}
    cluster_ids = {meta.cluster_id for _, meta in named}
    if len(cluster_ids) > 1:
        raise DataDirectoryError(f"the log directories belong to different clusters: {sorted(cluster_ids)}")
    for directory, meta in named:
        if meta.node_id != node.identity.node_id:
            raise DataDirectoryError(
                f"{directory.path} belongs to node {meta.node_id}, and this is node {node.identity.node_id}; "
                "set node.id accordingly or choose another directory"
            )
        if pinned is not None and meta.cluster_id != pinned:
            raise DataDirectoryError(
                f"{directory.path} belongs to cluster {meta.cluster_id}, and cluster {pinned} was asked for "
                "(--cluster-id); choose another directory, or leave the flag out"
            )
        if meta.directory_id is None:
            # Kafka's tools of earlier versions gave directories no ids: where partitions are is found by looking.
            try:
                directory.write_meta(meta._replace(directory_id=node.seams.randomness.uuid_bytes()))
                directory.has_new_id = True
            except OSError as error:
                directory.meta = None
                _put_offline(node, directory, error)
        elif (other := ids.setdefault(meta.directory_id, directory.path)) != directory.path:
            raise DataDirectoryError(
                f"{other} and {directory.path} are copies of one log directory; take one out of log.dirs"
            )
    node.identity.cluster_id = cluster_ids.pop() if cluster_ids else ""


def _metadata_directory(node: Node) -> LogDirectory:
    """Where the metadata log is; in a new cluster, where it begins."""
    holders = find_metadata(node.seams.fs, node.directories)
    if len(holders) > 1:
        raise DataDirectoryError(
            f"{' and '.join(each.path for each in holders)} both hold a metadata log ({METADATA_LOG}), and only one "
            "can be this cluster's; take the other directory out of log.dirs, or its metadata log out of it"
        )
    if holders:
        return holders[0]
    for directory in node.directories:
        if directory.offline:
            raise DataDirectoryError(f"cannot use {directory.path}: {directory.failure}")
    named = [each for each in node.directories if each.meta is not None]
    if named and not node.accepted.covers(METADATA_LOG):
        raise DataDirectoryError(
            f"{', '.join(each.path for each in named)} belongs to cluster {node.identity.cluster_id}, whose metadata "
            f"log ({METADATA_LOG}) is in none of log.dirs: the directory that holds it is probably not mounted, or "
            f"left out. To give up all topics and begin anew: {flag(METADATA_LOG)}"
        )
    return _begin_cluster(node, named)


def _begin_cluster(node: Node, named: list[LogDirectory]) -> LogDirectory:
    pinned = node.settings.broker.holdfast_cluster_id
    first = named[0] if named else node.directories[0]
    if not named and pinned is not None:
        raise DataDirectoryError(
            f"{', '.join(each.path for each in node.directories)}: empty, and cluster {pinned} was asked for "
            "(--cluster-id). Is it mounted? To begin a new cluster there, leave the flag out"
        )
    try:
        if first.is_blank:
            first.prepare(node.seams.boot_id, node.say)
        make_metadata(node.seams.fs, first)
        if first.meta is None:
            node.identity.cluster_id = encode_uuid(node.seams.randomness.uuid_bytes())
            _give_identity(node, first)
            node.identity.is_new_cluster = True
    except OSError as error:
        raise DataDirectoryError(f"cannot use {first.path}: {error}") from error
    return first


def _give_identity(node: Node, directory: LogDirectory) -> None:
    directory.write_meta(
        MetaProperties(node.identity.cluster_id, node.identity.node_id, node.seams.randomness.uuid_bytes())
    )


def _check_metadata(node: Node, metadata: LogDirectory) -> None:
    """A cluster that was used has a registration; without one, whoever left partitions here had other metadata.

    So had whoever left it in a directory that no registration knows.
    """
    known = node.metadata.image.brokers.get(node.identity.node_id)
    if known is not None and metadata.meta is not None and known.log_dirs:
        is_known = metadata.has_new_id or metadata.id in known.log_dirs
        if not is_known and not node.accepted.covers(METADATA_LOG):
            raise DataDirectoryError(
                f"the metadata log in {metadata.path} knows nothing of that directory: it is another cluster's, or was "
                f"moved there. Restore {METADATA_LOG}; or go on with this one, with {flag(METADATA_LOG)}"
            )
        return
    if node.metadata.image.brokers:
        return
    used = [each.path for each in _online(node) if each.holds_partitions(besides=METADATA_LOG)]
    if used and not node.accepted.covers(METADATA_LOG):
        raise DataDirectoryError(
            f"the metadata log is empty, and {', '.join(used)} holds partitions: what they belong to was lost. Restore "
            f"{METADATA_LOG}; or give up all topics with {flag(METADATA_LOG)}"
        )


def _check_ages(node: Node, metadata: LogDirectory) -> None:
    """No directory may be an older copy of itself: what was acknowledged since is missing from it.

    Every run leaves its epoch in the directories that it used, and which these were beside the metadata log. A
    registration comes before all of that, so a directory that knows a later run than the metadata log makes that one
    the older copy. When all directories are of one age, nobody can tell, nor needs to: that is a restored backup.
    """
    known = node.metadata.image.brokers.get(node.identity.node_id)
    for directory in _online(node):
        epoch = directory.session.broker_epoch
        is_other_run = known is not None and epoch != known.broker_epoch
        directory.was_kafkas = is_other_run and node.metadata.quorum.registered_with_kafka(
            node.identity.node_id
        )
        if known is not None and epoch > known.broker_epoch and not node.accepted.covers(METADATA_LOG):
            raise DataDirectoryError(
                f"the metadata log in {metadata.path} is older than {directory.path}: it was restored from a copy, and "
                "what was made since is unknown to it. Restore both from one backup; or go on with the older one, with "
                f"{flag(METADATA_LOG)}"
            )
        if directory.meta is None or not -1 < epoch < metadata.session.broker_epoch:
            continue
        name = encode_uuid(directory.id.bytes)
        if directory.id in metadata.session.directories and not node.accepted.covers(name):
            _put_offline(
                node,
                directory,
                "it is older than the metadata log: it was restored from a copy, and what was written since is missing "
                f"from it. Bring back the newer one; or give up what is missing with {flag(name)}",
            )


def _admit_new_directories(node: Node) -> list[UUID]:
    """Let blank directories join, if none is missing; returns the ids of those that are."""
    known = node.metadata.image.brokers.get(node.identity.node_id)
    hosting = {
        partition.directory_of(node.identity.node_id)
        for topic in node.metadata.image.topics.values()
        for partition in topic.partitions
    }
    registered = set(known.log_dirs if known is not None else ()) | hosting
    present = {each.id for each in _online(node) if each.meta is not None}
    missed = [
        each
        for each in sorted(registered - present - RESERVED_DIRECTORIES)
        if not node.accepted.covers(encode_uuid(each.bytes))
    ]
    texts = ", ".join(encode_uuid(each.bytes) for each in missed)
    elsewhere = {each.id for each in node.directories if each.offline and each.meta is not None}
    for directory in _online(node):
        if not directory.is_blank:
            continue
        if not elsewhere.issuperset(missed):
            _put_offline(
                node,
                directory,
                f"it is empty, and log directory {texts} is missing: is it mounted? If that one is gone for good, "
                f"{' '.join(flag(encode_uuid(each.bytes)) for each in missed)} gives up everything in it",
            )
            continue
        try:
            directory.prepare(node.seams.boot_id, node.say)
            _give_identity(node, directory)
        except OSError as error:
            _put_offline(node, directory, error)
    if missed and len(_online(node)) == len(node.directories) and not hosting.intersection(missed):
        node.say(f"log directory {texts} is in log.dirs no more; it held no partition")
        return []
    return missed


# Registration


def _register(node: Node, missed: list[UUID], moved: Iterable[MetadataRecord], now: Now) -> None:
    """Announce this run and raise every leader epoch; durable before anything else is written."""
    metadata = node.metadata.hosted
    known = node.metadata.image.brokers.get(node.identity.node_id)
    node.identity.broker_epoch = max(
        metadata.log.end_offset, known.broker_epoch + 1 if known is not None else 0
    )
    broker = RegisterBroker(
        broker_id=node.identity.node_id,
        broker_epoch=node.identity.broker_epoch,
        incarnation_id=UUID(bytes=node.seams.randomness.uuid_bytes()),
        end_points=tuple(node.identity.endpoints.values()),
        features=tuple(SupportedFeature(feature.name, feature.min, feature.max) for feature in FEATURES),
        rack=node.settings.broker.broker_rack,
        fenced=False,
        log_dirs=(*(directory.id for directory in _online(node)), *missed),
    )
    node.metadata.image.offline_directories.update(missed)
    node.metadata.image.folds_case = any(directory.folds_case() for directory in _online(node))
    levels = {feature.name: feature.finalized for feature in FEATURES if feature.name != "kraft.version"}
    records: list[MetadataRecord] = [
        *([AbortTransaction(reason="a broker starts")] if node.metadata.is_in_transaction else ()),
        *(changes.set_feature_levels(node.metadata.image, levels) if known is None else ()),
        *changes.register_broker(node.metadata.image, broker),
        *moved,
        *changes.raise_leader_epochs(node.metadata.image, node.identity.node_id),
    ]
    try:
        _append_first(node, metadata, records, now)
        pending = metadata.log.begin_flush()
        flush_each(node.seams.fs, pending.targets)
    except (ApiError, OSError) as error:
        raise DataDirectoryError(f"cannot use {metadata.directory.path}: {error}") from error
    metadata.log.advance_recovery_point(pending.end)
    metadata.offsets.advance_durable_end(pending.end)


def _append_first(node: Node, metadata: HostedPartition, records: list[MetadataRecord], now: Now) -> None:
    """Append the records of a start. On a full disk they take their room from the reserve."""
    while True:
        try:
            node.metadata.append(records, now)
            return
        except ApiError as error:
            cause = error.__cause__
            is_full = isinstance(cause, OSError) and cause.errno in NO_ROOM_ERRNOS
            if not is_full or not metadata.directory.give_up_reserve():
                raise
