"""The background process: one JSON task per line in, one JSON answer per line out, on the real disk.

It gives way to everybody on the processor and on the disk (see `give_way`). It ends with its input, and with its
parent however that ends, so that no orphan ever writes beside a new broker: Linux's kernel sees to it. Elsewhere a
thread reads the input ahead, which ends when the parent does, and ends the process whatever it is doing.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import struct
import sys
import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, BinaryIO, Final

from holdfast.broker.log.tasks import run
from holdfast.errors import HoldfastError
from holdfast.real import RealFileSystem, keep_freed_memory
from holdfast.seams import FileSystem

PR_SET_PDEATHSIG: Final = 1
NICENESS: Final = 19
SLICE_NS: Final = 100_000_000
"""How long this process would like to run at a stretch: the most that can be asked for. Who asks for less, and that
is everybody, takes the processor from it as soon as it wakes, instead of at the next tick."""
SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The number of the system call, which older C libraries have no name for."""
SCHED_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""size, policy, flags, nice, real-time priority, runtime (of ordinary processes: the slice), deadline, period."""


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; leave at once when it already has."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent_pid:
        sys.exit(0)


def give_way() -> None:
    """Let everybody else go first, on the processor and on the disk.

    Niceness decides how much of a processor this gets beside others, but not how soon one of them that wakes gets
    it: that may be at the next tick, a millisecond or more away. The slice does.
    """
    os.nice(NICENESS)
    number = SCHED_SETATTR.get(platform.machine()) if sys.platform.startswith("linux") else None
    if number is not None:
        fields = (SCHED_ATTRIBUTES.size, os.SCHED_OTHER, 0, NICENESS, 0, SLICE_NS, 0, 0)
        # Kernels before 6.12 ignore the slice, and a sandbox may refuse the call: neither is worse off.
        ctypes.CDLL(None).syscall(number, 0, SCHED_ATTRIBUTES.pack(*fields), 0)


def answer(fs: FileSystem, line: bytes) -> dict[str, Any]:
    """Carry out one task and say how it went."""
    try:
        request = json.loads(line)
        return {"result": run(fs, request["task"], request["arguments"])}
    except (HoldfastError, OSError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "out of memory"}


def read_ahead(tasks: BinaryIO) -> Iterator[bytes]:
    """The lines of the input, whose end is the end of this process: at once, in the middle of a task."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in tasks:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="tasks", daemon=True).start()
    while True:
        yield lines.get()


def serve(fs: FileSystem, tasks: Iterable[bytes], answers: BinaryIO) -> None:
    for line in tasks:
        answers.write(json.dumps(answer(fs, line)).encode() + b"\n")
        answers.flush()


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    # An interrupt from the terminal reaches the whole process group; the broker decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    give_way()
    keep_freed_memory()
    tasks = sys.stdin.buffer
    is_ended = sys.platform.startswith("linux")
    serve(RealFileSystem(), tasks if is_ended else read_ahead(tasks), sys.stdout.buffer)


if __name__ == "__main__":
    main()
