"""Audits one on top of the other, of pipelines with state: the words of a full audit, at the cost of what is new.

The pipelines, histories and damages are those of `tests/audit/soundness`: windows, duplicates, upserts, versions, and
everything that may happen to them between two audits.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyarrow.parquet import ParquetFile
from tests.audit.soundness.strokes import damage
from tests.audit.soundness.worlds import Estate, World
from tests.audit.test_erasures import ERASABLE
from tests.support.tiers import by_tier

from holdfast.audit.continuous import Incremental
from holdfast.audit.left import remembering
from holdfast.audit.model import AuditError, Report
from holdfast.audit.pipeline_audit import AuditOptions, audit_pipeline
from holdfast.audit.proven import Seen, Topics, take_all
from holdfast.audit.stateful.carried import Memory
from holdfast.audit.stateful.rows import Recorder
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.naming import client_settings
from holdfast.pipeline.operations.erasing import CannotErase, perform_erase, plan_erase
from holdfast.pipeline.positions import Place
from holdfast.pipeline.sinks.base import RowsRejected
from holdfast.pipeline.sinks.erasing import WrongCondition

ONLY = os.environ.get("HOLDFAST_SOUNDNESS_SEED")
SEEDS = int(os.environ.get("HOLDFAST_SOUNDNESS_SEEDS") or by_tier(quick=0, check=3, long=300))
FIRST = (4, 5, 12, 54)
"""Seeds with a change in PostgreSQL a moment before the audit, with duplicates into an upsert, with windows and
duplicates into PostgreSQL, with windows and an upsert."""
ALONE = (16, 20, 24)
"""Seeds of the tests that ask for a pipeline of their own."""


class Auditor:
    """As the command line has it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accepted: tuple[str, ...] = ()
        self.subject, self.fingerprint = world.definition.name, fingerprint(world.definition)

    def audit(self, since: Mapping[Place, int] | None, topics: Topics, memory: Memory | None) -> Report:
        options = AuditOptions(since=since, topic_starts=topics, memory=memory, accepted=self.accepted)
        return audit_pipeline(self.world.definition, options=options)

    def marks(self, proven: Mapping[Place, int]) -> Mapping[str, Seen]:
        return take_all(self.world.definition, client_settings(self.world.definition, None), proven)

    def remembers(self) -> str:
        return remembering(self.world.definition)


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    with Estate(tmp_path_factory.mktemp("estate")) as made:
        yield made


def whole(auditor: Auditor) -> Report:
    return auditor.audit(None, {}, None)


def evidence(report: Report) -> set[tuple[str, str, str]]:
    """Of each column whether some of its cells are not recomputed, or trusted."""
    return {
        (each.sink, each.column, word)
        for each in report.coverage
        for word in ("unaltered", "trusted")
        if getattr(each, word)
    }


def erase(world: World, chance: random.Random) -> None:
    """Rows of some sink that can be erased from go for good."""
    found = [each.name for each in world.program.sinks if each.kind in ERASABLE]
    world.run()
    with suppress(CannotErase, WrongCondition):
        for sink in chance.sample(found, min(1, len(found))):
            perform_erase(plan_erase(world.definition, "who = 'ann'", "request 7", sinks=[sink]))
            world.history.append(f"erased from {sink}")


def play(estate: Estate, seed: int, state: Path) -> list[str]:
    world = World(estate, estate.directory / "worlds" / f"incremental-{seed}", seed)
    chance = random.Random(f"incremental {seed}")
    wrong: list[str] = []
    try:
        world.begin()
        auditor = Auditor(world)
        world.produce(chance.randrange(10, 40))
        world.run()
        first = whole(auditor)
        auditor.accepted = tuple(f"{each.sink}.{each.column}" for each in first.trusted)
        for _ in range(3):
            auditor.fingerprint = fingerprint(world.definition)
            audits = Incremental(auditor, str(state), 0)
            report = audits.run()
            full = whole(auditor)
            if (report.exit_code(), report.findings) != (full.exit_code(), full.findings):
                wrong.append(f"{report.verdict}, and in full {full.verdict}: {report.reasons} {full.reasons}")
            if not evidence(report) <= evidence(full):
                wrong.append(f"less is recomputed: {evidence(report) - evidence(full)}")
            world.produce(chance.randrange(0, 12))
            operations = (
                world.die,
                world.compact,
                world.rebuild,
                world.refill,
                world.change,
                partial(erase, world, chance),
            )
            if chance.random() < 0.5:
                chance.choice(operations)()
            world.run()
        done = damage(world, random.Random(f"damage {seed}"))
        # Old records of a topic are looked at by each twelfth audit.
        topics = ["dead-letter"] if world.program.letters == "topic" else []
        topics += [each.name for each in world.program.sinks if each.kind == "kafka"]
        if done is not None and done.sink and not done.is_of_source and done.sink not in topics:
            try:
                full_code = whole(auditor).exit_code()
            except AuditError as error:
                full_code = error.exit_code
            try:
                code = Incremental(auditor, str(state), 0).run().exit_code()
            except AuditError as error:
                code = error.exit_code
            if full_code and not code:
                wrong.append(f"{done.what} in {done.sink}: passed over")
        return [f"seed {seed}: {line}; {world}" for line in wrong]
    except RowsRejected:
        return []
    finally:
        world.end()


