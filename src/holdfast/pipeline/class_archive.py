"""Spark's classes, parsed and verified once for this machine, and mapped into every JVM that starts afterwards.

A start of Spark loads some eighteen thousand classes out of 280 jars, and most of a start is just that. Java can keep
them in an archive of its own form (class data sharing) and map it, which takes a third off the time to the first batch.

- The first run has Java note the names of the classes it loads, which costs nothing. At its clean end, or after
  `LEARNED_AFTER_S`, a process of its own in the background makes the archive of them, at the lowest priority there is:
  it takes half a minute of processor time. Runs after that use the archive.
- It is of use to one Java and one set of jars only; both are in its name, by digest. Java compares once more by itself
  and goes on without an archive that does not fit (`-Xshare:auto`). A JVM that ends at once with the archive is started
  again without, and the archive goes.
- Nothing here is needed: a cache that cannot be written, a full disk, a Java that does not know the options, a class
  path that cannot be archived, all mean a start as long as it was.
- An archive is code. It lies in a directory that only its user can write to, or it is not used.
- It has its name once it is whole and on the disk, by a rename, so any number of processes may start and make at once.
  At most `KEPT` are there, those used last, of about 200 MB each.

Whoever sets Java's sharing himself, in the definition or in `SPARK_SUBMIT_OPTS`, is left alone.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEPT: Final = 3
LEARNED_AFTER_S: Final = 120
"""A run that goes on for ever has loaded by now what the next one will need."""
LEFT_AFTER_S: Final = 86_400
"""What processes that were killed have left goes when it is a day old."""
LISTS_MAX: Final = 8
"""Of names that runs have noted and nobody made an archive of, a megabyte each."""
MAKING_TIMEOUT_S: Final = 1_800
ROOM_BYTES: Final = 1 << 30
"""Free on the disk, or nothing is made."""
HEAP_BYTES_MAX: Final = 31 << 30
"""Java's references are wider in larger heaps, which an archive made with narrow ones does not fit."""
OWN_WAYS: Final = (
    "-Xshare",
    "SharedArchiveFile",
    "ArchiveClassesAtExit",
    "SharedClassListFile",
    "DumpLoadedClassList",
    "-Xmx",
    "UseZGC",
    "UseCompressed",
)
"""In Java's options: whoever says this shares classes in a way of his own, or has a heap the archive does not fit."""
QUIET: Final = ("-Xlog:disable", "-Xlog:all=warning:stderr")
"""Java warns on standard output, which is the user's."""
UNNAMEABLE: Final = r"[\s:\"'\\]"
"""Of a path: options are separated by the one, and archives by the other."""
_UNITS: Final = {"": 1 << 20, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class ClassArchive:
    """The archive for one Java and one set of jars; it may not be there yet."""

    java_home: str
    directory: str
    key: str

    @property
    def path(self) -> str:
        return os.path.join(self.directory, f"{self.key}.jsa")

    @property
    def is_there(self) -> bool:
        return _is_whole(self.path)

    @property
    def refusal_path(self) -> str:
        """There when Java could not make it: for a day it is not tried again."""
        return os.path.join(self.directory, f"{self.key}.none")

    @property
    def list_path(self) -> str:
        """The names of classes that the JVM of this process has loaded."""
        return os.path.join(self.directory, f"{self.key}.{os.getpid()}.classes")

    def java_options(self) -> list[str]:
        """What the JVM of the driver is started with."""
        try:
            if self.is_there:
                os.utime(self.path)
                return [f"-XX:SharedArchiveFile={self.path}", "-Xshare:auto", *QUIET]
            if self._is_refused():
                return []
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            if not _only_we_write(self.directory) or not os.access(self.directory, os.W_OK):
                return []
            _remove_all_but_newest(self.directory, "*.classes", LISTS_MAX - 1)
        except OSError:
            return []
        return [f"-XX:DumpLoadedClassList={self.list_path}", *QUIET]

    def _is_refused(self) -> bool:
        try:
            return os.path.getmtime(self.refusal_path) > time.time() - LEFT_AFTER_S
        except FileNotFoundError:
            return False

    def discard(self) -> None:
        """It did not do."""
        _remove(self.path)

    @contextlib.contextmanager
    def learning(self, session: SparkSession) -> Iterator[None]:
        """While the session is used: have the archive made of what it has loaded, if Java notes that."""
        if not os.path.exists(self.list_path):
            yield
            return
        class_path = str(session._jvm.java.lang.System.getProperty("java.class.path"))  # type: ignore[union-attr]
        timer = threading.Timer(LEARNED_AFTER_S, self.make_beside, (class_path,))
        timer.daemon = True
        timer.start()
        try:
            yield
            self.make_beside(class_path)
        except BaseException:
            _remove(self.list_path)
            raise
        finally:
            timer.cancel()

    def make_beside(self, class_path: str) -> subprocess.Popen[bytes] | None:
        """Have another process make it, which nobody waits for; nothing where it is made already."""
        copy = self.list_path + ".done"
        try:
            os.link(self.list_path, copy)  # once for this process
        except OSError:
            return None
        command = [sys.executable, "-m", "holdfast.pipeline.class_archive"]
        try:
            return subprocess.Popen(
                [*command, self.java_home, self.directory, self.key, copy],
                env={**os.environ, "CLASSPATH": class_path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return None


def class_archive(
    java_home: str, settings: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> ClassArchive | None:
    """The archive for sessions with these settings; nothing where there can be none."""
    options = (
        f"{settings.get('spark.driver.extraJavaOptions', '')} {environment.get('SPARK_SUBMIT_OPTS', '')}"
    )
    if any(word in options for word in OWN_WAYS) or not _heap_fits(settings.get("spark.driver.memory", "1g")):
        return None
    spark_home = environment.get("SPARK_HOME") or _installed_spark()
    try:
        key = _key(java_home, spark_home, settings, environment)
    except OSError:
        return None
    from holdfast.pipeline.cluster.packaging import cache_directory

    directory = os.path.join(os.path.dirname(cache_directory()), "java")
    return None if re.search(UNNAMEABLE, directory) else ClassArchive(java_home, directory, key)


def made_archive(java_home: str, settings: Mapping[str, str]) -> ClassArchive | None:
    """For sessions that are too small to learn from: the archive where it is there."""
    found = class_archive(java_home, settings)
    return found if found is not None and found.is_there else None


def _installed_spark() -> str:
    import pyspark

    return os.path.dirname(pyspark.__file__)


def _heap_fits(text: str) -> bool:
    stated = re.fullmatch(r"(\d+)([bkmgt]?)b?", text.strip().lower())
    return stated is not None and int(stated[1]) * _UNITS[stated[2]] <= HEAP_BYTES_MAX


def _key(java_home: str, spark_home: str, settings: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """By everything that Java compares; `OSError` where Java or Spark is laid out in another way."""
    from holdfast import __version__

    jars = sorted((entry.name, *_mark(entry.path)) for entry in os.scandir(os.path.join(spark_home, "jars")))
    others = [settings.get("spark.driver.extraClassPath", "")]
    others += [environment.get(name, "") for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")]
    others += [environment.get(name, "") for name in ("SPARK_DIST_CLASSPATH", "CLASSPATH")]
    java = _mark(os.path.join(java_home, "lib", "modules"))
    parts = (__version__, os.path.realpath(java_home), java, spark_home, jars, others)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _mark(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _is_whole(path: str) -> bool:
    """There, and nobody else can have written it."""
    return os.path.exists(path) and _only_we_write(path) and _only_we_write(os.path.dirname(path))


def _only_we_write(path: str) -> bool:
    status = os.stat(path)
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


# ---------------------------------------------------------------------------- making it


def make(archive: ClassArchive, classes: str) -> bool:
    """Make the archive of the classes in this list, unless another process does; whether it is there then."""
    from holdfast.pipeline.sinks.files import hold

    held = hold(os.path.join(archive.directory, f"{archive.key}.lock"))
    if held is None:
        return False
    try:
        if not os.path.exists(archive.path) and shutil.disk_usage(archive.directory).free >= ROOM_BYTES:
            _make(archive, classes)
        _forget(archive)
    finally:
        held.release()
    return os.path.exists(archive.path)


def _make(archive: ClassArchive, classes: str) -> None:
    from holdfast.pipeline.sinks.files import Disk

    _cut_to_whole_lines(classes)
    aside = os.path.join(archive.directory, f"{archive.key}.{os.getpid()}.new")
    command = [
        os.path.join(archive.java_home, "bin", "java"),
        "-Xshare:dump",
        "-Xlog:disable",
        "-Xmx512m",
        f"-XX:SharedClassListFile={classes}",
        f"-XX:SharedArchiveFile={aside}",
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=MAKING_TIMEOUT_S, check=False
        )
        if done.returncode != 0 or not os.path.exists(aside):
            Path(archive.refusal_path).write_bytes(done.stdout[-2_000:] + done.stderr[-2_000:])
            return
        os.chmod(aside, 0o600)
        Disk().flush_file(aside)
        os.replace(aside, archive.path)
    finally:
        _remove(aside)


def _cut_to_whole_lines(path: str) -> None:
    """A JVM that still runs has written part of its last line."""
    with open(path, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _forget(archive: ClassArchive) -> None:
    """Archives that were not used of late, and what was left by processes that were killed."""
    _remove_all_but_newest(archive.directory, "*.jsa", KEPT)
    before = time.time() - LEFT_AFTER_S
    for entry in list(os.scandir(archive.directory)):
        is_left = entry.name.endswith((".classes", ".done", ".new", ".none", ".lock"))
        if is_left and entry.stat().st_mtime < before:
            _remove(entry.path)


def _remove_all_but_newest(directory: str, pattern: str, kept: int) -> None:
    found = glob.glob(os.path.join(glob.escape(directory), pattern))
    for path in sorted(found, key=_newest_first)[kept:]:
        _remove(path)


def _newest_first(path: str) -> float:
    try:
        return -os.path.getmtime(path)
    except FileNotFoundError:
        return 0.0  # another process has removed it


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _step_back() -> None:
    """Everybody else comes first."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # Where sessions share the processor among each other, niceness counts within one only.
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


def main(arguments: Sequence[str]) -> int:
    """`JAVA_HOME DIRECTORY KEY LIST`, with the class path in the environment."""
    java_home, directory, key, copy = arguments
    _step_back()
    classes = os.path.join(directory, f"{key}.{os.getpid()}.classes")
    try:
        shutil.copyfile(copy, classes)  # the JVM may go on writing to its own
        return 0 if make(ClassArchive(java_home, directory, key), classes) else 1
    finally:
        for path in (classes, copy, copy.removesuffix(".done")):
            _remove(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
