"""The log of a Delta table, read without trust: every version that is there, and what they add up to.

`_delta_log/<version>.json` lists what one commit added and removed; `<version>.checkpoint.parquet` (or several parts)
is what all up to that version add up to. Readers of the table take the newest checkpoint and the versions behind it,
and so does this; but where every version is still there, they are also added up from the first one, and the two sums
have to agree. A version that is missing between others was taken out by hand: a clean-up removes the oldest only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from holdfast.audit.sinks import files
from holdfast.audit.sinks.base import SinkUnreadable

VERSION: Final = re.compile(r"(\d{20})\.json")
CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
OTHER_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\..*")
CHECKPOINT_COLUMNS: Final = ("add", "txn", "metaData")


@dataclass(frozen=True)
class Add:
    """One data file of the table."""

    path: str
    """Relative to the table, unless it is elsewhere."""
    size: int
    rows: int | None
    """As the log says; None: it does not."""
    values: Mapping[str, str | None]
    """Of the columns the table is partitioned by."""
    has_deletions: bool
    is_change: bool = True


@dataclass
class Commit:
    """One version."""

    version: int
    adds: list[Add] = field(default_factory=list)
    removes: dict[str, bool] = field(default_factory=dict)
    """Paths, and whether data changed by it."""
    transactions: dict[str, int] = field(default_factory=dict)
    told: str | None = None
    """The entry of a ledger in the commit's own words."""
    operation: str = ""
    metadata: Mapping[str, Any] | None = None


@dataclass
class State:
    """What some versions add up to."""

    files: dict[str, Add] = field(default_factory=dict)
    transactions: dict[str, int] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None

    def take(self, commit: Commit) -> None:
        for path in commit.removes:
            self.files.pop(path, None)
        for add in commit.adds:
            self.files[add.path] = add
        self.transactions |= commit.transactions
        self.metadata = commit.metadata or self.metadata


class DeltaLog:
    """All of a log that is there."""

    def __init__(self, table: str) -> None:
        self.directory = f"{table}/_delta_log"
        names = files.names_in(self.directory)
        self.commits: dict[int, Commit] = {}
        """By version, ascending."""
        self.troubles: list[str] = []
        """Versions and checkpoints that cannot be read, in words."""
        for match in filter(None, map(VERSION.fullmatch, names)):
            self._read(int(match[1]), match[0])
        self._checkpoints = _complete(names)
        unknown = [
            name for name in names if OTHER_CHECKPOINT.fullmatch(name) and not CHECKPOINT.fullmatch(name)
        ]
        self.checkpoint, kept = self._newest_checkpoint()
        if self.checkpoint < 0 and unknown and 0 not in self.commits:
            raise SinkUnreadable(f"{self.directory}: checkpoints of the form {unknown[0]} are not read here")
        self.version = max([*self.commits, self.checkpoint])
        if names and not self.exists and not self.troubles:
            raise SinkUnreadable(
                f"{self.directory} holds no version and no whole checkpoint: {', '.join(names[:5])}"
            )
        self.state = self._added_up(kept, range(self.checkpoint + 1, self.version + 1))

    @property
    def exists(self) -> bool:
        return self.version >= 0

    @property
    def holes(self) -> list[int]:
        """Versions that have to be there and are not."""
        first = min([self.checkpoint + 1, *self.commits]) if self.checkpoint >= 0 else 0
        return [version for version in range(first, self.version + 1) if version not in self.commits]

    @property
    def is_whole(self) -> bool:
        """Every version from the first on can be read."""
        return self.exists and self._has_all(self.version)

    def _has_all(self, last: int) -> bool:
        return all(version in self.commits for version in range(last + 1))

    def _added_up(self, state: State, versions: Iterable[int]) -> State:
        for version in versions:
            if version in self.commits:
                state.take(self.commits[version])
        return state

    def disagreements(self) -> Iterator[str]:
        """Files on which the checkpoint and the versions before it do not agree."""
        if self.checkpoint < 0 or not self._has_all(self.checkpoint):
            return
        replayed = self._added_up(State(), range(self.checkpoint + 1)).files.keys()
        kept = self._checkpoint_state(self.checkpoint).files.keys()
        for path in sorted(kept - replayed):
            yield f"{path} is in checkpoint {self.checkpoint} and no version up to it adds it"
        for path in sorted(replayed - kept):
            yield f"{path} was added and never removed, and is not in checkpoint {self.checkpoint}"

    def named(self) -> set[str]:
        """Every file that any version or checkpoint names, removed ones too."""
        commits = self.commits.values()
        added = (add.path for commit in commits for add in commit.adds)
        return {*self.state.files, *added, *(path for commit in commits for path in commit.removes)}

    # -------------------------------------------------------------------- reading

    def _read(self, version: int, name: str) -> None:
        try:
            text = files.text_of(f"{self.directory}/{name}")
            self.commits[version] = _parsed(version, text)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.troubles.append(
                f"version {version} of the log cannot be read ({type(error).__name__} {error})"
            )

    def _newest_checkpoint(self) -> tuple[int, State]:
        """Its version, -1 where there is none."""
        for version in sorted(self._checkpoints, reverse=True):
            try:
                return version, self._checkpoint_state(version)
            except files.Damaged as damage:
                self.troubles.append(f"checkpoint {version} of the log: {damage}")
        return -1, State()

    def _checkpoint_state(self, version: int) -> State:
        state = State()
        for name in self._checkpoints[version]:
            for row in _rows(f"{self.directory}/{name}"):
                commit = Commit(version)
                _apply(commit, {key: value for key, value in row.items() if value is not None})
                state.take(commit)
        return state


def _complete(names: list[str]) -> dict[int, list[str]]:
    """Checkpoints of which every part is there."""
    found: dict[tuple[int, int], list[str]] = {}
    for match in filter(None, map(CHECKPOINT.fullmatch, names)):
        found.setdefault((int(match[1]), int(match[3] or 1)), []).append(match[0])
    return {version: listed for (version, parts), listed in found.items() if len(listed) == parts}


def _rows(path: str) -> Iterator[dict[str, Any]]:
    with files.opened(path) as file:
        columns = [name for name in CHECKPOINT_COLUMNS if name in file.schema_arrow.names]
        try:
            for batch in file.iter_batches(columns=columns):
                yield from batch.to_pylist()
        except files.BROKEN as error:
            raise files.Damaged(f"it cannot be read ({error})") from error


def _parsed(version: int, text: str) -> Commit:
    commit = Commit(version)
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("it is empty")
    for line in lines:
        _apply(commit, json.loads(line))
    return commit


def _apply(commit: Commit, action: Mapping[str, Any]) -> None:
    for kind, content in action.items():
        if kind == "add":
            commit.adds.append(_add(content))
        elif kind == "remove":
            commit.removes[unquote(content["path"])] = bool(content.get("dataChange", True))
        elif kind == "txn":
            commit.transactions[content["appId"]] = int(content["version"])
        elif kind == "metaData":
            commit.metadata = content
        elif kind == "commitInfo":
            commit.told = content.get("holdfast")
            commit.operation = str(content.get("operation", ""))


def _add(content: Mapping[str, Any]) -> Add:
    stats = content.get("stats")
    rows = json.loads(stats).get("numRecords") if stats else None
    values = content.get("partitionValues") or {}
    return Add(
        path=unquote(content["path"]),
        size=int(content["size"]),
        rows=None if rows is None else int(rows),
        values=dict(values),
        has_deletions=content.get("deletionVector") is not None,
        is_change=bool(content.get("dataChange", True)),
    )
