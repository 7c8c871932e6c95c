"""`holdfast pipeline state`: what steps remember, shown and written to files."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from holdfast.pipeline.positions import Place, Position, Positions
from holdfast.pipeline.state.segments import Segment, StepState
from holdfast.pipeline.state.store import StateStore, Version

Run = Callable[..., subprocess.CompletedProcess[bytes]]

YAML = """\
pipeline: p
source:
  topics: [t]
  value:
    format: json
    fields:
      id: long
sinks:
  - parquet: out
"""
HOUR_MS = 3_600_000
NOON_MS = 1_767_268_800_000  # 2026-01-01 12:00:00 UTC


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(str(tmp_path / ".holdfast" / "p" / "state"))


def segment(store: StateStore, table: pa.Table) -> Segment:
    directory = store.segment_dir("a-1", "totals")
    os.mkdir(directory)
    pq.write_table(table, os.path.join(directory, "part-0.parquet"))
    adopted = store.adopt(directory)
    assert adopted is not None
    return adopted


def rows(*keys: str, until_ms: int = NOON_MS) -> pa.Table:
    return pa.table({"key": list(keys), "_until": pa.array([until_ms] * len(keys), pa.int64())})


def publish(store: StateStore, number: int, *segments: Segment) -> None:
    positions = Positions({Place("t", uuid.UUID(int=7), 0): Position(number * 10)})
    steps = {"totals": StepState("f", segments, {"late": 2})}
    watermark = {"watermark_ms": NOON_MS - HOUR_MS, "places": []}
    store.publish(Version(number, positions, watermark, steps, NOON_MS + number * HOUR_MS))


def test_show_tells_what_each_step_remembers_and_how_it_grows(
    run_here_anywhere: Run, file: Path, store: StateStore
) -> None:
    first = segment(store, rows("a", "b"))
    second = segment(store, rows("c", until_ms=NOON_MS + HOUR_MS))
    publish(store, 1, first)
    publish(store, 2, first, second)

    shown = run_here_anywhere("pipeline", "state", "show", str(file), "--output", "json")
    assert (shown.returncode, shown.stderr) == (0, b"")
    document = json.loads(shown.stdout)
    assert (document["version"], document["versions"]) == (2, [1, 2])
    assert document["watermark_ms"] == NOON_MS - HOUR_MS
    (step,) = document["steps"]
    assert (step["name"], step["rows"], step["segments"], step["notes"]) == ("totals", 3, 2, {"late": 2})
    assert step["bytes"] == document["bytes"] == first.bytes + second.bytes
    assert (step["oldest_until_ms"], step["newest_until_ms"]) == (NOON_MS, NOON_MS + HOUR_MS)
    assert step["growth"] == {"rows": 1, "bytes": second.bytes, "versions": 1, "over_ms": HOUR_MS}

    table = run_here_anywhere("pipeline", "state", "show", str(file)).stdout.decode()
    assert "version 2 of its state" in table
    assert "watermark 2026-01-01 11:00:00" in table
    assert f"+1 rows, +{second.bytes} bytes in 1 versions (1:00:00)" in table


def test_a_pipeline_without_state_says_so(run_here_anywhere: Run, file: Path, tmp_path: Path) -> None:
    shown = run_here_anywhere("pipeline", "state", "show", str(file))
    assert shown.returncode == 0
    assert b"has no state" in shown.stdout
    asked = run_here_anywhere("pipeline", "state", "export", str(file), "--step", "totals", "--to", "o.csv")
    assert asked.returncode == 2
    assert b"there is no state" in asked.stderr
    assert not (tmp_path / ".holdfast").exists(), "a look makes nothing"


def test_damage_is_told_with_the_way_out(run_here_anywhere: Run, file: Path, store: StateStore) -> None:
    kept = segment(store, rows("a"))
    publish(store, 1, kept)
    os.unlink(store.paths(kept)[0])
    for arguments in (("show", str(file)), ("export", str(file), "--step", "totals", "--to", "o.csv")):
        shown = run_here_anywhere("pipeline", "state", *arguments)
        assert shown.returncode == 1
        assert store.paths(kept)[0] in shown.stderr.decode()
        assert b"holdfast pipeline rebuild" in shown.stderr


def test_rows_of_a_version_are_exported_to_parquet(
    run_here_anywhere: Run, file: Path, store: StateStore, tmp_path: Path
) -> None:
    first = segment(store, rows("a", "b"))
    wider = segment(store, rows("c").append_column("total", pa.array([7], pa.int64())))
    publish(store, 1, first)
    publish(store, 2, first, wider)
    for more, expected in (
        ((), [("a", None), ("b", None), ("c", 7)]),
        (("--version", "1"), [("a", None), ("b", None)]),
    ):
        out = tmp_path / f"out-{len(expected)}.parquet"
        done = run_here_anywhere(
            "pipeline", "state", "export", str(file), "--step", "totals", "--to", str(out), *more
        )
        assert done.returncode == 0, done.stderr
        found = pq.read_table(out).to_pylist()
        assert [(row["key"], row.get("total")) for row in found] == expected
        assert f"{len(expected)} rows" in done.stdout.decode()


def test_csv_has_bytes_as_base64_and_what_is_nested_as_json(
    run_here_anywhere: Run, file: Path, store: StateStore, tmp_path: Path
) -> None:
    table = pa.table(
        {
            "raw": pa.array([b"\x00\xff", None], pa.binary()),
            "list": pa.array([[1, 2], None], pa.list_(pa.int64())),
            "_until": pa.array([1, 2], pa.int64()),
        }
    )
    publish(store, 1, segment(store, table))
    out = tmp_path / "out.csv"
    done = run_here_anywhere("pipeline", "state", "export", str(file), "--step", "totals", "--to", str(out))
    assert done.returncode == 0, done.stderr
    assert out.read_text() == '"raw","list","_until"\n"AP8=","[1, 2]",1\n,,2\n'


def test_moments_are_exported_alike_whoever_stored_them(
    run_here_anywhere: Run, file: Path, store: StateStore, tmp_path: Path
) -> None:
    """Spark stores them in twelve bytes without a zone, our tasks in eight; some lie where nanoseconds do not reach."""
    moments = pa.array([0, 40_000_000_000_000_000], pa.timestamp("us", "UTC"))
    ours = pa.table({"at": moments, "_until": pa.array([1, 2], pa.int64())})
    sparks = store.segment_dir("a-2", "totals")
    os.mkdir(sparks)
    pq.write_table(ours, os.path.join(sparks, "part-0.parquet"), use_deprecated_int96_timestamps=True)
    adopted = store.adopt(sparks)
    assert adopted is not None
    publish(store, 1, segment(store, ours), adopted)
    out = tmp_path / "out.parquet"
    done = run_here_anywhere("pipeline", "state", "export", str(file), "--step", "totals", "--to", str(out))
    assert done.returncode == 0, done.stderr
    assert pq.read_table(out).column("at").combine_chunks().equals(pa.concat_arrays([moments, moments]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step", "total", "--to", "new.csv"), "did you mean 'totals'"),
        (("--step", "totals", "--to", "new.csv", "--version", "9"), "there are 1"),
        (("--step", "totals", "--to", "new.xls"), "ends with .parquet or .csv"),
        (("--step", "totals", "--to", "p.yaml.csv"), "not overwritten"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    run_here_anywhere: Run, file: Path, store: StateStore, arguments: tuple[str, ...], words: str
) -> None:
    publish(store, 1, segment(store, rows("a")))
    there = file.parent / "p.yaml.csv"
    there.write_text("mine")
    step, name, to, path, *more = arguments
    asked = (step, name, to, str(file.parent / path), *more)
    done = run_here_anywhere("pipeline", "state", "export", str(file), *asked)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert there.read_text() == "mine"
    assert sorted(os.listdir(file.parent)) == [".holdfast", "p.yaml", "p.yaml.csv"]
