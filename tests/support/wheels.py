"""The wheel as a stranger installs it: built once, unpacked into virtual environments that have what it declares.

An environment has the wheel, the distributions that the wheel and the named extras ask for, and theirs: nothing else
of what tests are run with is importable. They are linked from where the tests run, at the versions pinned there, so
nothing is downloaded.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import venv
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "src" / "holdfast" / "reader" / "__pycache__"
"""Where the tests' own processes keep the decoders that they have compiled, which takes seconds."""
SCRIPT = "#!{python}\nimport sys\nfrom {module} import {name}\nsys.exit({name}())\n"


def build(directory: Path) -> Path:
    """The wheel of the checkout, unpacked: environments share it, so that what one has compiled none compiles again."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = directory.glob("holdfast-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "unpacked")
    return directory / "unpacked"


class Installed:
    """A virtual environment with the wheel and some of its extras, and perhaps tools beside it."""

    def __init__(
        self, wheel: Path, directory: Path, extras: Iterable[str] = (), beside: Iterable[str] = ()
    ) -> None:
        venv.create(directory, symlinks=True)
        self.directory = directory
        self.bin = directory / "bin"
        self.python = self.bin / "python"
        site = next((directory / "lib").glob("python*")) / "site-packages"
        for part in wheel.iterdir():
            (site / part.name).symlink_to(part)
        (metadata,) = site.glob("holdfast-*.dist-info")
        ours = PathDistribution(metadata)
        for script in ours.entry_points.select(group="console_scripts"):
            path = self.bin / script.name
            path.write_text(SCRIPT.format(python=self.python, module=script.module, name=script.attr))
            path.chmod(0o755)
        asked = [Requirement(f"holdfast[{','.join(extras)}]"), *map(Requirement, beside)]
        _link(_closure(asked, {"holdfast": ours}), site)

    def environment(self, **more: str) -> dict[str, str]:
        """That of the tests without what would lead back to their own packages or to a broker of somebody's."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HOLDFAST"))
        }
        own = {"PATH": f"{self.bin}:{kept['PATH']}", "COLUMNS": "200", "HOLDFAST_CACHE_DIR": str(COMPILED)}
        return {**kept, **own, **more}


def _closure(asked: Iterable[Requirement], known: Mapping[str, Distribution]) -> list[Distribution]:
    """What the requirements lead to, but for what is known."""
    found: dict[str, Distribution] = {}
    followed: set[tuple[str, str]] = set()
    waiting = list(asked)
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        of = known.get(name) or _installed(name)
        found[name] = of
        for extra in {"", *each.extras} - {extra for other, extra in followed if other == name}:
            followed.add((name, extra))
            needs = map(Requirement, of.requires or ())
            waiting += [
                need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})
            ]
    return [found[name] for name in found.keys() - known.keys()]


_installed = functools.cache(distribution)


def _link(distributions: Iterable[Distribution], site: Path) -> None:
    """Whole directories where one distribution has them alone, files where several share one."""
    files = {each: [file for file in each.files or () if file.parts[0] != ".."] for each in distributions}
    owners = Counter(top for of in files.values() for top in {file.parts[0] for file in of})
    for each, of in files.items():
        for place in {file if owners[file.parts[0]] > 1 else Path(file.parts[0]) for file in of}:
            if (source := Path(str(each.locate_file(str(place))))).exists():
                (site / place).parent.mkdir(parents=True, exist_ok=True)
                (site / place).symlink_to(source)
