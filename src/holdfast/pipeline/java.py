"""Finding a Java that Spark runs on: `JAVA_HOME`, the PATH, then the usual folders."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from holdfast.errors import HoldfastError

OLDEST = 17
USUAL_FOLDERS = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
)
ADVICE = (
    f"Spark needs Java {OLDEST} or newer. Install it (Debian and Ubuntu: apt install openjdk-17-jre-headless) "
    "or point JAVA_HOME at one"
)


class JavaMissing(HoldfastError):
    """No Java that Spark runs on was found; the message says what was."""

    exit_code = 3


def find_java(environment: Mapping[str, str] | None = None) -> str:
    """The home directory of a Java of version 17 or newer."""
    environment = os.environ if environment is None else environment
    too_old: list[str] = []
    for home in _candidates(environment):
        version = java_version(home)
        if version is not None and version >= OLDEST:
            return home
        if version is not None:
            too_old.append(f"{home} is version {version}")
    found = f" ({'; '.join(too_old)})" if too_old else ""
    raise JavaMissing(f"{ADVICE}. None was found by JAVA_HOME, on the PATH or in the usual folders{found}.")


def java_version(home: str) -> int | None:
    """The major version of the Java at this home; nothing if there is none that answers."""
    release = os.path.join(home, "release")
    executable = os.path.join(home, "bin", "java")
    if not os.access(executable, os.X_OK):
        return None
    if os.path.exists(release):
        with open(release, encoding="utf-8", errors="replace") as file:
            stated = re.search(r'^JAVA_VERSION="([^"]+)"', file.read(), re.MULTILINE)
        if stated:
            return _major(stated[1])
    try:
        answer = subprocess.run(
            [executable, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    stated = re.search(r'version "([^"]+)"', answer.stderr)
    return _major(stated[1]) if stated else None


def _major(version: str) -> int | None:
    parts = re.findall(r"\d+", version)
    if not parts:
        return None
    return int(parts[1]) if parts[0] == "1" and len(parts) > 1 else int(parts[0])


def _candidates(environment: Mapping[str, str]) -> Iterator[str]:
    if environment.get("JAVA_HOME"):
        yield environment["JAVA_HOME"]
    on_path = shutil.which("java", path=environment.get("PATH"))
    if on_path:
        yield os.path.dirname(os.path.dirname(os.path.realpath(on_path)))
    for pattern in USUAL_FOLDERS:
        yield from sorted(glob.glob(pattern))
