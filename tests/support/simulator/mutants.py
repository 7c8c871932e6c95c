"""Planted bugs, to prove that the checkers see them.

A mutant changes the seams under the broker, or one of its methods, for the length of a seed; the product
knows nothing of it. `MUTANTS` names every one: bugs of storage first, then those of groups, committed offsets,
transactions and compaction. Each must be caught within 200 seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from tests.support.simulator.broker import Broker, MakeSeams, SimulatedFlusher

from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.consumer_turn import Turn
from holdfast.broker.groups.offsets import OffsetStore
from holdfast.broker.log import cleaner, record_filter
from holdfast.broker.log.log import Log
from holdfast.broker.log.producer_state import Duplicate, ProducerStateMap
from holdfast.broker.log.recovery import _Opening
from holdfast.broker.log.scan import Damage, Survey
from holdfast.broker.metadata import changes
from holdfast.broker.node import intake
from holdfast.broker.node import node as node_module
from holdfast.broker.node.coordination import CoordinatorPartition
from holdfast.broker.node.handlers import transactions as transaction_handlers
from holdfast.broker.node.metadata_log import MetadataLog
from holdfast.broker.node.wall_clock import WallClock
from holdfast.broker.transactions import rules
from holdfast.broker.transactions.coordinator import TransactionCoordinator
from holdfast.broker.transactions.model import ProducerIdentity, TransactionMetadata, TransactionState
from holdfast.seams import FlushJob, Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.disk_files import SimulatedFile
from holdfast.wire.metadata_records import MetadataRecord, ProducerIds


class Mutant:
    """The healthy broker; mutants override what they spoil."""

    name = "healthy"

    flusher: type[SimulatedFlusher] = SimulatedFlusher
    planted: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def start(self, seams: MakeSeams) -> Broker:
        return Broker(seams)

    def kill(self, disk: SimulatedDisk) -> None:
        """The process dies, the machine does not."""
        disk.kill()


class NoFlush(Mutant):
    """The flusher reports success and flushes nothing."""

    name = "no-flush"

    class flusher(SimulatedFlusher):  # noqa: N801
        def carry_out(self, job: FlushJob) -> OSError | None:
            return None


class AckBeforeFlush(Mutant):
    """The flusher reports success first and flushes afterwards."""

    name = "ack-before-flush"

    class flusher(SimulatedFlusher):  # noqa: N801
        def step(self, rng: random.Random) -> None:
            if self.carried_out and rng.random() < 0.5:
                self.carry_out(self.carried_out.pop(0)[0])
            elif self.jobs:
                job = self.jobs.popleft().gathered()
                self.carried_out.append((job, None))
                self.report(job, None)

        def report_all(self) -> None:
            """Everything was reported long ago."""


class DirectoryNotFlushed(Mutant):
    """The flusher leaves directories out: a new segment's name is not durable."""

    name = "directory-not-flushed"

    class flusher(SimulatedFlusher):  # noqa: N801
        def carry_out(self, job: FlushJob) -> OSError | None:
            files = tuple(target for target in job.targets if not isinstance(target, str))
            return super().carry_out(job._replace(targets=files))


class RecoveryWithoutFlush(Mutant):
    """Recovery verifies what the page cache holds, without flushing it first."""

    name = "recovery-without-flush"

    def start(self, seams: MakeSeams) -> Broker:
        def flush(file: SimulatedFile) -> None:
            if not file.path.endswith(".log") or "__cluster_metadata" in file.path:
                flush_really(file)

        flush_really = SimulatedFile.flush
        with patch.object(SimulatedFile, "flush", flush):
            return super().start(seams)


class UnflushedLostAtKill(Mutant):
    """What is not flushed dies with the process, as if the broker kept it in its own memory."""

    name = "unflushed-lost-at-kill"

    def kill(self, disk: SimulatedDisk) -> None:
        disk.crash()


class Patched(Mutant):
    """Something is replaced for the length of a seed; the function that does it gives the mutant its name."""

    def __init__(self, plant: Callable[[], AbstractContextManager[Any]]) -> None:
        self.name = plant.__name__.strip("_").replace("_", "-")
        self.planted = plant


def _duplicate_answered_early() -> AbstractContextManager[Any]:
    """A retried batch that is a duplicate is answered without waiting for the first one's flush."""
    admit = intake.admit

    def admit_early(*arguments: Any) -> Any:
        admitted = admit(*arguments)
        return admitted._replace(last_offset=-1) if isinstance(admitted, Duplicate) else admitted

    return patch.object(intake, "admit", admit_early)


