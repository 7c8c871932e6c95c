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
built while some change is not durable waits (`MetadataLog.is_durable`).

A `Node` makes the parts, drives what recurs, and stops them in order. The work is theirs: requests reach them through
the protocols of `services`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from holdfast.atomic import flush_each
from holdfast.broker.node import dispatch, housekeeping, loggers, startup
from holdfast.broker.node.checkpoints import Checkpoints, LogStarts
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.connection import Connection
from holdfast.broker.node.context import Answer, Part, RequestContext, Session
from holdfast.broker.node.directories import REFUSED_ERRNOS, LogDirectory
from holdfast.broker.node.failures import Failures, Presence, defect_reporter
from holdfast.broker.node.fetch_sessions import FetchSessions
from holdfast.broker.node.following import ImageFollower
from holdfast.broker.node.group_service import GroupService
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.intake import Intake
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.meter import Meter
from holdfast.broker.node.partitions import HostedPartitions
from holdfast.broker.node.placement import AcceptedLosses
from holdfast.broker.node.services import Identity, NodeSeams
from holdfast.broker.node.timers import Timers
from holdfast.broker.node.transaction_service import ProducerIdSource, TransactionService
from holdfast.broker.node.troubles import Troubles
from holdfast.broker.node.usual_produce import UsualProduce
from holdfast.broker.node.wall_clock import WallClock
from holdfast.config.broker import BrokerConfig
from holdfast.errors import ApiError
from holdfast.saying import named, unfailing, warn
from holdfast.seams import Buffer, FlushTarget, Now
from holdfast.wire.messages import decode_request
from holdfast.wire.metadata_records import BrokerRegistrationChange, EndPoint

CHECKPOINT_INTERVAL_MS: Final = 1000
"""How often recovery points reach the disk while flushes happen: what bounds recovery's work after a crash."""
FLUSH_STUCK_S: Final = 5
"""A flush that takes so long is told of: a disk that is slow for once has answered by then."""
FLUSH_ALL_ABOVE: Final = 64
"""Files to flush at a stop from which one flush of the whole file system is cheaper than one of each."""
OPEN_AT_STOP_MAX: Final = 512
"""Files that a stop has open at a time, for it may have thousands of logs to close, each with several."""


