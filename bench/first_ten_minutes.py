"""How long a newcomer takes: README's commands and then the quick start's, typed as they stand, in a fresh environment.

`python -m bench.first_ten_minutes` copies what git knows into a temporary directory, makes an environment beside it and
runs the shell blocks and the programs of README.md and docs/quick-start.md from top to bottom. With `--wheel` there is
no checkout: the environment has the wheel, with the extras that the pages name, and what the pages call
`.venv/bin/` leads there. It reports when the first message was read, the first row of a pipeline was written and the
first proof was given, and every line that failed. What installs something (`make setup`, `pip`) is counted apart: all
other times are without it. Beside each stands the machine's load (that of a minute) when it had happened.

Four things are not as typed: the broker listens on a free port, which the other commands learn from the environment and
programs in place of 127.0.0.1:9092; the two pages' brokers are one; `make` is run for `make setup` alone; a consumer
that runs for ever is interrupted after a while. What stands behind the first proof is left out.

It needs the network wherever the pages do, and downloads what a newcomer would.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("README.md", "docs/quick-start.md")
EXTRAS: Final = "spark"
"""All that the pages use up to the first proof."""
SHELL: Final = ("", "sh", "bash", "shell", "console")
"""Languages of blocks that are typed into a terminal."""
INSTALLS: Final = re.compile(r"(make setup|pip)\b")
READY: Final = re.compile(r"ready on (\S+:\d+) ")
START_SECONDS_MAX: Final = 60.0
LINE_SECONDS_MAX: Final = 900.0
LOOK_SECONDS: Final = 0.05
FIRSTS: Final = {
    "first message": (re.compile(r"\bconsume\b"), re.compile(r"hello")),
    "first pipeline row": (re.compile(r"\bpipeline run\b"), re.compile(r"written to \S+ +[1-9]")),
    "first proof": (
        re.compile(r"\baudit\b|\bpipeline audit\b"),
        re.compile(r"lost 0, duplicated 0: (proven|unaltered)"),
    ),
}
"""What has happened when a line like the first has ended well and printed something like the second."""
FOR_EVER_SECONDS: Final = 20.0
"""How long a program may run that never ends by itself."""
ADDRESS: Final = "127.0.0.1:9092"


class Typed(NamedTuple):
    text: str
    is_program: bool = False

    @property
    def shown(self) -> str:
        return f"python: {self.text.splitlines()[0]} …" if self.is_program else self.text


def typed(text: str) -> Iterator[Typed]:
    """Lines of shell blocks, those that go on joined, without what stands behind a `#`; programs as a whole."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            yield Typed(block, is_program=True)
        elif language in SHELL:
            for line in block.replace("\\\n", " ").splitlines():
                bare = re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ")
                if bare:
                    yield Typed(bare)


def is_left_out(line: str, *, has_checkout: bool) -> bool:
    if not has_checkout and re.match(r"(make|pip)\b|.*\bexamples/", line):
        return True
    return bool(re.match(r"(make (?!setup\b)|git clone\b|cd\b)", line))


