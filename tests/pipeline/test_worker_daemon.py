"""The daemon that Spark's Python workers are forked from."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from pyspark import daemon
from holdfast.pipeline import worker_daemon

def manager():
    left = len(gc.get_objects())
    print(gc.get_freeze_count() > 10_000, left < 1_000, gc.isenabled())

daemon.manager = manager
worker_daemon.main()
"""


def test_a_worker_does_not_look_for_garbage_among_the_modules_that_the_daemon_has_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True", "True"]
