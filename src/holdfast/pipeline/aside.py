"""Which rows left the steps, as a pipeline records them in its home; read without Spark.

Sinks hold what came out of the steps, and the dead letter what was wrong. The rows that a filter, a query, a lookup or
a deduplication let go are nowhere: a ledger has their number and digest alone. So each batch that has such rows writes
their places down, in one file below `<home>/aside/`, flushed before the first sink commits the batch. Rows too late for
a `window`, `keyed` or `join` are there too, as `late-for`: they went on in the chain, and did not leave.

- A file is Parquet with the columns of `COLUMNS`, sorted by place, and names in its footer the batches it holds, each
  with its range, the fingerprint of the definition and its number of rows, one after the other.
- A batch is named by its range and fingerprint (`batch_name`), which a ledger's entry has too. Repeated, it replaces
  its own file. Another batch over the same offsets, by a changed definition or in another cut, has another name: what
  an entry is about is found by name, never by overlap.
- Files of batches that every sink has are merged, so a batch may stand in two files for a moment, with the same rows.

The record is the pipeline's word, and an audit says where it rests on that word; numbers and digests are checked
against the ledgers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.errors import HoldfastError
from holdfast.pipeline.positions import BatchRange, to_text

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

DIRECTORY: Final = "aside"
SUFFIX: Final = ".parquet"
VERSION: Final = 1
FOOTER: Final = b"holdfast.aside"
"""The key in a file's footer."""

FILTERED: Final = "filtered"
DUPLICATE: Final = "duplicate"
LATE: Final = "late"
LATE_FOR: Final = "late-for"
"""Too late for a window, keyed function or join, which lets its rows go on all the same."""
LEAVING: Final = (FILTERED, DUPLICATE, LATE)
"""The routes out of the chain."""
COLUMNS: Final = ("topic", "partition", "offset", "index", "route", "step")
ATTEMPTS_MAX: Final = 5
"""Files may be merged between being listed and being read; a merge happens once in dozens of batches."""


class AsideDamaged(HoldfastError):
    """A file of the record cannot be read, or is not what its footer says."""


@dataclass(frozen=True)
class AsideBatch:
    """The rows that one batch let go, and where they stand."""

    name: str
    range: BatchRange
    fingerprint: str
    rows: int
    path: str
    first_row: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "range": self.range.as_json(),
            "fingerprint": self.fingerprint,
            "rows": self.rows,
        }


def aside_path(home: str) -> str:
    return os.path.join(home, DIRECTORY)


def batch_name(batch: BatchRange, fingerprint: str) -> str:
    """The name of a batch's record. Leader epochs play no part: a repeat may know another one."""
    offsets = [
        [place.topic, str(place.topic_id), place.partition, span.start, span.end]
        for place, span in sorted(batch.spans.items())
        if span.offsets
    ]
    text = to_text({"range": offsets, "fingerprint": fingerprint})
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def schema() -> pa.Schema:
    """Of the files."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            ("topic", text),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("index", pa.int32()),
            ("route", text),
            ("step", text),
        ]
    )


# ---------------------------------------------------------------------------- reading


def recorded(home: str) -> dict[str, AsideBatch]:
    """All batches that let rows go, by name; `AsideDamaged` for a file that cannot be read."""
    return _retried(lambda: _listed(aside_path(home)))


def _retried(read: Callable[[], T]) -> T:
    """What was read, though files be merged meanwhile: what they held is then in another file."""
    for _ in range(ATTEMPTS_MAX - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def _listed(directory: str) -> dict[str, AsideBatch]:
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
    except FileNotFoundError:
        return {}
    found: dict[str, AsideBatch] = {}
    for name in names:
        for batch in batches_in(os.path.join(directory, name)):
            if batch.name not in found or os.path.basename(batch.path) == batch.name + SUFFIX:
                found[batch.name] = batch  # its own file is newer than one it was merged into
    return found


def batches_in(path: str) -> list[AsideBatch]:
    """What the footer of a file names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(path)
        document = json.loads((metadata.metadata or {})[FOOTER])
        if document["version"] != VERSION:
            raise AsideDamaged(
                f"{path} has version {document['version']}; this holdfast reads version {VERSION}"
            )
        found: list[AsideBatch] = []
        first = 0
        for each in document["batches"]:
            span = BatchRange.from_json(each["range"])
            found.append(AsideBatch(each["name"], span, each["fingerprint"], each["rows"], path, first))
            first += each["rows"]
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, OSError, KeyError, TypeError, ValueError) as error:
        raise AsideDamaged(
            f"{path} cannot be read as a record of rows that left a pipeline: {error}"
        ) from error
    if first != metadata.num_rows:
        raise AsideDamaged(f"{path} holds {metadata.num_rows} rows, and its footer names {first}")
    return found


def tables(batches: Iterable[AsideBatch]) -> Iterator[tuple[AsideBatch, pa.Table]]:
    """The rows of these batches, each file read once; `FileNotFoundError` when one was merged meanwhile."""
    by_path: dict[str, list[AsideBatch]] = {}
    for batch in batches:
        by_path.setdefault(batch.path, []).append(batch)
    for path, wanted in by_path.items():
        table = read_file(path)
        for batch in wanted:
            yield batch, table.slice(batch.first_row, batch.rows)


def read_file(path: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, partitioning=None).select(list(COLUMNS)).cast(schema())
    except FileNotFoundError:
        raise
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError, KeyError, ValueError) as error:
        raise AsideDamaged(
            f"{path} cannot be read as a record of rows that left a pipeline: {error}"
        ) from error


def read_all(home: str, wanted: Iterable[str] | None = None) -> list[tuple[AsideBatch, pa.Table]]:
    """The rows of the batches of these names, or of all; names that are not there are left out."""
    names = None if wanted is None else set(wanted)

    def read() -> list[tuple[AsideBatch, pa.Table]]:
        known = sorted(recorded(home).items())
        return list(tables(batch for name, batch in known if names is None or name in names))

    return _retried(read)


def counts_of(table: pa.Table) -> Mapping[tuple[str, str], int]:
    """Rows by route and step."""
    import pyarrow as pa

    texts = table.select(["route", "step"]).cast(pa.schema([("route", pa.string()), ("step", pa.string())]))
    grouped = texts.group_by(["route", "step"]).aggregate([([], "count_all")])
    return {(row["route"], row["step"]): row["count_all"] for row in grouped.to_pylist()}
