"""What is wrong with a definition: findings that say where and what to write instead, all of them at once.

A finding names the place by its path in the definition (`steps[1].expect.else`), which is the same for YAML and Python;
a file adds line and column. `DefinitionError` carries them all, because an author who corrects one error at a time
reads the same file ten times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from holdfast.errors import UsageError
from holdfast.pipeline.core.failures import nearest as nearest

Path: TypeAlias = tuple[str | int, ...]


class Mark(NamedTuple):
    """A place in a file, counted from 1 as editors do."""

    line: int
    column: int


@dataclass(frozen=True)
class Finding:
    path: Path
    message: str
    level: Literal["error", "warning"] = "error"
    mark: Mark | None = None
    file: str | None = None
    rests_on: tuple[Path, ...] = ()
    """Other parts that it looked at: if one of them could not be read, this is a consequence and not said."""

    def __str__(self) -> str:
        place = path_text(self.path)
        text = f"{place}: {self.message}" if place else self.message
        if self.level == "warning":
            text = f"warning: {text}"
        if self.file is None:
            return text
        where = f"{self.file}:{self.mark.line}:{self.mark.column}" if self.mark else self.file
        return f"{where}: {text}"

    def as_json(self) -> dict[str, object]:
        return {
            "level": self.level,
            "path": path_text(self.path),
            "message": self.message,
            "file": self.file,
            "line": self.mark.line if self.mark else None,
            "column": self.mark.column if self.mark else None,
        }


class DefinitionError(UsageError):
    """A definition that cannot be run; `findings` says why, one by one."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = tuple(findings)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.findings,)


def path_text(path: Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
