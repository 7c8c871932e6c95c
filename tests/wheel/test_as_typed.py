"""What README, the quick start and the fixtures' pages show works as typed, from the wheel with only the extras named.

The blocks are taken from the pages as they stand and run from top to bottom in one directory, as a newcomer would: what
one has made the next one finds. Two things are not as typed: the broker listens on a free port, and addresses are that
port's (in the pipeline's definition by the variable `KAFKA`, as it says). `make` is not run; that its targets exist is
seen, and `pip` is told to make a wheel, but not to install one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.caught_up import has_caught_up
from tests.support.wheels import ROOT, Installed

from holdfast.testing import plugin
from holdfast.testing.processes import die_with_parent

pytestmark = [pytest.mark.check, pytest.mark.xdist_group("wheel")]

Install = Callable[..., Installed]

WAIT_SECONDS_MAX = 280.0
LOOK_SECONDS = 0.1
ADDRESS = re.compile(r"\b(?:127\.0\.0\.1|localhost):9092\b")
READY = re.compile(r"ready on (127\.0\.0\.1:\d+)")
GROUP = re.compile(r'group="([^"]+)"')
TOPICS = re.compile(r'topics=\["([^"]+)"\]')
NOISE = re.compile(r"^%\d\|(?!.*Broker handle destroyed without termination: retrying$)", re.MULTILINE)
"""How librdkafka logs to standard error. That it gives up the address it was given for the broker's own, on a busy
machine while it is asking there for a producer id, is no complaint."""

FINDS = ("doctor --code",)
"""Ends with 1 on the settings that were laid before it."""
ELSEWHERE = ("cluster up", "cluster down")
"""Tried by tests of its own, with the Java and the jars it needs."""
WITH_SPARK = ("pipeline run", "audit pipeline my-pipeline", "trace ", "examples/pipelines/run.py")
LONG = (*WITH_SPARK, "lab run")


class Section(NamedTuple):
    extras: tuple[str, ...]
    blocks: list[tuple[str, str]]
    """Each with its language."""


def sections(text: str) -> Iterator[Section]:
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
        yield Section(tuple(sorted(set(re.findall(r"holdfast\[(\w+)\]", part)))), blocks)


class Newcomer:
    """A directory, a broker that they have started, and what they type."""

    def __init__(self, directory: Path, install: Install, is_patient: bool) -> None:
        self._directory = directory
        self._install = install
        self._is_patient = is_patient
        self._address = ""
        self._broker: subprocess.Popen[bytes] | None = None
        self._errors = directory / "errors.txt"
        (directory / "examples").symlink_to(ROOT / "examples")
        (directory / "README.md").symlink_to(ROOT / "README.md")

    def read(self, page: str) -> None:
        for section in sections(page):
            for language, text in section.blocks:
                if language == "python":
                    self.run_program(text, section.extras)
                elif language == "":
                    self.use(self._install(*section.extras))
                    for line in text.splitlines():
                        self.type(line)

    def use(self, installed: Installed) -> None:
        there = self._directory / ".venv"
        there.unlink(missing_ok=True)
        there.symlink_to(installed.directory)
        self._environment = installed.environment(
            HOLDFAST_BOOTSTRAP_SERVER=self._address, KAFKA=self._address
        )

    def type(self, line: str) -> None:
        if target := re.match(r"make ([a-z]+)", line):
            assert f"\n{target[1]}: " in (ROOT / "Makefile").read_text(), line
        elif line.startswith("pip "):
            assert line in pip_lines((ROOT / "README.md").read_text()), f"no test runs: {line}"
        elif "holdfast serve" in line:
            self._serve(line)
        elif not any(words in line for words in ELSEWHERE) and (
            self._is_patient or not any(words in line for words in LONG)
        ):
            self._run(line, ["/bin/sh", "-ec", ADDRESS.sub(self._address, line)])

    def _serve(self, line: str) -> None:
        with (self._directory / "serve.log").open("wb") as log:
            self._broker = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {line.partition('#')[0]} --listen 127.0.0.1:0"],
                cwd=self._directory,
                env=self._environment,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while (found := READY.search(said := (self._directory / "serve.log").read_text())) is None:
            assert self._broker.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(LOOK_SECONDS)
        self._address = found[1]
        self._environment |= {"HOLDFAST_BOOTSTRAP_SERVER": found[1], "KAFKA": found[1]}

    def run_program(self, text: str, extras: tuple[str, ...]) -> None:
        is_test = "def test_" in text
        self.use(self._install(*extras, beside=("pytest",) if is_test else ()))
        file = self._directory / ("test_as_typed.py" if is_test else "as_typed.py")
        file.write_text(ADDRESS.sub(self._address, text))
        options = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if is_test else []
        self._run(text, [".venv/bin/python", *options, file.name])

    def _run(self, typed: str, command: list[str]) -> None:
        """To its end; a program that goes on for ever is interrupted when its group has nothing left to do."""
        with self._errors.open("w") as errors:
            program = subprocess.Popen(
                command,
                cwd=self._directory,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        try:
            if groups := GROUP.findall(typed):
                self._await_handled(program, groups, typed)
                program.send_signal(signal.SIGINT)
            output, _ = program.communicate(timeout=WAIT_SECONDS_MAX)
        finally:
            # With whatever the shell has started, where it did not come to its end.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        said = self._errors.read_text()
        told = f"{typed}\n{output.decode()}\n{said}"
        assert program.returncode == any(words in typed for words in FINDS), told
        assert NOISE.search(said) is None, told
        assert "Traceback" not in said, told

    def _await_handled(self, program: subprocess.Popen[bytes], groups: list[str], typed: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        topics = TOPICS.findall(typed)
        while not all(has_caught_up(self._address, group, topics) for group in groups):
            assert program.poll() is None, self._errors.read_text()
            assert time.monotonic() < deadline, self._errors.read_text()
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        if self._broker is not None:
            self._broker.send_signal(signal.SIGTERM)
            assert self._broker.wait(WAIT_SECONDS_MAX) == 0


@pytest.fixture
def newcomer(tmp_path: Path, install: Install, request: pytest.FixtureRequest) -> Iterator[Newcomer]:
    made = Newcomer(tmp_path, install, request.config.getoption("--long"))
    yield made
    made.close()


@pytest.mark.timeout(900)  # in `make long` a page starts Spark several times
@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_a_page_for_newcomers(newcomer: Newcomer, page: str) -> None:
    newcomer.read((ROOT / page).read_text())


def pip_lines(page: str) -> list[str]:
    return re.findall(r"^pip .*$", page, re.MULTILINE)


def test_what_pip_is_told_to_do_makes_a_wheel(tmp_path: Path) -> None:
    """Nothing is downloaded, and nothing installed where tests run: of `pip install` the extras alone are looked at."""
    for part in ("LICENSE", "README.md", "pyproject.toml", "hatch_build.py", "src"):
        (tmp_path / part).symlink_to(ROOT / part)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = pip_lines((ROOT / "README.md").read_text())
    for line in lines:
        assert re.match(r"pip (install '?\.|wheel --no-deps )", line), line
        named = re.findall(r"\.\[(\w+)\]", line) + re.findall(r"\w+", line.partition("other extras:")[2])
        assert [extra for extra in named if extra not in declared] == [], line
    (wheel,) = [line for line in lines if line.startswith("pip wheel ")]
    subprocess.run(
        ["/bin/sh", "-ec", f"{sys.executable} -m {wheel}"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
        },  # pip means "no isolation" by 0
        check=True,
        capture_output=True,
        timeout=WAIT_SECONDS_MAX,
    )
    assert list((tmp_path / "dist").glob("holdfast-*.whl"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_examples_page(newcomer: Newcomer) -> None:
    newcomer.read((ROOT / "examples" / "README.md").read_text())


def test_the_fixtures(newcomer: Newcomer) -> None:
    """The page of the plugin has its tests indented."""
    parts = re.findall(r"(?:^    .*\n|^\n)+", plugin.__doc__ or "", re.MULTILINE)
    tests = [re.sub("^    ", "", part, flags=re.MULTILINE) for part in parts if "def test_" in part]
    assert len(tests) == 2
    newcomer.run_program("\n".join(tests), ("registry",))
