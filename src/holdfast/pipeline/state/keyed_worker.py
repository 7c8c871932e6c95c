"""One micro-batch of a keyed step in a worker: bucket by bucket, the function for each key, then files.

The rows of a bucket come sorted by key and by place. Keys with rows, and those whose timer or time to live the batch
has passed, are looked up in the bucket's files; then the worker handles each, in the order of hashes:

- before a row, what that row's own watermark has passed happens: timers go off, and a key that is past its time to
  live is forgotten. So rows are handed over in as many parts as that takes; mostly it is one;
- after the last row the same with the watermark (and the time) of the batch.

Since no row's own watermark is below the pipeline's where its batch begins, both come to the same when the batch is
cut in two between them.

A worker reports files and counts as JSON. What fails is part of the report and not raised: raised, it would come back
as a JVM exception around a Python traceback, and Spark would try four times.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.frames import failure_report, raised_at
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.keyed import EACH_ROW, KeyState
from holdfast.pipeline.state.keyed_files import (
    NEVER,
    STATE,
    Merge,
    Passed,
    StateFile,
    file_name,
    first_of_run,
    write_state,
)
from holdfast.pipeline.state.keyed_rows import OutputRows, WrongRows, as_arrow

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

BUCKET: Final = "_hf_bucket"
HASH: Final = "_hf_hash"
PLACE: Final = "_hf_place"
EVENT: Final = "_hf_event"
OWN: Final = "_hf_own"
"""Columns a worker needs and the function does not get: bucket and hash of the key, hash of the record's place, event
time and own watermark in milliseconds."""

PLAIN: Final = {"int64": int, "double": float, "string": str, "binary": bytes, "bool": bool}
"""Types of Arrow that give back the very value that was put."""
SLAB_ROWS: Final = 4_096
"""Rows that are made into dicts at a time."""
OBJECTS_BEFORE_COLLECTION: Final = 200_000
"""What a function of the user's leaves in circles is still bounded."""


@dataclass(frozen=True)
class KeyedJob:
    """What a worker needs to know; pickled to it."""

    step: str
    function: bytes
    function_name: str
    key: tuple[str, ...]
    handed_out: tuple[str, ...]
    """The columns the function gets."""
    output: pa.Schema
    state: pa.Schema
    ttl_ms: int
    is_event: bool
    """Timers are by event time."""
    number: int
    since: Passed
    """What had passed where the last batch ended."""
    now: Passed
    """What has where this one ends."""
    files: tuple[tuple[str, ...], ...]
    """Of the whole state, by bucket."""
    merging: tuple[tuple[str, ...], ...]
    """Those of them that are to become one, by bucket."""
    merges_all: bool
    rows_directory: str
    state_directory: str
    merged_directory: str


