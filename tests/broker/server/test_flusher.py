"""The flusher: quick disks are flushed on the loop, slow ones in threads, and every job is reported once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from holdfast import real
from holdfast.broker.server import flusher as module
from holdfast.broker.server.flusher import (
    FORGIVEN_AFTER_MAX,
    FORGIVEN_AFTER_MIN,
    INLINE_SECONDS_MAX,
    TRY_APART_EVERY,
    AdaptiveFlusher,
    ManyFiles,
)
from holdfast.real import RealFile, RealFileSystem, WholeFlushFailed
from holdfast.seams import FlushJob, FlushTarget


class Target:
    """A file whose flush records the thread it ran on, and fails when told."""

    path = "/nowhere"

    def __init__(self, failure: Exception | None = None) -> None:
        self.threads: list[int] = []
        self.failure = failure

    def flush(self) -> None:
        self.threads.append(threading.get_ident())
        if self.failure is not None:
            raise self.failure


async def flush(flusher: AdaptiveFlusher, *targets: Target | RealFile) -> list[OSError | None]:
    loop = asyncio.get_running_loop()
    outcomes: list[asyncio.Future[OSError | None]] = [loop.create_future() for _ in targets]
    inside = True

    def reporter(outcome: asyncio.Future[OSError | None]) -> Callable[[OSError | None], None]:
        def done(error: OSError | None) -> None:
            assert not inside, "reported from inside submit"
            assert not outcome.done(), "reported twice"
            outcome.set_result(error)

        return done

    for target, outcome in zip(targets, outcomes, strict=True):
        files = cast(tuple[FlushTarget, ...], (target,))
        flusher.submit(FlushJob(files, reporter(outcome)))
    inside = False
    return await asyncio.wait_for(asyncio.gather(*outcomes), 30)


def raised(where: str, defect: Exception) -> None:
    raise AssertionError(where) from defect


@pytest.fixture
async def flusher() -> AdaptiveFlusher:
    loop = asyncio.get_running_loop()
    return AdaptiveFlusher(4, loop.call_soon, loop.call_soon_threadsafe, raised)


async def test_a_single_quick_flush_happens_on_the_loop(flusher: AdaptiveFlusher) -> None:
    target = Target()
    assert await flush(flusher, target) == [None]
    assert target.threads == [threading.get_ident()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time as the flusher sees it, to be moved by hand."""
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


async def test_several_quick_flushes_of_a_turn_happen_on_the_loop(
    flusher: AdaptiveFlusher, clock: list[float]
) -> None:
    targets = [Target() for _ in range(6)]
    assert await flush(flusher, *targets) == [None] * 6
    assert all(target.threads == [threading.get_ident()] for target in targets)


async def test_flushes_that_together_take_too_long_happen_side_by_side(
    flusher: AdaptiveFlusher, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "_average_seconds", INLINE_SECONDS_MAX / 2)
    few, many = [Target() for _ in range(2)], [Target() for _ in range(6)]
    assert await flush(flusher, *few) == [None] * 2
    assert all(target.threads == [threading.get_ident()] for target in few)
    assert await flush(flusher, *many) == [None] * 6
    assert all(target.threads != [threading.get_ident()] for target in many)
    flusher.close()


async def test_a_disk_that_turns_slow_holds_up_the_loop_once(
    flusher: AdaptiveFlusher, clock: list[float]
) -> None:
    class Slow(Target):
        def flush(self) -> None:
            super().flush()
            clock[0] += 1.0

    targets = [Slow() for _ in range(6)]
    assert await flush(flusher, *targets) == [None] * 6
    assert targets[0].threads == [threading.get_ident()]
    assert all(target.threads != [threading.get_ident()] for target in targets[1:])
    flusher.close()


