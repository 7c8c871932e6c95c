"""The audit finds damage and names it, every time; and where there is none it accuses nobody.

Each trial is a world of its own (`tests.support.audit_worlds`): a log with gaps, markers and aborted records, one
to three sinks of all kinds in their real formats, dead letters, windows. Trial n is the same every time: run one alone
with `HOLDFAST_AUDIT_TRIAL=n`, or more than the usual number with `HOLDFAST_AUDIT_TRIALS=2000`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.support.audit_mutations import Mutation, all_mutations
from tests.support.audit_world_writer import WorldWriter
from tests.support.audit_worlds import KINDS, PIPELINE, make_plan
from tests.support.fake_cluster import FakeCluster
from tests.support.tiers import by_tier

from holdfast.audit.model import Verdict
from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.testing.postgres import PostgresServer

ONLY = os.environ.get("HOLDFAST_AUDIT_TRIAL")
PARTS = 4
MUTATIONS = all_mutations()
TRIALS = int(os.environ.get("HOLDFAST_AUDIT_TRIALS") or by_tier(quick=12, check=len(MUTATIONS), long=1000))
"""`make check` tries every mutation once."""
TRUSTED = {"dead-letter.failure", "kafka-totals.key", "kafka-totals.headers"}
"""What nothing makes again in these worlds, which are written without digests."""


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldWriter]:
    settings = ("fsync=off", "full_page_writes=off", "autovacuum=off")
    threads = pa.cpu_count(), pa.io_thread_count()
    pa.set_cpu_count(1)  # files this small are not worth a second thread
    pa.set_io_thread_count(1)
    with (
        FakeCluster() as cluster,
        PostgresServer(settings=settings) as server,
        WorldWriter(cluster, str(tmp_path_factory.mktemp("worlds")), server.url) as writer,
    ):
        yield writer
    pa.set_cpu_count(threads[0])
    pa.set_io_thread_count(threads[1])


def in_part(part: int) -> list[int]:
    if ONLY is not None:
        return [int(ONLY)] if int(ONLY) % PARTS == part else []
    return list(range(part, TRIALS, PARTS))


def damage(trial: int, mutation: Mutation, writer: WorldWriter) -> list[str]:
    """What the audit of a damaged world should have said and did not."""
    chance = random.Random(f"stroke {trial}")
    plan = mutation.plan(trial)
    held = mutation.held(plan)
    stroke = mutation.before(plan, held, chance) if mutation.before is not None else None
    world = writer.write(plan)
    if mutation.after is not None:
        stroke = mutation.after(world, writer, held, chance)
    assert stroke is not None
    report = audit_pipeline(world.definition)
    missing = stroke.missing(report)
    told = [each.what() for each in report.findings]
    return (
        [f"trial {trial} ({mutation}; {stroke.what}; seed {plan.seed}): {missing}; found {told}"]
        if missing
        else []
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_is_found_and_named(part: int, writer: WorldWriter) -> None:
    wrong = [
        line for trial in in_part(part) for line in damage(trial, MUTATIONS[trial % len(MUTATIONS)], writer)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_kind_of_damage_to_every_kind_of_sink_is_tried() -> None:
    tried = {str(MUTATIONS[trial % len(MUTATIONS)]) for trial in range(200)}
    assert tried == {str(each) for each in MUTATIONS}
    assert {each.kind for each in MUTATIONS} == {*KINDS, None}


@pytest.mark.check
def test_a_dead_letter_topic_that_was_trimmed_accuses_nobody(writer: WorldWriter) -> None:
    """What it held is not known any more: neither is what reached the windows, and which rows of keys are newest."""
    tried = 0
    for trial in range(40):
        plan = make_plan(trial)
        if not plan.is_stateful or not plan.dead.rows():
            continue
        tried += 1
        world = writer.write(plan)
        for partition in writer.cluster.topics[f"{PIPELINE}-dlt"].partitions:
            partition.log_start = partition.log_end
        report = audit_pipeline(world.definition)
        assert report.verdict is Verdict.INCONCLUSIVE, (trial, report.reasons)
        if tried == 4:
            return
    raise AssertionError("no such world")


@pytest.mark.parametrize("part", range(PARTS))
def test_an_undamaged_world_is_proven(part: int, writer: WorldWriter) -> None:
    wrong: list[str] = []
    for trial in in_part(part):
        world = writer.write(make_plan(trial))
        report = audit_pipeline(world.definition)
        if report.findings or {each.name for each in report.trusted} - TRUSTED:
            wrong.append(f"trial {trial}: {report.verdict}: {report.reasons}")
    assert not wrong, "\n".join(wrong)
