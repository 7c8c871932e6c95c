"""Generations are added and never rewritten, and no golden file tells where it was made."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.golden.opening import GENERATIONS, SUMS


def test_there_is_a_generation() -> None:
    assert [path.name for path in GENERATIONS] == [f"generation-{at + 1}" for at in range(len(GENERATIONS))]
    assert GENERATIONS


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda path: path.name)
def test_no_file_of_a_generation_was_changed(generation: Path) -> None:
    lines = (line.split() for line in (generation / SUMS).read_text("ascii").splitlines())
    listed = {name: checksum for checksum, name in lines}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in generation.iterdir()
        if path.name != SUMS
    }
    assert found == listed
