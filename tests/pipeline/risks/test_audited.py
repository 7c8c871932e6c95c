"""A plain Structured Streaming job is audited by its checkpoint: one that is fine, and one that wrote a batch twice."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from holdfast.audit.checkpoint import audit_checkpoint
from holdfast.audit.model import Fate, Report, Verdict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from .conftest import Scene


def audit(scene: Scene, match: str = "id = value.id") -> Report:
    settings = {"bootstrap.servers": scene.bootstrap}
    return audit_checkpoint(str(scene.checkpoint), f"parquet:{scene.out}", match, settings)


def test_a_job_that_was_never_disturbed_is_proven_and_one_that_was_killed_is_not(plain: Scene) -> None:
    plain.send_orders(range(8))
    plain.query(plain.orders())
    clean = audit(plain)
    assert clean.verdict is Verdict.PROVEN, clean.reasons
    assert (clean.scope.begins, clean.scope.offsets) == ("the query's first batch", 8)
    assert clean.sinks[0].rows == 8

    def append_and_die(rows: DataFrame, number: int) -> None:
        plain.append(rows, number)
        raise RuntimeError("killed between the write and Spark's commit")

    plain.send_orders(range(8, 10))
    with pytest.raises(Exception, match="killed between"):
        plain.query(plain.orders(), append_and_die)
    waiting = audit(plain)
    # Planned, written, and not committed: pending, although its rows are there.
    assert waiting.verdict is Verdict.PROVEN, waiting.reasons
    assert any("planned and not committed" in note and "8 to 9" in note for note in waiting.notes)

    plain.query(plain.orders())
    replayed = audit(plain)
    assert replayed.verdict is Verdict.FAILED
    (finding,) = replayed.findings
    assert (finding.fate, finding.ranges, finding.count) == (Fate.DUPLICATED, ((8, 9),), 2)


def test_a_batch_that_sparks_file_sink_takes_for_an_old_one_is_lost(plain: Scene) -> None:
    def to_files() -> None:
        query = (
            plain.orders()
            .writeStream.format("parquet")
            .option("path", str(plain.out))
            .option("checkpointLocation", str(plain.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    plain.send_orders(range(5))
    to_files()
    assert audit(plain).verdict is Verdict.PROVEN
    shutil.rmtree(plain.checkpoint)
    plain.send_orders(range(5, 10))
    to_files()
    (finding,) = audit(plain).findings
    assert (finding.fate, finding.ranges) == (Fate.LOST, ((5, 9),))
