"""Spark's daemon of Python workers on another machine, started from the parts that were shipped.

This file stands at the top of the package as `holdfast_worker.py`, and is the first thing a worker's Python runs. So it
imports nothing but the standard library before it has compared that Python with what the parts were made for: parts for
another one fail in ways that nobody understands. What it says on standard error reaches the driver through Spark.
"""

from __future__ import annotations

import json
import os
import platform
import sys

MANIFEST = "holdfast-package.json"
MARK = "holdfast-package:"
"""Before a line that is for the driver."""


def facts() -> dict[str, str]:
    """What the parts depend on, of the Python that runs this."""
    return {
        "implementation": sys.implementation.name,
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "system": sys.platform,
        "machine": platform.machine(),
        "libc": platform.libc_ver()[0] or "other",
    }


def find_problem(made_for: dict[str, str], here: dict[str, str]) -> str:
    """Why the parts cannot run here; empty when they can."""
    different = [name for name in sorted(here) if made_for.get(name) != here[name]]
    if not different:
        return ""
    theirs = ", ".join(f"{name} {made_for.get(name)}" for name in different)
    ours = ", ".join(f"{name} {here[name]}" for name in different)
    return f"made for {theirs}, and {sys.executable} on {platform.node()} is {ours}"


def main() -> None:
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), MANIFEST), encoding="utf-8") as file:
        made_for = json.load(file)["made_for"]
    problem = find_problem(made_for, facts())
    if problem:
        sys.stderr.write(f"{MARK} {problem}\n")
        sys.exit(1)

    from holdfast.pipeline import worker_daemon

    worker_daemon.main()


if __name__ == "__main__":
    main()
