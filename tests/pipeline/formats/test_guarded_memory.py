"""Damaged values of the formats that machine code reads: never a crash, never a byte past their end."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiers import by_tier

ROOT = Path(__file__).parents[3]
ROUNDS = by_tier(quick=200, check=800, long=3000)


@pytest.mark.parametrize(
    "format_",
    ["json", *(pytest.param(each, marks=pytest.mark.check) for each in ("avro", "protobuf", "csv"))],
)
def test_damage_never_crashes_the_machine_code_nor_makes_it_read_past_the_end(format_: str) -> None:
    # In a process of its own: the memory behind the values is guarded, and a read there would be the end of it.
    command = [sys.executable, "-m", "tests.pipeline.formats.guarded_fuzz", format_, "5000000", str(ROUNDS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, f"{ROUNDS} rounds\n"), run.stderr
