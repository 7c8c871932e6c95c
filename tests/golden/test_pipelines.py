"""Pipelines that earlier versions ran: ledgers, states and certificates are read, and audits prove what they proved.

What needs Spark, going on from here, is in `tests/pipeline/test_golden.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.golden.pipeline_inputs import PER_PART, joined_rows, plain_rows
from tests.golden.pipelines import ARCHIVES, Pipelines, name_of, opened

from holdfast.audit.certificate import verify
from holdfast.audit.continuous import Incremental
from holdfast.audit.model import Verdict
from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline
from holdfast.audit.proven import read_state
from holdfast.cli.audit_every import PipelineAuditor
from holdfast.pipeline.aside import counts_of, read_all
from holdfast.pipeline.definition.naming import home_of
from holdfast.pipeline.definition.streams import is_stateful
from holdfast.pipeline.engine.status import read_status
from holdfast.pipeline.state.store import StateStore, state_path
from holdfast.reader import read

COMPLETE = ("plain", "mirror", "counting", "joining")
REMEMBERING = ("counting", "joining", "stopped", "tables")
CERTIFIED = ("counting", "mirror", "plain")


@pytest.fixture(scope="module", params=ARCHIVES, ids=name_of)
def pipelines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pipelines]:
    with opened(request.param, tmp_path_factory.mktemp("pipelines")) as found:
        yield found


@pytest.mark.parametrize("name", COMPLETE)
def test_every_ledger_tells_where_its_sink_stands(pipelines: Pipelines, name: str) -> None:
    status = read_status(pipelines.load(name).definition, bootstrap=pipelines.bootstrap_servers)
    assert status.source_problem is None
    for sink in status.sinks:
        assert (sink.problem, sink.lag, sink.is_of_this_definition) == (None, 0, True), sink.name
        assert sink.entry is not None


def test_a_batch_that_a_kill_interrupted_is_in_one_ledger_and_not_in_the_other(pipelines: Pipelines) -> None:
    status = read_status(pipelines.load("stopped").definition, bootstrap=pipelines.bootstrap_servers)
    lags = {sink.name: sink.lag for sink in status.sinks}
    assert lags == {"dead-letter": 0, "stops": 0, "copies": PER_PART}


@pytest.mark.parametrize("name", REMEMBERING)
def test_every_state_is_read_with_every_row_it_names(pipelines: Pipelines, name: str) -> None:
    import pyarrow.parquet as pq

    definition = pipelines.load(name).definition
    store = StateStore(state_path(home_of(definition)), is_writer=False)
    newest = store.newest()
    assert newest is not None
    assert newest.steps.keys() == {step.name for step in definition.steps if is_stateful(step)}
    for segment in newest.segments:
        rows = sum(pq.read_metadata(path).num_rows for path in store.paths(segment))
        assert rows == segment.rows > 0


def test_rows_that_left_the_steps_are_where_they_were_put_aside(pipelines: Pipelines) -> None:
    home = home_of(pipelines.load("plain").definition)
    left = [counts_of(table) for _, table in read_all(home)]
    filtered = plain_rows(pipelines.expected["parts"])["filtered"]
    assert sum(sum(each.values()) for each in left) == len(filtered)
    assert {place for each in left for place in each} == {("filtered", "no-spam")}


def test_every_sink_holds_what_was_written(pipelines: Pipelines) -> None:
    parts = pipelines.expected["parts"]
    ends = plain_rows(parts)
    assert sorted(row["id"] for row in pipelines.rows("out/plain")) == ends["kept"]
    assert sorted(row["id"] for row in pipelines.delta_rows("out/plain-delta")) == ends["kept"]
    assert sorted(int(key) for key in keys(pipelines, "plain-copy")) == ends["kept"]
    assert len(keys(pipelines, "plain-dlt")) == len(ends["dead"])
    paid, alarms = joined_rows(parts)
    rows = pipelines.rows("out/paid")
    assert sorted((row["id"], row["customer"], row["city"], row["paid"]) for row in rows) == sorted(paid)
    assert sorted(row["card"] for row in pipelines.rows("out/alarms")) == sorted(alarms)


def keys(pipelines: Pipelines, topic: str) -> list[bytes]:
    return [row["key"] for batch in read(pipelines.bootstrap_servers, topic) for row in batch.to_pylist()]


@pytest.mark.parametrize("name", ["plain", "counting", "joining"])
def test_an_audit_still_accounts_for_it_and_trusts_what_has_no_digest(
    pipelines: Pipelines, name: str
) -> None:
    report = pipelines.audit(name)
    assert report.findings == ()
    assert not any(each.is_gap for each in report.unproven), report.reasons
    assert all("before their digests" in each.why for each in report.trusted), report.reasons


def test_certificates_are_whole_and_chained(pipelines: Pipelines) -> None:
    results = verify([str(pipelines.directory / "certificates")])
    assert [(each.subject, len(each.certificates)) for each in results] == [(name, 2) for name in CERTIFIED]
    for chain in results:
        assert chain.is_whole, chain.problem
        newest = chain.certificates[-1]
        assert newest.verdict == Verdict.PROVEN
        proven = read_state(str(pipelines.directory / f"{chain.subject}.proven"))
        assert proven is not None
        assert proven.certificate == newest.sha256


def test_an_audit_goes_on_from_what_is_proven(pipelines: Pipelines, tmp_path: Path) -> None:
    state = tmp_path / "mirror.proven"
    state.write_bytes((pipelines.directory / "mirror.proven").read_bytes())
    auditor = PipelineAuditor(
        pipelines.load("mirror"), pipelines.bootstrap_servers, AuditOptions(), audit_pipeline
    )
    audits = Incremental(auditor, str(state), 0)
    report = audits.run()
    assert (report.verdict, audits.was_full) == (Verdict.PROVEN, False), report.notes
    assert [(each.start, each.end) for each in report.partitions] == [(PER_PART, PER_PART)] * 2
