"""Segments: the immutable files a step's state is made of.

A segment is a directory of Parquet files that nobody writes to any more. Its rows have a column `_until bigint`, never
null: the time, in milliseconds, at which a row closes or dies. The least and greatest of it come from the files'
footers, so a segment that is over, or has nothing in a range of time, is passed over without being read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import EnvironmentFails, PipelineError
from holdfast.pipeline.sinks.files import Disk

if TYPE_CHECKING:
    import pyarrow.parquet as pq

UNTIL: Final = "_until"
"""The column with the time at which a row closes or dies, in milliseconds."""
PARQUET_MAGIC: Final = b"PAR1"


class StateDamaged(PipelineError):
    """A file of the state is missing, or is not what was written. The sinks are not affected."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(
            f"the pipeline's state is damaged: {path} {what}. The sinks are whole: `holdfast pipeline rebuild` makes "
            "the state anew from the source"
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
        return {
            "files": list(self.files),
            "rows": self.rows,
            "bytes": self.bytes,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "tier": self.tier,
        }

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
