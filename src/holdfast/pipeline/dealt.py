"""Rows that may be more than memory should hold: together at first, then dealt out into files.

    rows = DealtRows(schema, directory, bucket_of)
    rows.add(table)
    rows.spill()                  # from here on in files, a bucket each
    for bucket in rows.buckets(): # all at once, or bucket by bucket

Rows for which `bucket_of` says the same number come back in the same table, in the order in which they were added. The
buckets of two such heaps belong together when both are in memory or both in files. When to spill is the owner's to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BUCKETS: Final = 64
"""How many files at most; and by so much less is in memory when they are read."""

Numbers = npt.NDArray[np.int64]


class DealtRows:
    def __init__(self, schema: pa.Schema, directory: str, bucket_of: Callable[[pa.Table], Numbers]) -> None:
        self._schema = schema
        self._directory = directory
        self._bucket_of = bucket_of
        self._held: list[pa.Table] = []
        self._files: dict[int, tuple[pa.OSFile, pa.RecordBatchFileWriter]] | None = None

    @property
    def is_spilled(self) -> bool:
        return self._files is not None

    def add(self, rows: pa.Table) -> None:
        if self._files is None:
            self._held.append(rows)
        else:
            self._deal(rows)

    def spill(self) -> None:
        """Everything to files, from here on."""
        if self._files is None:
            os.makedirs(self._directory, exist_ok=True)
            self._files = {}
            for rows in self._held:
                self._deal(rows)
            self._held = []

    def _deal(self, rows: pa.Table) -> None:
        assert self._files is not None
        numbers = self._bucket_of(rows)
        order = np.argsort(numbers, kind="stable")
        rows = rows.take(pa.array(order))
        ends = np.searchsorted(numbers[order], np.arange(BUCKETS + 1))
        for bucket in range(BUCKETS):
            first, behind = int(ends[bucket]), int(ends[bucket + 1])
            if first == behind:
                continue
            if bucket not in self._files:
                file = pa.OSFile(self._path(bucket), "wb")
                self._files[bucket] = file, pa.ipc.new_file(file, self._schema)
            self._files[bucket][1].write_table(rows.slice(first, behind - first))

    def _path(self, bucket: int) -> str:
        return os.path.join(self._directory, f"{bucket}.arrow")

    def buckets(self) -> Iterator[pa.Table]:
        """All there is, once: what was given out is forgotten, and its files are removed."""
        empty = self._schema.empty_table()
        if self._files is None:
            held, self._held = self._held, []
            yield pa.concat_tables([empty, *held])
            return
        for file, writer in self._files.values():
            writer.close()
            file.close()
        for bucket in range(BUCKETS):
            if bucket not in self._files:
                yield empty
                continue
            with pa.OSFile(self._path(bucket), "rb") as file:
                yield pa.ipc.open_file(file).read_all()
            os.unlink(self._path(bucket))