class Watch:
    """What has passed, without what was spent on installing."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._worked_s = 0.0
        self.set_up_s = 0.0

    def set_up(self) -> None:
        """What was done last was installing."""
        self.set_up_s += self._passed()

    def tell(self, what: str) -> None:
        self._worked_s += self._passed()
        print(f"{self._worked_s:8.1f} s  load {os.getloadavg()[0]:5.1f}  {what}", flush=True)

    def _passed(self) -> float:
        before, self._at = self._at, time.monotonic()
        return self._at - before


class Newcomer:
    def __init__(self, directory: Path, wheel: Path | None) -> None:
        self.has_checkout = wheel is None
        self.checkout = directory / "holdfast"
        self.checkout.mkdir()
        venv.create(directory / "environment", with_pip=True)
        self.address = ADDRESS
        if wheel is None:
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
            subprocess.run(["tar", "x"], cwd=self.checkout, input=archive.stdout, check=True)
        else:
            (self.checkout / ".venv").symlink_to(directory / "environment")
            pip = [str(directory / "environment" / "bin" / "pip"), "install", "--quiet", "pytest"]
            subprocess.run([*pip, f"{wheel.resolve()}[{EXTRAS}]"], check=True)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST"))
        }
        path = f"{directory / 'environment' / 'bin'}:{kept['PATH']}"
        self.environment: Mapping[str, str] = {**kept, "PATH": path}
        self.broker: subprocess.Popen[bytes] | None = None
        self.printed = ""
        """By what was typed last."""

    def run_program(self, text: str) -> bool:
        is_test = "def test_" in text
        file = self.checkout / ("test_typed.py" if is_test else "typed.py")
        file.write_text(text.replace(ADDRESS, self.address), encoding="utf-8")
        python = ".venv/bin/python -m pytest -q" if is_test else ".venv/bin/python"
        if ".run(" not in text:
            return self.type(f"{python} {file.name}")
        return self.type(f"timeout --signal=INT --preserve-status {FOR_EVER_SECONDS} {python} {file.name}")

    def type(self, line: str) -> bool:
        """Whether the line ended well, or began well if it goes on."""
        self.printed = ""
        if re.search(r"\bholdfast serve\b", line):
            return self.broker is not None or self._serve(line)
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", line],
                cwd=self.checkout,
                env=self.environment,
                stdout=subprocess.PIPE,
                text=True,
                timeout=LINE_SECONDS_MAX,
            )
        except subprocess.TimeoutExpired:
            return False
        self.printed = done.stdout
        return done.returncode == 0

    def _serve(self, line: str) -> bool:
        said = self.checkout / "serve.log"
        command = f"exec {line.removesuffix('&')} --listen 127.0.0.1:0"
        with said.open("wb") as log:
            self.broker = subprocess.Popen(
                ["/bin/sh", "-c", command], cwd=self.checkout, env=self.environment, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS_MAX
        while (found := READY.search(said.read_text(errors="replace"))) is None:
            if self.broker.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        address = {"HOLDFAST_BOOTSTRAP_SERVER": found[1], "KAFKA": found[1]}
        self.environment = {**self.environment, **address}
        self.address = found[1]
        return True

    def close(self) -> None:
        if self.broker is not None:
            self.broker.send_signal(signal.SIGTERM)
            self.broker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--until", choices=list(FIRSTS), default="first proof", help="where to stop")
    parser.add_argument("--wheel", type=Path, help="without a checkout: from this wheel, with its extras")
    options = parser.parse_args()
    until = options.until
    waiting = dict(FIRSTS)
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="first-ten-minutes-") as directory:
        watch = Watch()
        newcomer = Newcomer(Path(directory), options.wheel)
        watch.set_up()
        try:
            for each in (each for page in PAGES for each in typed((ROOT / page).read_text(encoding="utf-8"))):
                line = each.text
                if not each.is_program and is_left_out(line, has_checkout=newcomer.has_checkout):
                    continue
                is_well = newcomer.run_program(line) if each.is_program else newcomer.type(line)
                if not each.is_program and INSTALLS.match(line):
                    watch.set_up()
                watch.tell(f"{'ok    ' if is_well else 'FAILED'}  {each.shown}")
                if not is_well:
                    failed.append(line)
                happened = is_well and not each.is_program
                for what, (like, shown) in list(waiting.items()):
                    if not (happened and like.search(line) and shown.search(newcomer.printed)):
                        continue
                    watch.tell(f"== {what}")
                    del waiting[what]
                if until not in waiting:
                    break
        finally:
            newcomer.close()
        print(f"{watch.set_up_s:8.1f} s  of installing beside it")
    for what in waiting:
        print(f"{'-':>8}    == {what} did not happen")
    return int(bool(failed) or until in waiting)


if __name__ == "__main__":
    sys.exit(main())
