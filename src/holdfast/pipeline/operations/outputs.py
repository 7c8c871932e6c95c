"""What a pipeline's sinks hold, read back without Spark: rows with their lineage, batch by batch.

Readers see what everybody sees: whole batches of Parquet, committed versions of Delta, one snapshot of a table,
committed records of a topic. Values come as bytes, in the form in which they are compared (`multisets.as_bytes`).
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.core.sql import LINEAGE, PLACE
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.operations.multisets import as_bytes
from holdfast.pipeline.sinks.base import SinkError

if TYPE_CHECKING:
    from holdfast.pipeline.sinks.parquet import ParquetStore

BATCH_ROWS: Final = 65_536
SOURCE: Final = re.compile(rb"(?s)(?P<topic>.+):(?P<partition>\d+)@(?P<offset>\d+)#(?P<index>\d+)")
"""The header `hf-source` of a record that a pipeline wrote."""
NUMBER: Final = f"\ue000{os.urandom(8).hex()}:"
"""Before the text of a number while its object is turned over: no value has it."""
COPIED_BYTES: Final = 8 * 1024 * 1024
"""Of a table's text, turned into rows at once."""


@dataclass(frozen=True)
class Rows:
    """Some rows of an output."""

    topics: pa.Array
    partitions: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    indexes: npt.NDArray[np.int64]
    content: pa.Table
    """Columns of bytes, `columns` of them, without the lineage."""
    gone: npt.NDArray[np.bool_] | None = None
    """Records without a value: they take a key back."""


class Output(Protocol):
    """One sink's rows."""

    columns: tuple[str, ...]
    """All that any row has."""
    note: str
    """What of it cannot be read any more; empty where all of it can."""

    def rows(self) -> Iterator[Rows]:
        """From the first to the last, in no order."""


def open_output(definition: PipelineDefinition, sink: SinkDefinition, settings: Mapping[str, str]) -> Output:
    """Of a definition with its secrets expanded; `settings` are those of its source."""
    match sink:
        case ParquetSink():
            from holdfast.pipeline.sinks.parquet import ParquetSinkWriter

            return ParquetOutput(ParquetSinkWriter(sink, definition.name, definition.directory).store)
        case DeltaSink():
            from holdfast.pipeline.sinks.delta import DeltaSinkWriter

            return DeltaOutput(DeltaSinkWriter(sink, definition.name, definition.directory))
        case PostgresSink():
            return PostgresOutput(sink)
        case KafkaSink():
            return KafkaOutput(sink, settings)


def _of_struct(lineage: pa.Array, content: pa.Table) -> Rows:
    topic, partition, offset, index = (pc.struct_field(lineage, name) for name in PLACE)
    if pa.types.is_dictionary(topic.type):
        topic = topic.dictionary_decode()
    return Rows(topic, _numbers(partition), _numbers(offset), _numbers(index), content)


