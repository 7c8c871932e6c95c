"""The suite's nursery: commands, brokers and members of storms are forked from a process that has done the imports."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from holdfast.testing.forked import Nursery

NURSERY: Final = Nursery("tests.support.preloaded", Path(__file__).parents[2])
open_process: Final = NURSERY.open_process
