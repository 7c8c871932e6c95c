"""What was redriven is remembered exactly, through any number of interruptions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.redriving import METADATA_BYTES_MAX, Progress


@given(st.integers(0, 2**40), st.lists(st.integers(0, 300)), st.lists(st.booleans()))
def test_it_holds_what_was_added_and_nothing_else(start: int, added: list[int], breaks: list[bool]) -> None:
    progress = Progress(start)
    for at, offset in enumerate(added):
        progress.add(start + offset)
        if at < len(breaks) and breaks[at]:
            progress = Progress.read(progress.position, progress.metadata())
    assert {offset for offset in range(302) if start + offset in progress} == set(added)
    first_left = next(offset for offset in range(302) if offset not in added)
    assert progress.position == start + first_left
    assert start - 1 in progress


def test_gaps_are_passed() -> None:
    progress = Progress(10)
    progress.skip(10, 15)
    assert progress.position == 15
    progress.add(16)
    progress.skip(17, 20)
    assert progress.position == 15
    assert 19 in progress
    progress.add(15)
    assert progress.position == 20
    assert progress.metadata() == Progress(0).metadata()


def test_skipping_over_what_is_done_forgets_it() -> None:
    progress = Progress(0, {5, 6, 9})
    progress.skip(0, 6)
    assert progress.position == 7
    assert len(progress._done) == 1


@given(st.text())
def test_metadata_of_others_says_nothing(text: str) -> None:
    assert Progress.read(7, text).position >= 7
    assert Progress.read(7, f"hf-redriven:{text}").position >= 7
    assert Progress.read(7, None) == Progress(7)


def test_many_scattered_ones_fit_and_too_many_are_refused() -> None:
    chance = random.Random(7)
    sparse = Progress(0, {offset for offset in range(1, 100_000) if chance.random() < 0.01})
    assert len(sparse.metadata()) <= METADATA_BYTES_MAX
    assert Progress.read(0, sparse.metadata()) == sparse
    dense = Progress(0, {offset for offset in range(1, 100_000) if chance.random() < 0.5})
    with pytest.raises(ValueError, match="scattered"):
        dense.metadata()
