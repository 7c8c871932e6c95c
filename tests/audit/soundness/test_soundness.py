"""The audit is held to its word: damage is never passed over, and a sound pipeline is never accused.

Every seed is a pipeline, a history and a damage of its own (`programs`, `worlds`, `strokes`), made with the real sinks
on a real broker and a real PostgreSQL, without Spark. It is audited before the damage and after it, and `judging` holds
both answers against what was done. Seed n is the same every time: `HOLDFAST_SOUNDNESS_SEED=n` runs it alone,
`HOLDFAST_SOUNDNESS_SEEDS=20000` as many, from `HOLDFAST_SOUNDNESS_FIRST=n` on.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.audit.soundness.certificates import forged
from tests.audit.soundness.judging import noticed, promised
from tests.audit.soundness.programs import make_program
from tests.audit.soundness.strokes import STROKES, damage
from tests.audit.soundness.worlds import Estate, World, lived
from tests.support.tiers import by_tier

from holdfast.pipeline.sinks.base import RowsRejected

ONLY = os.environ.get("HOLDFAST_SOUNDNESS_SEED")
SEEDS = int(os.environ.get("HOLDFAST_SOUNDNESS_SEEDS") or by_tier(quick=6, check=300, long=2000))
FIRST = int(os.environ.get("HOLDFAST_SOUNDNESS_FIRST") or 0)
PARTS = by_tier(quick=1, check=4, long=12)
CERTIFIED = 3
"""Of so many seeds one has its reports certified, and a certificate changed."""


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    path: Path = tmp_path_factory.mktemp("estate")
    with Estate(path) as made:
        yield made


def in_part(part: int) -> list[int]:
    seeds = range(FIRST, FIRST + SEEDS) if ONLY is None else [int(ONLY)]
    return [seed for seed in seeds if seed % PARTS == part]


def play(estate: Estate, seed: int) -> list[str]:
    """What the audit should have said of this seed's world and did not.

    A window's row that a table does not take, a null in its key for instance, stops the pipeline: no audit follows.
    """
    with contextlib.suppress(RowsRejected), lived(estate, seed) as world:
        sound = world.audit()
        wrong = promised(world, sound)
        accepted = sound.trusted()
        if accepted:
            wrong += promised(world, world.audit(accepted))
        done = damage(world, random.Random(f"damage {seed}"))
        if done is not None:
            answer = world.audit(accepted)
            wrong += noticed(world, sound, done, answer, accepted)
            if seed % CERTIFIED == 0:
                reports = [each.report for each in (sound, answer) if each.report]
                wrong += forged(reports, estate.directory / "certificates" / str(seed), random.Random(seed))
        return [f"seed {seed}: {line}; {world}" for line in wrong]
    return []


@pytest.mark.timeout(600 + 2 * SEEDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_damage_is_never_passed_over_and_a_sound_pipeline_never_accused(part: int, estate: Estate) -> None:
    wrong = [line for seed in in_part(part) for line in play(estate, seed)]
    assert not wrong, "\n".join(wrong)


def test_what_an_upsert_in_delta_took_before_it_was_reset_is_no_fault(estate: Estate) -> None:
    def is_one(seed: int) -> bool:
        sinks = make_program(seed).sinks
        return [(sink.kind, sink.words.get("mode")) for sink in sinks] == [("merge", None)]

    seed = next(filter(is_one, count(50_000)))
    world = World(estate, estate.directory / "worlds" / str(seed), seed)
    try:
        world.begin()
        for _ in range(2):
            world.produce(10)
            world.run()
        world.reset()
        world.run()
        outcome = world.audit()
        assert outcome.exit_code in (0, 4), outcome.why()
    finally:
        world.end()


def test_rows_of_one_record_may_all_be_dead_letters_in_a_table(estate: Estate) -> None:
    def is_one(seed: int) -> bool:
        program = make_program(seed)
        words = [step.words for step in program.steps]
        expands = next((at for at, each in enumerate(words) if "expand" in each), len(words))
        turns_away = any(each.get("else") == "quarantine" for each in words[expands:])
        return program.letters == "parquet" and turns_away

    seed = next(filter(is_one, count(2589)))
    with lived(estate, seed) as world:
        outcome = world.audit()
        assert not promised(world, outcome), outcome.why()


def test_every_damage_has_its_turn() -> None:
    assert len(STROKES) <= 60, "300 seeds try each of them five times"