def run_buckets(job: KeyedJob, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A report for each bucket that has rows here; a bucket's rows stand together."""
    import pyarrow as pa

    reports = []
    try:
        call = _load(job)
        for bucket, rows in _by_bucket(batches):
            reports.append(json.dumps(BucketBatch(job, call, bucket, rows).run()))
    except (HoldfastError, OSError) as error:
        reports = [json.dumps(failure_report(error))]
    yield pa.RecordBatch.from_arrays([pa.array(reports, pa.string())], names=["report"])


def _load(job: KeyedJob) -> Callable[..., Any]:
    from pyspark import cloudpickle

    try:
        call: Callable[..., Any] = cloudpickle.loads(job.function)
    except Exception as error:
        raise StepError(
            job.step,
            f"the function {job.function_name} cannot be loaded by a worker: {type(error).__name__}: {error}",
        ) from error
    return call


def _by_bucket(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
    import numpy as np
    import pyarrow as pa

    current, parts = -1, list[Any]()
    for batch in batches:
        numbers = batch.column(BUCKET).to_numpy()
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, end in itertools.pairwise(edges):
            if start == end:
                continue
            if numbers[start] != current and parts:
                yield current, pa.Table.from_batches(parts)
                parts = []
            current = int(numbers[start])
            parts.append(batch.slice(start, end - start))
    if parts:
        yield current, pa.Table.from_batches(parts)


@dataclass(slots=True)
class KeyEntry:
    """A key while the worker handles it."""

    key: tuple[Any, ...]
    hash: int
    state: KeyState
    last: int = NEVER
    until: int = NEVER
    hold: int = NEVER
    was_alive: bool = False
    """Where the batch begins."""
    hides: bool = False
    """It was alive by a version that would still count where the batch ends."""
    is_touched: bool = False

    @property
    def is_alive(self) -> bool:
        return self.state._value is not None or self.state.timer_ms is not None


class Group(NamedTuple):
    """The rows of one key: where they stand, and how their times run."""

    start: int
    end: int
    first_own: int
    first_event: int
    greatest_own: int
    greatest_event: int


NO_ROWS: Final = Group(0, 0, NEVER, NEVER, NEVER, NEVER)


class BucketBatch:
    """One bucket's keys in one micro-batch."""

    def __init__(self, job: KeyedJob, call: Callable[..., Any], bucket: int, rows: pa.Table) -> None:
        self.job = job
        self.call = call
        self.bucket = bucket
        self.takes_each_row = bool(getattr(call, EACH_ROW, False))
        # Rows without a hash come first: late ones, and the one without a place that stands for the bucket.
        unhashed = rows.column(HASH).null_count
        self.late = rows.column(PLACE).slice(0, unhashed).drop_null().to_numpy()
        rows = rows.slice(unhashed).combine_chunks()
        self.given: pa.Table = rows.select(list(job.handed_out))
        self.nothing: pa.Table = self.given.slice(0, 0)
        self.slab: list[dict[str, Any]] = []
        self.slab_start = 0
        self.hashes = rows.column(HASH).to_numpy()
        self.places = rows.column(PLACE).to_numpy()
        self.events = rows.column(EVENT).to_numpy()
        self.owns = rows.column(OWN).fill_null(NEVER).to_numpy()
        self.starts: np.ndarray[Any, Any] = first_of_run(rows, [HASH, *job.key]).nonzero()[0]
        self.keys = _tuples(rows.select(list(job.key)).take(self.starts), job.key)
        self.columns = frozenset(field.name for field in job.state.field(STATE).type)
        self.plain = {field.name: PLAIN.get(str(field.type)) for field in job.state.field(STATE).type}
        self.rows = OutputRows(job.output, job.key)
        self.counters = {"expired": 0, "fired": 0, "keys": 0}
        self.kept: list[tuple[KeyEntry, bool]] = []
        """Keys to be written, and whether they are gone."""

    def run(self) -> dict[str, Any]:
        files = [StateFile(path) for path in self.job.files[self.bucket]]
        with _seldom_collected():
            for entry, group in self._agenda(files):
                self._handle(entry, group)
        label = uuid.uuid4().hex
        return {
            "bucket": self.bucket,
            "taken": _tally(self.places),
            "late": _tally(self.late),
            "touched": len(self.keys),
            "counters": self.counters,
            **self._write_rows(label),
            **self._write_state(label, files),
        }

    # -------------------------------------------------------------------- which keys

    def _agenda(self, files: Sequence[StateFile]) -> list[tuple[KeyEntry, Group]]:
        """Keys with rows and keys with something due, in the order of their hashes."""
        import numpy as np

        job = self.job
        above, to = job.since.watermark_ms - job.ttl_ms, job.now.watermark_ms - job.ttl_ms
        due = [file.due("_last", above, to) for file in files]
        above, to = job.since.watermark_ms, job.now.watermark_ms
        if not job.is_event:
            above, to = job.since.clock_ms, job.now.clock_ms
        due += [file.due("_timer", above, to) for file in files]
        hashes = self.hashes[self.starts]
        known = self._known(files, np.unique(np.concatenate([hashes, *due])))
        agenda = []
        for key, hashed, group in zip(self.keys, hashes.tolist(), self._groups(), strict=True):
            entry = known.pop(key, None) or KeyEntry(key, hashed, self._state(key, None, None))
            agenda.append((entry, group))
        agenda += [(entry, NO_ROWS) for entry in sorted(known.values(), key=lambda entry: repr(entry.key))]
        agenda.sort(key=lambda each: each[0].hash)
        return agenda

    def _groups(self) -> Iterator[Group]:
        import numpy as np

        if not len(self.starts):
            return iter(())
        ends = np.append(self.starts, len(self.hashes))[1:]
        columns = (
            self.starts,
            ends,
            self.owns[self.starts],
            self.events[self.starts],
            np.maximum.reduceat(self.owns, self.starts),
            np.maximum.reduceat(self.events, self.starts),
        )
        return map(Group._make, zip(*(column.tolist() for column in columns), strict=True))

    def _known(
        self, files: Sequence[StateFile], hashes: np.ndarray[Any, Any]
    ) -> dict[tuple[Any, ...], KeyEntry]:
        """The newest version of each key that has one of these hashes."""
        import numpy as np
        import pyarrow as pa

        if not len(hashes):
            return {}
        parts = [part for file in files for part in file.find(hashes)]
        if not parts:
            return {}
        table = pa.concat_tables(parts)
        order = np.argsort(table.column("_seq").to_numpy(), kind="stable")
        newest = dict(
            zip(_tuples(table.select(list(self.job.key)).take(order), self.job.key), order, strict=True)
        )
        table = table.take(pa.array(list(newest.values()), pa.int64()))
        names = ("_hash", "_last", "_timer", "_gone", "_until", "_hold", STATE)
        versions = zip(newest, *(table.column(name).to_pylist() for name in names), strict=True)
        return {version[0]: self._entry(*version) for version in versions}

    def _entry(
        self,
        key: tuple[Any, ...],
        hashed: int,
        last: int,
        timer: int | None,
        gone: bool,
        until: int,
        hold: int,
        value: dict[str, Any] | None,
    ) -> KeyEntry:
        def counts(passed: Passed) -> bool:
            if gone or (timer is None and last + self.job.ttl_ms <= passed.watermark_ms):
                return False
            return until > passed.watermark_ms or hold > passed.clock_ms

        if not counts(self.job.since):
            return KeyEntry(key, hashed, self._state(key, None, None), until=until, hold=hold)
        state = self._state(key, value, timer)
        return KeyEntry(key, hashed, state, last, until, hold, was_alive=True, hides=counts(self.job.now))

    def _state(self, key: tuple[Any, ...], value: dict[str, Any] | None, timer_ms: int | None) -> KeyState:
        return KeyState(
            key,
            value,
            timer_ms=timer_ms,
            batch_time_ms=self.job.now.clock_ms,
            columns=self.columns,
            normal=self._normal,
        )

    def _normal(self, value: dict[str, Any]) -> dict[str, Any]:
        """As it will be read from the file."""
        if all(each is None or type(each) is self.plain.get(name) for name, each in value.items()):
            return value
        normal: dict[str, Any] = as_arrow([value], self.job.state.field(STATE).type).to_pylist()[0]
        return normal

    # -------------------------------------------------------------------- one key

    def _handle(self, entry: KeyEntry, group: Group) -> None:
        if self.takes_each_row:
            self._row_by_row(entry, group)
        else:
            self._by_parts(entry, group)
        self._pass(entry, self.job.now.watermark_ms)
        if not self.job.is_event:
            self._fire(entry, self.job.now.clock_ms)
            self._pass(entry, self.job.now.watermark_ms)
        self._keep(entry)

    def _row_by_row(self, entry: KeyEntry, group: Group) -> None:
        start, end = group.start, group.end
        if start == end:
            return
        rows = self._dicts(start, end)
        owns, events = self.owns[start:end].tolist(), self.events[start:end].tolist()
        for row, own, event in zip(rows, owns, events, strict=True):
            self._pass(entry, own)
            entry.state.watermark_ms = _watermark(own)
            self._call(entry, row, event)

    def _dicts(self, start: int, end: int) -> list[dict[str, Any]]:
        """These rows as dicts; the rows after them are made with them, since they come next."""
        if not self.slab_start <= start <= end <= self.slab_start + len(self.slab):
            self.slab_start = start
            self.slab = self.given.slice(start, max(end - start, SLAB_ROWS)).to_pylist()
        return self.slab[start - self.slab_start : end - self.slab_start]

    def _by_parts(self, entry: KeyEntry, group: Group) -> None:
        at, end = group.start, group.end
        own, event = group.first_own, group.first_event
        greatest_own, greatest_event = group.greatest_own, group.greatest_event
        while at < end:
            self._pass(entry, own)
            stop = end
            timer = entry.state.timer_ms if self.job.is_event else None
            # A key lives at least as long as the first of these rows makes it.
            if (timer is not None and greatest_own >= timer) or greatest_own >= event + self.job.ttl_ms:
                stop = self._stop(entry, timer, at, end)
            if (at, stop) != (group.start, group.end):
                greatest_own, greatest_event = int(self.owns[at:stop].max()), int(self.events[at:stop].max())
            entry.state.watermark_ms = _watermark(greatest_own)
            self._call(entry, self.given.slice(at, stop - at), greatest_event)
            at = stop
            if at < end:
                own, event = int(self.owns[at]), int(self.events[at])
                greatest_own = int(self.owns[at:end].max())

    def _stop(self, entry: KeyEntry, timer: int | None, at: int, end: int) -> int:
        """The first row after `at` whose own watermark has passed the key's timer or its time to live."""
        import numpy as np

        last = np.maximum.accumulate(np.maximum(self.events[at : end - 1], entry.last))
        owns = self.owns[at + 1 : end]
        passed = owns >= last + self.job.ttl_ms
        if timer is not None:
            passed |= owns >= timer
        return at + 1 + int(passed.argmax()) if passed.any() else end

    def _pass(self, entry: KeyEntry, watermark_ms: int) -> None:
        """What is over where the watermark has come to this."""
        if self.job.is_event:
            self._fire(entry, watermark_ms)
        if entry.state.timer_ms is None and entry.is_alive and entry.last + self.job.ttl_ms <= watermark_ms:
            entry.state.clear()
            entry.last = NEVER
            self.counters["expired"] += 1

    def _fire(self, entry: KeyEntry, time_ms: int) -> None:
        state = entry.state
        while state.timer_ms is not None and state.timer_ms <= time_ms:
            state.fired_ms, state.timer_ms = state.timer_ms, None
            state.watermark_ms = (
                state.fired_ms if self.job.is_event else _watermark(self.job.now.watermark_ms)
            )
            self.counters["fired"] += 1
            self._call(entry, None if self.takes_each_row else self.nothing, NEVER)
            state.fired_ms = None

    def _call(self, entry: KeyEntry, rows: Any, event_ms: int) -> None:
        state = entry.state
        time_ms = event_ms if state.fired_ms is None else state.fired_ms
        try:
            self.rows.take(self.call(entry.key, rows, state), entry.key, time_ms)
        except Exception as error:
            raise self._told(entry.key, error) from error
        entry.last = max(entry.last, event_ms)
        entry.until = max(entry.until, entry.last + self.job.ttl_ms)
        if state.timer_ms is not None:
            if self.job.is_event:
                entry.until = max(entry.until, state.timer_ms)
            else:
                entry.hold = max(entry.hold, state.timer_ms)
        entry.is_touched = True

    def _told(self, key: tuple[Any, ...], error: Exception) -> StepError:
        name = self.job.function_name
        if isinstance(error, WrongRows):
            return StepError(self.job.step, f"the function {name} {error}, for the key {error.key or key!r}")
        where = raised_at(error)
        return StepError(
            self.job.step,
            f"the function {name} raised {type(error).__name__}: {error}, for the key {key!r}"
            + (f" ({where})" if where else ""),
        )

    def _keep(self, entry: KeyEntry) -> None:
        self.counters["keys"] += entry.is_alive - entry.was_alive
        if entry.is_alive:
            if entry.is_touched:
                self.kept.append((entry, False))
        elif entry.hides:
            self.kept.append((entry, True))

    # -------------------------------------------------------------------- files

    def _write_rows(self, label: str) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = self.rows.table()
        except WrongRows as error:
            raise self._told(error.key, error) from error
        if not table.num_rows:
            return {"rows": 0, "rows_file": None}
        path = os.path.join(self.job.rows_directory, file_name(self.bucket, label))
        numbered = table.add_column(0, "_index", pa.array(range(table.num_rows), pa.int64()))
        numbered = numbered.add_column(
            0, "_bucket", pa.repeat(pa.scalar(self.bucket, pa.int32()), table.num_rows)
        )
        pq.write_table(numbered, path, compression="none", write_statistics=False)
        return {"rows": table.num_rows, "rows_file": path}

    def _write_state(self, label: str, files: Sequence[StateFile]) -> dict[str, Any]:
        job = self.job
        state_file = merged_file = None
        if self.kept:
            state_file = os.path.join(job.state_directory, file_name(self.bucket, label))
            write_state(state_file, self._versions())
        merging = [file for file in files if file.path in job.merging[self.bucket]]
        if merging:
            path = os.path.join(job.merged_directory, file_name(self.bucket, label))
            merged_file = (
                path if Merge(merging, job.state, job.key, job.now, job.merges_all).write(path) else None
            )
        return {"state_file": state_file, "merged_file": merged_file}

    def _versions(self) -> pa.Table:
        import pyarrow as pa

        schema, kept = self.job.state, self.kept
        columns: dict[str, list[Any]] = {
            "_hash": [entry.hash for entry, _ in kept],
            "_seq": [self.job.number] * len(kept),
            "_last": [entry.last for entry, _ in kept],
            "_timer": [entry.state.timer_ms for entry, _ in kept],
            "_gone": [gone for _, gone in kept],
            "_until": [entry.until for entry, _ in kept],
            "_hold": [entry.hold for entry, _ in kept],
        }
        for number, name in enumerate(self.job.key):
            columns[name] = [entry.key[number] for entry, _ in kept]
        arrays = [as_arrow(columns[name], schema.field(name).type) for name in columns]
        return pa.Table.from_arrays([*arrays, self._values()], schema=schema)

    def _values(self) -> pa.Array:
        kind = self.job.state.field(STATE).type
        values = [entry.state._value for entry, _ in self.kept]
        try:
            return as_arrow(values, kind)
        except WrongRows as error:
            for (entry, _), value in zip(self.kept, values, strict=True):
                try:
                    as_arrow([value], kind)
                except WrongRows as wrong:
                    raise StepError(
                        self.job.step,
                        f"the function {self.job.function_name} put a state that is not what `state` declares, "
                        f"{kind}: {wrong}, for the key {entry.key!r}",
                    ) from wrong
            raise StepError(self.job.step, f"its state: {error}") from error


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """A batch makes many objects that live till its end, and none in circles: looking for those takes a third of it."""
    usual = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _tally(places: np.ndarray[Any, Any]) -> list[int]:
    """Number and digest of rows, by the hashes of their places."""
    import numpy as np

    return [len(places), int(np.sum(places.view(np.uint64), dtype=np.uint64)) & MASK]


def _tuples(table: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in names), strict=True))


def _watermark(time_ms: int) -> int | None:
    return None if time_ms == NEVER else time_ms
