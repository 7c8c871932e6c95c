"""Finding a Java that Spark runs on: `JAVA_HOME`, the PATH, then the usual folders.

`python -m holdfast.pipeline.java --install` also installs Debian's headless Java where there is none, apt is there and
the user may use it; everywhere else it says in one line what to install.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
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


PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")
"""In the order of preference; which of them there are depends on the Debian or Ubuntu."""


def install_java(environment: Mapping[str, str] | None = None) -> str:
    """The home of a Java, after installing one with apt if there is none. `JavaMissing` where that is not possible."""
    environment = os.environ if environment is None else environment
    try:
        return find_java(environment)
    except JavaMissing:
        apt = shutil.which("apt-get", path=environment.get("PATH"))
        if apt is None or os.geteuid() != 0:
            raise
    quiet = {**environment, "DEBIAN_FRONTEND": "noninteractive"}
    print("No Java found: installing Debian's headless one with apt-get", file=sys.stderr, flush=True)
    failure = ""
    for arguments in (
        ["update", "-qq"],
        *(["install", "-y", "-qq", "--no-install-recommends", name] for name in PACKAGES),
    ):
        done = subprocess.run([apt, *arguments], env=quiet, capture_output=True, text=True, check=False)
        if arguments[0] == "install" and done.returncode == 0:
            return find_java(environment)
        failure = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else failure
    raise JavaMissing(f"{ADVICE}. apt-get could not install it: {failure}")


def main(arguments: list[str]) -> int:
    """Print the home of a Java; exit with 3 and one line of advice where there is none."""
    try:
        print(install_java() if "--install" in arguments else find_java())
    except JavaMissing as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
