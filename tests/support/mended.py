"""Defects that were mended, each put back for the length of a game, and the net that must notice it.

A net is a game with seeds, which notices or does not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

from holdfast.metadata import changes
from holdfast.node.handlers import k27_write_txn_markers
from holdfast.testing.simulator import SeedFailed, run_seed
from holdfast.testing.simulator.mutants_coordinators import Patched

Plant = Callable[[], AbstractContextManager[Any]]
Net = Callable[[Plant, int], bool]
"""Whether a seed notices what is planted."""
TORN = (
    "aborted-shown",
    "committed-hidden",
    "fenced-ended",
    "sequence-lost",
    "torn-transaction",
    "undecided-shown",
)
GROUP_LOST = ("position-lost", "member-lost", "given-before-release")


class Mended(NamedTuple):
    name: str
    plant: Plant
    net: Net
    seed: int
    """The first seed that notices it, to save the seeds before; should it not any more, the others have their turn."""


def simulated(*rules: str) -> Net:
    """A seed of the simulator breaks one of these rules."""

    def is_noticed(plant: Plant, seed: int) -> bool:
        try:
            run_seed(seed, Patched("put back", plant))
        except SeedFailed as failure:
            return failure.rule in rules
        return False

    return is_noticed


def _forged_marker_taken() -> AbstractContextManager[Any]:
    """Whoever sends a marker ends a transaction, and fences whom it names."""
    return patch.object(k27_write_txn_markers, "ends_hanging", lambda *arguments: True)


def _internal_topics_changed() -> AbstractContextManager[Any]:
    """Internal topics can be grown and deleted like any other."""
    return patch.object(changes, "refuse_internal", lambda *arguments: None)


MENDED = (
    Mended("forged-marker-taken", _forged_marker_taken, simulated(*TORN), 1),
    Mended("internal-topics-changed", _internal_topics_changed, simulated(*GROUP_LOST), 13),
)
