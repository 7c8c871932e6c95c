"""The record of rows that left, held against the ledger: which rows they are, and not only how many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from tests.support.audit_sinks import Ledger

from holdfast.audit.left import read_left
from holdfast.pipeline.aside import LATE_FOR, schema
from holdfast.pipeline.definition.model import EventTime, PipelineDefinition, Source, Window
from holdfast.pipeline.digest import digest_of_offsets
from holdfast.pipeline.engine.aside import AsideFiles
from holdfast.pipeline.positions import Place

PLACE = Place("orders", UUID(int=1), 0)
DEFINITION = PipelineDefinition(
    "shop",
    Source(("orders",), event_time=EventTime("at", "1m")),
    steps=(Window("totals", {"n": "count(*)"}, size="1m", key=("who",)),),
)


@pytest.mark.parametrize(("recorded", "is_found"), [((1, 2), False), ((1, 3), True)])
def test_other_rows_than_those_that_were_late_for_a_step_are_found(
    tmp_path: Path, recorded: tuple[int, int], is_found: bool
) -> None:
    ledger = Ledger("shop", "files")
    ledger.opening({PLACE: 0})
    digest = digest_of_offsets(PLACE.topic, PLACE.partition, np.array([1, 2], np.int64))
    entry = replace(
        ledger.entry({PLACE: (0, 5)}, rows=5),
        taps={"totals": {"late": 2}},
        digests={f"{LATE_FOR}:totals": f"{digest:016x}"},
    )
    places = {"topic": "orders", "partition": 0, "index": 0, "route": LATE_FOR, "step": "totals"}
    table = pa.Table.from_pylist([{**places, "offset": offset} for offset in recorded])
    table = table.select(schema().names).cast(schema())
    AsideFiles(str(tmp_path)).write(entry.range, entry.fingerprint, table, [])
    found = read_left(DEFINITION, str(tmp_path), {PLACE: (0, 5)}, [entry]).examined.findings
    assert [("late for 'totals'" in each.detail) for each in found] == [True] * is_found