def _numbers(values: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(values.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)


def _content(
    batch: pa.RecordBatch | pa.Table, columns: Sequence[str], constants: Mapping[str, str | None]
) -> pa.Table:
    present = set(batch.schema.names)
    found: dict[str, pa.Array] = {}
    for name in columns:
        if name in present:
            found[name] = as_bytes(batch.column(name))
        else:
            value = constants.get(name)
            scalar = pa.scalar(None if value is None else value.encode(), pa.large_binary())
            found[name] = pa.repeat(scalar, batch.num_rows)
    if not found:
        return pa.table({"": pa.nulls(batch.num_rows)}).select([])
    return pa.table(found)


class ParquetOutput:
    """Every batch that is committed, those from before a reset too: readers see them."""

    note = ""

    def __init__(self, store: ParquetStore) -> None:
        import pyarrow.parquet as pq

        self._files = [path for number in store.numbers() for path in _data_files(store.path, number)]
        names: dict[str, None] = {}
        for path in self._files:
            for name in (*pq.read_schema(path).names, *_folders(store.path, path)):
                names.setdefault(name)
        self._path = store.path
        self.columns = tuple(name for name in names if name != LINEAGE)

    def rows(self) -> Iterator[Rows]:
        import pyarrow.parquet as pq

        for path in self._files:
            constants = _folders(self._path, path)
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    yield _of_struct(batch.column(LINEAGE), _content(batch, self.columns, constants))


def _data_files(root: str, number: int) -> list[str]:
    from holdfast.pipeline.sinks.files import files_below
    from holdfast.pipeline.sinks.parquet import batch_directory

    directory = os.path.join(root, batch_directory(number))
    return sorted(
        os.path.join(directory, path)
        for path in files_below(directory)
        if not os.path.basename(path).startswith("_")
    )


def _folders(root: str, path: str) -> dict[str, str | None]:
    """What the directories above a file say of its rows; the first is that of the batch."""
    from holdfast.pipeline.sinks.writing import NO_VALUE

    found: dict[str, str | None] = {}
    for folder in os.path.relpath(os.path.dirname(path), root).split(os.sep)[1:]:
        name, _, value = folder.partition("=")
        found[unquote(name)] = None if value == NO_VALUE else unquote(value)
    return found


class DeltaOutput:
    """The newest version of a table."""

    note = ""

    def __init__(self, writer: Any) -> None:
        from holdfast.pipeline.sinks.writing import CONTENT

        self._table = writer.ledger.table()
        names = [] if self._table is None else [field.name for field in self._table.schema().fields]
        self.columns = tuple(name for name in names if name not in (LINEAGE, CONTENT))

    def rows(self) -> Iterator[Rows]:
        if self._table is None:
            return
        for batch in self._table.to_pyarrow_dataset().to_batches(batch_size=BATCH_ROWS):
            if batch.num_rows:
                yield _of_struct(batch.column(LINEAGE), _content(batch, self.columns, {}))


class PostgresOutput:
    """One snapshot of a table, copied out as text."""

    note = ""

    def __init__(self, sink: PostgresSink) -> None:
        from holdfast.pipeline.sinks.postgres_sql import CONTENT, LINEAGE_COLUMNS

        self._sink = sink
        with self._connected() as connection:
            found = connection.execute(
                "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
                "ORDER BY ordinal_position",
                (sink.schema_name, sink.table),
            ).fetchall()
        self._names = [str(name) for (name,) in found]
        self.columns = tuple(name for name in self._names if name not in (*LINEAGE_COLUMNS, CONTENT))

    def _connected(self) -> Any:
        import psycopg

        try:
            return psycopg.connect(self._sink.url, connect_timeout=10, application_name="holdfast compare")
        except psycopg.Error as error:
            raise SinkError(
                f"sink {self._sink.name!r}: PostgreSQL cannot be reached: {str(error).strip()}"
            ) from error

    def rows(self) -> Iterator[Rows]:
        from psycopg import sql

        if not self._names:
            return
        listed = sql.SQL(", ").join(sql.Identifier(name) for name in self._names)
        statement = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT csv)").format(
            listed, sql.Identifier(self._sink.schema_name, self._sink.table)
        )
        with self._connected() as connection, connection.cursor() as cursor:
            # Two databases may print the same moment, or the same number, in their own way.
            connection.execute("SET TIME ZONE 'UTC'")
            connection.execute("SET extra_float_digits = 1")
            with cursor.copy(statement) as copy:
                held = bytearray()
                for chunk in copy:
                    held += chunk  # one row each, whatever line ends are in it
                    if len(held) > COPIED_BYTES:
                        yield self._parsed(bytes(held))
                        held.clear()
                if held:
                    yield self._parsed(bytes(held))

    def _parsed(self, text: bytes) -> Rows:
        import pyarrow.csv

        table = pyarrow.csv.read_csv(
            io.BytesIO(text),
            pyarrow.csv.ReadOptions(column_names=self._names, block_size=max(len(text), 1)),
            pyarrow.csv.ParseOptions(newlines_in_values=True),
            pyarrow.csv.ConvertOptions(
                column_types={name: pa.string() for name in self._names},
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        topic, *numbers = (
            table.column(f"_hf_{name}").combine_chunks()
            if f"_hf_{name}" in self._names
            else pa.nulls(table.num_rows, pa.string())
            for name in PLACE
        )
        partitions, offsets, indexes = (
            _numbers(pc.fill_null(column.cast(pa.int64()), -1)) for column in numbers
        )
        return Rows(topic, partitions, offsets, indexes, _content(table, self.columns, {}))


class KafkaOutput:
    """The committed records of a topic that say where they came from."""

    def __init__(self, sink: KafkaSink, settings: Mapping[str, str]) -> None:
        from holdfast.client.settings import shared_settings
        from holdfast.reader.cluster import Cluster
        from holdfast.reader.model import TopicPartition

        own = dict(sink.settings)
        self._sink = sink
        self._settings: dict[str, str] = (
            {**own, "bootstrap.servers": sink.bootstrap}
            if sink.bootstrap is not None
            else {**{name: str(value) for name, value in shared_settings(settings).items()}, **own}
        )
        self.columns = ("key", "value", *(f"header {name}" for name in sink.headers))
        with Cluster(self._settings) as cluster:
            info = cluster.topics([sink.topic])[sink.topic]
            places = [TopicPartition(sink.topic, number) for number in info.partitions]
            gone = sum(answer.offset for answer in cluster.offsets(places, "earliest").values())
        self.note = f"the topic {sink.topic} has dropped its first {gone:,} offsets" if gone else ""

    def rows(self) -> Iterator[Rows]:
        from holdfast.reader.topic_reader import read

        settings = {name: value for name, value in self._settings.items() if name != "bootstrap.servers"}
        for batch in read(self._settings["bootstrap.servers"], self._sink.topic, settings=settings):
            found = self._of_batch(batch)
            if found is not None:
                yield found

    def _of_batch(self, batch: pa.RecordBatch) -> Rows | None:
        lineage: list[tuple[str, int, int, int]] = []
        kept: list[tuple[bytes | None, bytes | None, dict[str, bytes | None]]] = []
        for row in batch.select(["key", "value", "headers"]).to_pylist():
            headers = {header["key"]: header["value"] for header in row["headers"] or ()}
            match = SOURCE.fullmatch(headers.get("hf-source") or b"")
            if match is not None:
                partition, offset, index = (int(match[name]) for name in ("partition", "offset", "index"))
                lineage.append((match["topic"].decode(), partition, offset, index))
                kept.append((row["key"], row["value"], headers))
        if not kept:
            return None
        content = {
            "key": [key for key, _, _ in kept],
            "value": [plain_json(value) for _, value, _ in kept],
            **{
                f"header {name}": [headers.get(name) for _, _, headers in kept] for name in self._sink.headers
            },
        }
        partitions, offsets, indexes = (
            np.array([place[at] for place in lineage], np.int64) for at in (1, 2, 3)
        )
        return Rows(
            pa.array([place[0] for place in lineage], pa.string()),
            partitions,
            offsets,
            indexes,
            pa.table({name: pa.array(values, pa.large_binary()) for name, values in content.items()}),
            np.array([value is None for _, value, _ in kept]),
        )


def plain_json(value: bytes | None, left_out: Sequence[str] = ()) -> bytes | None:
    """A JSON object with its names in order, since their order means nothing, and without these fields; anything else
    as it is. Numbers stay as they are written: as floats, those with many digits would be equal that are not."""
    if value is None or value[:1] != b"{":
        return value
    try:
        document = json.loads(value, parse_float=lambda text: f"{NUMBER}{text}")
    except ValueError:
        return value
    kept = {name: each for name, each in document.items() if name not in left_out}
    text = json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return re.sub(f'"{NUMBER}([^"]*)"', r"\1", text).encode()
