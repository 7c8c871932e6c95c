"""What a wheel is told when it is built: the commit that it was built from, where a checkout knows it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def commit_of(checkout: str) -> str | None:
    """The commit of the checkout, with a `+` where files differ from it; nothing where git or its data are missing."""
    if not (Path(checkout) / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class CommitStamp(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or (commit := commit_of(self.root)) is None:
            return
        self._stamp = Path(self.directory) / "holdfast-build.json"
        self._stamp.parent.mkdir(parents=True, exist_ok=True)
        self._stamp.write_text(json.dumps({"commit": commit}) + "\n")
        build_data["force_include"][str(self._stamp)] = "holdfast/build.json"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if (stamp := getattr(self, "_stamp", None)) is not None:
            stamp.unlink(missing_ok=True)
