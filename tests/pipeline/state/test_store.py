"""Versions of state on disk: what is found, what is kept, what is noticed when it is damaged."""

from __future__ import annotations

import json
import os
import random
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.sinks.files import files_below
from holdfast.pipeline.state.segments import Segment, StateDamaged, StepState, alive
from holdfast.pipeline.state.store import StateStore, Version, discard_state

TOPIC = uuid.UUID(int=7)


def at(*offsets: int, topic_id: uuid.UUID = TOPIC, epoch: int = 3) -> Positions:
    """Positions in partitions 0, 1…"""
    return Positions(
        {Place("orders", topic_id, number): Position(offset, epoch) for number, offset in enumerate(offsets)}
    )


def write(store: StateStore, untils: Sequence[int], label: str = "a-1", step: str = "totals") -> str:
    """Rows as pyarrow writes them, with what Spark leaves beside them."""
    directory = store.segment_dir(label, step)
    os.mkdir(directory)
    table = pa.table({"key": [f"k{until}" for until in untils], "_until": pa.array(untils, pa.int64())})
    pq.write_table(table, os.path.join(directory, "part-0.parquet"))
    Path(directory, "_SUCCESS").touch()
    Path(directory, ".part-0.parquet.crc").write_bytes(b"crc")
    return directory


def segment(store: StateStore, untils: Sequence[int], label: str = "a-1") -> Segment:
    adopted = store.adopt(write(store, untils, label))
    assert adopted is not None
    return adopted


def published(store: StateStore, number: int, standing: Positions, *segments: Segment) -> Version:
    version = Version(
        number, standing, {"w": number}, {"totals": StepState("f", segments, {"late": 2})}, 1000
    )
    store.publish(version)
    return version


def everything(store: StateStore) -> set[str]:
    return set(files_below(store.path))


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(str(tmp_path / "state"))


def again(store: StateStore) -> StateStore:
    """As the next process finds it."""
    return StateStore(store.path)


# ---------------------------------------------------------------------------- segments


def test_a_segment_knows_its_rows_and_times_and_nothing_but_rows_stays(store: StateStore) -> None:
    adopted = segment(store, [30, 10, 20])

    assert (adopted.rows, adopted.low_ms, adopted.high_ms, adopted.tier) == (3, 10, 30, 0)
    assert adopted.files == ("data/a-1/totals-1/part-0.parquet",)
    assert adopted.bytes == os.path.getsize(os.path.join(store.path, adopted.files[0]))
    assert everything(store) == set(adopted.files)


def test_a_segment_without_rows_is_none_and_leaves_nothing(store: StateStore) -> None:
    assert store.adopt(write(store, [])) is None
    assert everything(store) == set()


def test_times_are_read_from_the_rows_where_the_footer_has_none(store: StateStore) -> None:
    directory = store.segment_dir("a-1", "totals")
    os.mkdir(directory)
    table = pa.table({"_until": pa.array([5, 9, 7], pa.int64())})
    pq.write_table(table, os.path.join(directory, "part-0.parquet"), write_statistics=False)
    adopted = store.adopt(directory)
    assert adopted is not None
    assert (adopted.low_ms, adopted.high_ms) == (5, 9)


@pytest.mark.parametrize("column", [None, pa.array([1, None], pa.int64())])
def test_rows_that_do_not_say_when_they_end_are_no_state(store: StateStore, column: pa.Array | None) -> None:
    directory = store.segment_dir("a-1", "totals")
    os.mkdir(directory)
    table = pa.table({"key": [1, 2]} if column is None else {"_until": column})
    pq.write_table(table, os.path.join(directory, "part-0.parquet"))
    with pytest.raises(ValueError, match="say when they end"):
        store.adopt(directory)


def test_directories_for_segments_are_never_the_same(store: StateStore) -> None:
    paths = {store.segment_dir("a-1", "totals") for _ in range(3)}
    assert len(paths) == 3
    assert not any(os.path.exists(path) for path in paths)


def test_segments_that_are_over_are_told_by_their_times(store: StateStore) -> None:
    old, new = segment(store, [10, 20]), segment(store, [20, 30])
    assert alive((old, new), None) == (old, new)
    assert alive((old, new), 20) == (new,)
    assert alive((old, new), 30) == ()


# ---------------------------------------------------------------------------- versions


def test_a_new_store_has_no_version(store: StateStore) -> None:
    assert store.newest() is None
    assert store.find(at(0)) is None
    assert store.versions() == ()


