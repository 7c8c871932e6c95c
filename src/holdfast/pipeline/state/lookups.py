"""Lookups: columns of a reference table, whose version is pinned for each batch.

    <home>/lookups/<step>/<version>.parquet    what was read, in one form: see `tables`
    <home>/lookups/<step>/pinned.json          the newest version, when the table was looked at, and its mark

A batch names its versions in its plan and in the ledger. Whoever repeats it joins the same rows, whatever became of the
table: a snapshot stays while an entry or a plan names it. The version is Delta's own number, or a digest of the
content: a table that was read again and is the same is the same version.

A row that the table has nothing for is kept with nulls; for other wishes it carries a flag, and an ordinary rule under
the step's name (`rule_of`) sends it where the definition says.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.atomic import read_named
from holdfast.pipeline.core.failures import PipelineError, StepError
from holdfast.pipeline.core.sql import quoted
from holdfast.pipeline.definition.model import Expect, Filter, Lookup, PipelineDefinition
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import to_text
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.state.tables import LookupUnavailable, Mark, Table, shown

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

PINNED: Final = "pinned.json"
SUFFIX: Final = ".parquet"
_WHOLE: Final = ("tinyint", "smallint", "int", "bigint")
_TEXTUAL: Final = ("string", *_WHOLE)
"""Types whose values are equal exactly when their texts are."""


class LookupGone(PipelineError):
    """The version of a table that a batch was taken with is not there any more."""


# ---------------------------------------------------------------------------- versions


def pin(step: Lookup, now_ms: int, home: str, *, directory: str = ".", disk: Disk | None = None) -> str:
    """The version of the table that a batch at `now_ms` uses; the table is read when the last look is too old."""
    disk = disk or Disk()
    table = Table(step, directory)
    folder = _folder(home, step.name)
    selection = _digest(
        to_text({"table": shown(step.table), "query": step.query, "columns": table.needed}).encode()
    )
    last = _last_pin(folder)
    if last is not None and (last["selection"] != selection or not _is_there(folder, last["version"])):
        last = None
    if last is not None and 0 <= now_ms - last["looked_ms"] < parse_duration_ms(step.refresh):
        return str(last["version"])
    mark = table.mark()
    if last is not None and mark.text and mark.text == last["mark"]:
        version = str(last["version"])
    else:
        rows, mark = table.read()
        if last is not None and not rows.num_rows and _rows(os.path.join(folder, last["version"] + SUFFIX)):
            raise LookupUnavailable(
                f"step {step.name!r}: {table.shown} has no rows any more, and had some: no row would find anything. "
                f"Bring them back; if that is meant, remove {os.path.join(folder, PINNED)}"
            )
        version = _keep(folder, rows, mark, selection, disk)
    content = {"version": version, "looked_ms": now_ms, "mark": mark.text, "selection": selection}
    disk.replace(os.path.join(folder, PINNED), to_text(content).encode())
    return version


def forget(home: str, step: str, named: Collection[str]) -> None:
    """Remove the snapshots that no entry and no plan names; the newest stays."""
    folder = _folder(home, step)
    last = _last_pin(folder)
    kept = {*named, last["version"]} if last else set(named)
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name != PINNED and (not name.endswith(SUFFIX) or name.removesuffix(SUFFIX) not in kept):
            Disk().remove(os.path.join(folder, name))


def _keep(folder: str, rows: pa.Table, mark: Mark, selection: str, disk: Disk) -> str:
    buffer = io.BytesIO()
    pq.write_table(rows.replace_schema_metadata(None), buffer, compression="zstd")
    content = buffer.getvalue()
    identity = _digest(f"{mark.text} {selection}".encode())[:8]
    version = f"{mark.version}-{identity}" if mark.version else _digest(content)
    if not _is_there(folder, version):
        disk.create_directory(folder)
        disk.replace(os.path.join(folder, version + SUFFIX), content)
    return version


def _last_pin(folder: str) -> dict[str, Any] | None:
    """Nothing when there is none that can be read: then the table is read."""
    try:
        found: dict[str, Any] = json.loads(read_named(os.path.join(folder, PINNED)))
        return found if {"version", "looked_ms", "mark", "selection"} <= found.keys() else None
    except (FileNotFoundError, ValueError):
        return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _folder(home: str, step: str) -> str:
    return os.path.join(home, "lookups", step)


def _is_there(folder: str, version: str) -> bool:
    return _rows(os.path.join(folder, version + SUFFIX)) is not None


def _rows(path: str) -> int | None:
    """Of a snapshot; nothing when there is none that can be read."""
    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException):
        return None


# ---------------------------------------------------------------------------- rows


def found_column(step: Lookup) -> str:
    """The flag of rows that the table has something for; there unless `missing` is `null`."""
    return f"_found_{step.name}"


def rule_of(step: Lookup) -> Expect | Filter | None:
    """What becomes of rows that the table has nothing for, as a rule over the joined rows; None: they go on."""
    flag = quoted(found_column(step))
    match step.missing:
        case "null":
            return None
        case "filter":
            return Filter(step.name, flag)
        case "quarantine":
            return Expect(step.name, flag, "quarantine")
        case "fail":
            return Expect(step.name, flag, "fail")


def added_columns(step: Lookup, directory: str = ".") -> StructType:
    """The columns rows get, by the table as it is now; `StepError` when it has none such."""
    return _added(step, Table(step, directory).schema())


def join(
    frame: DataFrame, step: Lookup, version: str, home: str, *, expected: StructType | None = None
) -> DataFrame:
    """Every row once, with the table's columns of this version, and the flag where `missing` needs it.

    `expected`: the columns that following steps and sinks were checked with; a table that has others now is refused.
    """
    from pyspark.sql import functions as f

    path = _snapshot(step, version, home)
    schema = pq.read_schema(path)
    added = _added(step, schema)
    if expected is not None and [(each.name, each.dataType) for each in added] != [
        (each.name, each.dataType) for each in expected
    ]:
        raise StepError(
            step.name,
            f"its columns were {expected.simpleString()} when the pipeline started, and are {added.simpleString()} in "
            "the table now: start the pipeline again, and see whether its sinks can take them",
        )
    check_rows(step, frame.schema, _spark_schema(schema))
    table = frame.sparkSession.read.schema(_spark_schema(schema)).parquet(path)
    keys = [f"_key_{number}_{step.name}" for number in range(len(step.on))]
    flag = [f.lit(True).alias(found_column(step))] if step.missing != "null" else []
    right = table.select(
        *(f.col(quoted(name)).alias(key) for key, name in zip(keys, step.on.values(), strict=True)),
        *(f.col(quoted(name)) for name in step.columns),
        *flag,
    )
    condition = f.lit(True)
    for key, name in zip(keys, step.on, strict=True):
        ours, theirs = _alike(
            frame[quoted(name)], frame.schema[name].dataType, right[quoted(key)], right.schema[key].dataType
        )
        condition = condition & (ours == theirs)
    rows = frame.join(f.broadcast(right), condition, "left").drop(*keys)
    if step.missing == "null":
        return rows
    name = found_column(step)
    return rows.withColumn(name, f.coalesce(f.col(quoted(name)), f.lit(False)))


def check_rows(step: Lookup, rows: StructType, table: StructType) -> None:
    """Whether rows of this schema can be joined; `StepError` when not."""
    there = {name.lower() for name in rows.names}
    for name in step.columns:
        if name.lower() in there:
            raise StepError(
                step.name, f"the rows have a column {name!r} already: rename one of the two before"
            )
        if name.startswith("_"):
            raise StepError(step.name, f"{name!r}: names that begin with _ are the pipeline's own; rename it")
    for ours, theirs in step.on.items():
        if ours not in rows.names:
            raise StepError(step.name, f"the rows have no column {ours!r}; they have {', '.join(rows.names)}")
        kinds = rows[ours].dataType.simpleString(), table[theirs].dataType.simpleString()
        families = (_TEXTUAL, ("binary", "string"))
        if kinds[0] != kinds[1] and not any(set(kinds) <= set(family) for family in families):
            raise StepError(
                step.name,
                f"column {ours!r} is {kinds[0]} and the table's {theirs!r} is {kinds[1]}: cast one of them",
            )


def _alike(ours: Column, kind: DataType, theirs: Column, other: DataType) -> tuple[Column, Column]:
    """Both in a type in which values that differ stay different."""
    kinds = kind.simpleString(), other.simpleString()
    if set(kinds) == {"binary", "string"}:
        return ours.cast("binary"), theirs.cast("binary")
    if kinds[0] != kinds[1] and "string" in kinds:
        return ours.cast("string"), theirs.cast("string")
    return ours, theirs


def _added(step: Lookup, schema: pa.Schema) -> StructType:
    from pyspark.sql.types import StructField, StructType

    table = _spark_schema(schema)
    return StructType([StructField(name, table[name].dataType, True) for name in step.columns])


def _spark_schema(schema: pa.Schema) -> StructType:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def _snapshot(step: Lookup, version: str, home: str) -> str:
    folder = _folder(home, step.name)
    path = os.path.join(folder, version + SUFFIX)
    if _rows(path) is None:
        raise LookupGone(
            f"step {step.name!r}: version {version} of {step.name!r} cannot be found in {folder}, and a batch that was "
            "taken with it cannot be repeated alike. Bring the file back from a copy of the home; or let sinks that "
            "are behind start anew (`holdfast pipeline reset --sink`)"
        )
    return path


# ---------------------------------------------------------------------------- a run's tables


class Lookups:
    """The reference tables of one pipeline: which version of each a batch sees.

    A version is pinned with the plan, and stands in plan and ledger: a batch that is recomputed sees the table it saw
    first. Versions that neither names any more are removed.
    """

    def __init__(self, definition: PipelineDefinition, home: str = "") -> None:
        """Without a home, for the schemas alone."""
        self._home = home
        self._directory = definition.directory
        self._steps = [step for step in definition.steps if isinstance(step, Lookup)]
        self._added: dict[str, StructType] = {}

    def schema_after(self, rows: StructType, step: Lookup) -> StructType:
        """Of the joined rows, with the flag where the step has a rule; `StepError` when they cannot be joined."""
        from pyspark.sql.types import BooleanType, StructField, StructType

        table = Table(step, self._directory).schema()
        check_rows(step, rows, _spark_schema(table))
        self._added[step.name] = added = _added(step, table)
        flags = [StructField(name, BooleanType()) for name in self.flags(step)]
        return StructType([*rows.fields, *added.fields, *flags])

    def flags(self, step: Lookup) -> tuple[str, ...]:
        """The column that the step's rule looks at, if it has one."""
        return () if step.missing == "null" else (found_column(step),)

    def join(self, frame: DataFrame, step: Lookup, version: str) -> DataFrame:
        """The rows with the table's columns of this version."""
        return join(frame, step, version, self._home, expected=self._added[step.name])

    def pinned(self, known: Mapping[str, str], now_ms: int) -> dict[str, str]:
        """A version for every lookup: the known one, else the one to use now."""
        return {
            step.name: known.get(step.name) or pin(step, now_ms, self._home, directory=self._directory)
            for step in self._steps
        }

    def forget(self, entries: Iterable[Entry]) -> None:
        """Remove the versions that no ledger names; between two batches."""
        kept = list(entries)
        for step in self._steps:
            named = {entry.lookups[step.name] for entry in kept if step.name in entry.lookups}
            forget(self._home, step.name, named)
