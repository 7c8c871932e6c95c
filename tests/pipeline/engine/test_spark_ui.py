"""What Spark's UI shows of a run: jobs and stages by batch, phase and sink, and nothing of it afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Bench


@pytest.mark.spark
def test_jobs_have_the_names_of_batch_phase_and_sink(bench: Bench) -> None:
    spark = bench.spark
    store = spark.sparkContext._jsc.sc().statusStore()
    before = store.jobsList(None).size()
    bench.produce_orders(7)
    bench.run()
    spark.range(1).count()
    jobs = store.jobsList(None)
    told = [jobs.apply(index) for index in range(jobs.size())]
    of_run = sorted(told, key=lambda job: int(job.jobId()))[before:]
    texts = [str(job.description()) for job in of_run]
    assert texts.pop() == "None"
    for sink in ("main", "second"):
        assert any(
            text.startswith("Some(orders, ") and text.endswith(f": 7 offsets, prepare {sink})")
            for text in texts
        )
