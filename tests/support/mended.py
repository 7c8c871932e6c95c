"""Defects that were mended, each put back for the length of a game, and the net that must notice it.

A net is a game with seeds, which notices or does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.support import ageing, defects

from holdfast.errors import CorruptLog, InvalidRecords, StorageError
from holdfast.groups.classic_members import ClassicMember
from holdfast.groups.classic_time import Sessions
from holdfast.log import cleaner
from holdfast.log.record_filter import note_keys
from holdfast.log.segment import Segment
from holdfast.metadata import changes
from holdfast.node import intake
from holdfast.node.context import Later
from holdfast.node.handlers import k27_write_txn_markers
from holdfast.node.node import Node
from holdfast.node.wall_clock import WallClock
from holdfast.seams import Now
from holdfast.testing.simulator import SeedFailed, run_seed
from holdfast.testing.simulator.mutants_coordinators import Patched
from holdfast.transactions.coordinator import TransactionCoordinator

Plant = Callable[[], AbstractContextManager[Any]]
Net = Callable[[Plant, int], bool]
"""Whether a seed notices what is planted."""
TORN = (
    "aborted-shown",
    "committed-hidden",
    "fenced-ended",
    "sequence-lost",
    "torn-transaction",
    "undecided-shown",
)
GROUP_LOST = ("position-lost", "member-lost", "given-before-release")


class Mended(NamedTuple):
    name: str
    plant: Plant
    net: Net
    seed: int
    """The first seed that notices it, to save the seeds before; should it not any more, the others have their turn."""


def simulated(*rules: str) -> Net:
    """A seed of the simulator breaks one of these rules."""

    def is_noticed(plant: Plant, seed: int) -> bool:
        try:
            run_seed(seed, Patched("put back", plant))
        except SeedFailed as failure:
            return failure.rule in rules
        return False

    return is_noticed


def played(play: Callable[[int], object]) -> Net:
    """A game is lost, or breaks down."""

    def is_noticed(plant: Plant, seed: int) -> bool:
        try:
            with plant():
                play(seed)
        except Exception:  # noqa: BLE001 - some defects end in no rule broken but in whatever they raise
            return True
        return False

    return is_noticed


def _untimed_as_old_as_segment() -> AbstractContextManager[Any]:
    """Records without times are as old as the segment they are in."""

    def newest_ms(segment: Segment) -> int:
        return segment.max_timestamp if segment.max_timestamp >= 0 else segment.created_ms

    return patch.object(Segment, "newest_ms", property(newest_ms))


@contextmanager
def _header_believed() -> Iterator[None]:
    """A batch whose header says 0, as librdkafka's do without times, is from 1970."""
    unchecked = patch.object(intake, "_with_own_maximum", lambda header, batch, records: (header, batch))
    with unchecked, _untimed_as_old_as_segment():
        yield


def _forged_marker_taken() -> AbstractContextManager[Any]:
    """Whoever sends a marker ends a transaction, and fences whom it names."""
    return patch.object(k27_write_txn_markers, "ends_hanging", lambda *arguments: True)


def _wall_clock_believed() -> AbstractContextManager[Any]:
    """What expires goes by the wall clock, wherever that has jumped."""
    return patch.object(WallClock, "proven", lambda guard: guard._clock.now())


def _horizon_beyond_time() -> AbstractContextManager[Any]:
    """Compaction computes times that no batch can hold."""
    return patch.object(cleaner, "nearest_timestamp", lambda timestamp: timestamp)


def _junk_ends_compaction() -> AbstractContextManager[Any]:
    """One batch whose records make no sense, and its topic is never compacted."""

    def note_or_give_up(*arguments: Any) -> None:
        try:
            note_keys(*arguments)
        except (CorruptLog, InvalidRecords) as error:
            raise StorageError(str(error)) from error

    return patch.object(cleaner, "note_keys", note_or_give_up)


def _flip_flushes_nothing() -> AbstractContextManager[Any]:
    """holdfast.flush from os to group counts for what comes, and what was there stays unflushed."""

    def follow_settings(node: Node) -> None:
        node.apply_settings()
        for hosted in node.partitions:
            hosted.log.config = node.topic_config(hosted.topic)

    return patch.object(Node, "_follow_settings", follow_settings)


def _session_watched_once() -> AbstractContextManager[Any]:
    """A defect while a silent member is taken out, and nobody looks again."""

    def look_at(sessions: Sessions, member: ClassicMember, now: Now) -> None:
        member.timer = None
        if member in sessions._membership.members.values():
            if member.deadline_ms > now.monotonic_ms:
                sessions._watch(member, member.deadline_ms)
            else:
                sessions._silent(member, now)

    return patch.object(Sessions, "_look_at", look_at)


def _time_outs_end_at_a_defect() -> AbstractContextManager[Any]:
    """A defect while one transaction is aborted, and no other ever is."""

    def abort_timed_out(coordinator: TransactionCoordinator, now: Now) -> None:
        for transaction in list(coordinator._ongoing.values()):
            if transaction.deadline_ms <= now.monotonic_ms and not transaction.is_busy:
                coordinator._fence(transaction, now, lambda ended: None)
        if coordinator._ongoing:
            coordinator._await_time_outs(now)

    return patch.object(TransactionCoordinator, "_abort_timed_out", abort_timed_out)


def _parked_for_ever() -> AbstractContextManager[Any]:
    """A defect while a parked request is answered leaves it without an answer."""
    return patch.object(Later, "take", lambda later, action, event: action(event))


def _internal_topics_changed() -> AbstractContextManager[Any]:
    """Internal topics can be grown and deleted like any other."""
    return patch.object(changes, "refuse_internal", lambda *arguments: None)


def _tick_with_defect(number: int) -> None:
    defects.check_call(number * 7)


AGED = played(ageing.play)
TICKED = played(_tick_with_defect)
MENDED = (
    Mended("header-believed", _header_believed, AGED, 77),
    Mended("untimed-as-old-as-segment", _untimed_as_old_as_segment, AGED, 83),
    Mended("wall-clock-believed", _wall_clock_believed, AGED, 6),
    Mended("horizon-beyond-time", _horizon_beyond_time, AGED, 27),
    Mended("junk-ends-compaction", _junk_ends_compaction, AGED, 139),
    Mended("flip-flushes-nothing", _flip_flushes_nothing, AGED, 2),
    Mended("session-watched-once", _session_watched_once, TICKED, 11),
    Mended("time-outs-end-at-a-defect", _time_outs_end_at_a_defect, TICKED, 26),
    Mended("parked-for-ever", _parked_for_ever, TICKED, 1),
    Mended("forged-marker-taken", _forged_marker_taken, simulated(*TORN), 1),
    Mended("internal-topics-changed", _internal_topics_changed, simulated(*GROUP_LOST), 13),
)
