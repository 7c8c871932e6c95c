"""How much a run of the tests does: `make test` is quick, `make check` does more, `make long` everything.

A mark puts a test into a tier (tests/conftest.py); here are the numbers of seeds and examples that go with each. Test
modules ask while they are imported, after the command line has been read.
"""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings

TIERS: Final = ("quick", "check", "long")
EXAMPLES_SHARE: Final = {"quick": 0.2, "check": 0.5, "long": 3.0}
EXAMPLES_LEAST: Final = 5

_current = "check"


def choose(tier: str) -> None:
    """Say, before anything asks, which tier this run is."""
    global _current
    _current = tier
    # A shared machine is slow at times; a property does not fail for that. What CI tries is the same every time.
    settings.register_profile(
        tier,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=examples(100),
        derandomize=tier != "long",
        database=None,
    )
    settings.load_profile(tier)


def is_long() -> bool:
    return _current == "long"


def by_tier(*, quick: int, check: int, long: int) -> int:
    """How many seeds, rounds or trials a test goes through."""
    return {"quick": quick, "check": check, "long": long}[_current]


def examples(usual: int) -> int:
    """How many examples of a property this run tries; `make check` tries half the usual number."""
    return max(min(EXAMPLES_LEAST, usual), round(usual * EXAMPLES_SHARE[_current]))
