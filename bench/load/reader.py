"""A topic read by the batch reader, and exported to a file: from the first question to the last row."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


def read(spec: dict[str, Any]) -> dict[str, Any]:
    """Everything in the topic as Arrow batches; the code is loaded before the clock starts."""
    from holdfast import reader

    reader.warm()
    begun_at = time.monotonic()
    cpu_at = time.process_time()
    count = sum(batch.num_rows for batch in reader.read(spec["bootstrap_servers"], spec["topic"]))
    seconds = time.monotonic() - begun_at
    return {"seconds": seconds, "count": count, "cpu_seconds": time.process_time() - cpu_at}


def first(spec: dict[str, Any]) -> dict[str, Any]:
    """A fresh process to its first batch, imports included."""
    code = (
        "from holdfast import reader; "
        f"next(iter(reader.read({spec['bootstrap_servers']!r}, {spec['topic']!r}, end={{0: 1}})))"
    )
    begun_at = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    return {"seconds": time.monotonic() - begun_at}


def export(spec: dict[str, Any]) -> dict[str, Any]:
    """`holdfast export` as its users run it, start of the process included."""
    path = spec["path"]
    command = [sys.executable, "-m", "holdfast.cli", "export", spec["topic"], "--format", spec["format"]]
    command += ["--output", path, "--bootstrap-server", spec["bootstrap_servers"]]
    begun_at = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - begun_at
    size = os.path.getsize(path)
    os.unlink(path)
    return {"seconds": seconds, "bytes": size}