def test_a_version_is_read_back_as_it_was_published(store: StateStore) -> None:
    version = published(store, 4, at(10, 20), segment(store, [1]))
    assert again(store).versions() == (version,)
    assert again(store).newest() == version


def test_a_version_is_found_where_somebody_stands(store: StateStore) -> None:
    first = published(store, 1, at(10), segment(store, [1]))
    second = published(store, 2, at(20), segment(store, [2]))

    found = again(store)
    assert found.find(at(10)) == first
    assert found.find(at(20)) == second
    assert found.find(at(15)) is None
    assert found.find(at(10, epoch=9)) == first, "epochs tell how it was read, not where it is"
    assert found.find(at(10, topic_id=uuid.UUID(int=8))) is None, "another incarnation of the topic"
    assert found.find(Positions({})) is None


def test_partitions_that_came_later_do_not_hide_a_version(store: StateStore) -> None:
    version = published(store, 1, at(10))
    assert store.find(at(10, 0)) == version
    assert store.find(at(11, 0)) is None
    wider = published(store, 2, at(10, 5))
    assert store.find(at(10, 5)) == wider
    assert store.find(at(10)) == version, "a version that knows more than the sink is not the sink's"


def test_the_number_a_ledger_names_chooses_among_versions(store: StateStore) -> None:
    older, newer = published(store, 1, at(10)), published(store, 2, at(10))
    assert store.find(at(10)) == newer
    assert store.find(at(10), number=1) == older
    assert store.find(at(10), number=3) is None


def test_a_version_published_again_replaces_itself(store: StateStore) -> None:
    published(store, 1, at(10), segment(store, [1], "a-1"))
    second = published(store, 1, at(10), segment(store, [2], "b-1"))
    assert again(store).versions() == (second,)


def test_a_task_that_writes_again_after_its_report_writes_beside_the_segment(store: StateStore) -> None:
    directory = write(store, [5, 9])
    adopted = store.adopt(directory, reported=[os.path.join(directory, "part-0.parquet"), None])
    assert adopted is not None
    pq.write_table(pa.table({"_until": [1]}), os.path.join(directory, "late.parquet"))
    (path,) = store.paths(adopted)
    assert os.listdir(os.path.dirname(path)) == ["part-0.parquet"]
    published(store, 1, at(1), adopted)
    store.gc([])
    assert [name for name in everything(store) if name.startswith("data")] == list(adopted.files)


def test_nothing_reported_is_no_segment(store: StateStore) -> None:
    assert store.adopt(write(store, [5]), reported=[None]) is None


def test_a_version_cannot_name_what_was_not_adopted(store: StateStore) -> None:
    good = segment(store, [1])
    with pytest.raises(ValueError, match="not adopted"):
        published(store, 1, at(10), replace(good, files=("data/a-1/totals-9/part-0.parquet",)))
    assert again(store).versions() == ()


# ---------------------------------------------------------------------------- what goes, and what stays


def test_versions_stay_while_somebody_stands_there_and_share_their_segments(store: StateStore) -> None:
    one, two, three, four = (segment(store, [number]) for number in range(4))
    published(store, 1, at(10), one)
    behind = published(store, 2, at(20), one, two)
    published(store, 3, at(30), three)
    ahead = published(store, 4, at(40), two, four)

    store.gc([at(20), at(40)])

    assert store.versions() == again(store).versions() == (behind, ahead)
    kept = {name for each in (one, two, four) for name in each.files}
    assert {name for name in everything(store) if name.endswith(".parquet")} == kept


def test_the_newest_version_stays_though_nobody_stands_there_yet(store: StateStore) -> None:
    published(store, 1, at(10), segment(store, [1]))
    newest = published(store, 2, at(20), segment(store, [2]))
    store.gc([])
    assert store.versions() == (newest,)


def test_what_a_crash_left_goes_and_segments_whose_manifest_is_lost_stay_till_then(store: StateStore) -> None:
    version = published(store, 1, at(10), segment(store, [1]))
    before = everything(store)
    segment(store, [2], "b-1")
    write(store, [3], "c-1")
    Path(store.path, "versions", f"{2:020d}-{'0' * 16}.json.new").write_bytes(b"{")

    opened = again(store)
    assert opened.versions() == (version,)
    assert everything(store) > before
    opened.remove_unnamed()
    assert everything(store) == before
    assert os.listdir(os.path.join(store.path, "data")) == ["a-1"]