async def test_while_flushes_are_slow_the_loop_waits_for_no_disk(
    flusher: AdaptiveFlusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INLINE_SECONDS_MAX", -1.0)  # whatever it takes is too long
    slow = Target()
    assert await flush(flusher, slow) == [None]
    assert slow.threads != [threading.get_ident()]
    monkeypatch.setattr(module, "INLINE_SECONDS_MAX", 3600.0)
    quick = Target()
    assert await flush(flusher, quick) == [None]
    assert quick.threads == [threading.get_ident()]
    flusher.close()


async def test_a_background_flush_never_holds_up_the_loop(flusher: AdaptiveFlusher) -> None:
    target = Target()
    reported = asyncio.get_running_loop().create_future()
    files: tuple[FlushTarget, ...] = (target,)  # type: ignore[assignment]
    flusher.submit(FlushJob(files, reported.set_result, is_background=True))
    assert await asyncio.wait_for(reported, 30) is None
    assert target.threads != [threading.get_ident()]
    flusher.close()


@pytest.mark.parametrize("count", [1, 3])
async def test_a_failure_is_reported_with_its_error(flusher: AdaptiveFlusher, count: int) -> None:
    failure = OSError(5, "no")
    assert await flush(flusher, *[Target(failure) for _ in range(count)]) == [failure] * count
    flusher.close()


async def test_closing_finishes_what_was_submitted(flusher: AdaptiveFlusher) -> None:
    reported: list[OSError | None] = []
    target = Target()
    files: tuple[FlushTarget, ...] = (target,)  # type: ignore[assignment]
    flusher.submit(FlushJob(files, reported.append))
    flusher.close()
    assert reported == [None]
    assert target.threads


async def test_many_files_of_one_file_system_are_flushed_at_once_when_that_is_quicker(
    flusher: AdaptiveFlusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[RealFile] = []
    monkeypatch.setattr(module, "flush_whole", flushed.append)
    monkeypatch.setattr(real, "is_flushed_whole", lambda device: True)
    monkeypatch.setattr(flusher, "_average_seconds", 1.0)  # each file by itself has been slow
    fs = RealFileSystem()
    files = [fs.open(str(tmp_path / str(number)), "create") for number in range(5)]
    assert await flush(flusher, *files) == [None] * 5
    assert flushed == [files[0]]
    flusher.close()


async def test_many_files_are_flushed_each_by_itself_where_flushing_all_is_not_known_to_flush(
    flusher: AdaptiveFlusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(real, "is_flushed_whole", lambda device: False)
    monkeypatch.setattr("os.fdatasync", flushed.append)
    monkeypatch.setattr(flusher, "_average_seconds", 1.0)
    fs = RealFileSystem()
    files = [fs.open(str(tmp_path / str(number)), "create") for number in range(5)]
    assert await flush(flusher, *files) == [None] * 5
    assert sorted(flushed) == sorted(file.fd for file in files)
    flusher.close()


async def test_a_whole_file_system_that_fails_fails_every_job(
    flusher: AdaptiveFlusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = OSError(5, "no")

    def fail(file: RealFile) -> None:
        raise failure

    monkeypatch.setattr(module, "flush_whole", fail)
    monkeypatch.setattr(real, "is_flushed_whole", lambda device: True)
    monkeypatch.setattr(flusher, "_average_seconds", 1.0)
    fs = RealFileSystem()
    files = [fs.open(str(tmp_path / str(number)), "create") for number in range(3)]
    assert await flush(flusher, *files) == [failure] * 3
    flusher.close()


async def test_a_file_system_that_could_not_write_a_file_of_others_fails_no_job(
    flusher: AdaptiveFlusher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: RealFile) -> None:
        raise WholeFlushFailed(5, "somebody's file")

    broken = OSError(5, "ours")
    monkeypatch.setattr(module, "flush_whole", fail)
    monkeypatch.setattr(real, "is_flushed_whole", lambda device: True)
    monkeypatch.setattr(flusher, "_average_seconds", 1.0)
    fs = RealFileSystem()
    files = [fs.open(str(tmp_path / str(number)), "create") for number in range(3)]

    def fdatasync(fd: int) -> None:
        if fd == files[1].fd:
            raise broken

    monkeypatch.setattr("os.fdatasync", fdatasync)
    assert await flush(flusher, *files) == [None, broken, None]
    flusher.close()


def turns_at_once(many: ManyFiles, slow: Callable[[int], bool], turns: int) -> list[int]:
    """Of so many turns with sixteen files those that are flushed at once, where a flush of all takes 0.4 ms, or 50."""
    found = []
    for turn in range(turns):
        if many.are_flushed_at_once(16, 0.00013):
            many.took(0.05 if slow(turn) else 0.0004)
            found.append(turn)
    return found


def test_one_slow_flush_of_everything_is_soon_forgiven() -> None:
    found = turns_at_once(ManyFiles(), lambda turn: turn == 100, 400)
    assert found == [*range(101), *range(101 + FORGIVEN_AFTER_MIN, 400)]


def test_flushing_everything_is_hardly_tried_where_it_stays_slow() -> None:
    found = turns_at_once(ManyFiles(), lambda turn: True, 10 * FORGIVEN_AFTER_MAX)
    assert 8 <= len(found) <= 18


def test_each_file_by_itself_is_tried_now_and_then() -> None:
    found = turns_at_once(ManyFiles(), lambda turn: False, 4 * TRY_APART_EVERY)
    assert len(found) == 4 * TRY_APART_EVERY - 4


# Defects


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["on the loop", "in threads"])
@pytest.mark.parametrize("count", [1, 2, 5])
async def test_what_a_report_raises_is_told_and_costs_no_other_job_its_report(
    count: int, seconds: float
) -> None:
    loop = asyncio.get_running_loop()
    told: list[str] = []
    flusher = AdaptiveFlusher(
        2,
        loop.call_soon,
        loop.call_soon_threadsafe,
        lambda where, defect: told.append(f"{where}: {defect!r}"),
    )
    flusher._average_seconds = seconds

    def broken(error: OSError | None) -> None:
        raise RecursionError

    for _ in range(count):
        flusher.submit(FlushJob((cast(FlushTarget, Target()),), broken))
    assert await flush(flusher, Target(), Target()) == [None, None]
    flusher.close()  # of two threads one may be behind
    assert told == ["what follows a flush: RecursionError()"] * count


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["on the loop", "in threads"])
async def test_a_flush_that_runs_into_a_defect_has_failed(flusher: AdaptiveFlusher, seconds: float) -> None:
    flusher._average_seconds = seconds
    for _ in range(6):  # more than there are threads
        first, second = await flush(flusher, Target(ValueError("not open")), Target())
        assert first is not None
        assert "not open" in str(first)
        assert second is None


async def test_a_system_without_threads_flushes_on_the_loop(
    flusher: AdaptiveFlusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    flusher._average_seconds = 1.0
    targets = [Target(), Target(OSError("broken")), Target()]
    first, failed, last = await flush(flusher, *targets)
    assert (first, str(failed), last) == (None, "broken", None)
    assert all(target.threads == [threading.get_ident()] for target in targets)
