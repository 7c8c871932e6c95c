"""Every experiment of the lab, by the identifier of its risk."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from holdfast.lab.experiment import Experiment, by_id
from holdfast.lab.experiments import (
    hf1xx,
    hf1xx_transactions,
    hf2xx,
    hf2xx_simulated,
    hf3xx,
    hf3xx_groups,
    hf4xx,
    hf4xx_steps,
)

EXPERIMENTS: Final[Mapping[str, Experiment]] = MappingProxyType(
    by_id(
        (
            *hf1xx.EXPERIMENTS,
            *hf1xx_transactions.EXPERIMENTS,
            *hf2xx.EXPERIMENTS,
            *hf2xx_simulated.EXPERIMENTS,
            *hf3xx.EXPERIMENTS,
            *hf3xx_groups.EXPERIMENTS,
            *hf4xx.EXPERIMENTS,
            *hf4xx_steps.EXPERIMENTS,
        )
    )
)
