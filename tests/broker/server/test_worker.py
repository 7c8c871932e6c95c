"""The background process: answers in order, failures of any kind, and never an orphan."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from holdfast.broker.server.worker import ProcessWorker
from holdfast.broker.server.worker_main import NICENESS, SCHED_SETATTR, SLICE_NS

Outcome = tuple[Mapping[str, Any] | None, str | None]


def raised(where: str, defect: Exception) -> None:
    raise AssertionError(where) from defect


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[ProcessWorker]:
    worker = ProcessWorker(asyncio.get_running_loop(), raised)
    yield worker
    await worker.close()


def submit(worker: ProcessWorker, task: str, arguments: Mapping[str, Any]) -> asyncio.Future[Outcome]:
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    worker.submit(task, arguments, lambda result, error: outcome.set_result((result, error)))
    assert not outcome.done()
    return outcome


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.asyncio
async def test_tasks_are_carried_out_on_the_real_disk_in_order(worker: ProcessWorker, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a", "b")]
    for name in names:
        name.touch()
    outcomes = [submit(worker, "remove", {"paths": [str(name)]}) for name in (*names, names[0])]
    assert await asyncio.gather(*outcomes) == [
        ({"removed": 1}, None),
        ({"removed": 1}, None),
        ({"removed": 0}, None),
    ]
    assert not any(name.exists() for name in names)


@pytest.mark.asyncio
async def test_a_task_that_fails_is_reported_and_the_next_one_runs(worker: ProcessWorker) -> None:
    unknown = submit(worker, "defragment", {})
    missing = submit(worker, "remove", {"paths": ["/dev/null/nothing"]})
    fine = submit(worker, "remove", {"paths": []})
    result, error = await unknown
    assert result is None
    assert error is not None
    assert "defragment" in error
    result, error = await missing
    assert error is not None
    assert "Not a directory" in error
    assert await fine == ({"removed": 0}, None)


@pytest.mark.asyncio
@pytest.mark.check
async def test_the_last_words_of_a_child_are_told_and_nothing_else_hears_them(
    worker: ProcessWorker, capfd: pytest.CaptureFixture[str]
) -> None:
    defect = submit(worker, "compact", {})
    fine = submit(worker, "remove", {"paths": []})
    result, error = await defect
    assert result is None
    assert error is not None
    assert "ended without an answer" in error
    assert "Traceback" in error
    assert "KeyError" in error
    assert await fine == ({"removed": 0}, None)
    await worker.close()
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "KeyError" not in said


@pytest.mark.asyncio
@pytest.mark.check
async def test_a_child_that_dies_fails_its_task_and_is_replaced(worker: ProcessWorker) -> None:
    await submit(worker, "remove", {"paths": []})
    first = worker.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    result, error = await submit(worker, "remove", {"paths": []})
    assert result is None
    assert error is not None
    assert "background process failed" in error
    assert await submit(worker, "remove", {"paths": []}) == ({"removed": 0}, None)
    assert worker.pid != first


class ScriptedWorker(ProcessWorker):
    """Its child is a shell, which answers every task with the same line."""

    answer = '{"result": {"removed": 0}}'

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        script = 'while read -r task; do echo "$0"; done'
        return await asyncio.create_subprocess_exec("sh", "-c", script, self.answer, stdin=pipe, stdout=pipe)


@pytest.mark.asyncio
async def test_a_child_that_answers_nonsense_fails_its_task_and_is_replaced() -> None:
    worker = ScriptedWorker(asyncio.get_running_loop(), raised)
    try:
        for worker.answer in ("[]", "5", "{}", '{"result": 5}', "nonsense", '{"result": {}', ""):
            result, error = await submit(worker, "remove", {"paths": []})
            assert result is None
            assert error is not None
            assert "background process failed" in error
            assert worker.pid is None
        worker.answer = ScriptedWorker.answer
        assert await submit(worker, "remove", {"paths": []}) == ({"removed": 0}, None)
    finally:
        await worker.close()


@pytest.mark.asyncio
async def test_what_a_report_raises_is_told_and_costs_no_other_task_its_report() -> None:
    told: list[str] = []
    worker = ScriptedWorker(
        asyncio.get_running_loop(), lambda where, defect: told.append(f"{where}: {defect!r}")
    )

    def broken(result: Mapping[str, Any] | None, error: str | None) -> None:
        raise MemoryError

    try:
        worker.submit("remove", {"paths": []}, broken)
        assert await submit(worker, "remove", {"paths": []}) == ({"removed": 0}, None)
    finally:
        await worker.close()
    assert told == ["what follows the task remove: MemoryError()"]


@pytest.mark.asyncio
async def test_the_child_gives_way_to_the_broker(worker: ProcessWorker) -> None:
    await submit(worker, "remove", {"paths": []})
    assert worker.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, worker.pid) == 19


@pytest.mark.asyncio
@pytest.mark.check
async def test_an_idle_child_is_let_go_and_started_again_when_needed() -> None:
    worker = ProcessWorker(asyncio.get_running_loop(), raised, idle_seconds=0.0)
    try:
        await submit(worker, "remove", {"paths": []})
        runner = worker._runner
        assert runner is not None
        await runner
        assert worker.pid is None
        assert await submit(worker, "remove", {"paths": []}) == ({"removed": 0}, None)
    finally:
        await worker.close()


@pytest.mark.asyncio
async def test_closing_ends_the_child_and_reports_nothing(worker: ProcessWorker) -> None:
    await submit(worker, "remove", {"paths": []})
    pid = worker.pid
    assert pid is not None
    outcome = submit(worker, "remove", {"paths": []})
    await worker.close()
    assert not is_alive(pid)
    assert not outcome.done()


PARENT = """
import asyncio
from holdfast.broker.server.worker import ProcessWorker
from holdfast.broker.server.worker_main import NICENESS, SCHED_SETATTR, SLICE_NS

