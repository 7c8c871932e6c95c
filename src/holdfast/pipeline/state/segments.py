"""Segments: the immutable files a step's state is made of.

A segment is a directory of Parquet files that nobody writes to any more. Its rows have a column `_until bigint`, never
null: the time, in milliseconds, at which a row closes or dies. The least and greatest of it come from the files'
footers, so a segment that is over, or has nothing in a range of time, is passed over without being read.

Which segments of a step's state become one: size-tiered, as in a log-structured merge tree.

A batch adds a segment. Eight of a tier become one of the next, so a row is rewritten a few times in its life and not in
each batch; a large batch starts in a higher tier, and is not rewritten with the small ones that come after it. Where
keys repeat, segments stop growing at the size of all that is alive, and tiers alone would keep eight copies of it: once
the others together have more than twice the largest, all become one. Batches that touch one key in a hundred rewrite
less than three per cent of the state each on average; one in two hundred rewrites all of it.

Which it is, is decided by what stands in the manifest alone, so a batch that is repeated merges alike. Merging itself
is the step's business, since it knows what two rows of one key come to: `merged` asks it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import EnvironmentFails, PipelineError
from holdfast.pipeline.sinks.files import Disk

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from holdfast.pipeline.state.operator import OperatorContext


UNTIL: Final = "_until"
"""The column with the time at which a row closes or dies, in milliseconds."""
PARQUET_MAGIC: Final = b"PAR1"


class StateDamaged(PipelineError):
    """A file of the state is missing, or is not what was written. The sinks are not affected."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(
            f"the pipeline's state is damaged: {path} {what}. The sinks are whole: `holdfast pipeline rebuild` "
            "rebuilds the state from the source"
        )
        self.path = path
        self.what = what

    def __reduce__(self) -> tuple[object, ...]:
        return StateDamaged, (self.path, self.what)


def not_seen(what: str) -> EnvironmentFails:
    """Tasks wrote what the driver does not find."""
    return EnvironmentFails(
        f"{what}: the home's file system shows machines different contents (a directory cache of NFS). Nothing was "
        "committed; mount it without such a cache (`noac`, or `lookupcache=none`) and run again"
    )


