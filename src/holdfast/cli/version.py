"""`holdfast version`: which holdfast this is, down to the commit where that is known.

A wheel has the commit that it was built from in `build.json` (hatch_build.py); a checkout asks git. A `+` behind a
commit means that files differed from it.
"""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import typer

import holdfast
from holdfast import __version__
from holdfast.cli.options import CommandGroup, OutputOption
from holdfast.cli.output import Output, print_json

app = CommandGroup()

PARTS = ("confluent-kafka", "kio")
DESCRIBE = ("git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
GIT_SECONDS_MAX = 10


def origin(package: Path = Path(holdfast.__file__).parent) -> dict[str, str | None]:
    """The commit, and the wheel that this was installed from; a checkout has none."""
    checkout = package.parent.parent
    if package.parent.name == "src" and (checkout / ".git").exists():
        try:
            done = subprocess.run(
                DESCRIBE, cwd=checkout, capture_output=True, text=True, check=True, timeout=GIT_SECONDS_MAX
            )
        except (OSError, subprocess.SubprocessError):
            return {"commit": None, "wheel": None}
        return {"commit": done.stdout.strip(), "wheel": None}
    try:
        commit = json.loads((package / "build.json").read_text())["commit"]
    except FileNotFoundError:  # built from an archive of the sources, which know no commit
        commit = None
    try:
        tag = (metadata.distribution("holdfast").read_text("WHEEL") or "").partition("Tag: ")[2].split()
    except metadata.PackageNotFoundError:
        tag = []
    return {"commit": commit, "wheel": f"holdfast-{__version__}-{tag[0]}.whl" if tag else None}


@app.command()
def version(output: OutputOption = Output.TABLE) -> None:
    """Show the version of holdfast with its commit, and of what it stands on."""
    parts = {name: metadata.version(name) for name in PARTS}
    found = origin()
    if output is Output.JSON:
        print_json({"holdfast": __version__, **found, "python": platform.python_version(), **parts})
        return
    rest = ", ".join(f"{name} {number}" for name, number in parts.items())
    whence = f"commit {found['commit'] or 'unknown'}, {found['wheel'] or 'no wheel'}"
    typer.echo(f"holdfast {__version__} (Python {platform.python_version()}, {rest}; {whence})")
