"""Planted bugs of groups, positions, transactions and compaction: see `mutants`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from tests.support.simulator.mutants import Mutant

from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.consumer_turn import Turn
from holdfast.broker.groups.offsets import OffsetStore
from holdfast.broker.log import cleaner, record_filter
from holdfast.broker.log.log import Log
from holdfast.broker.log.producer_state import ProducerStateMap
from holdfast.broker.log.scan import Survey
from holdfast.broker.metadata import changes
from holdfast.broker.node.coordination import CoordinatorPartition
from holdfast.broker.node.handlers import transactions as transaction_handlers
from holdfast.broker.transactions import rules
from holdfast.broker.transactions.coordinator import TransactionCoordinator
from holdfast.broker.transactions.model import ProducerIdentity, TransactionMetadata, TransactionState
from holdfast.testing.disk import SimulatedDisk


class Patched(Mutant):
    """One attribute is replaced for the length of a seed."""

    def __init__(self, name: str, plant: Callable[[], AbstractContextManager[Any]]) -> None:
        self.name = name
        self._plant = plant

    @contextmanager
    def planted(self) -> Iterator[None]:
        with self._plant():
            yield


class UnflushedLostAtKill(Mutant):
    """What is not flushed dies with the process, as if the broker kept it in its own memory."""

    name = "unflushed-lost-at-kill"

    def kill(self, disk: SimulatedDisk) -> None:
        disk.crash()


def _group_answers_early() -> AbstractContextManager[Any]:
    """What a group's coordinator says, of positions too, leaves before its records are flushed."""

    answer = CoordinatorPartition.answer

    def answer_at_once(journal: CoordinatorPartition, fields: Any, refusal: Any) -> Any:
        return fields if journal.hosted.topic == "__consumer_offsets" else answer(journal, fields, refusal)

    return patch.object(CoordinatorPartition, "answer", answer_at_once)


def _positions_not_reloaded() -> AbstractContextManager[Any]:
    """A group is rebuilt without its positions."""
    return patch.object(OffsetStore, "restore", lambda *arguments: None)


def _pending_positions_shown() -> AbstractContextManager[Any]:
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


def _compaction_takes_aborted_for_real() -> AbstractContextManager[Any]:
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


COORDINATOR_MUTANTS: tuple[Mutant, ...] = (
    UnflushedLostAtKill(),
    Patched("group-answers-early", _group_answers_early),
    Patched("positions-not-reloaded", _positions_not_reloaded),
    Patched("pending-positions-shown", _pending_positions_shown),
    Patched("members-not-reloaded", _members_not_reloaded),
    Patched("old-generation-accepted", _old_generation_accepted),
    Patched("everybody-owns-everything", _everybody_owns_everything),
    Patched("given-before-release", _given_before_release),
    Patched("marker-before-decision", _marker_before_decision),
    Patched("enrolment-not-awaited", _enrolment_not_awaited),
    Patched("fenced-epoch-accepted", _fenced_epoch_accepted),
    Patched("fenced-end-accepted", _fenced_end_accepted),
    Patched("decision-not-resumed", _decision_not_resumed),
    Patched("stable-too-early", _stable_too_early),
    Patched("strangers-end-transactions", _strangers_end_transactions),
    Patched("internal-topics-grow", _internal_topics_grow),
    Patched("aborted-not-told", _aborted_not_told),
    Patched("compaction-drops-the-last", _compaction_drops_the_last),
    Patched("aborted-replaces-committed", _compaction_takes_aborted_for_real),
    Patched("time-looked-up-late", _time_looked_up_late),
)
