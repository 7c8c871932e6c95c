"""Leader epochs: who wrote what, and where logs part (KIP-101, KIP-320)."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.log.leader_epochs import LEADER_EPOCH_FILE, EpochEnd, EpochStart, LeaderEpochs
from holdfast.errors import CorruptLog, UsageError
from holdfast.testing.disk import SimulatedDisk

PATH = f"/data/{LEADER_EPOCH_FILE}"
UNKNOWN = EpochEnd(-1, -1)

Steps: TypeAlias = list[tuple[int, int]]


def epochs_of(*entries: tuple[int, int]) -> LeaderEpochs:
    return LeaderEpochs(EpochStart(*entry) for entry in entries)


def grown(steps: Steps) -> LeaderEpochs:
    """Epochs and offsets from increments."""
    epochs, epoch, start = LeaderEpochs(), -1, -1
    for epoch_step, offset_step in steps:
        epoch += epoch_step
        start += offset_step
        epochs.assign(epoch, start)
    return epochs


growth = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20)), max_size=10)


def test_an_epoch_ends_where_the_next_begins_and_the_latest_where_the_log_does() -> None:
    epochs = epochs_of((2, 0), (4, 10), (7, 25))
    assert epochs.end_offset_for(2, 40) == EpochEnd(2, 10)
    assert epochs.end_offset_for(4, 40) == EpochEnd(4, 25)
    assert epochs.end_offset_for(7, 40) == EpochEnd(7, 40)


def test_an_epoch_that_wrote_nothing_is_answered_with_the_one_before() -> None:
    epochs = epochs_of((2, 0), (4, 10), (7, 25))
    assert epochs.end_offset_for(3, 40) == EpochEnd(2, 10)
    assert epochs.end_offset_for(6, 40) == EpochEnd(4, 25)


def test_an_epoch_before_all_known_ends_where_the_first_begins() -> None:
    assert epochs_of((2, 5), (4, 10)).end_offset_for(1, 40) == EpochEnd(1, 5)


@pytest.mark.parametrize("epoch", [-1, 8])
def test_an_undefined_or_future_epoch_is_unknown(epoch: int) -> None:
    assert epochs_of((2, 0), (7, 25)).end_offset_for(epoch, 40) == UNKNOWN


def test_an_empty_log_knows_no_epoch() -> None:
    epochs = LeaderEpochs()
    assert epochs.latest_epoch == -1
    assert epochs.end_offset_for(0, 0) == UNKNOWN
    assert epochs.end_offset_for(-1, 0) == UNKNOWN
    assert epochs.epoch_for(0) == -1


def test_an_epoch_is_assigned_once() -> None:
    epochs = LeaderEpochs()
    assert epochs.assign(3, 10)
    assert not epochs.assign(3, 20)
    assert epochs.entries == [(3, 10)]


def test_an_epoch_that_wrote_nothing_gives_way() -> None:
    epochs = epochs_of((1, 0), (2, 10))
    epochs.assign(3, 10)
    assert epochs.entries == [(1, 0), (3, 10)]


def test_an_assignment_drops_what_contradicts_it() -> None:
    epochs = epochs_of((1, 0), (2, 10), (5, 20))
    epochs.assign(3, 15)
    assert epochs.entries == [(1, 0), (2, 10), (3, 15)]
    epochs.assign(3, 5)
    assert epochs.entries == [(1, 0), (3, 5)]


@pytest.mark.parametrize(("epoch", "offset"), [(-1, 0), (0, -1)])
def test_nonsense_is_not_assigned(epoch: int, offset: int) -> None:
    with pytest.raises(UsageError):
        LeaderEpochs().assign(epoch, offset)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30)), max_size=20))
def test_whatever_is_assigned_both_columns_grow(assigned: Steps) -> None:
    entries = epochs_of(*assigned).entries
    for before, after in itertools.pairwise(entries):
        assert before.epoch < after.epoch
        assert before.start_offset < after.start_offset
    if assigned:
        assert entries[-1].epoch == assigned[-1][0]


@given(growth, st.integers(0, 250))
def test_truncating_the_end_forgets_epochs_that_began_there_or_later(steps: Steps, end_offset: int) -> None:
    epochs = grown(steps)
    expected = [entry for entry in epochs.entries if entry.start_offset < end_offset]
    assert epochs.truncate_from_end(end_offset) == (len(expected) < len(steps))
    assert epochs.entries == expected


@given(growth, st.integers(0, 250))
def test_truncating_the_start_keeps_the_epoch_of_every_offset_left(steps: Steps, start_offset: int) -> None:
    epochs = grown(steps)
    before = epochs.entries
    wrote = {offset: epochs.epoch_for(offset) for offset in range(start_offset, 260)}
    assert epochs.truncate_from_start(start_offset) == (epochs.entries != before)
    assert {offset: epochs.epoch_for(offset) for offset in range(start_offset, 260)} == wrote
    assert len([entry for entry in epochs.entries if entry.start_offset <= start_offset]) <= 1
    assert all(entry.start_offset >= start_offset for entry in epochs.entries)


@given(growth, st.integers(0, 250))
def test_the_epoch_of_an_offset_is_the_last_that_began_at_or_before_it(steps: Steps, offset: int) -> None:
    epochs = grown(steps)
    began = [entry.epoch for entry in epochs.entries if entry.start_offset <= offset]
    assert epochs.epoch_for(offset) == (began[-1] if began else -1)


def test_cleared_epochs_are_none() -> None:
    epochs = epochs_of((1, 0))
    epochs.clear()
    assert epochs.entries == []


# ---- the file


def test_the_file_is_kafkas() -> None:
    assert epochs_of((1, 0), (4, 77)).to_bytes() == b"0\n2\n1 0\n4 77\n"


@given(growth)
def test_epochs_survive_their_file(steps: Steps) -> None:
    epochs = grown(steps)
    assert LeaderEpochs.from_bytes(epochs.to_bytes(), PATH).entries == epochs.entries


def test_epochs_survive_power_loss_once_written(disk: SimulatedDisk) -> None:
    assert LeaderEpochs.read(disk, PATH).entries == []
    epochs_of((1, 0), (4, 77)).write(disk, PATH)
    disk.crash()
    assert LeaderEpochs.read(disk, PATH).entries == [(1, 0), (4, 77)]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"0\n1\n1\n", "line 3"),
        (b"0\n1\n1 0 0\n", "line 3"),
        (b"0\n1\n-1 0\n", "line 3"),
        (b"0\n1\n1 x\n", "line 3"),
        (b"0\n2\n1 0\n1 5\n", "line 4"),
        (b"0\n2\n1 5\n2 5\n", "line 4"),
        (b"0\n1\n2147483648 5\n", "line 3"),
        (b"0\n2\n1 5\n", "line 2"),
    ],
)
def test_what_no_one_wrote_is_corrupt_and_the_line_is_named(content: bytes, line: str) -> None:
    with pytest.raises(CorruptLog, match=f"{LEADER_EPOCH_FILE}, {line}"):
        LeaderEpochs.from_bytes(content, PATH)


@given(growth, st.data())
def test_any_cut_is_found_but_for_an_empty_file(steps: Steps, data: st.DataObject) -> None:
    content = grown(steps).to_bytes()
    cut = content[: data.draw(st.integers(1, len(content) - 1))]
    with pytest.raises(CorruptLog):
        LeaderEpochs.from_bytes(cut, PATH)
    assert LeaderEpochs.from_bytes(b"", PATH).entries == []