class Node:
    def __init__(
        self,
        config: BrokerConfig,
        seams: NodeSeams,
        accept_loss: Iterable[str] = (),
        serve_unenforced: Iterable[str] = (),
    ) -> None:
        """`accept_loss` names what is given up if it is missing: see `placement`; `serve_unenforced` the kinds of
        records that may be there although nobody enforces them: see `inherited`."""
        fs = seams.fs
        self.seams = seams
        self.say = say = named(unfailing(seams.say), loggers.BROKER)
        storage = named(say, loggers.STORAGE)
        self.report = report = defect_reporter(say)
        self.troubles = Troubles(storage, lambda: seams.clock.now().monotonic_ms)
        self.timers = Timers(self._timer_failed)
        self.meter = meter = Meter(seams.clock, named(say, loggers.REQUESTS))
        self.identity = Identity(config.node_id)
        self.accepted = AcceptedLosses(accept_loss)
        self.serve_unenforced = frozenset(serve_unenforced)
        metadata_say = named(say, loggers.METADATA)
        self.metadata = MetadataLog(
            fs, config, lambda hosted: self.commit.request(hosted), report, metadata_say
        )
        self.settings = settings = self.metadata.settings
        self.wall_clock = WallClock(
            fs,
            seams.clock,
            seams.boot_id,
            lambda: settings.broker.holdfast_clock_settle_ms,
            self.troubles,
            say,
        )
        self.failures = Failures(
            fs,
            self.troubles,
            self.metadata,
            lambda directory: self.partitions.in_directory(directory),
            storage,
        )
        self.directories = [LogDirectory(fs, path, self.failures) for path in config.log_dirs]
        self.partitions = HostedPartitions(
            fs, self.metadata, self.directories, self.accepted, self.troubles, meter, report, storage
        )
        meter.names_by_id = self.partitions.names_by_id
        self.checkpoints = Checkpoints(fs, seams.flusher, self.partitions, storage)
        self.log_starts = LogStarts(fs, seams.worker, seams.clock, self.timers, self.checkpoints, storage)
        self.failures.presence = Presence(self.directories)
        self.commit = GroupCommit(
            seams.flusher, seams.call_soon, self._note_flush, report, meter.flush_messages.note
        )
        self.producer_ids = ProducerIdSource(self.metadata, config.node_id)
        self.groups = GroupService(self)
        self.transactions = TransactionService(self, self.groups, self.producer_ids)
        self.metadata.on_change = ImageFollower(
            self.metadata, self.partitions, self.checkpoints.deletions, self.commit, self.groups
        ).follow
        self.fetch_sessions = FetchSessions(
            config.max_incremental_fetch_session_cache_slots, seams.randomness
        )
        self.intake = Intake(self.commit)
        self.usual_produce = UsualProduce(self.intake, self.partitions, self.metadata, meter)
        self.unserved_topics: set[tuple[str, str]] = set()

    # Life

    def start(self, endpoints: Sequence[EndPoint], now: Now) -> None:
        """Open the data directories, replay the metadata log, raise leader epochs, open every partition."""
        self.identity.endpoints = {endpoint.name: endpoint for endpoint in endpoints}
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
        self.timers.is_stopped = True
        self.wall_clock.save()
        self._fence(now)
        for directory in self.directories:
            if not directory.offline:
                try:
                    self._close_logs(directory)
                    directory.close_cleanly(
                        self.checkpoints.recovery_points(directory),
                        self.checkpoints.log_starts(directory),
                        self.partitions.ends_in(directory),
                        # A partition found damaged must be found damaged again, not taken for cleanly closed.
                        None if self.partitions.has_damaged(directory) else self.identity.broker_epoch,
                    )
                except OSError as error:
                    if error.errno not in REFUSED_ERRNOS:
                        directory.take_offline(error)
                    else:
                        self.failures.is_left_clean = False
                        text = "what was acknowledged is there, and the next start verifies it"
                        self.say(
                            warn(f"{directory.path} could not be left as a clean stop does: {error}; {text}")
                        )
            directory.release()

    def _fence(self, now: Now) -> None:
        """Say that this broker is gone: an Apache Kafka that is started here need not wait for it."""
        if not self.metadata.is_open or self.identity.broker_epoch < 0:
            return
        gone = BrokerRegistrationChange(
            broker_id=self.identity.node_id, broker_epoch=self.identity.broker_epoch, fenced=1
        )
        try:
            self.metadata.append([gone], now)
        except ApiError as error:
            self.say(f"that this broker is gone could not be recorded: {error}")

    def _close_logs(self, directory: LogDirectory) -> None:
        written: list[HostedPartition] = []
        targets: list[FlushTarget] = []
        for partition in self.partitions.in_directory(directory):
            written.append(partition)
            targets += partition.log.write_for_clean_start()
            if len(targets) >= OPEN_AT_STOP_MAX:
                self._close_written(written, targets)
                written, targets = [], []
        self._close_written(written, targets)

    def _close_written(self, written: list[HostedPartition], targets: list[FlushTarget]) -> None:
        if len(targets) > FLUSH_ALL_ABOVE:
            self.seams.fs.flush_many(targets)
        else:
            flush_each(self.seams.fs, targets)
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
        return Connection(self, Session(listener, address), transmit, close)

    def handle(self, context: RequestContext, frame: Buffer, body_offset: int, now: Now) -> Answer:
        """Begin one request; an API or version that is not offered gets the protocol's own answer."""
        handler = dispatch.find(context)
        if handler is None:
            return dispatch.refuse(context)
        request = decode_request(context.api_key, context.version, frame, body_offset)
        return handler(self, context, request, now)

    # Time

    @property
    def next_deadline_ms(self) -> int | None:
        return self.timers.next_deadline_ms

    def tick(self, now: Now) -> None:
        self.timers.run_due(now.monotonic_ms)

    def _note_flush(self, partition: HostedPartition) -> None:
        self.checkpoints.are_due = True
        self.failures.presence.watch(partition)

    def _every_second(self, due_ms: int) -> None:
        def run() -> None:
            if self.timers.is_stopped:
                return
            # Seconds in which nothing ran, since the process was stopped, are not made up for.
            now = self.seams.clock.now()
            now_ms = max(due_ms, now.monotonic_ms)
            self._every_second(now_ms + CHECKPOINT_INTERVAL_MS)
            for work in (
                *(production.time_out for production in self.intake.timed_out(now_ms)),
                lambda: self.meter.every_second(self.settings.broker.holdfast_slow_request_ms),
                self.failures.presence.look,
                self.metadata.require_alone,
                self.commit.look,
                lambda: self.failures.stuck(self.commit.stuck(FLUSH_STUCK_S)),
                self.checkpoints.write_due,
                self.commit.go_on,
                self.checkpoints.deletions.carry_on,
                lambda: startup.finish(self, now),
                lambda: self.failures.retry_refused(
                    self.directories, now_ms, self.checkpoints.write_log_starts
                ),
            ):
                self._guarded(work)

        self.timers.at(due_ms, run)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do one of several things, each of which is done whatever became of the others."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - see above
            self._timer_failed(work, error)

    def _timer_failed(self, action: Callable[[], None], error: Exception) -> None:
        self.report(f"the timer {getattr(action, '__qualname__', action)}", error)
