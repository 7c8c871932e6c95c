"""Every planted bug, by name: each must be caught within 200 seeds."""

from __future__ import annotations

from tests.support.simulator.mutants import STORAGE_MUTANTS, Mutant
from tests.support.simulator.mutants_coordinators import COORDINATOR_MUTANTS

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in (*STORAGE_MUTANTS, *COORDINATOR_MUTANTS)}
