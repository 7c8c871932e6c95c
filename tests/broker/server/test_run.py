"""What `holdfast serve` asks of the process it runs in."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from holdfast.broker.server.run import load_config
from holdfast.cli.serve import parse_options

ROUNDS: Final = 64
MEGABYTE: Final = 1024 * 1024
PAGES_PER_MEGABYTE: Final = 256

PAGE_FAULTS_OF_FRAMES: Final = f"""
import resource
from holdfast.real import keep_freed_memory

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        frame = bytearray({MEGABYTE})
        records = bytes(frame)
        del frame, records
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
faults(1)
print(faults({ROUNDS}))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_the_memory_of_one_large_request_serves_the_next() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS_OF_FRAMES], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < ROUNDS * PAGES_PER_MEGABYTE / 4


@pytest.mark.parametrize(
    ("arguments", "directories"),
    [
        ([], ("holdfast-data",)),
        (["--override", "log.dir=x"], ("x",)),
        (["--override", "log.dirs=x,y"], ("x", "y")),
        (["--override", "log.dir=x", "--data-dir", "z"], ("z",)),
        (["--config", "FILE"], ("from-file",)),
        (["--config", "FILE", "--override", "log.dir=x"], ("x",)),
        (["--config", "FILE", "--data-dir", "z"], ("z",)),
    ],
)
def test_where_the_data_is_kept(arguments: list[str], directories: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "server.properties"
    file.write_text("log.dir=from-file\n", encoding="utf-8")
    config, _ = load_config(
        parse_options([str(file) if argument == "FILE" else argument for argument in arguments])
    )
    assert config.log_dirs == directories


LIMIT_OF_OPEN_FILES: Final = """
import resource
from holdfast.broker.server.server import raise_descriptor_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
allowed = raise_descriptor_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), hard, allowed)
"""


@pytest.mark.check
def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMIT_OF_OPEN_FILES], capture_output=True, text=True, check=True
    )
    soft, hard, hard_before, allowed = map(int, done.stdout.split())
    assert soft == hard == hard_before != 256
    assert allowed == hard