@dataclass(frozen=True)
class Segment:
    """Some immutable files of one step's state, alone in their directory."""

    files: tuple[str, ...]
    """Relative to the state's directory."""
    rows: int
    bytes: int
    low_ms: int
    """Least `_until` of its rows: when the first of them closes or dies."""
    high_ms: int
    tier: int = 0

    def may_hold(self, until_above: int | None, until_to: int | None) -> bool:
        """Whether it can have rows whose `_until` is above the one and not past the other."""
        return (until_above is None or self.high_ms > until_above) and (
            until_to is None or self.low_ms <= until_to
        )

    def lies_within(self, until_above: int | None, until_to: int | None) -> bool:
        """Whether all of its rows are."""
        return (until_above is None or self.low_ms > until_above) and (
            until_to is None or self.high_ms <= until_to
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "files": list(self.files)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Segment:
        numbers = {name: int(document[name]) for name in ("rows", "bytes", "low_ms", "high_ms", "tier")}
        return cls(tuple(document["files"]), **numbers)


@dataclass(frozen=True)
class StepState:
    """What one step remembers."""

    fingerprint: str = ""
    """Of the step and of everything before it: other ones would have made another state."""
    segments: tuple[Segment, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the step's own: counters, and what it needs beside rows."""

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)

    def as_json(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "segments": [segment.as_json() for segment in self.segments],
            "notes": dict(self.notes),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StepState:
        segments = tuple(Segment.from_json(each) for each in document["segments"])
        return cls(document["fingerprint"], segments, document["notes"])


def alive(segments: Iterable[Segment], dead_to_ms: int | None) -> tuple[Segment, ...]:
    """Without those whose every row is over: `_until` at or before this time."""
    return tuple(segment for segment in segments if segment.may_hold(dead_to_ms, None))


# ---------------------------------------------------------------------------- taking over what was written


@dataclass(frozen=True)
class Found:
    """One Parquet file by its footer."""

    rows: int
    low_ms: int
    high_ms: int


def take_over(root: str, directory: str, disk: Disk, tier: int) -> Segment | None:
    """The Parquet files that stand in `directory` as a durable segment; None, and no directory, without rows.

    What else a writer left there (marks of success, checksums, attempts) is removed.
    """
    found: dict[str, Found] = {}
    for path in _parquet_files(directory, disk):
        footer = read_footer(path)
        if footer.rows:
            found[path] = footer
        else:
            disk.remove(path)
    if not found:
        disk.remove_tree(directory)
        return None
    for path in found:
        disk.flush_file(path)
    # The names too: of the files, and of every directory above them up to the state's own.
    above = directory
    while True:
        disk.flush_directory(above)
        if os.path.samefile(above, root):
            break
        above = os.path.dirname(above)
    return Segment(
        files=tuple(os.path.relpath(path, root) for path in sorted(found)),
        rows=sum(each.rows for each in found.values()),
        bytes=sum(disk.size(path) for path in found),
        low_ms=min(each.low_ms for each in found.values()),
        high_ms=max(each.high_ms for each in found.values()),
        tier=tier,
    )


def _parquet_files(directory: str, disk: Disk) -> list[str]:
    files = []
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_dir():
            disk.remove_tree(entry.path)
        elif entry.name.endswith(".parquet") and not entry.name.startswith(("_", ".")):
            files.append(entry.path)
        else:
            disk.remove(entry.path)
    return files


def read_footer(path: str) -> Found:
    """Rows, and the least and greatest `_until`; `ValueError` for a file without it, or with nulls in it."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        if UNTIL not in file.schema_arrow.names:
            raise ValueError(f"{path} has no column {UNTIL}: rows of state say when they end")
        if not metadata.num_rows:
            return Found(0, 0, 0)
        statistics = _statistics(metadata)
        if statistics is None:
            import pyarrow.compute as pc

            column = file.read(columns=[UNTIL]).column(0)
            if column.null_count:
                raise ValueError(f"{path} has rows without {UNTIL}: rows of state say when they end")
            found = pc.min_max(column).as_py()
            statistics = found["min"], found["max"]
        return Found(metadata.num_rows, *statistics)


def _statistics(metadata: pq.FileMetaData) -> tuple[int, int] | None:
    """By the footer, where it says; None when the column has to be read."""
    lows, highs = [], []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:
            continue
        column = next(
            chunk for chunk in map(group.column, range(group.num_columns)) if chunk.path_in_schema == UNTIL
        )
        statistics = column.statistics
        if statistics is None or not statistics.has_min_max or statistics.null_count != 0:
            return None
        lows.append(int(statistics.min))
        highs.append(int(statistics.max))
    return min(lows), max(highs)


def check_present(root: str, segment: Segment) -> None:
    """Files are where they should be, as long as they were, and end as Parquet does; else `StateDamaged`.

    Content is checked when it is read: pages carry checksums of their own.
    """
    total = 0
    for name in segment.files:
        path = os.path.join(root, name)
        try:
            with open(path, "rb") as file:
                total += file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - len(PARQUET_MAGIC)))
                if file.read() != PARQUET_MAGIC:
                    raise StateDamaged(path, "does not end as a Parquet file does")
        except FileNotFoundError:
            raise StateDamaged(path, "is missing") from None
        except OSError as error:
            raise StateDamaged(path, f"cannot be read ({error})") from error
    if total != segment.bytes:
        where = os.path.join(root, os.path.dirname(segment.files[0]))
        raise StateDamaged(where, f"holds {total} bytes, and {segment.bytes} were written")


# ---------------------------------------------------------------------------- which segments become one


FAN_IN: Final = 8
"""Segments of one tier that become one of the next."""
EXCESS_MAX: Final = 2
"""How many times the largest segment all others may come to, once it is `SETTLED` tiers above the lowest."""
SETTLED: Final = 2
TINY_BYTES: Final = 64 * 1024
"""The size up to which a new segment is of tier 0; each further tier is eight times as large."""
TINY_MAX: Final = 16
"""Segments of that size cost more to open than to read, whatever their tiers."""
FILE_BYTES: Final = 64 * 1024 * 1024
"""About what one task writes when segments are merged."""


def tier_of(segment: Segment) -> int:
    """By how often its rows were merged, or by its size, whichever is more."""
    tier, size = segment.tier, TINY_BYTES * FAN_IN**segment.tier
    while segment.bytes > size:
        tier, size = tier + 1, size * FAN_IN
    return tier


def segments_to_merge(segments: Sequence[Segment]) -> list[Segment] | None:
    """Those that should become one now, oldest first; mostly none."""
    if len(segments) < 2:
        return None
    tiers = Counter(tier_of(segment) for segment in segments)
    largest = max(segments, key=lambda segment: segment.bytes)
    others = sum(segment.bytes for segment in segments) - largest.bytes
    if tier_of(largest) >= min(tiers) + SETTLED and others > EXCESS_MAX * largest.bytes:
        return list(segments)
    full = [tier for tier, count in tiers.items() if count >= FAN_IN]
    if full:
        # A merge that fills the next tier takes that one along: what it holds would be rewritten by the next batch.
        last = min(full)
        while tiers[last + 1] >= FAN_IN - 1:
            last += 1
        return [segment for segment in segments if min(full) <= tier_of(segment) <= last]
    tiny = [segment for segment in segments if segment.bytes <= TINY_BYTES]
    return tiny if len(tiny) > TINY_MAX else None


def merged_tier(merging: Sequence[Segment]) -> int:
    """Of what they become: the next tier where one was full, else the one of the largest."""
    tiers = Counter(tier_of(segment) for segment in merging)
    top = max(tiers)
    lower = sum(count for tier, count in tiers.items() if tier < top)
    return top + 1 if tiers[top] + (lower >= FAN_IN) >= FAN_IN else top


def with_merged(
    segments: Sequence[Segment], merging: Sequence[Segment], result: Segment | None
) -> tuple[Segment, ...]:
    """The segments with `result` in the place of those it was made from."""
    gone = set(merging)
    first = next(number for number, segment in enumerate(segments) if segment in gone)
    before = [segment for segment in segments[:first] if segment not in gone]
    after = [segment for segment in segments[first:] if segment not in gone]
    return (*before, *([result] if result else []), *after)


def write_segment(context: OperatorContext, step: str, rows: DataFrame, tier: int = 0) -> Segment | None:
    """Write these rows, which have `_until`, as a segment of the step's state; None when there are none."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    directory = context.store.segment_dir(context.label, step)
    written = Observation()
    counted = rows.observe(written, f.count(f.lit(1)).alias("rows"))
    counted.write.option("compression", "lz4_raw").parquet(directory)
    segment = context.store.adopt(directory, tier)
    seen = 0 if segment is None else segment.rows
    if seen != written.get["rows"]:
        raise not_seen(
            f"tasks wrote {written.get['rows']} rows of state to {directory}, and {seen} are there"
        )
    return segment


def merged(
    context: OperatorContext,
    step: str,
    schema: StructType | str,
    segments: Iterable[Segment],
    merge: Callable[[DataFrame, Sequence[Segment]], DataFrame] | None = None,
) -> tuple[Segment, ...]:
    """These segments of the step's state where the batch ends: those that are due made one, what is over left out.

    `merge` makes of the rows of segments what they come to, and keeps `_until`; without it they are put together. Rows
    whose `_until` the watermark has passed are left out, and segments of nothing else are dropped unread.
    """
    over_ms = context.next_watermark_ms
    living = alive(segments, over_ms)
    merging = segments_to_merge(living)
    if merging is None:
        return living
    rows = context.store.frame(context.spark, merging, schema, until_above=over_ms)
    if rows is None:
        return with_merged(living, merging, None)
    rows = rows.coalesce(files_for(merging)) if merge is None else merge(rows, merging)
    return with_merged(living, merging, write_segment(context, step, rows, merged_tier(merging)))


def files_for(segments: Iterable[Segment]) -> int:
    """How many files the rows of these come to."""
    return 1 + sum(segment.bytes for segment in segments) // FILE_BYTES
