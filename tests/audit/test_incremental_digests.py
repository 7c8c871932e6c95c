"""Audits on top of what was proven, of pipelines whose cells only digests vouch for: no false word, none missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from unittest.mock import patch

import pytest
from tests.audit.soundness.worlds import Estate, World

from holdfast.audit.continuous import Incremental
from holdfast.audit.model import Fate, Report
from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline
from holdfast.audit.proven import Seen, Topics, take_all
from holdfast.audit.stateful.carried import Memory
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.model import ParquetSink
from holdfast.pipeline.definition.naming import client_settings
from holdfast.pipeline.positions import Place

WITH_A_TOPIC = (2, 15, 27)
"""Seeds with a Python step and without state: Delta; a topic and Parquet; a topic. All have dead letters."""


class Auditor:
    """As the command line has it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.subject, self.fingerprint = world.definition.name, fingerprint(world.definition)

    def audit(self, since: Mapping[Place, int] | None, topics: Topics, memory: Memory | None) -> Report:
        options = AuditOptions(since=since, topic_starts=topics, memory=memory)
        return audit_pipeline(self._world.definition, options=options)

    def marks(self, proven: Mapping[Place, int]) -> Mapping[str, Seen]:
        return take_all(self._world.definition, client_settings(self._world.definition, None), proven)

    def remembers(self) -> str:
        return ""


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    with Estate(tmp_path_factory.mktemp("estate")) as made:
        yield made


@pytest.mark.parametrize("seed", WITH_A_TOPIC)
@pytest.mark.check
def test_what_is_new_is_held_against_its_digests(estate: Estate, seed: int) -> None:
    world = World(estate, estate.directory / "worlds" / str(seed), seed)
    try:
        world.begin()
        # An audit goes back to before the batches that a run has merged; here it should not.
        unmerged = [
            replace(sink, compact=0) if isinstance(sink, ParquetSink) else sink
            for sink in world.definition.sinks
        ]
        world.definition = replace(world.definition, sinks=tuple(unmerged))
        world.produce(15)
        world.run()
        audits = Incremental(Auditor(world))
        first = audits.run()
        assert first.exit_code() == 0, first.reasons
        for _ in range(2):
            world.produce(7)
            world.run()
            report = audits.run()
            assert (report.verdict, report.findings, audits.was_full) == (first.verdict, (), False)
        world.produce(7)
        world.run()
        proven = audits.proven
        assert proven is not None
        options = AuditOptions(since=proven.positions, topic_starts=proven.topics)
        with patch("holdfast.audit.unaltered.totals", lambda made, groups, count: [1] * count):
            wrong = audit_pipeline(world.definition, options=options)
        assert {each.fate for each in wrong.findings} == {Fate.ALTERED}
    finally:
        world.end()
