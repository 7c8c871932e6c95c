"""Where holdfast runs: Linux, and macOS with what it has; CPython with its global lock. Elsewhere it says so and stops.

`holdfast.real` says what a machine lacks that is served all the same.
"""

from __future__ import annotations

import sys


def refusal() -> str:
    """Why this machine or interpreter is not served, in a sentence; empty where it is."""
    if sys.platform in ("win32", "cygwin"):
        return (
            "holdfast does not run on Windows, whose files cannot be flushed and replaced as its promises need: "
            "run it under WSL 2 or in a container"
        )
    # A build that can do without the lock has a letter of its own; it may have been started with the lock.
    if "t" in getattr(sys, "abiflags", ""):
        return (
            "holdfast does not run on a free-threaded build of Python, which libraries of its are not made for: "
            f"install the usual build of Python {sys.version_info[0]}.{sys.version_info[1]}"
        )
    return ""
