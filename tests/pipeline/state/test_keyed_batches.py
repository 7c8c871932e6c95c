"""Turns of a keyed step as its workers take them, without Spark: small logs, any batches, files on disk."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.state_batches import TOPIC_ID, Placed, Record, placed
from tests.support.tiers import examples

from holdfast.pipeline.core.failures import EnvironmentFails, StepError
from holdfast.pipeline.core.frames import pickled
from holdfast.pipeline.keyed import KeyState, each_row
from holdfast.pipeline.positions import Place
from holdfast.pipeline.state import keyed_files
from holdfast.pipeline.state.keyed_files import NEVER, Passed, state_schema
from holdfast.pipeline.state.keyed_worker import BUCKET, EVENT, HASH, OWN, PLACE, KeyedJob, run_buckets
from holdfast.pipeline.state.segments import StateDamaged
from holdfast.pipeline.state.store import StateStore
from holdfast.pipeline.state.watermarks import Clock, Watermarks

BUCKETS = 2
KINDS = {"k": pa.string(), "n": pa.int64()}
COUNTED = pa.schema([("k", pa.string()), ("n", pa.int64()), ("at", pa.int64())])
SUMS = pa.struct([("n", pa.int64()), ("sum", pa.int64())])


@dataclass
class Outcome:
    rows: dict[Any, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """By key, in order: without the numbers of versions, which batches decide."""
    counters: Counter[str] = field(default_factory=Counter)
    memory: dict[Any, Any] = field(default_factory=dict)
    """Value and timer of every key that is alive at the end."""
    files: list[list[str]] = field(default_factory=lambda: [[] for _ in range(BUCKETS)])


@dataclass
class Turns:
    """One step and its files."""

    directory: Path
    function: Callable[..., Any]
    output: pa.Schema = COUNTED
    value: pa.StructType = SUMS
    ttl_ms: int = 1_000_000
    is_event: bool = True
    delay_ms: int = 0
    hashes: int = 1 << 63
    """How many hashes there are: few make keys collide."""
    games: int = 0

    def play(
        self,
        log: Sequence[Record],
        cuts: Iterable[int] = (),
        *,
        merges: Collection[int] = (),
        batch_times: Sequence[int] | None = None,
    ) -> Outcome:
        """Batches whose number is in `merges` also make one file of those there were: of all, or of all but one."""
        self.games += 1
        clock = Clock(delay_ms=self.delay_ms)
        rows = placed(log, clock)
        known = sorted({Place(each.topic, TOPIC_ID, each.partition) for each in log})
        limits = [0, *sorted(set(cuts)), len(rows)]
        outcome, marks, since = Outcome(), Watermarks(), Passed()
        for number in range(len(limits) - 1):
            batch = rows[limits[number] : limits[number + 1]]
            greatest: dict[Place, int | None] = {}
            for each in batch:
                place = Place(each.record.topic, TOPIC_ID, each.record.partition)
                assert each.record.time_ms is not None
                greatest[place] = max(greatest.get(place) or each.record.time_ms, each.record.time_ms)
            time_ms = number if batch_times is None else batch_times[number]
            after = marks.after(clock, time_ms, known, greatest)
            now = Passed(NEVER if after.watermark_ms is None else after.watermark_ms, time_ms)
            self._turn(outcome, batch, marks.watermark_ms, number + 1, since, now, number in merges)
            marks, since = after, now
        outcome.memory = self.memory(outcome, since)
        assert len(outcome.memory) == outcome.counters["keys"]
        return outcome

    def _is_late(self, each: Placed, watermark_ms: int | None) -> bool:
        own = _own(each, watermark_ms)
        assert each.record.time_ms is not None
        return own is not None and each.record.time_ms + self.ttl_ms <= own

    def _turn(
        self,
        outcome: Outcome,
        rows: Sequence[Placed],
        watermark_ms: int | None,
        number: int,
        since: Passed,
        now: Passed,
        merges: bool,
    ) -> None:
        all_of_them = number % 2 == 0
        merging = tuple(
            tuple(files if all_of_them else files[1:]) if merges else () for files in outcome.files
        )
        job = self.job(outcome, number, since, now, merging, all_of_them)
        taken = late = 0
        for report in _reports(job, self._dealt(rows, watermark_ms)):
            taken += report["taken"][0]
            late += report["late"][0]
            outcome.counters.update(report["counters"])
            files = outcome.files[report["bucket"]]
            outcome.files[report["bucket"]] = [
                *(path for path in files if path not in merging[report["bucket"]]),
                *filter(None, (report["merged_file"], report["state_file"])),
            ]
            if report["rows_file"]:
                for row in pq.read_table(report["rows_file"]).to_pylist():
                    outcome.rows[row["_key"]].append(
                        {name: each for name, each in row.items() if name not in ("_bucket", "_index")}
                    )
        assert late == sum(self._is_late(each, watermark_ms) for each in rows)
        assert taken + late == len(rows)

    def job(
        self,
        outcome: Outcome,
        number: int,
        since: Passed,
        now: Passed,
        merging: tuple[tuple[str, ...], ...],
        merges_all: bool,
    ) -> KeyedJob:
        folders = [self.directory / f"{self.games}-{number}-{name}" for name in ("rows", "state", "merged")]
        for folder in folders:
            folder.mkdir()
        return KeyedJob(
            step="rule",
            function=pickled(self.function),
            function_name="rule",
            key=("k",),
            handed_out=("k", "n", "_event_time"),
            output=self.output,
            state=state_schema([pa.field("k", pa.string())], self.value),
            ttl_ms=self.ttl_ms,
            is_event=self.is_event,
            number=number,
            since=since,
            now=now,
            files=tuple(map(tuple, outcome.files)),
            merging=merging,
            merges_all=merges_all,
            rows_directory=str(folders[0]),
            state_directory=str(folders[1]),
            merged_directory=str(folders[2]),
        )

    def _dealt(self, rows: Sequence[Placed], watermark_ms: int | None) -> list[pa.RecordBatch]:
        """As Spark would hand them over: sorted, in batches that end anywhere, with a row for each bucket."""
        dealt: list[dict[str, Any]] = [{BUCKET: number} for number in range(BUCKETS)]
        for each in rows:
            key = each.record.values["k"]
            digest = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
            hashed = digest % self.hashes - self.hashes // 2
            time_ms = each.record.time_ms
            assert time_ms is not None
            dealt.append(
                {
                    BUCKET: hashed % BUCKETS,
                    HASH: None if self._is_late(each, watermark_ms) else hashed,
                    PLACE: 1,
                    EVENT: time_ms,
                    OWN: _own(each, watermark_ms),
                    "_event_time": time_ms * 1000,
                    "k": key,
                    "n": each.record.values["n"],
                    "order": each.place,
                }
            )
        dealt.sort(
            key=lambda row: (
                row[BUCKET],
                row.get(HASH) is not None,
                row.get(HASH) or 0,
                row.get("k") is not None,
                row.get("k") or "",
                row.get("order", ()),
            )
        )
        numbers = [(name, pa.int64()) for name in (HASH, PLACE, EVENT, OWN)]
        time = ("_event_time", pa.timestamp("us", "UTC"))
        schema = pa.schema([(BUCKET, pa.int32()), *numbers, time, *KINDS.items()])
        return pa.Table.from_pylist(dealt, schema).to_batches(max_chunksize=3)  # type: ignore[no-any-return]

    def memory(self, outcome: Outcome, now: Passed) -> dict[Any, Any]:
        """The newest version of each key, where it counts, read without the code that the step reads it with."""
        versions = [
            row for files in outcome.files for path in files for row in pq.read_table(path).to_pylist()
        ]
        newest = {row["k"]: row for row in sorted(versions, key=lambda row: int(row["_seq"]))}
        found = {}
        for key, row in newest.items():
            is_over = row["_timer"] is None and row["_last"] + self.ttl_ms <= now.watermark_ms
            is_hidden = row["_until"] <= now.watermark_ms and row["_hold"] <= now.clock_ms
            if not (row["_gone"] or is_over or is_hidden):
                found[key] = (row["_state"], row["_timer"])
        return found


def _own(each: Placed, watermark_ms: int | None) -> int | None:
    known = [mark for mark in (each.watermark_ms, watermark_ms) if mark is not None]
    return max(known) if known else None


def _reports(job: KeyedJob, batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    texts = [text for batch in run_buckets(job, batches) for text in batch.column(0).to_pylist()]
    reports = [json.loads(text) for text in texts]
    for report in reports:
        if "failure" in report:
            raise pickle.loads(base64.b64decode(report["failure"]))
    return reports


def at(time_ms: int, key: str | None = "a", n: int = 1, partition: int = 0) -> Record:
    return Record(time_ms, {"k": key, "n": n}, partition)


# ---------------------------------------------------------------------------- functions


def total(key: tuple[str], rows: pa.Table, state: KeyState) -> list[dict[str, Any]]:
    """A fold: a row for each row, with what was summed up to it."""
    value = state.value or {"n": 0, "sum": 0}
    out = []
    for n in rows.column("n").to_pylist():
        value = {"n": value["n"] + 1, "sum": value["sum"] + n}
        out.append({"n": value["sum"], "at": value["n"]})
    state.put(value)
    return out


@each_row
def sessions(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    """Counts until nothing comes for 10 ms; 7 ends a session at once, 8 lets it go on without a timer."""
    if row is None:
        value = state.value or {"n": 0, "sum": 0}
        state.clear()
        return {"n": value["n"], "at": state.fired_ms}
    value = state.value or {"n": 0, "sum": 0}
    state.put({"n": value["n"] + 1, "sum": value["sum"] + row["n"]})
    if row["n"] == 7:
        state.clear()
    elif row["n"] == 8:
        state.clear_timer()
    else:
        state.set_timer(int(row["_event_time"].timestamp() * 1000) + 10)
    return {"n": value["n"], "at": state.watermark_ms}


@each_row
def ticking(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    """A timer that sets itself again, three times."""
    value = state.value or {"n": 0, "sum": 0}
    if row is not None:
        state.put({"n": 0, "sum": row["n"]})
        state.set_timer(int(row["_event_time"].timestamp() * 1000) + 5)
        return None
    assert state.fired_ms is not None
    if value["n"] < 2:
        state.put({"n": value["n"] + 1, "sum": value["sum"]})
        state.set_timer(state.fired_ms + 5)
    return {"n": value["n"], "at": state.fired_ms}


# ---------------------------------------------------------------------------- any batching

LOGS = st.lists(
    st.tuples(
        st.sampled_from(["a", "a", "b", None]),
        st.sampled_from([-12, -3, 0, 1, 4, 9, 16, 25]),
        st.sampled_from([1, 2, 7, 8]),
    ),
    min_size=2,
    max_size=14,
)


def as_log(parts: Sequence[tuple[str | None, int, int]]) -> list[Record]:
    """Time goes on, and now and then back; a key keeps to its partition."""
    log, now = [], 100
    for key, step, n in parts:
        now += step
        log.append(at(now, key, n, partition=1 if key == "b" else 0))
    return log


@pytest.mark.parametrize("function", [total, sessions, ticking], ids=["total", "sessions", "ticking"])
@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    parts=LOGS,
    cuts=st.sets(st.integers(0, 13), max_size=8),
    merges=st.sets(st.integers(0, 8)),
    ttl_ms=st.sampled_from([15, 40, 10_000]),
    delay_ms=st.sampled_from([0, 6]),
    hashes=st.sampled_from([2, 1 << 63]),
)
def test_any_batching_gives_the_rows_and_the_state_of_one_batch(
    tmp_path_factory: pytest.TempPathFactory,
    function: Callable[..., Any],
    parts: list[tuple[str | None, int, int]],
    cuts: set[int],
    merges: set[int],
    ttl_ms: int,
    delay_ms: int,
    hashes: int,
) -> None:
    log = as_log(parts)
    directory = tmp_path_factory.mktemp("turns")
    turns = Turns(directory, function, ttl_ms=ttl_ms, delay_ms=delay_ms, hashes=hashes)
    whole = turns.play(log)
    cut = turns.play(log, [each for each in cuts if each < len(log)], merges=merges)
    if function is total:
        # The time of a row is that of the call's last event: of a row at a time it is that row's.
        for outcome in (cut, whole):
            for row in (row for rows in outcome.rows.values() for row in rows):
                del row["_timestamp"]
    assert dict(cut.rows) == dict(whole.rows)
    assert cut.memory == whole.memory
    assert cut.counters == whole.counters


@each_row
def reminded(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    """By the clock: reminds of a key two batches after its last row, at most twice."""
    value = state.value or {"n": 0, "sum": 0}
    if row is None:
        if value["n"] == 0:
            state.put({"n": 1, "sum": value["sum"]})
            state.set_timer(state.batch_time_ms + 1)
        return {"n": value["n"], "at": value["sum"]}
    state.put({"n": 0, "sum": value["sum"] + row["n"]})
    state.set_timer(state.batch_time_ms + 2)
    if row["n"] == 7:
        state.clear()
    elif row["n"] == 8:
        state.clear_timer()
    return None


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    parts=LOGS,
    cuts=st.sets(st.integers(0, 13), max_size=8),
    merges=st.sets(st.integers(0, 8)),
    ttl_ms=st.sampled_from([15, 40, 10_000]),
)
def test_merging_changes_nothing_for_timers_by_the_clock(
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[tuple[str | None, int, int]],
    cuts: set[int],
    merges: set[int],
    ttl_ms: int,
) -> None:
    log = as_log(parts)
    turns = Turns(tmp_path_factory.mktemp("turns"), reminded, ttl_ms=ttl_ms, is_event=False)
    limits = [each for each in cuts if each < len(log)]
    plain, merged = turns.play(log, limits), turns.play(log, limits, merges=merges)
    assert dict(merged.rows) == dict(plain.rows)
    assert merged.memory == plain.memory
    assert merged.counters == plain.counters


# ---------------------------------------------------------------------------- timers


def test_a_timer_goes_off_once_when_the_watermark_has_passed_it(tmp_path: Path) -> None:
    log = [at(100), at(109, "b"), at(110, "b"), at(200, "b")]
    turns = Turns(tmp_path, sessions)
    assert [row["at"] for row in turns.play(log[:2], [1]).rows[b"a"]] == [None]
    assert [row["at"] for row in turns.play(log[:3], [1, 2]).rows[b"a"]] == [None, 110]
    played = turns.play(log, [1, 2, 3])
    assert [row["at"] for row in played.rows[b"a"]] == [None, 110]
    assert played.counters["fired"] == 1


def test_a_timer_goes_off_before_the_row_whose_own_watermark_has_passed_it(tmp_path: Path) -> None:
    log = [at(100), at(130, "b"), at(131), at(132)]
    played = Turns(tmp_path, sessions).play(log)
    assert [(row["n"], row["at"]) for row in played.rows[b"a"]] == [(0, None), (1, 110), (0, 130), (1, 131)]


def test_timers_due_before_a_batch_part_its_rows(tmp_path: Path) -> None:
    """Also for a function that takes all rows at once."""
    calls: list[tuple[int, int | None]] = []

    def note(key: tuple[str], rows: pa.Table, state: KeyState) -> list[dict[str, Any]]:
        assert rows.schema.names == ["k", "n", "_event_time"]
        state.put({"n": 0, "sum": 0})
        if state.fired is None:
            state.set_timer(110)
        return [{"n": rows.num_rows, "at": state.fired_ms}]

    log = [at(100), at(105), at(111), at(112), at(113)]
    played = Turns(tmp_path, note).play(log, [1])
    calls = [(row["n"], row["at"]) for row in played.rows[b"a"]]
    # 105 and 111 come while the watermark has not passed 110; 112 comes after.
    assert calls == [(1, None), (2, None), (0, 110), (2, None), (0, 110)]


def test_a_timer_can_set_itself_again(tmp_path: Path) -> None:
    played = Turns(tmp_path, ticking).play([at(100), at(111, "b")])
    assert [row["at"] for row in played.rows[b"a"]] == [105, 110]
    assert played.memory["a"] == ({"n": 2, "sum": 1}, 115)


@each_row
def by_the_clock(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
    if row is None:
        return {"n": state.batch_time_ms, "at": state.fired_ms}
    state.put({"n": row["n"], "sum": 0})
    state.set_timer(1000 * row["n"])
    return None


def test_a_processing_timer_goes_off_with_the_batch_that_reaches_it(tmp_path: Path) -> None:
    log = [at(100, n=5), at(101, "b"), at(102, "b"), at(103, "b")]
    turns = Turns(tmp_path, by_the_clock, is_event=False)
    played = turns.play(log, [1, 2, 3], batch_times=[4000, 4999, 5001, 9000])
    assert [(row["n"], row["at"]) for row in played.rows[b"a"]] == [(5001, 5000)]


def test_a_processing_timer_keeps_a_key_past_its_time_to_live(tmp_path: Path) -> None:
    log = [at(100, n=5), at(500, "b"), at(501, "b")]
    turns = Turns(tmp_path, by_the_clock, is_event=False, ttl_ms=50)
    held = turns.play(log, [1, 2], batch_times=[1000, 2000, 3000], merges={1, 2})
    assert held.memory["a"] == ({"n": 5, "sum": 0}, 5000)
    over = turns.play(log, [1, 2], batch_times=[1000, 2000, 5000], merges={1, 2})
    assert [row["at"] for row in over.rows[b"a"]] == [5000]
    assert "a" not in over.memory
    assert over.counters["expired"] == 1


# ---------------------------------------------------------------------------- forgetting


def test_a_key_is_forgotten_when_nothing_came_for_its_time_to_live(tmp_path: Path) -> None:
    turns = Turns(tmp_path, total, ttl_ms=50)
    log = [at(100), at(149, "b"), at(150, "b"), at(151, "b"), at(152)]
    assert set(turns.play(log[:2], [1]).memory) == {"a", "b"}
    over = turns.play(log[:4], [1, 2, 3])
    assert set(over.memory) == {"b"}
    assert over.counters["expired"] == 1
    again = turns.play(log, [1, 2, 3, 4])
    assert [row["at"] for row in again.rows[b"a"]] == [1, 1]
    assert again.counters["expired"] == 1
    assert again.counters["keys"] == 2


def test_a_key_is_forgotten_between_two_rows_of_one_batch(tmp_path: Path) -> None:
    played = Turns(tmp_path, total, ttl_ms=50).play([at(100), at(101), at(160, "b"), at(161), at(162)])
    assert [row["at"] for row in played.rows[b"a"]] == [1, 2, 1, 2]
    assert played.counters["expired"] == 1


def test_a_timer_keeps_a_key_past_its_time_to_live(tmp_path: Path) -> None:
    @each_row
    def wait(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
        if row is None:
            assert state.value == {"n": 1, "sum": 1}
            return {"n": 1, "at": state.fired_ms}
        state.put({"n": 1, "sum": 1})
        if key == ("a",):
            state.set_timer(900)
        return None

    log = [at(100), at(500, "b"), at(899, "b"), at(900, "b")]
    played = Turns(tmp_path, wait, ttl_ms=50).play(log, [1, 2, 3], merges={1, 2, 3})
    assert [row["at"] for row in played.rows[b"a"]] == [900]
    assert set(played.memory) == {"b"}


def test_a_cleared_key_hides_its_older_versions_until_they_are_merged(tmp_path: Path) -> None:
    def clear_on_seven(key: tuple[str], rows: pa.Table, state: KeyState) -> list[dict[str, Any]]:
        value = state.value or {"n": 0, "sum": 0}
        state.put({"n": value["n"] + 1, "sum": 0})
        if 7 in rows.column("n").to_pylist():
            state.clear()
        return [{"n": value["n"], "at": 0}]

    log = [at(100), at(101, n=7), at(102, "b"), at(103, "b"), at(104)]
    turns = Turns(tmp_path, clear_on_seven, hashes=2)
    cleared = turns.play(log[:4], [1, 2])
    assert set(cleared.memory) == {"b"}
    files = [path for paths in cleared.files for path in paths]
    assert sum(pq.read_metadata(path).num_rows for path in files) == 3
    merged = turns.play(log[:4], [1, 2, 3], merges={3})
    files = [path for paths in merged.files for path in paths]
    assert sum(pq.read_metadata(path).num_rows for path in files) == 2
    assert [row["n"] for row in turns.play(log, [1, 2, 3, 4]).rows[b"a"]] == [0, 1, 0]


def test_a_merge_of_some_files_keeps_what_hides_rows_of_others(tmp_path: Path) -> None:
    log = [at(100), at(101, n=7), at(102, "b"), at(103)]
    played = Turns(tmp_path, sessions).play(log, [1, 2, 3], merges={2})
    assert [row["n"] for row in played.rows[b"a"]] == [0, 1, 0]


def test_no_older_version_comes_to_light_when_a_newer_one_is_dropped(tmp_path: Path) -> None:
    @each_row
    def wait(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
        if row is None:
            return {"n": 0, "at": state.fired_ms}
        state.put({"n": 0, "sum": 0})
        if row["n"] == 8:
            state.clear_timer()
        elif row["k"] == "a":
            state.set_timer(1000)
        return None

    log = [at(100), at(101, n=8), at(200, "b"), at(201, "b"), at(1001, "b")]
    played = Turns(tmp_path, wait, ttl_ms=50).play(log, [1, 2, 3, 4], merges={2})
    assert played.rows[b"a"] == []
    assert set(played.memory) == {"b"}


def test_a_key_that_keeps_nothing_is_not_written(tmp_path: Path) -> None:
    played = Turns(tmp_path, lambda key, rows, state: None).play([at(100), at(101, "b")], [1])
    assert played.files == [[], []]


# ---------------------------------------------------------------------------- files


def test_a_turn_writes_the_keys_it_touched_and_no_others(tmp_path: Path) -> None:
    log = [at(100, f"key-{number}") for number in range(40)] + [at(101, "key-3"), at(102, "key-4")]
    played = Turns(tmp_path, total).play(log, [40])
    newest = [paths[-1] for paths in played.files if len(paths) > 1]
    assert sorted(row for path in newest for row in pq.read_table(path).column("k").to_pylist()) == [
        "key-3",
        "key-4",
    ]


def test_files_of_a_task_that_ran_twice_are_no_part_of_the_state(tmp_path: Path) -> None:
    played = Turns(tmp_path, total).play([at(100)])
    file = next(Path(path) for paths in played.files for path in paths)
    store = StateStore(str(tmp_path / "state"))
    directory = Path(store.segment_dir("label", "rule"))
    directory.mkdir()
    for name in (keyed_files.file_name(1, "reported"), keyed_files.file_name(1, "lost")):
        (directory / name).write_bytes(file.read_bytes())
    reported = str(directory / keyed_files.file_name(1, "reported"))
    segment = store.adopt(str(directory), reported=[None, reported])
    assert segment is not None
    assert [Path(path).name for path in store.paths(segment)] == [Path(reported).name]
    assert [keyed_files.bucket_of(path) for path in store.paths(segment)] == [1]


def test_a_reported_file_that_is_not_seen_stops_the_batch(tmp_path: Path) -> None:
    store = StateStore(str(tmp_path / "state"))
    directory = Path(store.segment_dir("label", "rule"))
    directory.mkdir()
    (directory / keyed_files.file_name(1, "seen")).touch()
    unseen = str(directory / keyed_files.file_name(2, "unseen"))
    with pytest.raises(EnvironmentFails, match=re.escape(unseen)):
        store.adopt(str(directory), reported=[str(directory / keyed_files.file_name(1, "seen")), unseen])


def test_many_row_groups_and_ranges_of_hashes_are_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_files, "ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(keyed_files, "MERGE_ROWS", 4)
    log = [at(100 + number, f"key-{number % 23}") for number in range(90)]
    turns = Turns(tmp_path, total)
    whole = turns.play(log)
    cut = turns.play(log, [10, 35, 36, 60], merges={2, 3, 4})
    assert cut.memory == whole.memory
    assert len(cut.memory) == 23


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8:120] = bytes(byte ^ 0xFF for byte in content[8:120])
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [Path.unlink, flip], ids=["gone", "bits"])
def test_a_damaged_file_is_told_and_not_taken_for_an_empty_state(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    turns = Turns(tmp_path, total)
    outcome = turns.play([at(100)])
    path = next(Path(path) for paths in outcome.files for path in paths)
    harm(path)
    batch = placed([at(101)], Clock())
    with pytest.raises(StateDamaged, match=path.name):
        turns._turn(outcome, batch, 100, 9, Passed(100, 0), Passed(101, 1), False)


# ---------------------------------------------------------------------------- types

EVERYTHING = {
    "text": "ü",
    "data": b"\0\xff",
    "flag": True,
    "tiny": -3,
    "real": 0.1,
    "price": Decimal("12.50"),
    "day": date(2026, 5, 1),
    "moment": datetime(2026, 5, 1, 12, 30, 0, 123_456, tzinfo=UTC),
    "tags": ["a", None],
    "place": {"x": 1, "y": [1.5]},
    "counts": [("a", 1)],
    "empty": None,
}
TYPES = pa.struct(
    [
        ("text", pa.string()),
        ("data", pa.binary()),
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("real", pa.float32()),
        ("price", pa.decimal128(10, 2)),
        ("day", pa.date32()),
        ("moment", pa.timestamp("us", "UTC")),
        ("tags", pa.list_(pa.string())),
        ("place", pa.struct([("x", pa.int64()), ("y", pa.list_(pa.float64()))])),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("empty", pa.string()),
    ]
)


@pytest.mark.parametrize("cuts", [[], [1]], ids=["within a batch", "over two"])
def test_a_state_of_any_type_comes_back_as_it_was(tmp_path: Path, cuts: list[int]) -> None:
    everything = EVERYTHING

    @each_row
    def keep(key: tuple[str], row: dict[str, Any], state: KeyState) -> dict[str, Any] | None:
        if state.value is None:
            state.put(everything)
            return None
        return {"n": 1, "at": sum(state.value[name] == everything[name] for name in everything)}

    played = Turns(tmp_path, keep, value=TYPES).play([at(100), at(101)], cuts)
    # A float of 32 bits is not what 0.1 is in Python, and that is so within a batch as well.
    assert [row["at"] for row in played.rows[b"a"]] == [len(everything) - 1]


def test_rows_without_a_key_are_a_key_too(tmp_path: Path) -> None:
    log = [at(100, None), at(101, "null"), at(102, None)]
    played = Turns(tmp_path, total, hashes=1).play(log, [1])
    assert [row["at"] for row in played.rows[None]] == [1, 2]
    assert set(played.memory) == {None, "null"}


# ---------------------------------------------------------------------------- what fails


def fails_at_three(key: tuple[str], rows: pa.Table, state: KeyState) -> None:
    if 3 in rows.column("n").to_pylist():
        raise ValueError("three is too much")


def test_what_a_function_raises_is_told_with_key_function_and_line(tmp_path: Path) -> None:
    with pytest.raises(StepError) as raised:
        Turns(tmp_path, fails_at_three).play([at(100), at(101, "b", 3)])
    text = str(raised.value)
    assert "step 'rule': the function rule raised ValueError: three is too much, for the key ('b',)" in text
    assert "test_keyed_batches.py, line" in text


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([{"n": 1}], "returned rows without the column 'at' of its schema, for the key ('b',)"),
        ([{"n": "x", "at": 0}], "returned 'x' for 'n', which is no int64"),
        (3, "returned int"),
    ],
)
def test_rows_that_do_not_fit_are_told_with_their_key(tmp_path: Path, returned: Any, message: str) -> None:
    def rule(key: tuple[str], rows: pa.Table, state: KeyState) -> Any:
        return returned if key == ("b",) else []

    with pytest.raises(StepError) as raised:
        Turns(tmp_path, rule).play([at(100), at(101, "b"), at(102, "c")])
    assert message in str(raised.value)
    assert "for the key ('b',)" in str(raised.value)


def test_a_state_that_does_not_fit_is_told_with_its_key(tmp_path: Path) -> None:
    def rule(key: tuple[str], rows: pa.Table, state: KeyState) -> None:
        state.put({"n": "many" if key == ("b",) else 1, "sum": 0})

    with pytest.raises(
        StepError, match=r"put a state that is not what `state` declares.*for the key \('b',\)"
    ):
        Turns(tmp_path, rule).play([at(100), at(101, "b"), at(102, "c")])


def test_a_column_the_state_does_not_have_is_told_with_the_line(tmp_path: Path) -> None:
    def rule(key: tuple[str], rows: pa.Table, state: KeyState) -> None:
        state.put({"m": 1})

    with pytest.raises(StepError, match=r"unknown m; missing n, sum.*test_keyed_batches.py, line"):
        Turns(tmp_path, rule).play([at(100)])


def test_a_function_that_a_worker_cannot_load_is_told(tmp_path: Path) -> None:
    turns = Turns(tmp_path, total)
    job = turns.job(Outcome(), 1, Passed(), Passed(), ((), ()), False)
    with pytest.raises(StepError, match="the function rule cannot be loaded by a worker: ValueError"):
        _reports(replace(job, function=b"\x80nonsense"), turns._dealt([], None))
