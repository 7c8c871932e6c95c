"""Every audit that is wrong on purpose is caught by some seed; none of them is worth more than the honest one.

Each is given worlds that have a sink for the damage that it does not see, and that damage. What a world has of it (a
nested field, a window that closed) is left to the seed, so it may take some of them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from itertools import count, islice

import pytest
from tests.audit.soundness.judging import noticed
from tests.audit.soundness.mutants import MUTANTS, WRITTEN, Mutant, Wrong
from tests.audit.soundness.programs import make_program
from tests.audit.soundness.strokes import can, damage
from tests.audit.soundness.worlds import Estate, lived

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WORLDS = 60
"""Looked at for one mutant; it is caught in the first few, if its guard works."""


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    with Estate(tmp_path_factory.mktemp("estate")) as made:
        yield made


def seeds_for(wrong: Wrong, first: int) -> Iterator[int]:
    """Those whose programs have a sink that such damage can be done to."""

    def fits(seed: int) -> bool:
        return any(
            can(each, sink, wrong.kinds) for each in wrong.passed_over for sink in make_program(seed).sinks
        )

    return islice(filter(fits, count(first)), WORLDS)


@pytest.mark.parametrize(("name", "first"), [(name, 10_000 * at) for at, name in enumerate(MUTANTS, 1)])
def test_every_mutant_of_the_audit_is_caught(name: str, first: int, estate: Estate) -> None:
    """A seed catches a mutant that is content where one that lacks only the guards beside it is not."""
    wrong = MUTANTS[name]
    for seed in seeds_for(wrong, first):
        with lived(estate, seed) as world:
            sound = world.audit()
            accepted = sound.trusted()
            done = damage(world, random.Random(f"damage {seed}"), wrong.passed_over, wrong.kinds)

            def is_content(mutant: Mutant) -> bool:
                with mutant():
                    return bool(done and noticed(world, sound, done, world.audit(accepted), accepted))  # noqa: B023

            if done is None or is_content(contextlib.nullcontext):
                continue
            if is_content(wrong.mutant) and not is_content(wrong.beside):
                return
    pytest.fail(f"in {WORLDS} worlds nothing was said of it")


@pytest.mark.parametrize(("name", "first"), [(name, 1000 * at) for at, name in enumerate(WRITTEN, 1)])
def test_a_digest_that_covers_less_is_caught(name: str, first: int, estate: Estate) -> None:
    wrong = WRITTEN[name]
    for seed in seeds_for(wrong, first):
        with wrong.mutant(), lived(estate, seed) as world:
            sound = world.audit()
            done = damage(world, random.Random(f"damage {seed}"), wrong.passed_over, wrong.kinds)
            answer = world.audit(sound.trusted())
            if (
                done is not None
                and answer.exit_code == 0
                and noticed(world, sound, done, answer, sound.trusted())
            ):
                return
    pytest.fail(f"in {WORLDS} worlds nothing was said of it")
