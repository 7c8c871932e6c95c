"""A mounted file system that forgets: what is flushed survives, what is not may not, and processes see plain files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.forgetful_mount import ForgetfulMount, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
TIMEOUT_S = 60
WORK = """
import os, sys
os.chdir(sys.argv[1])
os.mkdir("logs")
for name, flushed in (("kept", True), ("forgotten", False)):
    with open(f"logs/{name}", "wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        if flushed:
            os.fsync(file.fileno())
with open("logs/kept", "r+b") as file:
    file.seek(50_000)
    file.write(b"y" * 10)
    file.flush()
    os.fsync(file.fileno())
    os.ftruncate(file.fileno(), 90_000)
    os.fsync(file.fileno())
os.rename("logs/kept", "logs/renamed")
os.rename("logs/renamed", "logs/kept")
open("logs/removed", "wb").close()
os.unlink("logs/removed")
os.mkdir("empty")
os.rmdir("empty")
for path in ("logs", "."):
    directory = os.open(path, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
print(sorted(os.listdir("logs")), os.stat("logs/kept").st_size)
"""
LOOK = """
import sys
with open(sys.argv[1] + "/logs/kept", "rb") as file:
    data = file.read()
try:
    with open(sys.argv[1] + "/logs/forgotten", "rb") as file:
        other = file.read()
except FileNotFoundError:
    other = b""
print(len(data), data[50_000:50_010].decode(), other == b"x" * 100_000)
"""


def run(program: str, *arguments: str) -> str:
    """Never from this process: it serves the mount, and would wait for itself."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_sees_plain_files_and_what_was_flushed_survives(tmp_path: Path) -> None:
    survived: set[str] = set()
    for seed in range(6):
        directory = tmp_path / str(seed)
        with ForgetfulMount(directory, seed) as mount:
            assert run(WORK, str(directory)) == "['forgotten', 'kept'] 90000"
            assert run(LOOK, str(directory)) == "90000 yyyyyyyyyy True"
            mount.lose_power()
            size, changed, is_whole = run(LOOK, str(directory)).split()
            assert (size, changed) == ("90000", "y" * 10)
            survived.add(is_whole)
        assert os.listdir(directory) == []
    assert "False" in survived


def test_every_boot_is_another(tmp_path: Path) -> None:
    told = {"/proc/sys/kernel/random/boot_id"}
    with ForgetfulMount(tmp_path / "m") as mount:
        for _ in range(2):
            command = [*mount.as_after_a_boot(), "cat", "/proc/sys/kernel/random/boot_id"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            assert done.returncode == 0, done.stderr
            told.add(done.stdout)
    assert len(told) == 3
