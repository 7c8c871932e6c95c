"""Defects that were mended, each put back for the length of a game, and the game that must notice it.

Those that need many clients and faults at once are mutants of the simulator (`tests.support.simulator.mutants`);
here a single broker and a few records will do, at a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.support import ageing, defects, estate

from holdfast.broker.groups.classic_state import ClassicMember
from holdfast.broker.groups.classic_time import Sessions
from holdfast.broker.log import cleaner
from holdfast.broker.log.record_filter import note_keys
from holdfast.broker.log.recovery_steps import LostOffsets
from holdfast.broker.log.segment import Segment
from holdfast.broker.node import intake, metadata_log, partitions, startup
from holdfast.broker.node.context import Later
from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.following import ImageFollower
from holdfast.broker.node.placement import Survey
from holdfast.broker.node.wall_clock import WallClock
from holdfast.broker.transactions.coordinator import TransactionCoordinator
from holdfast.errors import CorruptLog, InvalidRecords, StorageError
from holdfast.seams import FileSystem, Now

Plant = Callable[[], AbstractContextManager[Any]]
Net = Callable[[Plant, int], bool]
"""Whether a seed notices what is planted."""


class Mended(NamedTuple):
    name: str
    plant: Plant
    net: Net
    seed: int
    """The first seed that notices it, to save the seeds before; should it not any more, the others have their turn."""


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

    def follow_settings(follower: ImageFollower) -> None:
        settings = follower._metadata.settings
        settings.reload()
        for hosted in follower._partitions:
            hosted.log.config = settings.topic(hosted.topic)

    return patch.object(ImageFollower, "_follow_settings", follow_settings)


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


def _missing_counts_as_new() -> AbstractContextManager[Any]:
    """A partition that is not found is made, wherever it was."""
    return patch.object(Survey, "_missing", lambda *arguments: "")


def _metadata_by_position() -> AbstractContextManager[Any]:
    """The first log directory is the one with the metadata log."""
    find = metadata_log.find_metadata

    def first(fs: FileSystem, directories: list[LogDirectory]) -> list[LogDirectory]:
        return [directory for directory in find(fs, directories) if directory is directories[0]]

    return patch.object(startup, "find_metadata", first)


def _lost_segment_passed_over() -> AbstractContextManager[Any]:
    """A log that lacks a segment goes on with the next one."""
    return patch.object(LostOffsets, "check", lambda *arguments: None)


def _names_not_cut() -> AbstractContextManager[Any]:
    """What is deleted gets a longer name, whatever the file system allows, and must get it."""

    def marked_name(topic: str, index: int, unique_id: str, mark: str) -> str:
        return f"{topic}-{index}.{unique_id}{mark}"

    return patch.multiple(partitions, marked_name=marked_name, OBSTINATE_ERRNOS=frozenset())


def _late_failure_ends_the_start() -> AbstractContextManager[Any]:
    """A log directory that fails once it is open ends the broker."""

    def refuses(directory: LogDirectory, error: OSError) -> bool:
        raise error

    return patch.object(LogDirectory, "refuses", refuses)


def _damaged_id_is_a_stranger() -> AbstractContextManager[Any]:
    """One flipped bit in partition.metadata, and the partition is a deleted one's."""
    return patch.object(Survey, "_is_in_place_of", lambda *arguments: False)


def _no_reserve() -> AbstractContextManager[Any]:
    """A start has no room of its own on a full disk."""
    return patch.object(LogDirectory, "give_up_reserve", lambda *arguments: False)


def _tick_with_defect(number: int) -> None:
    defects.check_call(number * 7)


def taken(kind: str, only: str = "") -> Net:
    """Something of this kind is away for a while."""
    return played(lambda seed: estate.play(seed, (kind,), 1, only))


AGED = played(ageing.play)
TICKED = played(_tick_with_defect)
MENDED = (
    Mended("missing-counts-as-new", _missing_counts_as_new, taken("partition"), 3),
    Mended("metadata-by-position", _metadata_by_position, taken("swapped"), 4),
    Mended("lost-segment-passed-over", _lost_segment_passed_over, taken("file missing", ".log"), 1),
    Mended("names-not-cut", _names_not_cut, taken("swapped"), 4),
    Mended("late-failure-ends-the-start", _late_failure_ends_the_start, taken("failing"), 0),
    Mended("damaged-id-is-a-stranger", _damaged_id_is_a_stranger, taken("file flipped", "partition.m"), 3),
    Mended("no-reserve", _no_reserve, taken("full"), 1),
    Mended("header-believed", _header_believed, AGED, 77),
    Mended("untimed-as-old-as-segment", _untimed_as_old_as_segment, AGED, 83),
    Mended("wall-clock-believed", _wall_clock_believed, AGED, 6),
    Mended("horizon-beyond-time", _horizon_beyond_time, AGED, 27),
    Mended("junk-ends-compaction", _junk_ends_compaction, AGED, 139),
    Mended("flip-flushes-nothing", _flip_flushes_nothing, AGED, 2),
    Mended("session-watched-once", _session_watched_once, TICKED, 13),
    Mended("time-outs-end-at-a-defect", _time_outs_end_at_a_defect, TICKED, 28),
    Mended("parked-for-ever", _parked_for_ever, TICKED, 1),
)
