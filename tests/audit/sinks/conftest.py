"""What tests of the audit's readers share: a topic of one partition, and sinks that hold ten rows of each batch."""

from __future__ import annotations

import os
import pwd
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from tests.support.audit_sinks import Ledger, rows_of

from holdfast.audit.lineage import LineageBatch
from holdfast.audit.model import Finding
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.pipeline.definition.model import PipelineDefinition, SinkDefinition, Source
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

PLACE = Place("orders", uuid.UUID(int=7), 0)
ROWS = 10
EVERYTHING = SinkScope({})


@dataclass
class Shop:
    """A pipeline named `shop`, one sink of it, and its ledger."""

    sink: str = "out"
    place: Place = PLACE
    everything: SinkScope = EVERYTHING
    ledger: Ledger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger("shop", self.sink)

    def definition(self, *sinks: SinkDefinition) -> PipelineDefinition:
        return PipelineDefinition("shop", Source(topics=("orders",)), sinks=sinks)

    def opening(self) -> Entry:
        return self.ledger.opening({self.place: 0})

    def entry(self, number: int, rows: int = ROWS) -> Entry:
        """Of the batch that takes ten offsets from ten times this number on."""
        return self.ledger.entry({self.place: (number * ROWS, number * ROWS + ROWS)}, rows=rows)

    def rows(self, number: int, leaving_out: Sequence[int] = ()) -> pa.Table:
        """Of that batch: `id` counts offsets, `country` alternates."""
        offsets = [each for each in range(number * ROWS, number * ROWS + ROWS) if each not in leaving_out]
        lineage = [("orders", 0, each, 0) for each in offsets]
        return rows_of(lineage, {"id": offsets, "country": [("nl", "be")[each % 2] for each in offsets]})

    def offsets(self, reader: SinkReader) -> list[int]:
        """Of every row, ascending."""
        return sorted(offset for batch in self.batches(reader) for offset in batch.offsets.tolist())

    def batches(self, reader: SinkReader) -> list[LineageBatch]:
        found = list(reader.rows(self.everything))
        assert all(batch.offsets.dtype == np.int64 and batch.indexes.dtype == np.int32 for batch in found)
        return found

    def found(self, reader: SinkReader) -> list[Finding]:
        """What is wrong, after all rows were read."""
        self.batches(reader)
        return list(reader.problems())


@pytest.fixture
def shop() -> Shop:
    return Shop()


ReadingOnly = Callable[[str | None], AbstractContextManager[None]]


@pytest.fixture
def public_directory() -> Iterator[str]:
    """One that other users can get to: pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="holdfast-audit-") as path:
        os.chmod(path, 0o755)
        yield path


@pytest.fixture
def reading_only() -> ReadingOnly:
    """Takes the right to write from everything below a path, and the rights of root from whoever has them."""

    @contextmanager
    def reading(path: str | None) -> Iterator[None]:
        directories = [] if path is None else [directory for directory, _, _ in os.walk(path)]
        for directory in directories:
            os.chmod(directory, 0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            yield
        finally:
            if is_root:
                os.seteuid(0)
            for directory in directories:
                os.chmod(directory, 0o755)

    return reading