def test_a_reader_changes_nothing(store: StateStore) -> None:
    published(store, 1, at(10), segment(store, [1]))
    write(store, [3], "c-1")
    before = everything(store)
    assert len(StateStore(store.path, is_writer=False).versions()) == 1
    assert everything(store) == before


def test_a_reader_goes_on_where_the_writer_has_removed_what_it_looked_at(store: StateStore) -> None:
    published(store, 1, at(10), segment(store, [1]))
    newest = published(store, 2, at(20), segment(store, [2]))

    class Slow(StateStore):
        def _manifests(self) -> list[str]:
            found = super()._manifests()
            store.gc([])
            return found

    assert Slow(store.path, is_writer=False).versions() == (newest,)


def test_a_reader_of_no_state_finds_none_and_makes_none(tmp_path: Path) -> None:
    assert StateStore(str(tmp_path / "none"), is_writer=False).newest() is None
    assert not (tmp_path / "none").exists()


def test_a_discarded_state_is_gone_though_it_was_damaged(store: StateStore) -> None:
    version = published(store, 1, at(10), segment(store, [1]))
    Path(store.path, "versions", version.name).write_bytes(b"{")
    discard_state(store.path)
    assert again(store).versions() == ()
    assert everything(store) == set()


# ---------------------------------------------------------------------------- damage


def test_a_manifest_with_a_changed_byte_is_damage(store: StateStore) -> None:
    version = published(store, 1, at(10), segment(store, [1]))
    path = Path(store.path, "versions", version.name)
    data = path.read_bytes()
    changes = random.Random(5)
    for _ in range(200):
        number = changes.randrange(len(data))
        path.write_bytes(
            data[:number] + bytes([data[number] ^ 1 << changes.randrange(8)]) + data[number + 1 :]
        )
        with pytest.raises(StateDamaged) as caught:
            again(store)
        assert str(path) in str(caught.value)
        assert "holdfast pipeline rebuild" in str(caught.value)


def test_a_manifest_cut_short_or_of_another_place_is_damage(store: StateStore) -> None:
    version = published(store, 1, at(10), segment(store, [1]))
    path = Path(store.path, "versions", version.name)
    data = path.read_bytes()
    for end in range(0, len(data), 37):
        path.write_bytes(data[:end])
        with pytest.raises(StateDamaged):
            again(store)
    path.write_bytes(data)
    path.rename(path.with_name(f"{2:020d}-{'0' * 16}.json"))
    with pytest.raises(StateDamaged, match="holds the manifest"):
        again(store)


def test_a_manifest_of_a_later_format_says_so(store: StateStore) -> None:
    version = published(store, 1, at(10))
    path = Path(store.path, "versions", version.name)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "format": 2}))
    with pytest.raises(StateDamaged, match="has format 2"):
        again(store)


def test_a_segment_that_is_missing_cut_or_zeroed_is_damage(store: StateStore) -> None:
    kept = segment(store, [1, 2, 3])
    published(store, 1, at(10), kept)
    path = Path(store.paths(kept)[0])
    data = path.read_bytes()
    for broken, words in (
        (data[:-10], "does not end as a Parquet file does"),
        (b"\0" * len(data), "does not end as a Parquet file does"),
        (data[10:], "bytes"),
    ):
        path.write_bytes(broken)
        with pytest.raises(StateDamaged, match=words):
            again(store)
    path.unlink()
    with pytest.raises(StateDamaged, match="is missing") as caught:
        again(store)
    assert str(path) in str(caught.value)


# ---------------------------------------------------------------------------- growth


def test_growth_is_noted_and_bounded(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.pipeline.state.store.HISTORY_BYTES_MAX", 2000)
    kept = segment(store, [1, 2])
    for number in range(100):
        published(store, number, at(number), kept)
    history = store.history()
    assert history[-1] == {"number": 99, "batch_time_ms": 1000, "steps": {"totals": [2, kept.bytes]}}
    assert [line["number"] for line in history] == list(range(history[0]["number"], 100))
    assert os.path.getsize(os.path.join(store.path, "history.jsonl")) <= 2100


def test_a_line_of_history_that_a_crash_cut_is_passed_over(store: StateStore) -> None:
    published(store, 1, at(1))
    with open(os.path.join(store.path, "history.jsonl"), "a") as file:
        file.write('{"number": 2, "ba')
    published(store, 3, at(3))
    assert [line["number"] for line in store.history()] == [1, 3]
    assert store.sizes() == {"totals": 0}
