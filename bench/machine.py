"""Facts about the machine and the programs a result was taken with, and what a process costs."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.testing.apache import KAFKA_VERSION, java_executable

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def facts(work_dir: Path) -> dict[str, str]:
    """What a reader needs to judge the figures."""
    import confluent_kafka

    librdkafka = confluent_kafka.libversion()[0]
    memory_gib = PAGE_BYTES * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{memory_gib:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _file_system(work_dir),
        "Python": platform.python_version(),
        "Java": _first_line([java_executable(), "-version"]),
        "Apache Kafka": KAFKA_VERSION,
        "client": f"confluent-kafka {confluent_kafka.__version__} on librdkafka {librdkafka}",
        "load before the run": " ".join(f"{each:.2f}" for each in os.getloadavg()),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(path: Path) -> str:
    """Type and options of the innermost mount that holds `path`."""
    held, found = -1, "unknown"
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mounted_at, kind, options, *_ = line.split()
        if path.resolve().is_relative_to(mounted_at) and len(mounted_at) >= held:
            held, found = len(mounted_at), f"{kind} ({options})"
    return found


def _first_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()[0]


def _family(pid: int) -> Iterator[int]:
    """The process and all its living descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            try:
                yield from _family(int(child))
            except FileNotFoundError:  # it ended while we were looking
                continue


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of its living children and of those it has waited for."""
    ticks = 0
    for each in _family(pid):
        # The command, second and in parentheses, may hold spaces; the figures come after it.
        figures = Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += sum(int(figure) for figure in figures[11:15])
    return ticks / TICKS_PER_S


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its children in MB; pages they share count for each."""
    pages = 0
    for each in _family(pid):
        pages += int(Path(f"/proc/{each}/statm").read_text(encoding="ascii").split()[1])
    return pages * PAGE_BYTES / 1e6
