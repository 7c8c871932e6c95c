"""The audit is held to its word on the real engine: the worlds of `tests.audit.soundness`, on Spark.

The worlds are those that run without Spark in every `make check`; here SQL, Python steps, windows and deduplication are
Spark's and the engine's own, killed in the middle of batches. The audit that evaluates the steps again is asked too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.audit.soundness.judging import noticed, promised
from tests.audit.soundness.strokes import damage
from tests.audit.soundness.worlds import Estate, lived
from tests.support.tiers import by_tier

from holdfast.audit.spark.auditing import audit_with_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
SEEDS = int(os.environ.get("HOLDFAST_SOUNDNESS_SEEDS") or by_tier(quick=2, check=2, long=200))
FIRST = int(os.environ.get("HOLDFAST_SOUNDNESS_FIRST") or 5000)
PARTS = by_tier(quick=1, check=1, long=10)


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    with Estate(tmp_path_factory.mktemp("estate")) as made:
        yield made


def play(estate: Estate, seed: int, spark: SparkSession) -> list[str]:
    """What audits should have said of this seed's world and did not."""
    with lived(estate, seed, spark) as world:
        sound = world.audit()
        wrong = promised(world, sound)
        again = audit_with_spark(world.definition, spark=spark)
        if again.exit_code() == 1:
            wrong.append(f"a sound world, steps evaluated again: {[each.what() for each in again.findings]}")
        done = damage(world, random.Random(f"damage {seed}"))
        if done is not None:
            wrong += noticed(world, sound, done, world.audit(sound.trusted()), sound.trusted())
        return [f"seed {seed}: {line}; {world}" for line in wrong]


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_is_never_passed_over_and_a_sound_pipeline_never_accused(
    part: int, estate: Estate, spark: SparkSession
) -> None:
    seeds = [seed for seed in range(FIRST, FIRST + SEEDS) if seed % PARTS == part]
    wrong = [line for seed in seeds for line in play(estate, seed, spark)]
    assert not wrong, "\n".join(wrong)
