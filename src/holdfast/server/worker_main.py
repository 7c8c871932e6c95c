"""The background process: one JSON task per line in, one JSON answer per line out, on the real disk.

It gives way to the broker on the processor and, with its niceness, on the disk. It ends with its input, and
with its parent however that ends: the kernel sees to it, so that no orphan ever writes beside a new broker.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any, BinaryIO, Final

from holdfast.errors import HoldfastError
from holdfast.log.tasks import run
from holdfast.real import RealFileSystem
from holdfast.seams import FileSystem

PR_SET_PDEATHSIG: Final = 1
NICENESS: Final = 19


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; leave at once when it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent_pid:
        sys.exit(0)


def answer(fs: FileSystem, line: bytes) -> dict[str, Any]:
    """Carry out one task and say how it went."""
    try:
        request = json.loads(line)
        return {"result": run(fs, request["task"], request["arguments"])}
    except (HoldfastError, OSError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "out of memory"}


def serve(fs: FileSystem, tasks: BinaryIO, answers: BinaryIO) -> None:
    for line in tasks:
        answers.write(json.dumps(answer(fs, line)).encode() + b"\n")
        answers.flush()


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    # An interrupt from the terminal reaches the whole process group; the broker decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    serve(RealFileSystem(), sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
