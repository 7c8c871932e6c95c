"""The child of a handler that forked ends with the code it asked for, and unwinds nothing of its parent's."""

from __future__ import annotations

import os

import pytest

from holdfast.client.forks import end_if_forked


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
