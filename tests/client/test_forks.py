"""The child of a handler that forked ends with the code it asked for, and unwinds nothing of its parent's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.client.consumer import Consumer
from holdfast.client.consuming.handling import Handling
from holdfast.client.consuming.tracker import PartitionTracker
from holdfast.client.consuming.workers import Reports, Workers
from holdfast.client.database.sink import DatabaseSink
from holdfast.client.messages import DeadLetter, Fields, Message
from holdfast.client.process import end_if_forked, ending_in_child
from holdfast.client.processor import Processor
from holdfast.client.retries import RetryPolicy
from holdfast.errors import UsageError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("why"), 1),
        (ValueError("why"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_a_forked_child_ends_where_its_handler_does(error: BaseException, code: int) -> None:
    pid = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            raise error
        except BaseException as raised:  # noqa: BLE001
            end_if_forked(pid, raised)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_what_a_handler_raises_in_its_own_process_is_nothing_to_end_for() -> None:
    end_if_forked(os.getpid(), SystemExit(3))


@pytest.mark.parametrize("fails", [False, True])
def test_a_child_that_comes_back_from_its_handler_handles_nothing_more(fails: bool) -> None:
    readable, writable = os.pipe()
    children: list[int] = []
    parent = os.getpid()

    def handle(message: Message) -> None:
        if message.offset == 0:
            children.append(os.fork())
            if fails and os.getpid() != parent:
                raise DeadLetter("for the child alone")
        elif os.getpid() != parent:
            os.write(writable, b"handled twice ")

    def set_aside(message: Message, reason: str, error: BaseException, attempts: int) -> None:
        os.write(writable, b"set aside ")

    reports = Reports()
    pool = Workers(
        1, "partition", 10, Handling(RetryPolicy(attempts=1), set_aside).one_by_one(handle), reports
    )
    tracker = PartitionTracker("t", 0, 0)
    fields: list[Fields] = [("t", 0, offset, 0, None, None, ()) for offset in range(3)]
    tracker.begin_all([0, 1, 2])
    pool.give(fields, tracker, 0)
    reports.wait(30)
    (run,) = reports.take()
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if fails else 0)
    os.close(writable)
    assert os.read(readable, 100) == b""
    assert (run.finished, run.error, tracker.is_closed) == (3, None, False)
    assert pool.close(30)
    os.close(readable)


def test_a_transform_that_forks_and_returns_ends_its_child() -> None:
    def fork() -> int:
        return os.fork()

    child = ending_in_child(fork)()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", ["consumer", "processor", "sink"])
def test_a_client_that_runs_in_the_parent_is_refused_in_a_child(kind: str) -> None:
    made: dict[str, Callable[[], Any]] = {
        "consumer": lambda: Consumer("b:9092", group="g", topics=["t"]),
        "processor": lambda: Processor("b:9092", group="g", topics=["t"]),
        "sink": lambda: DatabaseSink("b:9092", group="g", topics=["t"], database="sqlite:///x"),
    }
    client = made[kind]()
    client._running_in = os.getppid()
    with pytest.raises(UsageError, match="make one in the child"):
        client.run(print)
    client._running_in = os.getpid()
    with pytest.raises(UsageError, match="one run at a time"):
        client.run(print)
