"""Runs many programs: forked from one process that has done the imports, some at a time, each to its real end.

    python -m tests.endings.nursery AT_A_TIME BOOTSTRAP < jobs.json

A program is a process of its own, whose interpreter ends as any does: threads are joined, exit functions run, modules
are taken apart. Its streams are files in the directory of its job, and so is how it ended (`ended`: the exit code, or
`hung`). When all have ended, this process is the next one for each spool that they left: it delivers what is in there.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Final

from tests.endings import scene
from tests.endings.axes import MEMBERS
from tests.endings.scene import Job

from holdfast.client.producer import Producer

HUNG_SECONDS: Final = 15.0
"""More than the time-outs of a client and the waiting of its program together."""
DRAIN_SECONDS_MAX: Final = 30.0
STACKS_SECONDS: Final = 0.2
"""How long a program that hangs has to write down where."""
SHORTER: Final = (
    ("holdfast.client.producer", "CLOSE_SECONDS", 0.5),
    ("holdfast.client.exit_guard", "LAST_CHANCE_SECONDS", 3.0),
)
"""Time-outs that a program cannot choose, and that nobody here wants to wait for."""
LOADED: Final = (
    "asyncio",
    "confluent_kafka.admin",
    "holdfast.client.aio",
    "holdfast.client.direct",
    "holdfast.client.spool.sender",
    "holdfast.client.spool.transactional",
    "tests.endings.consuming",
    "tests.endings.producing",
    "tests.endings.producing_async",
)


def load() -> None:
    for module in LOADED:
        import_module(module)
    for module, name, seconds in SHORTER:
        assert hasattr(import_module(module), name), f"{module} has no {name} any more"
        setattr(import_module(module), name, seconds)


def program_of(job: Job) -> str:
    if job.client in MEMBERS:
        return "tests.endings.consuming"
    return "tests.endings.producing_async" if job.client == "AsyncProducer" else "tests.endings.producing"


def run_program(job: Job) -> None:
    scene.leave_things_open(job)
    scene.prepare_streams(job.way)
    import_module(program_of(job)).run(job)


def fork_all(jobs: list[Job], at_a_time: int) -> Job | None:
    """Returns a job in the process that is to carry it out, and None when all are done."""
    waiting = jobs[::-1]
    running: dict[int, tuple[Job, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_a_time:
            job = waiting.pop()
            child = os.fork()
            if child == 0:
                become(job)
                return job
            running[child] = (job, time.monotonic() + HUNG_SECONDS)
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            note(running.pop(child)[0], str(os.waitstatus_to_exitcode(status)))
        elif not child:
            time.sleep(0.005)
        for child, (job, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGUSR2)
                time.sleep(STACKS_SECONDS)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                del running[child]
                note(job, "hung")
    return None


def become(job: Job) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stacks = open(job.path("stacks"), "w")  # noqa: SIM115 - written to when the program is asked why it hangs
    faulthandler.register(signal.SIGUSR2, stacks)
    scene.keep(stacks)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(job.path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def note(job: Job, how: str) -> None:
    with open(job.path("ended"), "w") as file:
        file.write(how)


def drain(bootstrap: str, homes: list[str]) -> None:
    def deliver(home: str) -> None:
        with Producer(bootstrap, spool=home) as producer:
            producer.flush(DRAIN_SECONDS_MAX)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(deliver, homes))


def main() -> None:
    jobs = [Job(*each) for each in json.load(sys.stdin)]
    load()
    gc.collect()
    gc.freeze()
    job = fork_all(jobs, int(sys.argv[1]))
    if job is not None:
        run_program(job)
    else:
        drain(sys.argv[2], [home for each in jobs if os.path.exists(home := each.path("spool"))])


if __name__ == "__main__":
    main()