def _producer_id_reused() -> AbstractContextManager[Any]:
    """The record that takes a block of producer ids never reaches the metadata log."""
    append = MetadataLog.append

    def append_others(metadata: MetadataLog, records: Sequence[MetadataRecord], now: Now) -> None:
        if not records or not all(isinstance(record, ProducerIds) for record in records):
            append(metadata, records, now)
            return
        image = metadata.image
        image.apply_all(records, last_offset=image.last_offset, last_epoch=image.last_epoch)

    return patch.object(MetadataLog, "append", append_others)


def _file_length_believed() -> AbstractContextManager[Any]:
    """Recovery takes the end of the file for the end of the log, space written ahead included."""
    cut = _Opening._cut

    def believe(opening: _Opening, index: int, damage: Damage) -> None:
        segment = opening.segments[index]
        length = segment.file.size()
        if any(segment.file.pread(length, damage.position)):
            cut(opening, index, damage)
        else:
            segment.size = length

    return patch.object(_Opening, "_cut", believe)


def _log_line_raises() -> AbstractContextManager[Any]:
    """What is raised by whoever takes the broker's log ends what the broker was about to do."""
    return patch.object(node_module, "unfailing", lambda say: say)


def _wall_clock_believed() -> AbstractContextManager[Any]:
    """Whatever expires by time goes by the wall clock, wherever that has jumped."""
    return patch.object(WallClock, "proven", lambda guard: guard._clock.now())


def _group_answers_early() -> AbstractContextManager[Any]:
    """What a group's coordinator says, of positions too, leaves before its records are flushed."""

    answer = CoordinatorPartition.answer

    def answer_at_once(journal: CoordinatorPartition, fields: Any, refusal: Any) -> Any:
        return fields if journal.hosted.topic == "__consumer_offsets" else answer(journal, fields, refusal)

    return patch.object(CoordinatorPartition, "answer", answer_at_once)


def _offsets_not_reloaded() -> AbstractContextManager[Any]:
    """A group is rebuilt without its positions."""
    return patch.object(OffsetStore, "restore", lambda *arguments: None)


def _pending_offsets_shown() -> AbstractContextManager[Any]:
    """Positions sent in a transaction count at once."""

    def pending_for(store: OffsetStore, producer_id: int, group_id: str) -> Any:
        return store._committed.setdefault(group_id, {})

    return patch.object(OffsetStore, "_pending_for", pending_for)


def _members_not_reloaded() -> AbstractContextManager[Any]:
    """A classic group is rebuilt without its members."""
    restore = ClassicGroup.restore

    def without_members(group: ClassicGroup, **fields: Any) -> None:
        restore(group, **{**fields, "members": [], "leader": None})

    return patch.object(ClassicGroup, "restore", without_members)


def _old_generation_accepted() -> AbstractContextManager[Any]:
    """Whoever commits positions of a classic group may."""
    return patch.object(ClassicGroup, "check_offset_commit", lambda *arguments, **named: None)


def _everybody_owns_everything() -> AbstractContextManager[Any]:
    """Each member of a classic group gets the leader's part of the assignment."""
    synced = ClassicGroup._synced

    def synced_as_leader(group: ClassicGroup, member: Any) -> Any:
        leader = group.members.get(group.leader or "")
        return synced(group, leader or member)

    return patch.object(ClassicGroup, "_synced", synced_as_leader)


def _given_before_release() -> AbstractContextManager[Any]:
    """A KIP-848 member is given a partition whether or not another one still holds it."""
    return patch.object(Turn, "_has_other_owner", lambda *arguments: False)


def _marker_before_decision() -> AbstractContextManager[Any]:
    """The markers of a transaction do not wait until its decision is flushed."""

    def carry_out(coordinator: TransactionCoordinator, transaction: Any, now: Any, reply: Any) -> None:
        transaction.reply = reply
        coordinator._tell_partitions(transaction, sorted(transaction.metadata.partitions), now)

    return patch.object(TransactionCoordinator, "_carry_out", carry_out)


def _enrolment_not_awaited() -> AbstractContextManager[Any]:
    """A partition is written to before the coordinator durably knows that it takes part."""

    def when_durable(
        coordinator: TransactionCoordinator, request: Any, code: Any, done: Callable[[Any], None]
    ) -> None:
        done(dict.fromkeys(request.partitions, code) if code else {})

    return patch.object(TransactionCoordinator, "_when_durable", when_durable)


def _fenced_epoch_accepted() -> AbstractContextManager[Any]:
    """The coordinator takes any epoch of the right producer id."""

    def ignoring_epoch(metadata: TransactionMetadata, producer: ProducerIdentity) -> None:
        check(metadata, producer._replace(epoch=metadata.producer_epoch))

    check = rules.check_owner
    return patch.object(rules, "check_owner", ignoring_epoch)


