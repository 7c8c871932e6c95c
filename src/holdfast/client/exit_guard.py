"""No program ends quietly with messages under way: it says how many, and its exit code is not zero.

A producer is watched from its making until it is closed and whoever closed it was told what it left behind, whether or
not anybody else holds it. When the interpreter ends with one still watched, its messages get a last chance to leave. If
some do not, or an exception that ended a block hid them, or the one that names them ended a thread and no more, the
process ends with `EXIT_UNDELIVERED`, whatever it meant to end with. It ends as it would have without us: files are
flushed, and what others registered with `atexit` runs.

A forked child has the parent's objects and none of its threads: its messages are the parent's, and nothing of them is
counted or sent here. What the child makes itself is watched there.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
import time
from typing import Final, Protocol
from weakref import WeakSet

from holdfast.client.errors import UndeliveredMessages
from holdfast.client.messages import described
from holdfast.client.process import say

EXIT_UNDELIVERED: Final = 70
LAST_CHANCE_SECONDS = 10.0
"""For all producers together."""


class Watched(Protocol):
    def abandon(self, timeout: float) -> int:
        """Try to deliver what is left; returns how many messages are in danger that nobody was told of."""
        ...

    def orphan(self) -> None:
        """This process was forked from the one that it works in: refuse whatever is asked from now on."""
        ...


_open: set[Watched] = set()
_owed: list[int] = []
"""Messages of producers that are closed, of which nobody was told."""


def watch(producer: Watched) -> None:
    _open.add(producer)
    _watch_end_of_worker()


def unwatch(producer: Watched) -> None:
    _open.discard(producer)


def owe(count: int, line: str) -> None:
    """Something nobody can have heard of: it is said now, and the exit code will tell."""
    say(line)
    _owed.append(count)


def raised(error: UndeliveredMessages) -> UndeliveredMessages:
    """To be raised. A daemon thread may be cut off before anybody catches it: as long as it lives, nobody has."""
    if threading.current_thread().daemon:
        _in_the_air.add(error)
    return error


_in_the_air: WeakSet[UndeliveredMessages] = WeakSet()


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    """An exception that ends a thread is printed, and ends nothing else: the exit code will tell."""
    if isinstance(ended.exc_value, UndeliveredMessages):
        _in_the_air.discard(ended.exc_value)
        _owed.append(ended.exc_value.count)
    _print_end_of_thread(ended)


_print_end_of_thread = threading.excepthook
threading.excepthook = _thread_ended


def _named() -> int:
    """How many messages were named to nobody."""
    if _in_the_air:
        gc.collect()  # what was caught may live on in a cycle
    return sum(_owed) + sum(error.count for error in list(_in_the_air))


def _settle() -> int:
    """The program ends; returns the exit code that it must have, 0 for its own."""
    named = _named()
    lost = 0
    deadline = time.monotonic() + LAST_CHANCE_SECONDS
    while _open:
        producer = _open.pop()
        try:
            lost += producer.abandon(max(0.0, deadline - time.monotonic()))
        except BaseException as error:  # noqa: BLE001  whatever it is must not look like success
            say(described(error))
            lost += 1
            deadline = 0.0
    # What other threads have closed meanwhile they name, too.
    lost = named + max(lost, _named() - named)
    is_owed = bool(_owed)
    _owed.clear()
    _in_the_air.clear()
    if lost:
        say(
            f"{lost} message{'' if lost == 1 else 's'} had not been delivered when the program ended "
            "(close the producer, or leave its `with` block, to be told which)"
        )
    return EXIT_UNDELIVERED if lost or is_owed else 0


def _at_exit() -> None:
    code = EXIT_UNDELIVERED  # unless it is known to be well: a signal may interrupt this, too
    try:
        code = _settle()
    finally:
        if code:
            _end_with(code)


def _end_with(code: int) -> None:
    """Have the process end with this code when the interpreter is done with everything else.

    No function of Python's does that from here. The C library's `exit` calls first what is registered last, and calling
    `exit` again from there goes on with the rest and with the new code. (Not every C library allows that: others leave
    by `_exit`.)
    """
    try:
        libc = ctypes.CDLL(None)
        ending = libc.exit if hasattr(libc, "gnu_get_libc_version") else libc._exit
        libc.__cxa_atexit(ctypes.cast(ending, ctypes.c_void_p), ctypes.c_void_p(code), None)
    except (OSError, AttributeError, TypeError):
        _leave(code)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)


def _watch_end_of_worker() -> None:
    """A worker process of `multiprocessing` runs its own finalizers and leaves without `atexit`."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None and not _workers:
        from multiprocessing.util import Finalize

        _workers.append(Finalize(None, _at_end_of_worker, exitpriority=-sys.maxsize))  # after all others


_workers: list[object] = []
ATEXIT_RUNS_FINALIZERS: Final[bool] = sys.version_info >= (3, 13)
"""Of worker processes of `multiprocessing`."""


def _at_end_of_worker() -> None:
    code = _settle()
    if not code:
        return
    if not ATEXIT_RUNS_FINALIZERS:
        raise SystemExit(code)
    # `atexit` ignores SystemExit. Threads are all that is waited for after it.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    _leave(code)


def _after_fork() -> None:
    for producer in list(_open):
        producer.orphan()
    _open.clear()
    _owed.clear()
    _in_the_air.clear()
    _workers.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
