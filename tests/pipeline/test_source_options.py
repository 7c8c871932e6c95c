"""The options of the Spark source."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.source import cut, from_offset, to_offset
from holdfast.pipeline.source_options import SourceOptionError, parse_options
from holdfast.reader import TopicPartition

BASE = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders"}


def test_defaults_lose_nothing() -> None:
    options = parse_options(BASE)
    assert (options.starting, options.isolation) == ("earliest", "read_committed")
    assert options.settings == {"bootstrap.servers": "127.0.0.1:9092"}


def test_names_are_taken_in_any_case() -> None:
    options = parse_options({**BASE, "STARTINGOFFSETS": "latest", "maxoffsetspertrigger": "10"})
    assert (options.starting, options.max_offsets) == ("latest", 10)


def test_offsets_are_given_for_each_partition() -> None:
    options = parse_options({**BASE, "startingOffsets": '{"orders": {"0": 23, "1": -2}}'})
    assert options.starting == {TopicPartition("orders", 0): 23, TopicPartition("orders", 1): -2}


@pytest.mark.parametrize(
    ("given_options", "complaint"),
    [
        ({"failOnDataLoss": "false"}, "HF401"),
        ({"kafka.group.id": "mine"}, "joins no group"),
        ({"subscribePattern": "a.*"}, "exactly one of"),
        ({"startingOffsets": "soon"}, "no JSON"),
        ({"startingOffsets": "[1]"}, "is JSON like"),
        ({"startingOffsets": "earliest", "startingTimestamp": "5"}, "not both"),
        ({"startingTimestamp": "noon"}, "milliseconds"),
        ({"minPartitions": "0"}, "at least 1"),
        ({"kafka.isolation.level": "dirty"}, "read_committed or read_uncommitted"),
        ({"startingOffset": "earliest"}, "no option 'startingoffset'"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_why(given_options: dict[str, str], complaint: str) -> None:
    with pytest.raises(SourceOptionError, match=complaint):
        parse_options({**BASE, **given_options})


def test_a_broker_must_be_named() -> None:
    with pytest.raises(SourceOptionError, match=r"kafka\.bootstrap\.servers is missing"):
        parse_options({"subscribe": "orders"})


PLACES = [Place("orders", uuid.UUID(int=1), number) for number in range(5)]
waiting = st.dictionaries(st.sampled_from(PLACES), st.tuples(st.integers(0, 100), st.integers(0, 100)))


@given(waiting, st.integers(1, 300))
def test_a_batch_takes_a_share_of_every_partition(wanted: dict[Place, tuple[int, int]], most: int) -> None:
    starts = {place: Position(start) for place, (start, _) in wanted.items()}
    goals = {place: Position(start + size, 3) for place, (start, size) in wanted.items()}
    reached = cut(starts, goals, most).at
    taken = {place: reached[place].offset - start.offset for place, start in starts.items()}
    assert all(0 <= taken[place] <= wanted[place][1] for place in wanted)
    assert sum(taken.values()) <= most + len(PLACES)
    assert all(taken[place] > 0 for place in wanted if wanted[place][1] > 0)


@given(waiting)
def test_without_a_limit_a_batch_takes_everything(wanted: dict[Place, tuple[int, int]]) -> None:
    starts = {place: Position(start) for place, (start, _) in wanted.items()}
    goals = {place: Position(start + size, 3) for place, (start, size) in wanted.items()}
    assert {place: at.offset for place, at in cut(starts, goals, None).at.items()} == {
        place: at.offset for place, at in goals.items()
    }


@given(
    st.dictionaries(st.sampled_from(PLACES), st.builds(Position, st.integers(0, 2**60), st.integers(-1, 99)))
)
def test_an_offset_comes_back_as_it_was(positions: dict[Place, Position]) -> None:
    assert from_offset(to_offset(Positions(positions))) == Positions(positions)
