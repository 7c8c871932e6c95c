"""The broker without input and output.

The shell (asyncio server or simulator) owns sockets, clocks and threads. It gives a `Node` its seams, calls
`start`, feeds request frames to `Connection`s, calls `tick` when `next_deadline_ms` has passed, and `stop`.
Everything happens on the shell's one thread; nothing here blocks except opening, closing and a few small
files written durably on administrative requests.

The order of effects, stated once:

1. A record batch is appended (visible to nobody).
2. A flush that began after the append returns.
3. The durable end and the high watermark move; parked fetches and produces are completed.
4. Responses leave.

The cluster's image follows the same rule: a change is applied when its record is appended, and every response
built while some change is not durable waits behind `metadata_barrier`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from traceback import format_exception
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.atomic import flush_each
from holdfast.broker.log.named_start import name_start
from holdfast.broker.metadata.image import ClusterImage, EndPoint, Resource, ResourceType, TopicImage
from holdfast.broker.metadata.names import REQUIRED_SETTINGS
from holdfast.broker.node import dispatch, housekeeping
from holdfast.broker.node.checkpoints import Checkpoints
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.connection import Connection
from holdfast.broker.node.context import Answer, ConnectionInfo, Part, RequestContext
from holdfast.broker.node.deletions import Deletions
from holdfast.broker.node.directories import NO_DESCRIPTOR_ERRNOS, REFUSED_ERRNOS, LogDirectory
from holdfast.broker.node.fetch_sessions import FetchSessions
from holdfast.broker.node.group_service import GroupService
from holdfast.broker.node.handlers.k00_produce import Production
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.partitions import Partitions
from holdfast.broker.node.placement import AcceptedLosses
from holdfast.broker.node.presence import Presence
from holdfast.broker.node.producer_ids import ProducerIdSource
from holdfast.broker.node.removal import remove_below_start
from holdfast.broker.node.timers import Timers
from holdfast.broker.node.transaction_service import TransactionService
from holdfast.broker.node.troubles import Kind, Refusals, Troubles
from holdfast.broker.node.usual_produce import UsualProduce
from holdfast.broker.node.wall_clock import WallClock
from holdfast.broker.partition.offsets import CommitWaiter
from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig
from holdfast.errors import ApiError, LogDirectoryOffline
from holdfast.saying import Level, Line, Say, unfailing
from holdfast.seams import Buffer, Clock, FileSystem, Flusher, FlushTarget, Now, Randomness, Worker
from holdfast.wire.batch import Record, build_batch, check_whole
from holdfast.wire.messages import decode_request
from holdfast.wire.metadata_records import (
    Config,
    MetadataRecord,
    Partition,
    PartitionChange,
    RemoveTopic,
    Topic,
)

CHECKPOINT_INTERVAL_MS: Final = 1000
"""How often recovery points reach the disk while flushes happen: what bounds recovery's work after a crash."""
FLUSH_ALL_ABOVE: Final = 64
"""Files to flush at a stop from which one flush of the whole file system is cheaper than one of each."""
NAMED_MAX: Final = 20
"""Partitions that a line names; of more it gives the number."""
OPEN_AT_STOP_MAX: Final = 512
"""Files that a stop has open at a time, for it may have thousands of logs to close, each with several."""


@dataclass(frozen=True, slots=True)
class NodeSeams:
    """Everything a node needs from the world."""

    fs: FileSystem
    randomness: Randomness
    flusher: Flusher
    worker: Worker
    clock: Clock
    call_soon: Callable[[Callable[[], None]], None]
    """Run something when the requests that have already arrived were begun."""
    boot_id: str
    """Names the boot of the machine: another one means the page cache of the last run is gone."""
    say: Say
    """One line for the operator. What it raises is left alone; it must not block."""


