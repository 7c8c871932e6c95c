"""Every audit that is wrong on purpose is caught by some seed; none of them is worth more than the honest one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest
from tests.audit.soundness.judging import noticed
from tests.audit.soundness.mutants import MUTANTS, WRITTEN, Mutant
from tests.audit.soundness.strokes import damage
from tests.audit.soundness.worlds import Estate, lived

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
SEEDS = 600


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Estate]:
    with Estate(tmp_path_factory.mktemp("estate")) as made:
        yield made


def test_every_mutant_of_the_audit_is_caught(estate: Estate) -> None:
    """A seed catches a mutant that is content where one that lacks only the guards beside it is not."""
    uncaught = dict(MUTANTS)
    for seed in range(SEEDS):
        with lived(estate, seed) as world:
            sound = world.audit()
            accepted = sound.trusted()
            done = damage(world, random.Random(f"damage {seed}"))

            def is_content(mutant: Mutant) -> bool:
                with mutant():
                    return bool(done and noticed(world, sound, done, world.audit(accepted), accepted))  # noqa: B023

            if done is None or is_content(contextlib.nullcontext):
                continue
            for name, wrong in list(uncaught.items()):
                if is_content(wrong.mutant) and not is_content(wrong.beside):
                    del uncaught[name]
        if not uncaught:
            break
    assert not uncaught, f"in {SEEDS} seeds nothing was said of: {', '.join(uncaught)}"


@pytest.mark.parametrize(("name", "first"), [(name, 1000 * at) for at, name in enumerate(WRITTEN, 1)])
def test_a_digest_that_covers_less_is_caught(name: str, first: int, estate: Estate) -> None:
    for seed in range(first, first + SEEDS):
        with WRITTEN[name](), lived(estate, seed) as world:
            sound = world.audit()
            done = damage(world, random.Random(f"damage {seed}"))
            answer = world.audit(sound.trusted())
            if (
                done is not None
                and answer.exit_code == 0
                and noticed(world, sound, done, answer, sound.trusted())
            ):
                return
    pytest.fail(f"in {SEEDS} seeds nothing was said of it")
