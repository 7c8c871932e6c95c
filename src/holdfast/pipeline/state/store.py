"""Versions of a pipeline's state on disk.

    <home>/state/versions/<number>-<digest of its positions>.json    a version: its manifest
    <home>/state/data/<label>/<step>-<n>/part-….parquet              segments, which versions share
    <home>/state/history.jsonl                                       how it grew; for people, not flushed

The rules:

- A segment is written once, then adopted: its files and the names of its directories are flushed. A manifest that names
  it is written after that, aside, flushed, renamed and its directory flushed. `publish` refuses to name what it has not
  seen adopted. So whatever a manifest names is there after a loss of power.
- A version is there before any sink prepares the batch that made it, and stays while a sink stands at its positions:
  one that is behind takes up the very state the others had there.
- Removal goes the other way: manifests first, flushed, and only then the files that no manifest names any more.
- One process writes, under the lock of the pipeline's home; a reader (`is_writer=False`) changes nothing and may come
  at any time. What a crash left is removed once a batch has found its version, and not before: where manifests are
  lost, their segments wait for them to be restored.
- A manifest carries a checksum. What is missing or not as written is `StateDamaged`, never an empty state.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from holdfast.atomic import read_named
from holdfast.pipeline.positions import Positions, to_text
from holdfast.pipeline.sinks.files import Disk, files_below
from holdfast.pipeline.state.segments import (
    UNTIL,
    Segment,
    StateDamaged,
    StepState,
    check_present,
    not_seen,
    take_over,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

MANIFEST_FORMAT: Final = 1
HISTORY_BYTES_MAX: Final = 1024 * 1024
"""Some thousand batches; the older half goes when it is reached."""
_MANIFEST: Final = re.compile(r"(\d{20})-([0-9a-f]{16})\.json")
_VERIFIED: Final = {"parquet.page.verify-checksum.enabled": "true"}


def state_path(home: str) -> str:
    """Where the state of the pipeline with this home is."""
    return os.path.join(home, "state")


def discard_state(path: str) -> None:
    """Remove all of a state, damaged or not; a power cut leaves all of it, or files that no manifest names."""
    disk = Disk()
    if os.path.isdir(path):
        disk.remove_tree(os.path.join(path, "versions"))
        disk.flush_directory(path)
        disk.remove_tree(path)


@dataclass(frozen=True)
class Version:
    """The state of all steps at one place of the source."""

    number: int
    """Counts the batches that made it; grows."""
    positions: Positions
    """Where in the source it stands: everything before is in it, nothing after."""
    watermark: Mapping[str, Any] = field(default_factory=dict)
    """JSON of the event times seen so far."""
    steps: Mapping[str, StepState] = field(default_factory=dict)
    batch_time_ms: int = 0
    """Of the batch that made it."""

    @property
    def name(self) -> str:
        """Of its manifest."""
        return f"{self.number:020d}-{positions_digest(self.positions)}.json"

    @property
    def segments(self) -> Iterator[Segment]:
        for state in self.steps.values():
            yield from state.segments

    def stands_at(self, standing: Positions) -> bool:
        """Whether this is the state of somebody who stands there; partitions new since it was made do not matter."""
        if not self.positions.at:
            return not standing.at
        return all(
            (known := standing.at.get(place)) is not None and known.offset == position.offset
            for place, position in self.positions.at.items()
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "positions": self.positions.as_json(),
            "watermark": dict(self.watermark),
            "steps": {name: state.as_json() for name, state in self.steps.items()},
            "batch_time_ms": self.batch_time_ms,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Version:
        return cls(
            int(document["number"]),
            Positions.from_json(document["positions"]),
            document["watermark"],
            {name: StepState.from_json(state) for name, state in document["steps"].items()},
            int(document["batch_time_ms"]),
        )


def positions_digest(positions: Positions) -> str:
    """Of the places and offsets; leader epochs tell how they were read, not where they are."""
    places = {f"{place.topic_id}-{place.partition}": at.offset for place, at in positions.at.items()}
    return hashlib.sha256(to_text(places).encode()).hexdigest()[:16]


class StateStore:
    """The state of one pipeline. Opening raises `StateDamaged` for anything not as it was written."""

    def __init__(self, path: str, *, is_writer: bool = True, disk: Disk | None = None) -> None:
        self.path = os.path.abspath(path)
        self.disk = disk or Disk()
        self._is_writer = is_writer
        self._handed_out = 0
        self._durable: set[str] = set()
        """Files that were flushed: the only ones a manifest may name."""
        if is_writer:
            for directory in (self.path, self._versions_path, self._data_path):
                self.disk.create_directory(directory)
            self._remove_asides()
        self._versions: dict[str, Version] = {}
        self._load()

    @property
    def _versions_path(self) -> str:
        return os.path.join(self.path, "versions")

    @property
    def _data_path(self) -> str:
        return os.path.join(self.path, "data")

    # -------------------------------------------------------------------- versions

    def versions(self) -> tuple[Version, ...]:
        """All that are kept, oldest first."""
        return tuple(self._versions[name] for name in sorted(self._versions))

    def newest(self) -> Version | None:
        versions = self.versions()
        return versions[-1] if versions else None

    def find(self, standing: Positions, number: int | None = None) -> Version | None:
        """The newest version that stands there; with `number` that one alone, as a ledger may name it."""
        for version in reversed(self.versions()):
            if version.stands_at(standing) and number in (None, version.number):
                return version
        return None

    def publish(self, version: Version) -> None:
        """Make it durable; one with the same number and positions is replaced in one step."""
        for segment in version.segments:
            unknown = [name for name in segment.files if name not in self._durable]
            if unknown:
                raise ValueError(f"{unknown[0]} was not adopted: a version names only what was flushed")
        content = version.as_json()
        document = {"format": MANIFEST_FORMAT, "checksum": _checksum(content), "content": content}
        self.disk.replace(os.path.join(self._versions_path, version.name), to_text(document).encode())
        self._versions[version.name] = Version.from_json(content)
        self._note_growth(version)

    def gc(self, standings: Iterable[Positions]) -> None:
        """Keep the newest version and those that somebody stands at; the rest goes, with files nobody names.

        For the time between two batches: segments that were adopted and not published go too.
        """
        newest = self.newest()
        kept = {newest.name} if newest else set()
        kept |= {version.name for standing in standings if (version := self.find(standing))}
        dropped = [name for name in self._versions if name not in kept]
        for name in dropped:
            self.disk.remove(os.path.join(self._versions_path, name))
            del self._versions[name]
        if dropped:
            # Else a manifest could be there again after a loss of power, and its files not.
            self.disk.flush_directory(self._versions_path)
        self.remove_unnamed()

    # -------------------------------------------------------------------- segments

    def segment_dir(self, label: str, step: str) -> str:
        """A path for a new segment; its parent is there, it is not: whoever writes there makes it."""
        self._handed_out += 1
        parent = os.path.join(self._data_path, label)
        os.makedirs(parent, exist_ok=True)
        return os.path.join(parent, f"{step}-{self._handed_out}")

    def adopt(
        self, path: str, tier: int = 0, *, reported: Sequence[str | None] | None = None
    ) -> Segment | None:
        """What was written there (Parquet, with `_until bigint`) as a durable segment; None when it has no rows.

        Where tasks wrote the files themselves, those that were `reported` count. They move to a directory of their own:
        all that lies in a segment's directory is read, and a task that runs twice may still write where it began.
        """
        if reported is not None:
            path = _moved(path, [file for file in reported if file is not None])
        segment = take_over(self.path, path, self.disk, tier)
        if segment is not None:
            self._durable.update(segment.files)
        return segment

    def frame(
        self,
        spark: SparkSession,
        state: StepState | Iterable[Segment],
        schema: StructType | str,
        *,
        until_above: int | None = None,
        until_to: int | None = None,
        whole: bool = False,
    ) -> DataFrame | None:
        """The rows whose `_until` is above the one and not past the other; None when no segment can have any.

        `whole`: all rows of segments that can have any. Spark writes the times into the code it generates, and compiles
        that anew for each batch.
        """
        from pyspark.sql import functions as f

        segments = state.segments if isinstance(state, StepState) else state
        chosen = [segment for segment in segments if segment.may_hold(until_above, until_to)]
        if not chosen:
            return None
        for segment in chosen:
            check_present(self.path, segment)
        # Directories, since Spark lists more than a few dozen paths in a job of its own.
        folders = sorted({os.path.dirname(name) for segment in chosen for name in segment.files})
        paths = [os.path.join(self.path, folder) for folder in folders]
        rows = spark.read.schema(schema).options(**_VERIFIED).parquet(*paths)
        if not whole and not all(segment.lies_within(until_above, until_to) for segment in chosen):
            if until_above is not None:
                rows = rows.where(f.col(UNTIL) > until_above)
            if until_to is not None:
                rows = rows.where(f.col(UNTIL) <= until_to)
        return rows

    def paths(self, segment: Segment) -> list[str]:
        """Its files, absolute."""
        return [os.path.join(self.path, name) for name in segment.files]

    def sizes(self) -> dict[str, int]:
        """Bytes by step of the newest version."""
        newest = self.newest()
        return {name: state.bytes for name, state in newest.steps.items()} if newest else {}

    # -------------------------------------------------------------------- how it grew

    def history(self) -> list[dict[str, Any]]:
        """A line for each version published of late: `number`, `batch_time_ms`, `steps: {name: [rows, bytes]}`."""
        try:
            with open(os.path.join(self.path, "history.jsonl"), encoding="utf-8") as file:
                lines = file.readlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # a line that a crash cut
                continue
        return found

    def _note_growth(self, version: Version) -> None:
        path = os.path.join(self.path, "history.jsonl")
        line = {
            "number": version.number,
            "batch_time_ms": version.batch_time_ms,
            "steps": {name: [state.rows, state.bytes] for name, state in version.steps.items()},
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n" * (file.tell() > 0 and not _ends_with_newline(path)) + to_text(line) + "\n")
            size = file.tell()
        if size > HISTORY_BYTES_MAX:
            with open(path, "rb") as old, open(path + ".new", "wb") as new:
                old.seek(size // 2)
                old.readline()
                new.write(old.read())
            os.replace(path + ".new", path)

    # -------------------------------------------------------------------- what is on disk

    def _load(self) -> None:
        """Every version, and a look whether its files are there."""
        names = self._manifests()
        while True:
            try:
                self._versions = {name: self._read(name) for name in names}
                for version in self._versions.values():
                    for segment in version.segments:
                        if not self._durable.issuperset(segment.files):
                            check_present(self.path, segment)
                            self._durable.update(segment.files)
                return
            except StateDamaged:
                before, names = names, self._manifests()
                if self._is_writer or names == before:
                    raise  # else the writer went on while a reader looked

    def _manifests(self) -> list[str]:
        try:
            return sorted(filter(_MANIFEST.fullmatch, os.listdir(self._versions_path)))
        except FileNotFoundError:
            return []

    def _read(self, name: str) -> Version:
        path = os.path.join(self._versions_path, name)
        try:
            return _decoded(path, read_named(path))
        except FileNotFoundError:
            raise StateDamaged(path, "is missing") from None

    def _remove_asides(self) -> None:
        for name in os.listdir(self._versions_path):
            if not _MANIFEST.fullmatch(name):
                self.disk.remove(os.path.join(self._versions_path, name))

    def remove_unnamed(self) -> None:
        """Remove the files that no manifest names."""
        named = {
            name
            for version in self._versions.values()
            for segment in version.segments
            for name in segment.files
        }
        for name in list(files_below(self._data_path)):
            relative = os.path.join("data", name)
            if relative not in named:
                self.disk.remove(os.path.join(self.path, relative))
        for directory, _, _ in os.walk(self._data_path, topdown=False):
            if directory != self._data_path and not os.listdir(directory):
                os.rmdir(directory)
        self._durable &= named


def _moved(directory: str, files: Sequence[str]) -> str:
    """Where these files of the directory are now; what else is in it no manifest names, so it goes with `gc`."""
    there = {os.path.join(directory, name) for name in os.listdir(directory)}
    moved = f"{directory}-reported"
    os.mkdir(moved)
    for file in files:
        if file not in there:
            raise not_seen(f"a task wrote state to {file}, and this machine does not see it there")
        os.rename(file, os.path.join(moved, os.path.basename(file)))
    return moved


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_text(content).encode()).hexdigest()


def _decoded(path: str, data: bytes) -> Version:
    try:
        document = json.loads(data)
        version_of_format = document["format"]
        if version_of_format != MANIFEST_FORMAT:
            raise StateDamaged(
                path, f"has format {version_of_format}, and this holdfast reads {MANIFEST_FORMAT}"
            )
        if document["checksum"] != _checksum(document["content"]):
            raise StateDamaged(path, "does not match its checksum")
        version = Version.from_json(document["content"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateDamaged(path, f"is not a manifest ({type(error).__name__}: {error})") from error
    if version.name != os.path.basename(path):
        raise StateDamaged(path, f"holds the manifest {version.name}")
    return version


def _ends_with_newline(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
