"""A stateful step, played over a small log cut into any batches: what it gave, and what it remembers at the end.

The player stands in for the engine: it gives rows their own watermarks, moves the pipeline's, and hands each turn the
state that the one before has left. It checks what the engine would check: that every row of a batch is taken, late or
a duplicate, by number and by digest. A turn can be taken twice from the same state, as after a crash, and must give the
same both times.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.sql import HEADERS_DDL, ddl_schema
from holdfast.pipeline.digest import MASK, Tally, place_hash
from holdfast.pipeline.positions import Place
from holdfast.pipeline.state.operator import (
    DUPLICATES,
    LATE,
    OperatorContext,
    OperatorResult,
    StatefulOperator,
)
from holdfast.pipeline.state.segments import StepState
from holdfast.pipeline.state.store import StateStore
from holdfast.pipeline.state.watermarks import Clock, Watermarks, own_watermark_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HF_DDL: Final = (
    f"_hf struct<topic:string,partition:int,offset:bigint,index:int,timestamp:timestamp,key:binary,"
    f"headers:{HEADERS_DDL},tombstone:boolean,raw:binary,event_time:timestamp,watermark:timestamp>"
)
GAMES: Final = int(os.environ.get("HOLDFAST_GAMES", "1"))
"""How many random logs each property of a step is played over; `make chaos` plays more."""
TOPIC_ID: Final = uuid.UUID(int=7)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Record:
    """One row of the log; offsets are given by the order in which records stand in it."""

    time_ms: int | None
    values: Mapping[str, Any] = field(default_factory=dict)
    partition: int = 0
    topic: str = "t"
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class Placed:
    """A record at its place, with the watermark its log gives it."""

    record: Record
    offset: int
    watermark_ms: int | None

    @property
    def place(self) -> tuple[str, int, int]:
        return self.record.topic, self.record.partition, self.offset

    def is_late_for(self, end_ms: int) -> bool:
        return self.watermark_ms is not None and end_ms <= self.watermark_ms


@dataclass
class Played:
    """All that came out of a log."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    late: list[tuple[str, int, int]] = field(default_factory=list)
    duplicates: list[tuple[str, int, int]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    state: StepState = StepState()  # noqa: RUF009 - a frozen value
    watermark_ms: int | None = None
    store: StateStore | None = None

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """Where the rows came from, in order."""
        return sorted(_place(row["_hf"]) for row in self.rows)

    def memory(self, spark: SparkSession, ddl: Any) -> list[dict[str, Any]]:
        """The rows of the state that are alive at the end."""
        assert self.store is not None
        frame = self.store.frame(spark, self.state, ddl, until_above=self.watermark_ms)
        return [] if frame is None else [row.asDict(recursive=True) for row in frame.collect()]


def placed(log: Sequence[Record], clock: Clock) -> list[Placed]:
    """The records with their offsets and own watermarks: what follows from the log alone."""
    offsets: Counter[tuple[str, int]] = Counter()
    greatest: dict[tuple[str, int], int] = {}
    found = []
    for record in log:
        partition = (record.topic, record.partition)
        own = own_watermark_ms(greatest.get(partition), None, clock)
        found.append(Placed(record, offsets[partition], own))
        offsets[partition] += 1
        if record.time_ms is not None:
            greatest[partition] = max(greatest.get(partition, record.time_ms), record.time_ms)
    return found


class Player:
    """Plays logs through one step; columns of its records are named once, in Spark's words."""

    def __init__(self, spark: SparkSession, directory: str, ddl: str, delay_ms: int = 0) -> None:
        self._spark = spark
        self._directory = directory
        self._schema = ddl_schema(f"{HF_DDL}, {ddl}")
        self.clock = Clock(delay_ms=delay_ms)
        self._games = 0

    def play(
        self,
        operator: StatefulOperator,
        log: Sequence[Record],
        cuts: Iterable[int] = (),
        *,
        twice: Collection[int] = (),
        forgets: bool = False,
    ) -> Played:
        """Cut the log at these places; batches whose number is in `twice` are taken twice from the same state.

        `forgets` plants an error: every batch begins with an empty state.
        """
        self._games += 1
        home = os.path.join(self._directory, f"game-{self._games}")
        store = StateStore(os.path.join(home, "state"))
        rows = placed(log, self.clock)
        known = sorted({Place(each.topic, TOPIC_ID, each.partition) for each in log})
        limits = [0, *sorted(set(cuts)), len(rows)]
        played = Played(store=store)
        marks = Watermarks()
        for number, (start, end) in enumerate(itertools.pairwise(limits)):
            batch = rows[start:end]
            after = marks.after(self.clock, number, known, _greatest(batch))
            frame = self._staged(batch, marks.watermark_ms, os.path.join(home, f"stage-{number}.parquet"))
            state = StepState() if forgets else played.state
            turns = []
            for attempt in range(2 if number in twice else 1):
                label = f"b{number}-{attempt}"
                scratch = os.path.join(home, "scratch", label)
                os.makedirs(scratch)
                times = (number, marks.watermark_ms, after.watermark_ms)
                context = OperatorContext(self._spark, store, state, *times, number + 1, scratch, label)
                turn = operator.run(frame, context)
                turns.append((turn, *self._taken_down(operator, turn, batch)))
            assert all(turn[1:] == turns[0][1:] for turn in turns), "a turn taken again gave something else"
            turn, made, late, duplicates = turns[-1]
            played.rows += made
            played.late += late
            played.duplicates += duplicates
            played.counters.update(turn.counters)
            played.state = turn.state
            marks = after
        played.watermark_ms = marks.watermark_ms
        return played

    def _staged(self, batch: Sequence[Placed], watermark_ms: int | None, path: str) -> DataFrame:
        """As rows reach a step: in a file."""
        import pyarrow as pa
        import pyarrow.parquet as pq
        from pyspark.sql.pandas.types import to_arrow_schema

        rows = [{"_hf": _wide(each, watermark_ms), **each.record.values} for each in batch]
        schema = to_arrow_schema(self._schema, timezone="UTC")
        pq.write_table(pa.Table.from_pylist(rows, schema), path)
        return self._spark.read.schema(self._schema).parquet(path)

    def _taken_down(
        self, operator: StatefulOperator, turn: OperatorResult, batch: Sequence[Placed]
    ) -> tuple[list[dict[str, Any]], list[tuple[str, int, int]], list[tuple[str, int, int]]]:
        """The rows of a turn, in one order, checked as the engine does."""
        rows = [row.asDict(recursive=True) for row in turn.rows.collect()]
        rows.sort(key=lambda row: (*_place(row["_hf"]), row["_hf"]["index"]))
        late = _places(turn.streams.get(LATE))
        duplicates = _places(turn.streams.get(DUPLICATES))
        assert turn.row_count == len(rows)
        assert turn.late == _tally(late)
        assert turn.duplicate == _tally(duplicates)
        assert turn.taken + turn.late + turn.duplicate == _tally([each.place for each in batch])
        if operator.has_own_rows:
            assert len({row["_hf"]["index"] for row in rows}) == len(rows)
        else:
            assert turn.taken == _tally([_place(row["_hf"]) for row in rows])
        return rows, late, duplicates


def _wide(each: Placed, watermark_ms: int | None) -> dict[str, Any]:
    known = [mark for mark in (each.watermark_ms, watermark_ms) if mark is not None]
    return {
        "topic": each.record.topic,
        "partition": each.record.partition,
        "offset": each.offset,
        "index": 0,
        "timestamp": EPOCH,
        "headers": [{"key": key, "value": value} for key, value in each.record.headers],
        "tombstone": False,
        "event_time": _time(each.record.time_ms),
        "watermark": _time(max(known)) if known else None,
    }


def _time(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else EPOCH + timedelta(milliseconds=time_ms)


def _greatest(batch: Sequence[Placed]) -> dict[Place, int | None]:
    found: dict[Place, int | None] = {}
    for each in batch:
        place = Place(each.record.topic, TOPIC_ID, each.record.partition)
        times = [time for time in (found.get(place), each.record.time_ms) if time is not None]
        found[place] = max(times) if times else None
    return found


def _place(lineage: Mapping[str, Any]) -> tuple[str, int, int]:
    return lineage["topic"], lineage["partition"], lineage["offset"]


def _places(frame: DataFrame | None) -> list[tuple[str, int, int]]:
    if frame is None:
        return []
    return sorted(_place(row["_hf"].asDict()) for row in frame.select("_hf").collect())


def _tally(places: Sequence[tuple[str, int, int]]) -> Tally:
    return Tally(len(places), sum(place_hash(*place) for place in places) & MASK)
