"""A look at a pipeline's state without Spark: how large it is, how it grows, and its rows as a file.

What is shown is what is stored. A step's rows may hold several parts of one key that the step adds up when it reads
them, and rows whose time is over and that no merge has dropped yet.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import UsageError
from holdfast.pipeline.core.failures import EnvironmentFails
from holdfast.pipeline.state.segments import Segment, StateDamaged, StepState
from holdfast.pipeline.state.store import StateStore, Version

GROWTH_VERSIONS: Final = 100
"""Over how many of the last versions growth is told."""


@dataclass(frozen=True)
class Growth:
    """What a step's state gained between two versions."""

    rows: int
    bytes: int
    versions: int
    over_ms: int


@dataclass(frozen=True)
class StepSize:
    """What one step remembers, in numbers."""

    name: str
    state: StepState
    growth: Growth | None
    """Nothing before there are two versions."""

    @property
    def oldest_until_ms(self) -> int | None:
        return min((segment.low_ms for segment in self.state.segments), default=None)

    @property
    def newest_until_ms(self) -> int | None:
        return max((segment.high_ms for segment in self.state.segments), default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rows": self.state.rows,
            "bytes": self.state.bytes,
            "segments": len(self.state.segments),
            "oldest_until_ms": self.oldest_until_ms,
            "newest_until_ms": self.newest_until_ms,
            "growth": asdict(self.growth) if self.growth else None,
            "fingerprint": self.state.fingerprint,
            "notes": dict(self.state.notes),
        }


def step_sizes(store: StateStore, version: Version) -> list[StepSize]:
    """Of every step of a version, by name."""
    history = [line for line in store.history() if line["number"] <= version.number][-GROWTH_VERSIONS:]
    return [
        StepSize(name, state, _growth(name, state, version, history))
        for name, state in sorted(version.steps.items())
    ]


def _growth(
    name: str, state: StepState, version: Version, history: Sequence[dict[str, Any]]
) -> Growth | None:
    before = next((line for line in history if name in line["steps"]), None)
    if before is None or before["number"] >= version.number:
        return None
    rows, size = before["steps"][name]
    return Growth(
        state.rows - rows,
        state.bytes - size,
        version.number - before["number"],
        version.batch_time_ms - before["batch_time_ms"],
    )


def chosen_version(store: StateStore, number: int | None) -> Version:
    """The newest, or the one with this number; `UsageError` when there is none."""
    versions = store.versions()
    if not versions:
        raise UsageError(f"there is no state in {store.path}: no step has one, or no batch was run yet")
    if number is None:
        return versions[-1]
    found = next((version for version in reversed(versions) if version.number == number), None)
    if found is None:
        there = ", ".join(str(version.number) for version in versions)
        raise UsageError(f"version {number} of the state is not kept; there are {there}")
    return found


# ---------------------------------------------------------------------------- rows as a file


def export_rows(store: StateStore, segments: Sequence[Segment], path: str) -> int:
    """Write the rows of these segments to a new Parquet or CSV file, by its name; how many they are."""
    kind = os.path.splitext(path)[1].lower()
    if kind not in (".parquet", ".csv"):
        raise UsageError(f"{path}: rows go to a file whose name ends with .parquet or .csv")
    if os.path.exists(path):
        raise UsageError(f"{path} is there already, and is not overwritten")
    files = [file for segment in segments for file in store.paths(segment)]
    aside = f"{path}.{os.getpid()}.part"
    try:
        schema = _common_schema(files)
        count = (_write_parquet if kind == ".parquet" else _write_csv)(aside, schema, _batches(files, schema))
        os.rename(aside, path)
    except FileNotFoundError as error:
        if error.filename and str(error.filename).startswith(aside):
            raise
        raise EnvironmentFails(
            f"a running pipeline has replaced this version of the state in the meantime ({error}); try again"
        ) from error
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise StateDamaged(store.path, f"has a segment that cannot be read ({error})") from error
    finally:
        if os.path.exists(aside):
            os.unlink(aside)
    return count


def _common_schema(files: Sequence[str]) -> pa.Schema:
    """Of all of them: a segment from before a step got a column lacks it. What Spark writes has no zone."""
    schemas = [_in_utc(pq.read_schema(file).remove_metadata()) for file in files]
    return pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])


def _in_utc(schema: pa.Schema) -> pa.Schema:
    """Timestamps that Spark stores in twelve bytes, which are read without their zone, as the moments that they are."""
    moment = pa.timestamp("us", "UTC")
    return pa.schema(
        [field.with_type(moment) if field.type == pa.timestamp("ns") else field for field in schema]
    )


def _batches(files: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for file in files:
        with pq.ParquetFile(
            file, page_checksum_verification=True, coerce_int96_timestamp_unit="us"
        ) as opened:
            for batch in opened.iter_batches():
                columns = [
                    batch.column(field.name).cast(field.type)
                    if field.name in batch.schema.names
                    else pa.nulls(len(batch), field.type)
                    for field in schema
                ]
                yield pa.record_batch(columns, schema=schema)


def _write_parquet(path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
    count = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += len(batch)
    return count


def _write_csv(path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
    """Bytes as base64, what is nested as JSON."""
    import pyarrow.csv as arrow_csv

    texts: dict[str, Callable[[Any], str]] = {
        field.name: _base64 if _is_bytes(field.type) else _as_json
        for field in schema
        if _is_bytes(field.type) or pa.types.is_nested(field.type)
    }
    shown = pa.schema([(field.name, pa.string() if field.name in texts else field.type) for field in schema])
    count = 0
    with arrow_csv.CSVWriter(path, shown) as writer:
        for batch in batches:
            columns = [
                pa.array(
                    [None if value is None else texts[name](value) for value in column.to_pylist()],
                    pa.string(),
                )
                if name in texts
                else column
                for name, column in zip(schema.names, batch.columns, strict=True)
            ]
            writer.write_batch(pa.record_batch(columns, schema=shown))
            count += len(batch)
    return count


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _as_json(value: Any) -> str:
    return json.dumps(
        value,
        ensure_ascii=False,
        default=lambda each: _base64(each) if isinstance(each, bytes) else str(each),
    )
