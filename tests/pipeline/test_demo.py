"""`holdfast demo` as a newcomer runs it, only smaller."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.java

DEMO = [sys.executable, "-m", "holdfast.cli", "demo", "--orders", "3000"]
MARK = "HOLDFAST_DEMO_TEST"


@pytest.mark.long
def test_three_kills_lose_nothing_and_the_audit_proves_it(tmp_path: Path) -> None:
    kept, picture = tmp_path / "kept", tmp_path / "demo.svg"
    done = subprocess.run(
        [*DEMO, "--keep", str(kept), "--svg", str(picture)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    for victim in ("broker", "sender", "Spark job"):
        assert said.count(f"SIGKILL to the {victim},") == 1, said
    assert re.search("lost 0, duplicated 0, (proven|unaltered)", said)
    assert re.search(r"each of 2,\d{3} orders is there once", " ".join(said.split()))
    assert "<svg" in picture.read_text()
    page = (kept / "certificate.html").read_text()
    assert "cells recomputed" in page
    assert str(kept / "certificate.html") in said


def test_ctrl_c_ends_every_process_and_says_so(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*DEMO, "--keep", str(tmp_path / "kept")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: str(tmp_path), "PYTHONUNBUFFERED": "1"},
    ) as demo:
        assert demo.stdout is not None
        said = ""
        for line in demo.stdout:
            said += line
            if "the sender takes orders" in line:
                break
        assert len(_ours(tmp_path)) >= 4  # the demo, broker, sender, job
        demo.send_signal(signal.SIGINT)
        said += demo.stdout.read()
        assert demo.wait(60) == 130, said
    assert "interrupted" in said
    assert not _ours(tmp_path)


def _ours(mark: Path) -> list[int]:
    """The processes that descend from this test's demo."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0"):
                found.append(int(name))
    return found
