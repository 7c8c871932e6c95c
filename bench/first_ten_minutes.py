"""How long a newcomer takes: README's commands, typed as they stand into a fresh copy of the checkout.

`python -m bench.first_ten_minutes` copies what git knows into a temporary directory, makes an environment beside it and
runs the shell blocks of README from top to bottom, line by line. It reports when the first message was read, the first
pipeline had run and the first proof was given, and every line that failed. Three things are not as typed: the broker
listens on a free port, which the other commands learn from the environment; `make` is run for `make setup` alone; what
stands behind the first proof is left out.

It needs the network wherever README does, and downloads what a newcomer would.
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
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SHELL: Final = ("", "sh", "bash", "shell", "console")
"""Languages of blocks that are typed into a terminal."""
READY: Final = re.compile(r"ready on (\S+:\d+) ")
START_SECONDS_MAX: Final = 60.0
LINE_SECONDS_MAX: Final = 900.0
LOOK_SECONDS: Final = 0.05
FIRSTS: Final = {
    "first message": re.compile(r"\bconsume\b"),
    "first pipeline run": re.compile(r"\bpipeline run\b"),
    "first proof": re.compile(r"\baudit\b|\bpipeline audit\b"),
}
"""What has happened when a line like this has ended well."""


def typed_lines(text: str) -> Iterator[str]:
    """Lines of shell blocks, those that go on joined, without what stands behind a `#`."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if language in SHELL:
            for line in block.replace("\\\n", " ").splitlines():
                bare = re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ")
                if bare:
                    yield bare


def is_left_out(line: str) -> bool:
    return bool(re.match(r"(make (?!setup\b)|git clone\b|cd\b)", line))


class Newcomer:
    def __init__(self, directory: Path) -> None:
        self.checkout = directory / "holdfast"
        self.checkout.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x"], cwd=self.checkout, input=archive.stdout, check=True)
        venv.create(directory / "environment", with_pip=True)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST"))
        }
        path = f"{directory / 'environment' / 'bin'}:{kept['PATH']}"
        self.environment: Mapping[str, str] = {**kept, "PATH": path}
        self.broker: subprocess.Popen[bytes] | None = None

    def type(self, line: str) -> bool:
        """Whether the line ended well, or began well if it goes on."""
        if re.search(r"\bholdfast serve\b", line):
            return self.broker is not None or self._serve(line)
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", line],
                cwd=self.checkout,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                timeout=LINE_SECONDS_MAX,
            )
        except subprocess.TimeoutExpired:
            return False
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
        return True

    def close(self) -> None:
        if self.broker is not None:
            self.broker.send_signal(signal.SIGTERM)
            self.broker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--until", choices=list(FIRSTS), default="first proof", help="where to stop")
    until = parser.parse_args().until
    waiting = dict(FIRSTS)
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="first-ten-minutes-") as directory:
        newcomer = Newcomer(Path(directory))
        began = time.monotonic()
        try:
            for line in typed_lines((ROOT / "README.md").read_text(encoding="utf-8")):
                if is_left_out(line):
                    continue
                is_well = newcomer.type(line)
                print(
                    f"{time.monotonic() - began:8.1f} s  {'ok    ' if is_well else 'FAILED'}  {line}",
                    flush=True,
                )
                if not is_well:
                    failed.append(line)
                for what in [what for what, like in waiting.items() if is_well and like.search(line)]:
                    print(f"{time.monotonic() - began:8.1f} s  == {what}", flush=True)
                    del waiting[what]
                if until not in waiting:
                    break
        finally:
            newcomer.close()
    for what in waiting:
        print(f"{'-':>8}    == {what} did not happen")
    return int(bool(failed) or until in waiting)


if __name__ == "__main__":
    sys.exit(main())
