"""The files `holdfast export` writes: Parquet and Arrow keep every byte as it is, CSV and JSON lines are for reading.

In text a key, value or header is shown as it stands when it is UTF-8, else as base64, and a field beside it says
which: a null has no encoding, an empty text has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from json.encoder import encode_basestring as quoted
from typing import Any, BinaryIO, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from holdfast.cli.output import bytes_as_json
from holdfast.reader import SCHEMA

ROW_GROUP_BYTES: Final = 64 << 20
"""Of Parquet's row groups, in memory: what readers like, and little enough to hold."""
ROW_GROUP_ROWS: Final = 1 << 20
TIMESTAMP_TYPES: Final = ("CreateTime", "LogAppendTime")


class Writer(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def finish(self) -> None:
        """Write what makes the file whole; it stays open."""


class ParquetFile:
    def __init__(self, file: BinaryIO) -> None:
        from pyarrow import parquet

        self._writer = parquet.ParquetWriter(
            file, SCHEMA(), compression="zstd", use_dictionary=["topic", "partition", "timestampType"]
        )
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._bytes >= ROW_GROUP_BYTES or self._rows >= ROW_GROUP_ROWS:
            self._write_group()

    def finish(self) -> None:
        if self._batches:
            self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        self._writer.write_table(
            pa.Table.from_batches(self._batches, SCHEMA()), row_group_size=max(1, self._rows)
        )
        self._batches.clear()
        self._bytes = self._rows = 0


class ArrowFile:
    def __init__(self, file: BinaryIO) -> None:
        self._writer = pa.ipc.new_file(file, SCHEMA())

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def finish(self) -> None:
        self._writer.close()


class JsonLines:
    """The documents of `holdfast consume --output json`, without the leader's epoch.

    Put together as text, with the encoder used for strings alone: several times as fast as encoding documents.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, batch: pa.RecordBatch) -> None:
        topic = quoted(batch.column("topic")[0].as_py())
        head = f'{{"topic":{topic},"partition":{batch.column("partition")[0].as_py()},"offset":'
        types = [f',"timestamp_type":"{name}","timestamp_ms":' for name in TIMESTAMP_TYPES]
        columns = [
            batch.column("offset").to_pylist(),
            batch.column("timestampType").to_pylist(),
            pc.divide(batch.column("timestamp").cast(pa.int64()), 1000).to_pylist(),
            _json_fields("key", batch.column("key")),
            _json_fields("value", batch.column("value")),
            _json_headers(batch.column("headers")),
        ]
        lines = [
            f"{head}{offset}{types[kind]}{timestamp_ms}{key}{value}{headers}\n"
            for offset, kind, timestamp_ms, key, value, headers in zip(*columns, strict=True)
        ]
        self._file.write("".join(lines).encode())

    def finish(self) -> None:
        self._file.flush()


def _json_fields(name: str, column: pa.Array) -> Iterator[str]:
    """A column of bytes as two fields each, the text and how it was made."""
    head, middle = f',"{name}":', f',"{name}_encoding":'
    null = f"{head}null{middle}null"
    tails = {"utf-8": f'{middle}"utf-8"', "base64": f'{middle}"base64"'}
    text, encodings = _text(column)
    for shown, encoding in zip(text.to_pylist(), encodings.to_pylist(), strict=True):
        yield null if shown is None else f"{head}{quoted(shown)}{tails[encoding]}"


def _json_headers(column: pa.Array) -> Iterable[str]:
    if not len(column.flatten()):
        return repeat(',"headers":[]}', len(column))
    return (
        f',"headers":{json.dumps([_header(each) for each in headers], ensure_ascii=False, separators=(",", ":"))}}}'
        for headers in column.to_pylist()
    )


class CsvFile:
    def __init__(self, file: BinaryIO) -> None:
        from pyarrow import csv

        fields = [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("timestamp_type", pa.string()),
            ("key", pa.string()),
            ("key_encoding", pa.string()),
            ("value", pa.string()),
            ("value_encoding", pa.string()),
            ("headers", pa.string()),
        ]
        self._schema = pa.schema(fields)
        self._writer = csv.CSVWriter(file, self._schema)

    def write(self, batch: pa.RecordBatch) -> None:
        types = pa.array(TIMESTAMP_TYPES).take(batch.column("timestampType"))
        arrays = [batch.column(name) for name in ("topic", "partition", "offset", "timestamp")]
        arrays += [types, *_text(batch.column("key")), *_text(batch.column("value"))]
        arrays.append(_headers_text(batch.column("headers")))
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def finish(self) -> None:
        self._writer.close()


def _text(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """A column of bytes as text, and how each was made text."""
    try:
        text = column.cast(pa.string())
    except pa.ArrowInvalid:
        pairs = [bytes_as_json(data) for data in column.to_pylist()]
        return pa.array([text for text, _ in pairs], pa.string()), pa.array(
            [encoding for _, encoding in pairs], pa.string()
        )
    encodings = pc.if_else(column.is_valid(), "utf-8", pa.scalar(None, pa.string()))
    return text, encodings


def _headers_text(column: pa.Array) -> pa.Array:
    if not len(column.flatten()):
        return pa.nulls(len(column), pa.string())
    texts = [
        json.dumps([_header(header) for header in headers], ensure_ascii=False) if headers else None
        for headers in column.to_pylist()
    ]
    return pa.array(texts, pa.string())


def _header(header: dict[str, Any]) -> dict[str, str | None]:
    text, encoding = bytes_as_json(header["value"])
    return {"key": header["key"], "value": text, "value_encoding": encoding}


WRITERS: Final[dict[str, Callable[[BinaryIO], Writer]]] = {
    "parquet": ParquetFile,
    "jsonl": JsonLines,
    "csv": CsvFile,
    "arrow": ArrowFile,
}
