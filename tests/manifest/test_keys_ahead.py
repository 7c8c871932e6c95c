"""Keys folded ahead: whoever goes on comes to what a fold of everything comes to, and never trusts another file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.manifest.test_folding import batch

from holdfast.broker.log.scan import Batch
from holdfast.manifest.directory import LogFiles
from holdfast.manifest.keys_ahead import fold, fold_ahead

BATCHES = [
    batch(0, (b"a", b"1"), (b"b", b"1")),
    batch(2, (b"c", b"open"), producer=7),
    batch(3, (b"a", b"2")),
    batch(4, producer=7, marker=True),
    batch(5, (b"d", None), (b"b", b"2")),
]
CUT = 2
"""How many of them are in the first segment."""


@pytest.fixture
def files(tmp_path: Path) -> LogFiles:
    log = tmp_path / "topic-0"
    log.mkdir()
    for base, some in ((0, BATCHES[:CUT]), (3, BATCHES[CUT:])):
        (log / f"{base:020d}.log").write_bytes(b"".join(bytes(each.data) for each in some))
    return LogFiles("topic", 0, str(log), UUID(int=9), 0, 7)


@pytest.mark.parametrize("ahead", [2, 3, 4, 5, 7])
def test_a_fold_goes_on_from_where_it_was_kept(files: LogFiles, tmp_path: Path, ahead: int) -> None:
    state = str(tmp_path / "ahead" / "topic-0.state")
    whole = fold(files, 7, None)
    fold_ahead(files, ahead, state)
    # What lies below is not decoded again: it may be anything behind its first header.
    found = fold(files, 7, state)
    assert found.latest == whole.latest
    assert list(found.pending()) == list(whole.pending()) == []


def test_what_was_kept_is_used(files: LogFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = str(tmp_path / "topic-0.state")
    fold_ahead(files, 5, state)
    asked: list[int] = []
    before = LogFiles.batches

    def batches(self: LogFiles, below: int, start: int) -> Iterator[Batch]:
        asked.append(start)
        return before(self, below, start)

    monkeypatch.setattr(LogFiles, "batches", batches)
    fold(files, 7, state)
    assert asked == [5]


def test_another_file_in_its_place_is_folded_anew(files: LogFiles, tmp_path: Path) -> None:
    state = str(tmp_path / "topic-0.state")
    fold_ahead(files, 5, state)
    first = Path(files.segment_path(0))
    aside = tmp_path / "other"
    aside.write_bytes(bytes(batch(1, (b"b", b"1")).data) + bytes(BATCHES[1].data))
    os.replace(aside, first)
    assert fold(files, 7, state).latest == fold(files, 7, None).latest
    Path(state).write_bytes(b"\\0\\0\\0\\5nonsense")
    assert fold(files, 7, state).latest == fold(files, 7, None).latest