def _fenced_end_accepted() -> AbstractContextManager[Any]:
    """Any session of a transactional id may end the transaction that is going on."""

    def ignoring_epoch(metadata: TransactionMetadata, request: Any) -> Any:
        if metadata.state is TransactionState.ONGOING:
            present = request.producer._replace(epoch=metadata.producer_epoch)
            return end(metadata, request._replace(producer=present))
        return end(metadata, request)

    end = rules.end_of
    return patch.object(rules, "end_of", ignoring_epoch)


def _decision_not_resumed() -> AbstractContextManager[Any]:
    """A start that finds a decision without its completion leaves it at that."""
    loaded = TransactionCoordinator.loaded

    def without_resuming(coordinator: TransactionCoordinator, now: Any) -> None:
        with patch.object(TransactionCoordinator, "_tell_partitions", lambda *arguments: None):
            loaded(coordinator, now)

    return patch.object(TransactionCoordinator, "loaded", without_resuming)


@contextmanager
def _stable_too_early() -> Iterator[None]:
    """The last stable offset passes a transaction as soon as its end is appended: nothing of that is flushed.

    Its marker alone being early would harm nobody, since a start writes it again before it serves: here the decision
    behind the marker is not durable either.
    """
    complete = ProducerStateMap.complete

    def complete_at_once(producers: ProducerStateMap, *arguments: Any) -> Any:
        completed = complete(producers, *arguments)
        producers.advance_high_watermark(1 << 62)
        return completed

    with patch.object(ProducerStateMap, "complete", complete_at_once), _marker_before_decision():
        yield


def _strangers_end_transactions() -> AbstractContextManager[Any]:
    """Whoever sends a marker is believed: also in a transaction that its coordinator is going to end."""
    return patch.object(transaction_handlers, "ends_hanging", lambda *arguments: True)


def _internal_topics_grow() -> AbstractContextManager[Any]:
    """Internal topics are changed as any others; groups and transactions are looked for where they are not."""
    return patch.object(changes, "refuse_internal", lambda *arguments: None)


def _aborted_not_told() -> AbstractContextManager[Any]:
    """Fetches do not tell which transactions were aborted."""
    return patch.object(Log, "aborted_in", lambda *arguments: [])


def _compaction_drops_the_last() -> AbstractContextManager[Any]:
    """Compaction keeps no record of a key, not even the last."""
    keep = record_filter.keep_latest

    def keep_later(data: bytes, base_offset: int, offsets: dict[bytes, int], *arguments: Any) -> Any:
        return keep(data, base_offset, {key: offset + 1 for key, offset in offsets.items()}, *arguments)

    return patch.object(cleaner, "keep_latest", keep_later)


def _aborted_replaces_committed() -> AbstractContextManager[Any]:
    """Compaction lets a record of an aborted transaction replace the one before it."""
    build = cleaner._Cleaner._build_map

    def build_with_aborted(asked: cleaner._Cleaner) -> int:
        with patch.object(Survey, "is_aborted", lambda *arguments: False):
            return build(asked)

    return patch.object(cleaner._Cleaner, "_build_map", build_with_aborted)


def _time_looked_up_late() -> AbstractContextManager[Any]:
    """A lookup by time finds the first record that is later, instead of one of that time."""
    look_up = Log.batch_at_or_after_time

    def later(log: Log, timestamp: int, *arguments: Any) -> Any:
        return look_up(log, timestamp + 2_000, *arguments)

    return patch.object(Log, "batch_at_or_after_time", later)


HEALTHY = Mutant()
PLANTED = (
    _duplicate_answered_early,
    _producer_id_reused,
    _file_length_believed,
    _log_line_raises,
    _wall_clock_believed,
    _group_answers_early,
    _offsets_not_reloaded,
    _pending_offsets_shown,
    _members_not_reloaded,
    _old_generation_accepted,
    _everybody_owns_everything,
    _given_before_release,
    _marker_before_decision,
    _enrolment_not_awaited,
    _fenced_epoch_accepted,
    _fenced_end_accepted,
    _decision_not_resumed,
    _stable_too_early,
    _strangers_end_transactions,
    _internal_topics_grow,
    _aborted_not_told,
    _compaction_drops_the_last,
    _aborted_replaces_committed,
    _time_looked_up_late,
)
MUTANTS: dict[str, Mutant] = {
    mutant.name: mutant
    for mutant in (
        NoFlush(),
        AckBeforeFlush(),
        DirectoryNotFlushed(),
        RecoveryWithoutFlush(),
        UnflushedLostAtKill(),
        *map(Patched, PLANTED),
    )
}