class Node:
    def __init__(self, config: BrokerConfig, seams: NodeSeams, accept_loss: Iterable[str] = ()) -> None:
        """`accept_loss` names what is given up if it is missing: see `placement`."""
        self.config = config
        self.seams = seams
        self.fs = seams.fs
        self.say = unfailing(seams.say)
        self.troubles = Troubles(self.say, lambda: self.now().monotonic_ms)
        self.wall_clock = WallClock(
            seams.fs,
            seams.clock,
            seams.boot_id,
            lambda: self.config.holdfast_clock_settle_ms,
            self.troubles,
            self.say,
        )
        self.image = ClusterImage()
        self.cluster_id = ""
        self.is_new_cluster = False
        self.node_id = config.node_id
        self.broker_epoch = -1
        self.endpoints: dict[str, EndPoint] = {}
        """Advertised address by listener name: Metadata answers with that of the listener asked."""
        self.accepted = AcceptedLosses(accept_loss)
        self.directories = [LogDirectory(seams.fs, path) for path in config.log_dirs]
        self.checkpoints = Checkpoints(self)
        self._refusals = Refusals(seams.fs, self.troubles, self.checkpoints.write_log_starts)
        self.timers = Timers(self._timer_failed)
        self.fetch_sessions = FetchSessions(
            config.max_incremental_fetch_session_cache_slots, seams.randomness
        )
        self.partitions = Partitions(
            seams.fs,
            config.node_id,
            self.directories,
            self.topic_config,
            self.accepted,
            self.troubles,
            self.say,
            self.directory_failed,
            self.report_defect,
        )
        self.commit = GroupCommit(
            seams.flusher, seams.call_soon, self._flush_failed, self._flushed, self.report_defect
        )
        self.presence = Presence(self.directories, self.refused)
        self.producer_ids = ProducerIdSource(self)
        self.transactions = TransactionService(self)
        self.groups = GroupService(self)
        self.metadata: HostedPartition | None = None
        self.deletions = Deletions(seams.fs, self.checkpoints.forget_deleted, self.directory_failed, self.say)
        self.metadata_barrier: Callable[[CommitWaiter], None] | None = None
        """None while the image is durable; otherwise holds a response back until it is."""
        self.is_stopping = False
        self.fatal: str | None = None
        """Why this node cannot go on, once that is so."""
        self.on_fatal: Callable[[], None] = lambda: None
        self.unserved_topics: set[tuple[str, str]] = set()
        self._topic_configs: dict[str, TopicConfig] = {}
        self.usual_produce = UsualProduce(self)
        self._productions: deque[tuple[Production, int]] = deque()
        self._connections = 0

    # Life

    def start(self, endpoints: Sequence[EndPoint], now: Now) -> None:
        """Open the data directories, replay the metadata log, raise leader epochs, open every partition."""
        from holdfast.broker.node import startup

        self.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        try:
            startup.start(self, now)
        except BaseException:
            for directory in self.directories:
                directory.release()
            raise
        self._every_second(now.monotonic_ms + CHECKPOINT_INTERVAL_MS)
        housekeeping.schedule(self, now)

    def stop(self, now: Now) -> None:
        """Flush, write what a clean start trusts, and release the directories. Blocks."""
        self.is_stopping = True
        self.save_clock()
        for directory in self.directories:
            if not directory.offline:
                try:
                    self._close_logs(directory)
                    directory.close_cleanly(
                        self.checkpoints.recovery_points(directory),
                        self.checkpoints.log_starts(directory),
                        # A partition found damaged must be found damaged again, not taken for cleanly closed.
                        None if self.partitions.has_damaged(directory) else self.broker_epoch,
                    )
                except OSError as error:
                    self.directory_failed(directory, error)
            directory.release()

    def _close_logs(self, directory: LogDirectory) -> None:
        written: list[HostedPartition] = []
        targets: list[FlushTarget] = []
        for partition in self.in_directory(directory):
            written.append(partition)
            targets += partition.log.write_for_clean_start()
            if len(targets) >= OPEN_AT_STOP_MAX:
                self._close_written(written, targets)
                written, targets = [], []
        self._close_written(written, targets)

    def _close_written(self, written: list[HostedPartition], targets: list[FlushTarget]) -> None:
        if len(targets) > FLUSH_ALL_ABOVE:
            self.fs.flush_many(targets)
        else:
            flush_each(self.fs, targets)
        for partition in written:
            partition.log.close()

    # Requests

    def connect(
        self,
        listener: str,
        address: str,
        transmit: Callable[[list[Part]], None],
        close: Callable[[str], None],
    ) -> Connection:
        self._connections += 1
        return Connection(self, ConnectionInfo(self._connections, listener, address), transmit, close)

    def handle(self, context: RequestContext, frame: Buffer, body_offset: int, now: Now) -> Answer:
        """Begin one request; an API or version that is not offered gets the protocol's own answer."""
        handler = dispatch.find(context)
        if handler is None:
            return dispatch.refuse(context)
        request = decode_request(context.api_key, context.version, frame, body_offset)
        return handler(self, context, request, now)

    def api_versions_answer_version(self, version: int) -> int:
        return version if dispatch.is_offered(18, version) else 0

    @property
    def next_deadline_ms(self) -> int | None:
        return self.timers.next_deadline_ms

    def tick(self, now: Now) -> None:
        self.timers.run_due(now.monotonic_ms)

    def now(self) -> Now:
        """For what happens after its request, or without one. What expires goes by `wall_clock` instead."""
        return self.seams.clock.now()

    def save_clock(self) -> None:
        """Write down how late it is. A full disk leaves what stands there, from which less has passed."""
        metadata = self.metadata
        if metadata is not None and not metadata.directory.offline:
            try:
                self.wall_clock.save()
            except OSError as error:
                self.refused(metadata.directory, error)

    # Partitions

    def topic_config(self, topic: str) -> TopicConfig:
        config = self._topic_configs.get(topic)
        if config is None:
            stored = self.image.settings(Resource(ResourceType.TOPIC, topic))
            config = self._topic_configs[topic] = self.config.topic_config(
                {**stored, **REQUIRED_SETTINGS.get(topic, {})}
            )
        return config

    def apply_settings(self) -> None:
        """Take the image's settings of this broker into force; topics resolve theirs anew."""
        self.config = self.config.with_dynamic(
            self.image.settings(Resource(ResourceType.BROKER, str(self.node_id))),
            self.image.settings(Resource(ResourceType.BROKER, "")),
        )
        self._topic_configs.clear()

    def leader_of(self, topic: str, index: int) -> HostedPartition:
        """The partition, online and led here, or the protocol's error."""
        hosted = self.partitions.get(topic, index)
        if hosted is None:
            reason = self.partitions.offline_reason(topic, index)
            if reason is not None:
                raise ApiError(ErrorCode.kafka_storage_error, reason)
            raise ApiError(
                ErrorCode.unknown_topic_or_partition, f"this node hosts no partition {topic}-{index}"
            )
        if hosted.directory.offline:
            raise ApiError(
                ErrorCode.kafka_storage_error,
                f"{hosted.directory.path} is offline: {hosted.directory.failure}",
            )
        return hosted

    def topic_name(self, topic_id: UUID) -> str | None:
        return self.partitions.names_by_id.get(topic_id)

    # The metadata log

    def append_metadata(self, records: Sequence[MetadataRecord], now: Now) -> None:
        """Append changes, apply them, and hold responses back until they are durable."""
        if not records:
            return
        metadata = self.metadata
        assert metadata is not None
        if metadata.directory.offline:
            raise ApiError(ErrorCode.kafka_storage_error, "the metadata log is offline")
        batch = build_batch(
            [Record(index, 0, None, record.encode()) for index, record in enumerate(records)],
            base_timestamp=now.wall_ms,
        )
        try:
            stored = metadata.log.append(check_whole(batch), batch, metadata.leader_epoch, now)
        except OSError as error:
            self.refused(metadata.directory, error)
            raise ApiError(
                ErrorCode.kafka_storage_error, f"the metadata log could not be written: {error}"
            ) from error
        before = self._topics_touched(records)
        self.image.apply_all(records, last_offset=stored.last_offset, last_epoch=metadata.leader_epoch)
        self.metadata_barrier = self._wait_for_metadata
        metadata.offsets.when_committed(stored.next_offset, lambda error: self._metadata_committed())
        self.commit.request(metadata)
        if any(isinstance(record, Config) for record in records):
            self._follow_settings()
        self._follow_topics(before, now)

    def _wait_for_metadata(self, waiter: CommitWaiter) -> None:
        assert self.metadata is not None
        self.metadata.offsets.when_committed(self.metadata.log.end_offset, waiter)

    def _metadata_committed(self) -> None:
        assert self.metadata is not None
        if self.metadata.offsets.is_committed(self.metadata.log.end_offset):
            self.metadata_barrier = None

    def _topics_touched(self, records: Iterable[MetadataRecord]) -> dict[UUID, TopicImage | None]:
        """The topics that records are about, as they are before the records are applied."""
        return {
            record.topic_id: self.image.topics_by_id.get(record.topic_id)
            for record in records
            if isinstance(record, Topic | Partition | PartitionChange | RemoveTopic)
        }

    def _follow_topics(self, before: dict[UUID, TopicImage | None], now: Now) -> None:
        """Make what is hosted follow the image: first what goes, since a new topic may have an old one's name."""
        for topic_id, known in before.items():
            if known is not None and topic_id not in self.image.topics_by_id:
                self._withdraw(known)
        for topic_id, known in before.items():
            topic = self.image.topics_by_id.get(topic_id)
            if topic is None:
                continue
            have = len(known.partitions) if known is not None else 0
            for partition in topic.partitions[have:]:
                self.partitions.create(topic, partition, now)
            for partition in topic.partitions[:have]:
                hosted = self.partitions.get(topic.name, partition.index)
                if hosted is not None:
                    hosted.leader_epoch = partition.leader_epoch
        names = {topic_id: topic.name for topic_id, topic in before.items() if topic is not None}
        self.groups.topics_changed({*names.values()} | self._names_of(before), now)
        deleted = {name for topic_id, name in names.items() if topic_id not in self.image.topics_by_id}
        if deleted:
            self.groups.topics_deleted(deleted, now)

    def _names_of(self, topic_ids: Iterable[UUID]) -> set[str]:
        topics = (self.image.topics_by_id.get(topic_id) for topic_id in topic_ids)
        return {topic.name for topic in topics if topic is not None}

    def _follow_settings(self) -> None:
        self.apply_settings()
        for hosted in self.partitions:
            was_in_groups = hosted.flushes_in_groups
            hosted.log.config = self.topic_config(hosted.topic)
            if (
                hosted.flushes_in_groups
                and not was_in_groups
                and hosted.log.needs_flush
                and not hosted.offline
            ):
                # The durable end says that all of this is flushed: now it is to be true.
                self.commit.request(hosted)

    def _withdraw(self, topic: TopicImage) -> None:
        gone, doomed = self.partitions.withdraw(topic)
        self._topic_configs.pop(topic.name, None)
        assert self.metadata is not None
        for hosted in gone:
            hosted.fail(ApiError(ErrorCode.unknown_topic_or_partition, f"topic {topic.name!r} was deleted"))
        self.deletions.begin(doomed)

        def delete(error: Exception | None) -> None:
            if error is not None:
                return
            for segment in (segment for hosted in gone for segment in hosted.log.segments):
                segment.forget_file()
            self.deletions.decide(doomed)

        self.metadata.offsets.when_committed(self.metadata.log.end_offset, delete)

    # Time-outs of parked produces

    def watch_production(self, production: Production, deadline_ms: int) -> None:
        """Answer a parked produce when its time-out passes. Those that ended are let go of as others come."""
        productions = self._productions
        while productions and not productions[0][0].waiting:
            productions.popleft()
        productions.append((production, deadline_ms))

    def _time_out_productions(self, now_ms: int) -> None:
        for production, deadline_ms in list(self._productions):
            if production.waiting and deadline_ms <= now_ms:
                self._guarded(production.time_out)

    # Shortening

    def move_log_start(self, hosted: HostedPartition, offset: int) -> None:
        """Delete records below `offset`: the new start is durable before any file goes."""
        self.move_log_starts([(hosted, offset)])

    def move_log_starts(
        self, moves: Sequence[tuple[HostedPartition, int]], *, even_if_full: bool = False
    ) -> None:
        """The same for many partitions, with one write of the checkpoint for each directory.

        No client is shown a start that is not durable, so the logs learn of theirs last. Where a full disk refuses
        the checkpoint nothing moves, unless it must `even_if_full`: what expires is what makes room again.
        """
        moved = {hosted: offset for hosted, offset in moves if offset > hosted.log.start_offset}
        directories = dict.fromkeys(hosted.directory for hosted in moved)
        durable = {
            directory for directory in directories if self.checkpoints.write_log_starts(directory, moved)
        }
        for hosted, offset in moved.items():
            if hosted.offline:
                continue
            is_durable = hosted.directory in durable and not self.deletions.hides(hosted)
            if is_durable or (even_if_full and self._name_start(hosted, offset)):
                hosted.advance_start(offset)
                remove_below_start(self, hosted)

    def _name_start(self, hosted: HostedPartition, offset: int) -> bool:
        """Whether the start is durable without the checkpoint, by the name of a file: see `named_start`."""
        try:
            name_start(self.fs, hosted.log.segments[0], offset)
        except OSError as error:
            self.refused(hosted.directory, error)
            return False
        return True

    # Failures

    def refused(self, directory: LogDirectory, error: OSError) -> bool:
        """Whether a write was refused for want of room or descriptors, which is said. Any other error takes the
        directory offline."""
        if error.errno in REFUSED_ERRNOS:
            self._refusals.refused(directory, error)
            return True
        self.directory_failed(directory, error)
        return False

    def _flush_failed(self, partition: HostedPartition, error: OSError) -> None:
        if error.errno not in NO_DESCRIPTOR_ERRNOS:
            self.directory_failed(partition.directory, error)
            return
        self._refusals.refused(partition.directory, error)
        self.commit.put_off(partition)

    def directory_failed(self, directory: LogDirectory, error: OSError) -> None:
        """Out of service until restart: what is parked there has an unknown outcome and is told so."""
        if directory.offline:
            return
        directory.fail(error)
        if directory.meta is not None:
            self.image.offline_directories.add(directory.id)
        offline = self.in_directory(directory)
        for subject in (directory.path, *(hosted.name for hosted in offline)):
            self.troubles.forget(subject)
        self.troubles.begin(
            Kind.DIRECTORY_OFFLINE,
            directory.path,
            f"log directory {directory.path} is offline until restart, with {_listed(offline)}: {error}",
        )
        failure = LogDirectoryOffline(f"{directory.path} is offline: {error}")
        for hosted in offline:
            hosted.fail(failure)
        if self.metadata is not None and self.metadata.directory is directory:
            self.fatal = f"the metadata log is in {directory.path}, which failed: {error}"
            self.say(Line(f"{self.fatal}; this broker cannot go on and must be restarted", Level.ERROR))
            self.on_fatal()

    def report_defect(self, where: str, error: Exception) -> None:
        """Something raised what it should not have: say it with its place, so that it can be mended."""
        trace = "".join(format_exception(error))
        self.say(Line(f"defect in {where}: {trace}", Level.ERROR, kind=f"defect in {where}"))

    def _timer_failed(self, action: Callable[[], None], error: Exception) -> None:
        self.report_defect(f"the timer {getattr(action, '__qualname__', action)}", error)

    def in_directory(self, directory: LogDirectory) -> list[HostedPartition]:
        hosted = [partition for partition in self.partitions if partition.directory is directory]
        if self.metadata is not None and self.metadata.directory is directory:
            hosted.append(self.metadata)
        return hosted

    # What happens every second

    def _flushed(self, partition: HostedPartition) -> None:
        self.checkpoints.are_due = True
        self.presence.flushed(partition)

    def _every_second(self, due_ms: int) -> None:
        def run() -> None:
            if self.is_stopping:
                return
            # Seconds in which nothing ran, since the process was stopped, are not made up for.
            now_ms = max(due_ms, self.now().monotonic_ms)
            self._every_second(now_ms + CHECKPOINT_INTERVAL_MS)
            self._time_out_productions(now_ms)
            for work in (
                self.presence.look,
                self.checkpoints.write_due,
                self.commit.go_on,
                self.deletions.carry_on,
                self._finish_start,
                lambda: self._refusals.check(self.directories, now_ms),
            ):
                self._guarded(work)

        self.timers.at(due_ms, run)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do one of several things, each of which is done whatever became of the others."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - see above
            self._timer_failed(work, error)

    def _finish_start(self) -> None:
        from holdfast.broker.node import startup

        startup.finish(self, self.now())


def _listed(partitions: Sequence[HostedPartition]) -> str:
    names = ", ".join(partition.name for partition in partitions[:NAMED_MAX])
    more = len(partitions) - NAMED_MAX
    return f"{len(partitions)} partitions ({names}{f' and {more} more' if more > 0 else ''})"
