"""What all that start processes here have in common: a child dies with its parent, is found again, and has a port.

A child that starts others in turn (a JVM, Python workers) gives them its environment: a mark in it finds them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.errors import HoldfastError

POLL_SECONDS: Final = 0.005
KILL_SECONDS_MAX: Final = 30.0
MARK: Final = "HOLDFAST_CHAOS"
"""The environment variable that marks whatever was started for one purpose."""
PR_SET_PDEATHSIG: Final = 1


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel end the child when this process dies, however it dies, where that is safe.

    The kernel watches the *thread* that forked, so a child started from a thread that ends before the
    program does must not ask for it.
    """
    if not sys.platform.startswith("linux") or threading.current_thread() is not threading.main_thread():
        return None
    return partial(ask_to_die, os.getpid(), how)


def ask_to_die(parent_pid: int, how: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent_pid:  # it died between fork and prctl
        os._exit(1)


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark, directly or not, and have not ended."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            gone = contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError)
            with gone, open(f"/proc/{name}/environ", "rb") as file:
                if f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def kill_marked(mark: str, process: subprocess.Popen[bytes] | None = None) -> set[int]:
    """SIGKILL to all that have the mark, until nothing is there; returns which processes that were.

    `process` is their first, which is a child of this one and has to be waited for.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while members := marked(mark):
        if time.monotonic() > deadline:
            raise HoldfastError(f"processes that cannot be killed: {members}")
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(members)
        time.sleep(POLL_SECONDS)
        if process is not None:
            process.poll()
    return killed


def wait_until_ready(
    process: subprocess.Popen[bytes],
    is_ready: Callable[[], object],
    failed: Callable[[str], Exception],
    seconds: float,
) -> None:
    """Return once it is ready; raise what `failed` makes of the reason when it ends instead, or takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        code = process.poll()  # first: what it said before its end is there by then
        if is_ready():
            return
        if code is not None:
            raise failed(f"exited with {code} while starting")
        if time.monotonic() > deadline:
            raise failed(f"is not ready within {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def end(process: subprocess.Popen[bytes], how: signal.Signals, seconds: float) -> bool:
    """Send a signal and wait; false when it did not end in time and was killed."""
    process.send_signal(how)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on, and that the kernel gives to nobody else for a minute.

    A server may need seconds until it binds its port, and the kernel would meanwhile give it to any outgoing
    connection. So each port gets one connection, which its own side closes first: the kernel keeps such a port back
    (TIME_WAIT) from whoever asks for any port, and servers bind it all the same, since they set SO_REUSEADDR.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        for each in listeners:
            with socket.create_connection(each.getsockname()) as visitor:
                each.accept()[0].close()
                visitor.recv(1)
        return [each.getsockname()[1] for each in listeners]
