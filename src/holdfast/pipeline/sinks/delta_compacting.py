"""Merging the small files of a Delta table, in one commit that changes no data.

Only files the sink wrote itself are touched, known by their names, and only whole ones: a table in which somebody else
deletes rows by deletion vectors is left alone. New files are flushed before the commit that names them; old ones stay
for readers of older versions until a vacuum of the table. The ledger is not touched, so the pipeline may be running.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from holdfast.pipeline.definition.model import DeltaSink, PipelineDefinition
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.sinks.base import SinkError
from holdfast.pipeline.sinks.compacting import SMALL, Compacted, merge_files
from holdfast.pipeline.sinks.delta import COMMIT_TRIES, DeltaSinkWriter
from holdfast.pipeline.sinks.files import explained
from holdfast.pipeline.sinks.writing import FileSet, WrittenFile, lineage_of

OURS = re.compile(r"part-[0-9a-f]{32}\.parquet")


def compact_delta(definition: PipelineDefinition, sink: DeltaSink) -> Compacted | None:
    """Merge small files, partition by partition; None when there is nothing to merge."""
    writer = DeltaSinkWriter(sink, definition.name, definition.directory)
    table = writer.ledger.table()
    if table is None:
        return None
    if "deletionVectors" in (table.protocol().reader_features or ()):
        raise SinkError(f"sink {sink.name!r}: {writer.ledger.uri} has deletion vectors; merge it with Spark")
    old: list[WrittenFile] = []
    new: list[WrittenFile] = []
    with explained(sink.name, writer.ledger.uri):
        for group in small_files(table, sink):
            old += group
            new += _merged(writer, sink, group)
        if not new:
            return None
        writer.ledger.disk.flush_directory(writer.ledger.uri)
    _commit(writer, sink, old, new)
    return Compacted(sink.name, None, len(old), len(new), sum(file.rows for file in new))


def small_files(table: DeltaTable, sink: DeltaSink) -> Iterator[list[WrittenFile]]:
    """Groups of small files of one partition, two or more, as much as fits one file."""
    actions: Any = pa.table(table.get_add_actions(flatten=True))
    values = [_texts(actions.column(f"partition.{name}")) for name in sink.partition_by]
    sizes = actions.column("size_bytes").to_pylist()
    groups: dict[tuple[str | None, ...], list[WrittenFile]] = {}
    for at, path in enumerate(actions.column("path").to_pylist()):
        if OURS.fullmatch(path) and sizes[at] < SMALL * sink.file_bytes:
            key = tuple(column[at] for column in values)
            groups.setdefault(key, []).append(WrittenFile(path, 0, sizes[at], 0, key))
    for files in groups.values():
        if len(files) > 1:
            yield files


def _texts(column: Any) -> list[str | None]:
    """Values of a partition column as Delta writes them."""
    texts = pc.cast(column, pa.string()).to_pylist()
    if pa.types.is_timestamp(column.type):
        return [None if text is None else text.removesuffix("Z") for text in texts]
    return list(texts)


def _merged(writer: DeltaSinkWriter, sink: DeltaSink, group: list[WrittenFile]) -> list[WrittenFile]:
    ledger = writer.ledger
    files = FileSet(ledger.uri, (), sink.file_bytes, disk=ledger.disk)
    paths = [f"{ledger.uri}/{file.path}" for file in group]
    written = [replace(file, partition=group[0].partition) for file in merge_files(paths, files)]
    expected = [lineage_of(path, ledger.disk) for path in paths]
    rows, digest = sum(each[0] for each in expected), sum(each[1] for each in expected) & MASK
    if (sum(f.rows for f in written), sum(f.digest for f in written) & MASK) != (rows, digest):
        writer.remove(written)
        raise SinkError(
            f"sink {sink.name!r}: merged files do not have the rows they were made of; none was used"
        )
    return written


def _commit(writer: DeltaSinkWriter, sink: DeltaSink, old: list[WrittenFile], new: list[WrittenFile]) -> None:
    now_ms = time.time_ns() // 1_000_000
    actions: list[Any] = [replace(writer.named(file), data_change=False) for file in new]
    actions += [
        RemoveAction(
            file.path, False, now_ms, file.bytes, dict(zip(sink.partition_by, file.partition, strict=True))
        )
        for file in old
    ]
    wanted = {file.path for file in old}
    for _ in range(COMMIT_TRIES):
        table = writer.ledger.table()
        there = set() if table is None else {path.rpartition("/")[2] for path in table.file_uris()}
        if table is None or not wanted <= there:
            break
        if writer.commit_actions(table, actions, [], {}):
            return
    writer.remove(new)
    raise SinkError(
        f"sink {sink.name!r}: {writer.ledger.uri} was changed by somebody else meanwhile; try again"
    )