async def main():
    worker = ProcessWorker(asyncio.get_running_loop(), print)
    started = asyncio.Event()
    worker.submit("remove", {"paths": []}, lambda result, error: started.set())
    await started.wait()
    print(worker.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_child_dies_with_its_parent_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        descriptor = os.pidfd_open(child)
        parent.kill()
        parent.wait()
    try:
        # Readable once the process has ended.
        ended = asyncio.run(_readable(descriptor))
    finally:
        os.close(descriptor)
    assert ended


async def _readable(descriptor: int) -> bool:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 10)
    finally:
        loop.remove_reader(descriptor)
    return True


def test_the_child_imports_neither_the_server_nor_the_protocols_messages() -> None:
    script = "import sys, holdfast.broker.server.worker_main; print('\\n'.join(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = {"asyncio", "typer", "rich", "pydantic", "uvloop", "confluent_kafka", "holdfast.wire.messages"}
    assert not heavy & set(modules)
    assert not [
        name for name in modules if name.startswith(("holdfast.broker.node", "holdfast.broker.server.server"))
    ]


@pytest.mark.asyncio
async def test_the_background_process_lets_others_go_first(worker: ProcessWorker) -> None:
    await submit(worker, "remove", {"paths": []})
    assert worker.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, worker.pid) == NICENESS


@pytest.mark.check
def test_the_kernel_takes_the_slice_asked_for() -> None:
    number = SCHED_SETATTR.get(platform.machine())
    if number is None or tuple(map(int, platform.release().split(".")[:2])) < (6, 12):
        pytest.skip("this kernel has no slices to ask for")
    program = (
        "import ctypes, os\n"
        "from holdfast.broker.server.worker_main import SCHED_ATTRIBUTES, give_way\n"
        "give_way()\n"
        "found = ctypes.create_string_buffer(SCHED_ATTRIBUTES.size)\n"
        f"ctypes.CDLL(None).syscall({number + 1}, 0, found, SCHED_ATTRIBUTES.size, 0)\n"
        "print(*SCHED_ATTRIBUTES.unpack(found.raw))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    _, policy, _, nice, _, slice_ns, _, _ = map(int, done.stdout.split())
    assert (policy, nice, slice_ns) == (os.SCHED_OTHER, NICENESS, SLICE_NS)
