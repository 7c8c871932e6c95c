"""Runs of a program without Spark: rows go through the program's own Python instead of SQL, all else is the pipeline's.

Starts, plans, staging, decoding, ledgers, the state's store, and the sinks with what their tasks do are real; sinks see
frames over Arrow tables (`columns`). In the place of `Router` stands one that gives every step the meaning that the
program has for it. Deduplication and windows keep their memory in segments of the real store.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark.sql
from tests.audit.soundness.columns import HEADERS, Frame, Functions, json_text, writer_of
from tests.audit.soundness.programs import AGGREGATES, DELAY_MS, EVERY_MS, WINDOW_MS, Program, Row, Step

from holdfast.pipeline.aside import DUPLICATE, FILTERED, LATE_FOR
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.digest import MASK, Tally, place_hash
from holdfast.pipeline.engine import running
from holdfast.pipeline.engine.aside import Gathering, SideOutput, route_digests
from holdfast.pipeline.engine.routing import Routed, Stream
from holdfast.pipeline.engine.staging import Staged
from holdfast.pipeline.engine.stateful import StateUpdate
from holdfast.pipeline.ledger import Routes
from holdfast.pipeline.operations import rebuilding
from holdfast.pipeline.sinks import kafka_writer
from holdfast.pipeline.state import lookups
from holdfast.pipeline.state.operator import OperatorResult
from holdfast.pipeline.state.segments import StepState, check_present

LINEAGE: Final = pa.struct(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
)
RESERVED: Final = (
    ("_hf", LINEAGE), ("_timestamp", pa.timestamp("us", tz="UTC")), ("_key", pa.binary()),
    ("_headers", HEADERS), ("_tombstone", pa.bool_()),
)  # fmt: skip
LETTERS: Final = pa.schema(
    [
        ("_hf", LINEAGE), ("_key", pa.binary()), ("_raw", pa.binary()), ("_headers", HEADERS),
        ("_timestamp", pa.timestamp("us", tz="UTC")), ("_reason", pa.string()), ("_error", pa.string()),
    ]
)  # fmt: skip
FOR_EVER: Final = 1 << 60


@dataclass
class Walk:
    """What became of the rows of one batch."""

    rows: list[Row]
    letters: list[Row] = field(default_factory=list)
    left: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    """By route and step, the places of rows that left, or were late for a tap."""
    streams: dict[str, list[Row]] = field(default_factory=dict)
    warned: dict[str, int] = field(default_factory=dict)

    def leave(self, route: str, step: str, row: Row) -> None:
        self.left.setdefault((route, step), []).append(row["_hf"])


class Router:
    """The steps of a program; the session brings it."""

    def __init__(self, spark: Any, definition: PipelineDefinition, tables: Any) -> None:
        self._program: Program = spark.program
        self._definition = definition
        self._home = tables._home
        self.operators = {
            step.name: None for step in self._program.steps if step.kind in ("dedupe", "window")
        }
        self.makes_values = True
        self.empty_dead = Frame(LETTERS.empty_table())

    def empty(self, rows: str) -> Frame:
        return self._frame([], rows)

    def _frame(self, rows: list[Row], takes: str) -> Frame:
        columns = self._program.rows_columns(takes)
        return Frame(pa.Table.from_pylist(rows, pa.schema([*RESERVED, *columns.items()])))

    def walk(
        self,
        staged: Staged,
        batch_time_ms: int,
        scratch: str,
        update: StateUpdate | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> SimpleNamespace:
        def settle(*, have_run: bool = False) -> Routed:
            return self._settled(staged, update, versions or {})

        return SimpleNamespace(is_observed=False, main=None, staged_rows=None, settle=settle)

    def _settled(self, staged: Staged, update: StateUpdate | None, versions: Mapping[str, str]) -> Routed:
        walk = Walk([])
        for row in _staged(staged, update):
            if row["_error"] is None:
                walk.rows.append(row)
            else:
                walk.letters.append({**row, "_reason": _reason(row["_error"])})
        for step in self._program.steps:
            self._take(step, walk, update, versions)
        main = self._frame(walk.rows, "")
        dead = Frame(pa.Table.from_pylist(walk.letters, LETTERS))
        aside = tuple(_gatherings(walk))
        streams = {"": Stream(main, main.tally)}  # type: ignore[arg-type]
        for takes, rows in walk.streams.items():
            frame = self._frame(rows, takes)
            streams[takes] = Stream(frame, frame.tally)  # type: ignore[arg-type]
        return Routed(
            streams,
            Stream(dead, dead.tally),  # type: ignore[arg-type]
            _routes(walk),
            walk.warned,
            aside,
            digests=route_digests(aside, main.tally, dead.tally),
        )

    # -------------------------------------------------------------------- steps

    def _take(self, step: Step, walk: Walk, update: StateUpdate | None, versions: Mapping[str, str]) -> None:
        match step.kind:
            case "expect" | "filter":
                _rule(step, walk)
            case "lookup":
                [found] = [each for each in self._definition.steps if each.name == step.name]
                path = lookups._snapshot(found, versions[step.name], self._home)  # type: ignore[arg-type]
                cities = {row["login"]: row["city"] for row in pq.read_table(path).to_pylist()}
                walk.rows = [{**row, "city": cities.get(row["who"])} for row in walk.rows]
            case "dedupe":
                assert update is not None
                _dedupe(step, walk, update)
            case "window":
                assert update is not None
                _window(step, walk, update, self._program)
            case _ if "expand" in step.words:
                walk.rows = [
                    {**each, "_hf": {**row["_hf"], "index": index}}
                    for row in walk.rows
                    for index, each in enumerate(step.of_row(row))
                ]
            case _:
                made = [(row, step.of_row(row)) for row in walk.rows]
                walk.rows = [after for _, after in made if after is not None]
                for row in (before for before, after in made if after is None):
                    walk.leave(FILTERED, step.name, row)


def _staged(staged: Staged, update: StateUpdate | None) -> Iterator[Row]:
    for path in staged.files.values():
        for row in pq.read_table(path).to_pylist():
            place = {name: row[f"_{name}"] for name in ("topic", "partition", "offset")}
            row["_hf"] = place | {"index": 0}
            if update is not None:
                floor = update.floors_ms[row["_piece"]]
                own = None if row["_seen"] is None else row["_seen"] - DELAY_MS
                row["_own_ms"] = max((each for each in (floor, own) if each is not None), default=None)
            yield row


def _reason(error: str) -> str:
    return error.split(":", 2)[0] + ":" + error.split(":", 2)[1] if error.startswith("sink:") else "parse"


def _rule(step: Step, walk: Walk) -> None:
    otherwise = step.words.get("else", "filter")
    kept = []
    for row in walk.rows:
        if step.of_row(row):
            kept.append(row)
        elif otherwise == "warn":
            kept.append(row)
            walk.warned[step.name] = walk.warned.get(step.name, 0) + 1
        elif otherwise == "quarantine":
            error = f"it breaks the rule {step.name!r}: {step.words['that']}"
            walk.letters.append({**row, "_reason": step.name, "_error": error})
        else:
            walk.leave(FILTERED, step.name, row)
    walk.rows = kept


def _routes(walk: Walk) -> Routes:
    reasons: dict[str, int] = {}
    for letter in walk.letters:
        reasons[letter["_reason"]] = reasons.get(letter["_reason"], 0) + 1
    return Routes(
        len(walk.rows),
        reasons,
        {step: len(places) for (route, step), places in walk.left.items() if route == FILTERED},
        sum(len(places) for (route, _), places in walk.left.items() if route == DUPLICATE),
    )


def _gatherings(walk: Walk) -> Iterator[Gathering]:
    for code, ((route, step), places) in enumerate(sorted(walk.left.items())):
        digest = sum(place_hash(at["topic"], at["partition"], at["offset"]) for at in places) & MASK
        part = SideOutput(route, step, Tally(len(places), digest))
        rows = [{**at, "topic": 1, "code": code} for at in places]
        yield Gathering(lambda rows=rows: _Left(rows), {code: part}, code)  # type: ignore[misc,arg-type]


@dataclass(frozen=True)
class _Left:
    """Rows that left, as the engine asks a frame for them: of the one topic, which is its first."""

    rows: list[Row]

    def selectExpr(self, *columns: str) -> _Left:
        return self

    def unionAll(self, other: _Left) -> _Left:
        return _Left(self.rows + other.rows)

    def toArrow(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows)


# ------------------------------------------------------------------------ memory


def _tally(rows: list[Row]) -> Tally:
    hashes = (place_hash(row["_hf"]["topic"], row["_hf"]["partition"], row["_hf"]["offset"]) for row in rows)
    return Tally(len(rows), sum(hashes) & MASK)


def _remembered(update: StateUpdate, step: str) -> list[Any]:
    held = update.start.steps.get(step)
    found: list[Any] = []
    for segment in held.segments if held else ():
        check_present(update.state.store.path, segment)
        for path in update.state.store.paths(segment):
            found += [json.loads(text) for text in pq.read_table(path).column("kept").to_pylist()]
    return found


def _remember(
    update: StateUpdate, step: str, kept: list[tuple[Any, int]], *, anew: bool, **result: Any
) -> None:
    """`kept` goes into a segment, each with the time at which it dies; `anew`: in the place of all before it."""
    store, held = update.state.store, update.start.steps.get(step)
    directory = store.segment_dir(update.context.label, step)
    os.makedirs(directory)
    texts = pa.array([json.dumps(each) for each, _ in kept], pa.string())
    table = pa.table({"kept": texts, "_until": pa.array([until for _, until in kept], pa.int64())})
    pq.write_table(
        table, os.path.join(directory, "part-0.parquet"), compression="none", write_page_checksum=True
    )
    segment = store.adopt(directory)
    before = () if held is None or anew else held.segments
    state = replace(held or StepState(), segments=(*before, *([segment] if segment else [])))
    update.results[step] = OperatorResult(state=state, **result)


def _dedupe(step: Step, walk: Walk, update: StateUpdate) -> None:
    seen = {tuple(each) for each in _remembered(update, step.name)}
    new, fresh, again = list[Any](), list[Row](), list[Row]()
    for row in walk.rows:
        key = tuple(row[name] for name in step.words["key"])
        if key in seen:
            again.append(row)
            walk.leave(DUPLICATE, step.name, row)
        else:
            seen.add(key)
            new.append((key, FOR_EVER))
            fresh.append(row)
    walk.rows = fresh
    walk.streams[f"{step.name}.duplicates"] = again
    walk.streams[f"{step.name}.late"] = []
    _remember(
        update, step.name, new, anew=False, rows=None, taken=_tally(fresh), late=Tally(),
        duplicate=_tally(again), row_count=len(fresh),
    )  # fmt: skip


def _window(step: Step, walk: Walk, update: StateUpdate, program: Program) -> None:
    key = list(step.words["key"])
    held = _remembered(update, step.name)
    open_windows: dict[tuple[Any, ...], list[Row]] = {}
    for by, start, rows in held:
        open_windows[(*by, start)] = rows
    late, taken = list[Row](), list[Row]()
    for row in walk.rows:
        starts = _starts(step, _millis(row["_event_time"]), row["_own_ms"])
        if not starts:
            late.append(row)
            walk.leave(LATE_FOR, step.name, row)
            continue
        taken.append(row)
        place = row["_hf"]
        digest = place_hash(place["topic"], place["partition"], place["offset"])
        kept = {name: row.get(name) for name in ("id", "amount", "note")} | {"digest": digest}
        for start in starts:
            open_windows.setdefault((*(row[name] for name in key), start), []).append(kept)
    closed_ms = update.context.next_watermark_ms
    is_over = {at: closed_ms is not None and at[-1] + WINDOW_MS <= closed_ms for at in open_windows}
    over = sorted((at for at in open_windows if is_over[at]), key=_sorting)
    walk.streams[step.name] = [
        _window_row(step, program, at, open_windows[at], update.number, index)
        for index, at in enumerate(over)
    ]
    walk.streams[f"{step.name}.late"] = late
    kept_windows = [
        ((at[:-1], at[-1], rows), at[-1] + WINDOW_MS) for at, rows in open_windows.items() if not is_over[at]
    ]
    _remember(
        update, step.name, kept_windows, anew=True, rows=None, taken=_tally(taken), late=_tally(late),
        duplicate=Tally(), row_count=len(over), counters={"closed": len(over)},
    )  # fmt: skip


def _starts(step: Step, event_ms: int, own_ms: int | None) -> list[int]:
    """Of the windows that an event is in and is not late for."""
    every = EVERY_MS if "every" in step.words else WINDOW_MS
    last = event_ms // every * every
    found = range(last, event_ms - WINDOW_MS, -every)
    return [start for start in found if own_ms is None or start + WINDOW_MS > own_ms]


def _sorting(at: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple((each is not None, each if each is not None else 0) for each in at)


def _window_row(
    step: Step, program: Program, at: tuple[Any, ...], rows: list[Row], number: int, index: int
) -> Row:
    key = dict(zip(step.words["key"], at[:-1], strict=True))
    start = datetime.datetime.fromtimestamp(at[-1] / 1000, datetime.UTC)
    end = datetime.datetime.fromtimestamp((at[-1] + WINDOW_MS) / 1000, datetime.UTC)
    columns = program.window_columns(step)
    named = {**key, "window_start": start}
    text = json_text(named, pa.struct([(name, columns[name]) for name in named]))
    assert text is not None
    digest = sum(row["digest"] for row in rows) & MASK
    return {
        "_hf": {"topic": step.name, "partition": 0, "offset": number, "index": index},
        "_key": text.encode(),
        "_timestamp": end,
        "_tombstone": False,
        "_headers": [],
        **named,
        "window_end": end,
        **{name: AGGREGATES[name][2](rows) for name in step.words["aggregates"]},
        "_hf_count": len(rows),
        "_hf_digest": digest - (1 << 64) if digest >> 63 else digest,
    }


def _millis(time: datetime.datetime) -> int:
    return round(time.timestamp() * 1000)


# ------------------------------------------------------------------------ the place of Spark


class _Context:
    """Whatever else the engine says to Spark's context is for nobody."""

    def __init__(self) -> None:
        self.master = "local[1]"
        self.environment: dict[str, str] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: None


@contextmanager
def without_spark(program: Program) -> Iterator[Any]:
    """Inside, what it gives stands for the session of `run_pipeline`."""
    functions = Functions()
    functions.known |= program.expressions
    for writers in (2, 3):
        text = f"cast(pmod(xxhash64(coalesce(key, source)), {writers}) AS int)"
        functions.known[text] = writer_of(writers)
    with (
        patch.object(running, "refuse_session", lambda *given: None),
        patch.object(running, "refuse_changed", lambda *given: ""),
        patch.object(running, "Router", Router),
        patch.object(rebuilding, "Router", Router),
        patch.object(running, "BACK_OFF_MS", (0,)),
        patch.object(running, "RETRIES_MAX", 0),
        patch.object(pyspark.sql, "functions", functions),
        patch.dict(kafka_writer.DEFAULTS, {"transaction.timeout.ms": 5_000, "linger.ms": 0}),
    ):
        yield SimpleNamespace(program=program, sparkContext=_Context())