@pytest.mark.timeout(600 + 4 * SEEDS)
@pytest.mark.check
def test_an_audit_on_top_of_others_says_what_a_full_one_says(estate: Estate, tmp_path: Path) -> None:
    drawn = [*FIRST, *(seed for seed in range(SEEDS) if seed not in (*FIRST, *ALONE))][:SEEDS]
    seeds = drawn if ONLY is None else [int(ONLY)]
    wrong = [line for seed in seeds for line in play(estate, seed, tmp_path / str(seed))]
    assert not wrong, "\n".join(wrong)


def counted(kind: type, method: str, counts: Counter[str], count: Callable[..., int]) -> Any:
    original = getattr(kind, method)

    def counting(*given: Any, **options: Any) -> Any:
        counts[method] += count(*given)
        return original(*given, **options)

    return patch.object(kind, method, counting)


@pytest.mark.parametrize("seed", ALONE[: by_tier(quick=1, check=1, long=2)])
@pytest.mark.check
def test_records_and_files_of_what_is_proven_are_not_read_again(estate: Estate, seed: int) -> None:
    """Duplicates and windows, into Delta and Parquet."""
    world = World(estate, estate.directory / "worlds" / f"cost-{seed}", seed)
    try:
        world.begin()
        auditor = Auditor(world)
        audits = Incremental(auditor, None, 0)
        costs: list[Counter[str]] = []
        for records in (150, 10, 10):
            world.produce(records)
            world.run()
            counts: Counter[str] = Counter()
            with (
                counted(Recorder, "take", counts, lambda recorder, place, batch, decoded: batch.num_rows),
                counted(
                    ParquetFile,
                    "iter_batches",
                    counts,
                    # Others read the pipeline's state, whole, without naming groups of rows.
                    lambda file, *given: sum(
                        file.metadata.row_group(group).num_rows for group in (given[1] if given else ())
                    ),
                ),
            ):
                report = audits.run()
                assert report.exit_code() == 0, report.reasons
            costs.append(counts)
        assert not audits.was_full
        assert costs[0]["take"] > 140, "but for what transactions took back"
        for later in costs[1:]:
            assert later["take"] <= 10
            assert later["iter_batches"] * 5 < costs[0]["iter_batches"], costs
    finally:
        world.end()


@pytest.mark.check
def test_without_what_was_handed_on_everything_is_looked_at(estate: Estate, tmp_path: Path) -> None:
    world = World(estate, estate.directory / "worlds" / "harm", 24)
    try:
        world.begin()
        auditor, state = Auditor(world), tmp_path / "state"
        world.produce(10)
        world.run()
        assert Incremental(auditor, str(state), 0).run().exit_code() == 0
        harms: tuple[Callable[[bytes], bytes], ...] = (
            lambda data: data[:-9],
            lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
            lambda data: b"",
        )
        for harm in harms:
            (path,) = tmp_path.glob("*.carried")
            path.write_bytes(harm(path.read_bytes()))
            audits = Incremental(auditor, str(state), 0)
            report = audits.run()
            assert audits.was_full
            assert report.exit_code() == 0
            assert any("handed on is not there any more" in note for note in report.notes)
        audits = Incremental(auditor, str(state), 0)
        assert audits.run().exit_code() == 0
        assert not audits.was_full
    finally:
        world.end()
