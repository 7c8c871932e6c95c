"""A hand-over is taken back byte for byte, wherever the process that made it or took it back has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.graduate.conftest import Stopped

from holdfast import Broker
from holdfast.broker.log.checkpoints import CLEAN_SHUTDOWN_FILE
from holdfast.errors import UsageError
from holdfast.graduate import changes, handing_over
from holdfast.graduate.changes import AlreadyUsed
from holdfast.graduate.handing_over import graduate, undo


class Died(BaseException):
    """Nobody catches it, as nobody catches the end of a process."""


def dying_at(number: int) -> Callable[[], None]:
    left = number

    def tick() -> None:
        nonlocal left
        if not left:
            raise Died
        left -= 1

    return tick


def test_a_hand_over_leaves_nothing_of_ours_and_is_taken_back_byte_for_byte(stopped: Stopped) -> None:
    before = stopped.tree()
    graduate(stopped.request)
    after = stopped.tree()
    names = {Path(path).name for path in after}
    assert not [name for name in names if name.startswith("holdfast.") or name.endswith((".sums", ".cut"))]
    assert not [path for path in after if "notes" in path]
    assert any(path.endswith("orders-7.00000000000000000000000000000000-stray") for path in after)
    assert all(
        f"{path.removesuffix('.log')}.index" in after
        for path in after
        if path.endswith(".log") and "stray" not in path
    )
    undo(stopped.output)
    assert stopped.tree() == before
    assert changes.load(stopped.output) is None


def test_a_process_that_dies_at_any_change_leaves_what_can_be_taken_back(stopped: Stopped) -> None:
    before = stopped.tree()
    number = 0
    while True:
        try:
            graduate(stopped.request, tick=dying_at(number))
            break
        except Died:
            undo(stopped.output)
            assert stopped.tree() == before, f"died at change {number}"
        number += 1
    assert number > 10
    undone = 0
    while True:
        try:
            undo(stopped.output, dying_at(undone))
            break
        except Died:
            undone += 1
    assert undone > 10
    assert stopped.tree() == before


def test_a_hand_over_begun_again_after_a_death_takes_back_first(stopped: Stopped) -> None:
    before = stopped.tree()
    for number in (0, 5, 9):
        with pytest.raises(Died):
            graduate(stopped.request, tick=dying_at(number))
    graduate(stopped.request)
    with pytest.raises(Died):
        undo(stopped.output, dying_at(4))
    graduate(stopped.request)
    undo(stopped.output)
    assert stopped.tree() == before


KILLED = """
import os, signal, sys
from holdfast.graduate import handing_over
from holdfast.graduate.handing_over import Request
left = int(sys.argv[2])
def tick():
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
output = sys.argv[3]
if sys.argv[1] == "undo":
    handing_over.undo(output, tick)
else:
    handing_over.graduate(Request(tuple(sys.argv[4:]), ("127.0.0.1", 19092), ("127.0.0.1", 19093), output), tick=tick)
"""


@pytest.mark.check
def test_sigkill_in_the_middle_of_both(stopped: Stopped) -> None:
    before = stopped.tree()

    def killed(what: str, number: int) -> None:
        command = [sys.executable, "-c", KILLED, what, str(number), stopped.output, *stopped.paths]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL

    killed("graduate", 7)
    assert stopped.tree() != before
    graduate(stopped.request)
    killed("undo", 5)
    assert stopped.tree() != before
    undo(stopped.output)
    assert stopped.tree() == before


def test_nothing_is_taken_back_once_somebody_has_used_the_directories(stopped: Stopped) -> None:
    graduate(stopped.request)
    quorum = Path(
        next(Path(path) for path in stopped.paths if (Path(path) / "__cluster_metadata-0").exists())
    )
    quorum = quorum / "__cluster_metadata-0" / changes.QUORUM_STATE_FILE
    quorum.write_text("{}")
    with pytest.raises(AlreadyUsed, match="Kafka has written"):
        undo(stopped.output)
    quorum.unlink()
    mark = Path(stopped.paths[0], CLEAN_SHUTDOWN_FILE)
    kept = mark.read_bytes()
    mark.unlink()
    with pytest.raises(AlreadyUsed, match="used up the mark"):
        undo(stopped.output)
    mark.write_bytes(kept)
    with Broker(",".join(stopped.paths)):
        pass
    with pytest.raises(AlreadyUsed, match="appended to it since"):
        undo(stopped.output)


def test_a_hand_over_is_made_once(stopped: Stopped) -> None:
    graduate(stopped.request)
    with pytest.raises(UsageError, match="handed over already"):
        graduate(stopped.request)
    with pytest.raises(UsageError, match="nothing was handed over"):
        undo(os.path.dirname(stopped.output))


def test_a_dry_run_changes_nothing(stopped: Stopped) -> None:
    before = stopped.tree()
    outcome = graduate(stopped.request, is_dry_run=True)
    assert outcome.manifest.records == 301
    assert stopped.tree() == before
    assert not os.path.exists(f"{stopped.output}/{handing_over.MANIFEST_FILE}")
