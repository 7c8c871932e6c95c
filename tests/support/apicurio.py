"""A real schema registry for tests: Apicurio Registry, whose `ccompat` interface is Confluent's.

    with ApicurioRegistry() as registry:
        SchemaRegistryClient({"url": registry.url})

`application()` gives the directory with the program: downloaded once by Maven (110 MB), checked against the sum below,
unpacked under the user's cache directory. It keeps its schemas in memory, and the kernel ends it with the thread that
started it. It needs some ten seconds and 400 MB: `schema_registry` is for tests that only want a registry, this one for
those that must not take our word for what a registry does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final, Self
from urllib.error import URLError
from urllib.request import urlopen

from holdfast.errors import HoldfastError
from holdfast.testing.apache import (
    ApacheKafkaUnavailable,
    cache_directory,
    exclusive_lock,
    java_executable,
    run_maven,
)
from holdfast.testing.processes import die_with_parent, end, free_ports, wait_until_ready

VERSION: Final = "3.0.9"
"""The last that Java 17 runs."""
ARTIFACT: Final = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
SHA256: Final = "2b28181501a20cbf6efcd77f9b7153908fc01f3d3a7c32024c0bd9e1b04c8a43"
MAVEN_GOAL: Final = "org.apache.maven.plugins:maven-dependency-plugin:2.8:get"
"""Later ones want the parent of the artifact's description too, which was never published."""
JVM_OPTIONS: Final = ("-Xmx384M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
START_SECONDS_MAX: Final = 120.0
START_ATTEMPTS: Final = 3
STOP_SECONDS_MAX: Final = 30.0
LOG_QUOTE_CHARACTERS: Final = 4000


class NoApicurio(HoldfastError):
    """The registry cannot be run on this machine; the message says what is missing."""


class ApicurioDied(HoldfastError):
    """The registry ended by itself or never became ready; the end of its log is in the message."""


def application() -> Path:
    """The directory of the program, downloaded when it is not there yet."""
    target = cache_directory() / f"apicurio-{VERSION}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(target.parent / f"apicurio-{VERSION}.lock"):
        if not target.is_dir():
            aside = Path(tempfile.mkdtemp(prefix="download-", dir=target.parent))
            try:
                _download(aside)
                os.rename(aside / "unpacked", target)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return target


def _download(aside: Path) -> None:
    arguments = [MAVEN_GOAL, f"-Dartifact={ARTIFACT}", "-Dtransitive=false"]
    # In a repository of its own, where the one file is easily found.
    arguments.append(f"-Dmaven.repo.local={aside / 'repository'}")
    run_maven(f"Apicurio Registry ({ARTIFACT})", NoApicurio, arguments, aside)
    (archive,) = aside.glob("repository/**/*.tar.gz")
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SHA256:
            raise NoApicurio(f"the download of {ARTIFACT} has another SHA-256 than the expected one")
    with tarfile.open(archive) as packed:
        packed.extractall(aside / "unpacked", filter="data")


class ApicurioRegistry:
    def __init__(self) -> None:
        try:
            java = java_executable()
        except ApacheKafkaUnavailable as missing:
            raise NoApicurio("Apicurio Registry needs a Java runtime, 17 or newer") from missing
        (jar,) = application().glob("*-runner.jar")
        self._command = [java, *JVM_OPTIONS, "-jar", str(jar)]
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-apicurio-"))
        (self._port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/apis/ccompat/v7"

    def log(self) -> str:
        return (self._directory / "log").read_text(encoding="utf-8", errors="replace")

    def start(self) -> Self:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start()
                break
            except ApicurioDied:
                # Somebody else may have taken the port since it was found free.
                if attempt == START_ATTEMPTS or "seems to be in use" not in self.log():
                    raise
                self.close()
                self._directory.mkdir()
                (self._port,) = free_ports(1)
        return self

    def _start(self) -> None:
        environment = {
            **os.environ,
            "QUARKUS_HTTP_HOST": "127.0.0.1",
            "QUARKUS_HTTP_PORT": str(self._port),
            "APICURIO_STORAGE_KIND": "sql",
        }
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        wait_until_ready(
            self._process,
            self._is_ready,
            lambda why: ApicurioDied(f"Apicurio Registry {why}:\n{self.log()[-LOG_QUOTE_CHARACTERS:]}"),
            START_SECONDS_MAX,
        )

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/subjects", timeout=START_SECONDS_MAX) as answer:
                return bool(answer.status == 200)
        except (URLError, ConnectionError):
            return False

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end(process, signal.SIGTERM, STOP_SECONDS_MAX)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()
